"""The audit chain: one entry for each commit of the ledger, with its Merkle roots and the entry before it.

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

from schemas.integrity.ledger_leaves import NEWEST_ENCODING
from schemas.integrity.merkle import leaf_hash, merkle_root, root_and_level
from schemas.wire.strict_json import canonical_plain

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
    """The rows of one partition that a commit added.

    They have the offsets `first` to `last`, and `root` is the Merkle root over them in the order of offsets.
    `marks` (base64) are the first four bytes of each node of the lowest tree level with at most 32 nodes. They
    prove nothing, but show where two trees differ.
    """

    partition: Partition
    first: Number
    last: Number
    rows: Number
    root: _Hash
    marks: str


class ChainEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The entry of one commit to the Delta table with the id `table`.

    `root` is the Merkle root over the roots of its partitions, in the order of partitions. `ends` is, after the
    commit, the first offset of each partition that is not in the ledger. `rows` is the number of rows that the
    chain covers up to here. `start` is empty but in the first entry: the ends of the ledger before the chain
    began. Rows below them are not covered.
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
        """Return the SHA-256 of the canonical JSON of the entry, in hex."""
        return sha256(canonical_plain(msgspec.to_builtins(self, str_keys=True))).hexdigest()


class FirstEntry(NamedTuple):
    """The start of a chain: its table's id, and the ends of the table before the chain."""

    table: str
    start: dict[int, int]


class ChainLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry with its value as it was stored.

    `version` is the version of the table that the entry's commit made.
    """

    version: Number
    value: _Hash
    entry: ChainEntry

    def text(self) -> bytes:
        """Return the line of the chain file."""
        return canonical_plain(msgspec.to_builtins(self, str_keys=True)) + b"\n"


_parse_line: Final = msgspec.json.Decoder(ChainLine).decode
_parse_roots: Final = msgspec.json.Decoder(list[PartitionRoot]).decode


def partition_root(partition: int, offsets: tuple[int, int], leaves: list[bytes]) -> PartitionRoot:
    """Return the root of a run of rows.

    Args:
        partition: The Kafka partition of the rows.
        offsets: The offsets of the first and the last row.
        leaves: The leaf of each row, in the order of offsets.
    """
    root, level, _ = root_and_level(leaves, MARKS_MOST)
    marks = base64.b64encode(b"".join(node[:MARK_BYTES] for node in level)).decode("ascii")
    return PartitionRoot(partition, *offsets, len(leaves), root.hex(), marks)


def commit_root(partitions: Iterable[PartitionRoot]) -> str:
    """Return the root of a commit, in hex.

    The leaf of a partition is made of its numbers, as eight bytes each, and its root.
    """
    leaves = []
    for at in partitions:
        numbers = (at.partition, at.first, at.last, at.rows)
        leaves.append(leaf_hash(b"".join(n.to_bytes(8, "big") for n in numbers) + bytes.fromhex(at.root)))
    return merkle_root(leaves).hex()


def roots_text(roots: Iterable[PartitionRoot]) -> str:
    """Return the roots as the text that a Spark task returns with its data file."""
    return msgspec.json.encode(list(roots)).decode("ascii")


def read_roots(texts: Iterable[str]) -> list[PartitionRoot]:
    """Return the roots from the texts that tasks made by `roots_text`."""
    return [root for text in texts for root in _parse_roots(text)]


def next_entry(head: ChainEntry | FirstEntry, query: str, batch: int, roots: Iterable[str]) -> ChainEntry:
    """Return the entry of a micro-batch that follows `head`.

    `roots` are the texts of its tasks, by `roots_text`.
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
    """Return the value of `audit` in a commit's metadata."""
    return {"entry": msgspec.to_builtins(entry, str_keys=True), "value": entry.value()}


class LogPart(NamedTuple):
    """Entries of the commits that are still in Delta's log, and the log's newest version, -1 without a log."""

    lines: list[ChainLine]
    version: int


def lines_in_log(storage: FileSystem, after_version: int = -1) -> LogPart:
    """Return the entries in Delta's log of the versions after `after_version`."""
    found = storage.get_file_info(FileSelector("_delta_log", allow_not_found=True))
    versions = sorted(int(file.base_name[:-5]) for file in found if _is_commit(file.base_name))
    lines = (line_in_commit(storage, version) for version in versions if version > after_version)
    return LogPart([line for line in lines if line is not None], versions[-1] if versions else -1)


def has_commit(storage: FileSystem, version: int) -> bool:
    """Return whether Delta's log still has the commit of this version."""
    return bool(storage.get_file_info([_commit_path(version)])[0].type == FileType.File)


def line_in_commit(storage: FileSystem, version: int) -> ChainLine | None:
    """Return the entry in a commit, or None when the commit was deleted or has no readable entry."""
    try:
        with storage.open_input_stream(_commit_path(version)) as stream:
            texts = stream.read().splitlines()
        for text in texts:
            metadata = orjson.loads(text).get("commitInfo", {}).get("userMetadata") if text else None
            if metadata:
                return line_in_metadata(metadata, version)
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return None
    return None


def line_in_metadata(metadata: str, version: int) -> ChainLine | None:
    """Return the entry in a commit's userMetadata, or None when there is none that can be read."""
    try:
        audit = orjson.loads(metadata).get("audit")
        return None if audit is None else _parse_line(canonical_plain({"version": version, **audit}))
    except (ValueError, TypeError, AttributeError):
        return None


def newest_entry(known: ChainEntry | None, lines: Iterable[ChainLine]) -> ChainEntry | None:
    """Return the end of the chain that `lines` continue after `known`.

    Lines that do not continue the chain are ignored: another writer made them. If `known` is None, the chain
    begins with the first line.
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


def lines_in_file(path: Path) -> Iterator[ChainLine | None]:
    """Yield the lines of the chain file, None for one that cannot be read.

    A last line without a line end is left out: it was not written completely.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for text in file:
            if text.endswith(b"\n"):
                yield _read_line(text)


def last_in_file(path: Path) -> ChainLine | None:
    """Return the last readable line of the chain file, or None without one."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        size, tail = file.seek(0, os.SEEK_END), _TAIL_BYTES
        while True:
            file.seek(max(0, size - tail))
            texts = file.read().splitlines(keepends=True)
            # The first of them may be only the end of a line.
            for text in reversed(texts if tail >= size else texts[1:]):
                found = _read_line(text) if text.endswith(b"\n") else None
                if found is not None:
                    return found
            if tail >= size:
                return None
            tail *= 4


def _read_line(text: bytes) -> ChainLine | None:
    try:
        return _parse_line(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
