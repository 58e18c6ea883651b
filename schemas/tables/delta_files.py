"""The data files of a Delta table, read without Spark, always in the columns that the table declares.

Files of one table differ. The WRITE and OPTIMIZE of delta-rs, and Trunkline's own tasks, write `string` columns
with the table's nullability. The MERGE of delta-rs writes nullable `string_view` columns; no option of delta-rs
1.6.6 changes that. All readers therefore use the functions of this module, which cast each batch to the table's
schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import FileSystem, LocalFileSystem, PyFileSystem, SubTreeFileSystem

if TYPE_CHECKING:
    # It imports pandas, which would add a quarter of a second to the start of every program.
    import pyarrow.dataset as ds

_BYTES_READ: Final = 1024 * 1024


def table_storage(path: str) -> FileSystem:
    """Return an Arrow file system whose root is the folder of a Delta table. Nothing is read or created.

    `path` is a local path or a URI of an object store.
    """
    if "://" in path:
        return PyFileSystem(DeltaStorageHandler(path))
    # No Python file system: Arrow's threads would need the interpreter lock while the program exits, and abort.
    return SubTreeFileSystem(path, LocalFileSystem())


def dataset_of(table: DeltaTable) -> ds.Dataset:
    """Return a lazy Arrow dataset of all rows of `table`, in the version of the table that is loaded.

    Rows are read only when the caller scans the dataset.
    """
    where = urlsplit(table.table_uri)
    path = unquote(where.path) if where.scheme == "file" else table.table_uri
    return table.to_pyarrow_dataset(filesystem=table_storage(path))


def dataset_of_files(storage: FileSystem, paths: Sequence[str], schema: pa.Schema) -> ds.Dataset:
    """Return a lazy Arrow dataset of all rows of some Parquet files of a Delta table.

    Rows are read only when the caller scans the dataset. A missing file raises OSError: at this call for a
    local table, otherwise at the scan.

    Args:
        storage: the file system of the table, by `table_storage`.
        paths: the files, relative to the root of `storage`.
        schema: the columns of the result. A column that a file lacks is null in its rows.
    """
    import pyarrow.dataset as ds  # a late import, because it imports pandas

    return ds.dataset(list(paths), schema=schema, format="parquet", filesystem=storage)


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


def has_rows(path: str) -> bool:
    """Return whether a Delta table with at least one row exists at the path or URI `path`.

    The result is False both for an empty table and if there is no table.
    """
    if not DeltaTable.is_deltatable(path):
        return False
    return bool(dataset_of(DeltaTable(path)).head(1, columns=[]).num_rows)
