"""The audit chain: one entry for each commit of the ledger, with its Merkle roots and the entry before it.

An entry rides in its commit's metadata, so rows and entry are there together or not at all. Delta's log is
cleaned after an hour; the chain file keeps all entries, one JSON line each. An entry's value is SHA-256 of its
canonical JSON, which names the value before it: whoever knows one value knows all that came before.
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
# Whatever stands in the files, only such numbers and hashes come out of them. 64 bits hold the next one, too.
Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
# As wide as the ledger's column.
Partition = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}\\Z")]


class PartitionRoot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a commit added of one partition: offsets `first` to `last`, how many rows, the root over them in the
    order of offsets. `marks` (base64) are the first four bytes of each node of the lowest level with at most
    32: they prove nothing, and tell where a difference is.
    """

    partition: Partition
    first: Number
    last: Number
    rows: Number
    root: _Hash
    marks: str


class ChainEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One commit's entry, of the Delta table with the id `table`. `root`: over its partitions' roots, in the
    order of partitions. `ends`: the first offset of each partition after it that is not in the ledger; `rows`:
    how many rows the chain covers with it. `start`: in the first entry, the ends of the ledger before the chain
    began; what lies below is not covered.
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
        """SHA-256 of its canonical JSON, in hex."""
        return sha256(canonical_plain(msgspec.to_builtins(self, str_keys=True))).hexdigest()


class FirstEntry(NamedTuple):
    """What a chain begins with: its table's id, and the table's ends before the chain."""

    table: str
    start: dict[int, int]


class ChainLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry with its value as it was written down, and the version of the table that its commit made."""

    version: Number
    value: _Hash
    entry: ChainEntry

    def text(self) -> bytes:
        """Its line in the chain file."""
        return canonical_plain(msgspec.to_builtins(self, str_keys=True)) + b"\n"


_parse_line: Final = msgspec.json.Decoder(ChainLine).decode
_parse_roots: Final = msgspec.json.Decoder(list[PartitionRoot]).decode


def partition_root(partition: int, offsets: tuple[int, int], leaves: list[bytes]) -> PartitionRoot:
    """The root of a run of rows, by their leaves in the order of offsets; `offsets` of the first and last."""
    root, level, _ = root_and_level(leaves, MARKS_MOST)
    marks = base64.b64encode(b"".join(node[:MARK_BYTES] for node in level)).decode("ascii")
    return PartitionRoot(partition, *offsets, len(leaves), root.hex(), marks)


def commit_root(partitions: Iterable[PartitionRoot]) -> str:
    """The root of a commit: each partition's numbers, as eight bytes each, and root are a leaf of it."""
    leaves = []
    for at in partitions:
        numbers = (at.partition, at.first, at.last, at.rows)
        leaves.append(leaf_hash(b"".join(n.to_bytes(8, "big") for n in numbers) + bytes.fromhex(at.root)))
    return merkle_root(leaves).hex()


def roots_text(roots: Iterable[PartitionRoot]) -> str:
    """As a task hands them on with its file."""
    return msgspec.json.encode(list(roots)).decode("ascii")


def read_roots(texts: Iterable[str]) -> list[PartitionRoot]:
    """What tasks handed on, by `roots_text`."""
    return [root for text in texts for root in _parse_roots(text)]


def next_entry(head: ChainEntry | FirstEntry, query: str, batch: int, roots: Iterable[str]) -> ChainEntry:
    """The entry of a micro-batch that comes after `head`. `roots`: of its tasks, by `roots_text`."""
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
    """What a commit's marker says under `audit`."""
    return {"entry": msgspec.to_builtins(entry, str_keys=True), "value": entry.value()}


class LogPart(NamedTuple):
    """Entries of the commits that Delta's log still has, and the newest of its versions, -1 for no log."""

    lines: list[ChainLine]
    version: int


def lines_in_log(storage: FileSystem, after_version: int = -1) -> LogPart:
    """What the log has, from after a version of the table on."""
    found = storage.get_file_info(FileSelector("_delta_log", allow_not_found=True))
    versions = sorted(int(file.base_name[:-5]) for file in found if _is_commit(file.base_name))
    lines = (line_in_commit(storage, version) for version in versions if version > after_version)
    return LogPart([line for line in lines if line is not None], versions[-1] if versions else -1)


def has_commit(storage: FileSystem, version: int) -> bool:
    """Whether the log has this version's commit."""
    return bool(storage.get_file_info([_commit_path(version)])[0].type == FileType.File)


def line_in_commit(storage: FileSystem, version: int) -> ChainLine | None:
    """The entry in a commit; None when there is none that can be read, or when the log was cleaned of it."""
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
    """The entry in the userMetadata of the commit that made a version; None for none that can be read."""
    try:
        audit = orjson.loads(metadata).get("audit")
        return None if audit is None else _parse_line(canonical_plain({"version": version, **audit}))
    except (ValueError, TypeError, AttributeError):
        return None


def newest_entry(known: ChainEntry | None, lines: Iterable[ChainLine]) -> ChainEntry | None:
    """The chain's end: what comes after `known`, one entry after the other. Lines that do not continue the
    chain are somebody else's. Without a known entry it begins with the first line.
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
    """The lines of the chain file, None for one that cannot be read; a last one without its end is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for text in file:
            if text.endswith(b"\n"):
                yield _read_line(text)


def last_in_file(path: Path) -> ChainLine | None:
    """The last line that can be read, None when there is none near the file's end."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        size, tail = file.seek(0, os.SEEK_END), _TAIL_BYTES
        while True:
            file.seek(max(0, size - tail))
            texts = file.read().splitlines(keepends=True)
            # The first of them may be the end of a line.
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
