"""The data files of a Delta table, read without Spark, always in the columns that the table declares.

Files of one table differ. The WRITE and OPTIMIZE of delta-rs, and Trunkline's own tasks, write `string` columns
with the table's nullability. The MERGE of delta-rs writes nullable `string_view` columns; no option of delta-rs
1.6.6 changes that. All readers therefore use the functions of this module, which cast each batch to the table's
schema, and compare a filter with the cast values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import FileSelector, FileSystem, FileType, LocalFileSystem, PyFileSystem, SubTreeFileSystem

from trunkline_agent.errors import TrunklineError

if TYPE_CHECKING:
    # It imports pandas, which would add a quarter of a second to the start of every program.
    import pyarrow.dataset as ds

_BYTES_READ: Final = 1024 * 1024
_REASON_CHARACTERS: Final = 300
# Each costs a round trip in an object store.
_REQUESTS_AT_ONCE: Final = 8
# The column of a scan that says whether a row matches the filter.
_MATCHES: Final = "row matches the filter"


class TableRows:
    """The rows of some data files of a Delta table. They are read only when the caller scans them.

    Its methods take the arguments of those of `pyarrow.dataset.Dataset`. Unlike there, a filter may use text
    columns of files whose columns are `string_view`. Arrow has no comparisons for this type, but compares a
    filter with the smallest and largest value of each row group of a file, in the file's own type, to skip
    groups. So it refuses the filter, unless the group has one value only.
    """

    def __init__(self, dataset: ds.FileSystemDataset) -> None:
        self._dataset = dataset

    @property
    def schema(self) -> pa.Schema:
        """The columns that the table declares."""
        return self._dataset.schema

    def get_fragments(self) -> Iterator[ds.ParquetFileFragment]:
        """Yield the data files. A scan of one must be given `schema`, and no filter on a text column."""
        yield from self._dataset.get_fragments()

    def head(self, rows: int, columns: Sequence[str]) -> pa.Table:
        """Return the first `rows` rows."""
        return self._dataset.head(rows, columns=list(columns))

    def count_rows(self, filter: pc.Expression | None = None) -> int:  # noqa: A002
        """Return the number of rows that match `filter`."""
        if filter is None or not self._uses_text(filter):
            return int(self._dataset.count_rows(filter=filter))
        return sum(batch.num_rows for batch in self.to_batches([], filter))

    def to_table(self, columns: Sequence[str] | None = None, filter: pc.Expression | None = None) -> pa.Table:  # noqa: A002
        """Return the rows that match `filter` as one table, in no order."""
        names = self.schema.names if columns is None else list(columns)
        if filter is None or not self._uses_text(filter):
            return self._dataset.to_table(columns=names, filter=filter)
        schema = pa.schema([self.schema.field(name) for name in names])
        return pa.Table.from_batches(self.to_batches(names, filter), schema)

    def to_batches(
        self,
        columns: Sequence[str] | None = None,
        filter: pc.Expression | None = None,  # noqa: A002
        **scan: Any,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows that match `filter` in batches, in no order. `scan` are options of Arrow's scanner."""
        names = self.schema.names if columns is None else list(columns)
        if filter is None or not self._uses_text(filter):
            yield from self._dataset.to_batches(columns=names, filter=filter, **scan)
            return
        comparable, others = self._by_comparability(filter)
        yield from comparable.to_batches(columns=names, filter=filter, **scan)
        # As a column, the filter is applied to the cast values, and no row group is skipped.
        found = {name: pc.field(name) for name in names} | {_MATCHES: filter}
        for batch in others.to_batches(columns=found, **scan):
            yield batch.filter(batch.column(_MATCHES)).select(names)

    def _uses_text(self, expression: pc.Expression) -> bool:
        """Return whether the expression needs a text column."""
        others = pa.schema([field for field in self.schema if not pa.types.is_string(field.type)])
        try:
            others.empty_table().filter(expression)
        except pa.ArrowInvalid:
            return True
        return False

    def _by_comparability(self, expression: pc.Expression) -> tuple[ds.Dataset, ds.Dataset]:
        """Return the files that may have rows for the expression: those Arrow can filter, and the others."""
        # By the statistics in Delta's log, which have the table's types.
        files = list(self._dataset.get_fragments(filter=expression))
        with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as threads:
            is_view = list(threads.map(_has_views, files))
        found: dict[bool, list[ds.ParquetFileFragment]] = {False: [], True: []}
        for file, views in zip(files, is_view, strict=True):
            found[views].append(file)
        comparable, others = (
            type(self._dataset)(found[views], self.schema, self._dataset.format, self._dataset.filesystem)
            for views in (False, True)
        )
        return comparable, others


def _has_views(file: ds.ParquetFileFragment) -> bool:
    return any(pa.types.is_string_view(field.type) for field in file.physical_schema)


