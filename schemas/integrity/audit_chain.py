"""The audit chain: for each ledger commit an entry with Merkle roots of its rows and the hash before it.

An entry is part of its commit's metadata, so that rows and entry are stored together or not at all. Delta's log
is cleaned after an hour; the chain file keeps all entries, one JSON line each. An entry's value is the SHA-256
of its canonical JSON, which contains the value of the entry before. One value therefore proves all earlier
entries.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
import orjson
from pyarrow.fs import FileSelector, FileSystem, FileType

from schemas.integrity.ledger_leaves import NEWEST_ENCODING, leaf_hash, merkle_root, root_and_level
from schemas.integrity.line_objects import LinePlace, ObjectLines
from trunkline_agent.wire.strict_json import canonical_plain

BEFORE_THE_FIRST: Final = "0" * 64
MARKS_MOST: Final = 32
MARK_BYTES: Final = 4
_TAIL_BYTES: Final = 64 * 1024
# Bounds for numbers read from files. The number after the largest one still fits into 64 bits.
Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
# As wide as the column `partition` of the ledger.
Partition = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}\\Z")]


class PartitionRoot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The Merkle root over the rows of one Kafka partition that one commit added to the ledger.

    Attributes:
        partition: the Kafka partition.
        first: the lowest offset of the rows.
        last: the highest offset of the rows.
        rows: the number of rows.
        root: the Merkle root over the rows in the order of offsets, in hex.
        marks: the first four bytes of each node of the lowest tree level with at most 32 nodes, in base64. They
            prove nothing, but show where two trees differ.
    """

    partition: Partition
    first: Number
    last: Number
    rows: Number
    root: _Hash
    marks: str


class ChainEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The entry of the audit chain about one commit to the ledger.

    Attributes:
        number: the number of the entry. The first has 0.
        previous: the value of the entry before, 64 zeros for the first entry.
        table: the id of the Delta table `ledger`.
        query: the id of the Spark query that made the commit.
        batch: the number of the micro-batch.
        encoding: the number of the encoding by which rows were hashed (`ledger_leaves.ENCODINGS`).
        root: the Merkle root over the roots of `partitions`, in hex.
        partitions: the roots of the rows that the commit added, in the order of partitions.
        ends: after the commit, the first offset of each partition that is not in the ledger.
        rows: the number of rows that the chain covers, including this entry.
        start: in the first entry, the `ends` of the ledger before the chain began. Rows below them are not
            covered. Empty in later entries.
    """

    number: Number
    previous: _Hash
    table: str
    query: str
    batch: Number
    encoding: Number
    root: _Hash
    partitions: tuple[PartitionRoot, ...]
    ends: dict[Partition, Number]
    rows: Number
    start: dict[Partition, Number]

    def value(self) -> str:
        """Return the entry's hash, which the next entry contains: the SHA-256 of its canonical JSON, in hex."""
        return sha256(canonical_plain(msgspec.to_builtins(self, str_keys=True))).hexdigest()


class FirstEntry(NamedTuple):
    """The start of a chain that has no entries yet.

    `table` is the id of the Delta table `ledger`. `start` maps each partition to the first offset that is not
    in the ledger.
    """

    table: str
    start: dict[int, int]


class ChainLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of the chain as it is stored: one line of the chain file.

    `value` is the stored hash of `entry`; only a comparison with `entry.value()` shows that they belong
    together. `version` is the Delta version of the ledger that the entry's commit made.
    """

    version: Number
    value: _Hash
    entry: ChainEntry

    def text(self) -> bytes:
        """Return the entry as a line of the chain file: canonical JSON in UTF-8, with the line end."""
        return canonical_plain(msgspec.to_builtins(self, str_keys=True)) + b"\n"


_parse_line: Final = msgspec.json.Decoder(ChainLine).decode
_parse_roots: Final = msgspec.json.Decoder(list[PartitionRoot]).decode


def partition_root(partition: int, offsets: tuple[int, int], leaves: list[bytes]) -> PartitionRoot:
    """Return the Merkle root over consecutive ledger rows of one Kafka partition.

    Args:
        partition: The Kafka partition of the rows.
        offsets: The offsets of the first and the last row.
        leaves: The hash of each row, in the order of offsets, as `ledger_leaves` returns them.
    """
    root, level, _ = root_and_level(leaves, MARKS_MOST)
    marks = base64.b64encode(b"".join(node[:MARK_BYTES] for node in level)).decode("ascii")
    return PartitionRoot(partition, *offsets, len(leaves), root.hex(), marks)


def commit_root(partitions: Iterable[PartitionRoot]) -> str:
    """Return the Merkle root over the partitions of one commit, in hex.

    `partitions` are the roots of the rows that the commit added, in the order of partitions. Each leaf is the
    hash of a `PartitionRoot`: its partition, first, last and rows as eight bytes each, and its root.
    """
    leaves = []
    for at in partitions:
        numbers = (at.partition, at.first, at.last, at.rows)
        leaves.append(leaf_hash(b"".join(n.to_bytes(8, "big") for n in numbers) + bytes.fromhex(at.root)))
    return merkle_root(leaves).hex()


def roots_text(roots: Iterable[PartitionRoot]) -> str:
    """Encode roots as JSON text, which a Spark task returns to the driver together with its data file."""
    return msgspec.json.encode(list(roots)).decode("ascii")


def read_roots(texts: Iterable[str]) -> list[PartitionRoot]:
    """Decode the texts that Spark tasks made with `roots_text`. Return all their roots in one list.

    Raises msgspec.DecodeError for any other text.
    """
    return [root for text in texts for root in _parse_roots(text)]


def next_entry(head: ChainEntry | FirstEntry, query: str, batch: int, roots: Iterable[str]) -> ChainEntry:
    """Return the chain entry for a micro-batch that is to be committed to the ledger. Nothing is stored yet.

    Args:
        head: The last entry of the chain, or the start of a chain without entries.
        query: The id of the Spark query.
        batch: The number of the micro-batch.
        roots: The texts that the tasks of the micro-batch made with `roots_text`.
    """
    partitions = tuple(sorted(read_roots(roots), key=lambda at: at.partition))
    before, rows = (head.start, 0) if isinstance(head, FirstEntry) else (head.ends, head.rows)
    ends = before | {at.partition: at.last + 1 for at in partitions}
    return ChainEntry(
        number=0 if isinstance(head, FirstEntry) else head.number + 1,
        previous=BEFORE_THE_FIRST if isinstance(head, FirstEntry) else head.value(),
        table=head.table,
        query=query,
        batch=batch,
        encoding=NEWEST_ENCODING,
        root=commit_root(partitions),
        partitions=partitions,
        ends=dict(sorted(ends.items())),
        rows=rows + sum(at.rows for at in partitions),
        start=head.start if isinstance(head, FirstEntry) else {},
    )


def commit_metadata(entry: ChainEntry) -> dict[str, object]:
    """Return the object to store under the key `audit` in the metadata of the commit that `entry` is about.

    It has two keys: `entry` with the fields of the entry, and `value` with the hash of the entry.
    """
    return {"entry": msgspec.to_builtins(entry, str_keys=True), "value": entry.value()}


class LogPart(NamedTuple):
    """The chain entries found in Delta's transaction log of the ledger.

    `version` is the newest version of the table in that log, or -1 if there is no log.
    """

    lines: list[ChainLine]
    version: int


def lines_in_log(storage: FileSystem, after_version: int = -1) -> LogPart:
    """Return the chain entries in the commits that Delta's transaction log still has, in the order of versions.

    A commit without a readable entry is left out. An empty list means that no commit has one, or that there is
    no log.

    Args:
        storage: the file system of the ledger, by `table_storage`.
        after_version: only commits with a higher version are read. -1 means all.
    """
    found = storage.get_file_info(FileSelector("_delta_log", allow_not_found=True))
    versions = sorted(int(file.base_name[:-5]) for file in found if _is_commit(file.base_name))
    lines = (line_in_commit(storage, version) for version in versions if version > after_version)
    return LogPart([line for line in lines if line is not None], versions[-1] if versions else -1)


def has_commit(storage: FileSystem, version: int) -> bool:
    """Return whether Delta's transaction log still has the commit that made the table version `version`.

    Delta deletes old commits, so False does not mean that the version never existed. `storage` is the file
    system of the ledger, by `table_storage`.
    """
    return bool(storage.get_file_info([_commit_path(version)])[0].type == FileType.File)


def line_in_commit(storage: FileSystem, version: int) -> ChainLine | None:
    """Return the chain entry in the Delta commit that made the table version `version`.

    Returns None when the commit was deleted or has no readable entry. `storage` is the file system of the
    ledger, by `table_storage`.
    """
    metadata = user_metadata(storage, version)
    return None if metadata is None else line_in_metadata(metadata, version)


def user_metadata(storage: FileSystem, version: int) -> str | None:
    """Return the field `userMetadata` of the Delta commit that made a table version; None: it has none.

    None, too, for a commit that was deleted or cannot be read. `storage` is the table's file system, by
    `table_storage`.
    """
    try:
        with storage.open_input_stream(_commit_path(version)) as stream:
            texts = stream.read().splitlines()
        for text in texts:
            found = orjson.loads(text).get("commitInfo", {}).get("userMetadata") if text else None
            if found:
                return str(found)
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return None
    return None


def line_in_metadata(metadata: str, version: int) -> ChainLine | None:
    """Parse the chain entry in the field `userMetadata` of a Delta commit.

    Args:
        metadata: the text of the field, JSON with the key `audit`.
        version: the table version that the commit made.

    Returns:
        The entry, or None if there is none or it cannot be parsed.
    """
    try:
        audit = orjson.loads(metadata).get("audit")
        return None if audit is None else _parse_line(canonical_plain({"version": version, **audit}))
    except (ValueError, TypeError, AttributeError):
        return None


def newest_entry(known: ChainEntry | None, lines: Iterable[ChainLine]) -> ChainEntry | None:
    """Follow the audit chain through stored entries and return its last entry.

    Entries that do not follow the one before are ignored, because another writer made them.

    Args:
        known: the last entry that the caller knows. None means that the chain begins with the first valid line.
        lines: the entries stored after it, in the order of versions.

    Returns:
        The last entry that continues the chain. If no line continues it, `known` itself, which may be None.
    """
    for line in lines:
        follows = known is None or (line.entry.number, line.entry.previous) == (known.number + 1, known.value())
        if follows and line.value == line.entry.value():
            known = line.entry
    return known


def _is_commit(name: str) -> bool:
    return len(name) == 25 and name.endswith(".json") and name[:20].isdecimal()


def _commit_path(version: int) -> str:
    return f"_delta_log/{version:020d}.json"


def lines_in_file(path: LinePlace) -> Iterator[ChainLine | None]:
    """Yield the entries of a chain file in order, with None for a line that cannot be parsed.

    A last line without a line end is left out, because it was not written completely. A missing file has no
    entries.
    """
    if isinstance(path, ObjectLines):
        yield from map(_read_line, path.lines())
    elif path.exists():
        with path.open("rb") as file:
            for text in file:
                if text.endswith(b"\n"):
                    yield _read_line(text)


def last_in_file(path: LinePlace) -> ChainLine | None:
    """Return the last complete entry of a chain file that can be parsed, or None if there is no such entry.

    Reads the file from its end. A missing file has no entries.
    """
    return next(lines_from_end(path), None)


def lines_from_end(path: LinePlace) -> Iterator[ChainLine]:
    """Yield the complete entries of a chain file that can be parsed, the last one first.

    Reads the file from its end, a part at a time. A missing file has no entries.
    """
    texts = path.from_end() if isinstance(path, ObjectLines) else _texts_from_end(path)
    yield from (line for text in texts if (line := _read_line(text)) is not None)


def _texts_from_end(path: Path) -> Iterator[bytes]:
    if not path.exists():
        return
    with path.open("rb") as file:
        before, rest = file.seek(0, os.SEEK_END), b""
        while before > 0:
            start = max(0, before - _TAIL_BYTES)
            file.seek(start)
            part = file.read(before - start) + rest
            before = start
            # The first text may be only the end of a line, and is read with the part before.
            texts = part.splitlines(keepends=True)
            rest = texts.pop(0) if start > 0 else b""
            yield from (text for text in reversed(texts) if text.endswith(b"\n"))


def _read_line(text: bytes) -> ChainLine | None:
    try:
        return _parse_line(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