class _ObjectStorage(DeltaStorageHandler):
    """The handler of an object store, made to fit Arrow where deltalake 1.6 does not."""

    def delete_dir(self, path: str) -> None:
        self.delete_dir_contents(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:  # type: ignore[override]
        found = self.get_file_info_selector(FileSelector(path, allow_not_found=True, recursive=True))
        with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as threads:
            list(threads.map(self.delete_file, [file.path for file in found if file.type == FileType.File]))

    def open_output_stream(self, path: str, metadata: dict[str, str] | None = None) -> pa.PythonFile:
        return pa.PythonFile(_BytesStream(self._handler.open_output_stream(path, metadata)))


class _BytesStream:
    """A stream of deltalake, which takes bytes alone. Arrow hands large parts over as buffers."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, data: Any) -> Any:
        return self._stream.write(bytes(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def table_storage(path: str) -> FileSystem:
    """Return an Arrow file system whose root is the folder of a Delta table. Nothing is read or created.

    `path` is a local path or a URI of an object store.
    """
    where = urlsplit(path)
    if where.scheme == "file":
        path = unquote(where.path)
    elif "://" in path:
        return PyFileSystem(_ObjectStorage(path))
    # No Python file system: Arrow's threads would need the interpreter lock while the program exits, and abort.
    return SubTreeFileSystem(path, LocalFileSystem())


def move_files(storage: FileSystem, places: Mapping[str, str]) -> None:
    """Move files within a file system, each from a key of `places` to its value, some at a time.

    In an object store, each move is a copy and a deletion. Raises OSError.
    """

    def move(place: tuple[str, str]) -> None:
        storage.create_dir(str(PurePosixPath(place[1]).parent))
        storage.move(*place)

    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as threads:
        list(threads.map(move, places.items()))


def reason_of(error: Exception) -> str:
    """Return the reason of a failure of disk or object store as one short line, for an error message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # An error of obstore shows the whole exchange after an empty line.
    lines = str(error).partition("\n\n")[0].split()
    return " ".join(lines)[:_REASON_CHARACTERS] or type(error).__name__


def dataset_of(table: DeltaTable) -> TableRows:
    """Return all rows of `table`, in the version of the table that is loaded."""
    return TableRows(table.to_pyarrow_dataset(filesystem=table_storage(table.table_uri)))


def rows_at(path: str, columns: Sequence[str], where: pc.Expression | None = None) -> pa.Table | None:
    """Return the rows of the table at the path or URI `path` that match `where`, in no order.

    The result is None if there is no table. Raises TrunklineError for a table that cannot be read.
    """
    try:
        if not DeltaTable.is_deltatable(path):
            return None
        return dataset_of(DeltaTable(path)).to_table(columns, where)
    except (DeltaError, OSError, pa.ArrowException) as error:
        raise TrunklineError(f"the table at {path} cannot be read: {error}") from error


def dataset_of_files(storage: FileSystem, paths: Sequence[str], schema: pa.Schema) -> TableRows:
    """Return all rows of some Parquet files of a Delta table.

    A missing file raises OSError: at this call for a local table, otherwise at the scan.

    Args:
        storage: the file system of the table, by `table_storage`.
        paths: the files, relative to the root of `storage`.
        schema: the columns of the result. A column that a file lacks is null in its rows.
    """
    import pyarrow.dataset as ds  # a late import, because it imports pandas

    return TableRows(ds.dataset(list(paths), schema=schema, format="parquet", filesystem=storage))


def small_batches(table: DeltaTable, columns: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
    """Yield all rows of `table`, file by file, in batches of at most `rows` rows with the given columns.

    Use it to read a table in little memory: only one batch is decoded at once. Arrow's own scanner decodes
    whole row groups, which takes gigabytes with long texts. The batches have the columns in the order of
    `columns`. A table without rows yields nothing.
    """
    dataset = dataset_of(table)
    schema = pa.schema([dataset.schema.field(name) for name in columns])
    for fragment in dataset.get_fragments():
        with fragment.filesystem.open_input_file(fragment.path) as source:
            file = pq.ParquetFile(source, pre_buffer=False, buffer_size=_BYTES_READ)
            for batch in file.iter_batches(batch_size=rows, columns=list(columns), use_threads=False):
                yield batch.select(schema.names).cast(schema)


def is_table(path: str) -> bool:
    """Return whether there is a Delta table at the path or URI `path`."""
    return DeltaTable.is_deltatable(path)


def has_rows(path: str) -> bool:
    """Return whether a Delta table with at least one row exists at the path or URI `path`.

    The result is False both for an empty table and if there is no table.
    """
    if not DeltaTable.is_deltatable(path):
        return False
    return bool(dataset_of(DeltaTable(path)).head(1, columns=[]).num_rows)
