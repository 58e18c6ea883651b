"""The data files of a Delta table as an Arrow dataset, for those who read without Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from deltalake import DeltaTable
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import FileSystem, LocalFileSystem, PyFileSystem, SubTreeFileSystem

if TYPE_CHECKING:
    # It brings pandas along, a quarter of a second for each program that starts, also without tables.
    import pyarrow.dataset as ds


def table_storage(path: str) -> FileSystem:
    """The file system below a table's path or URI."""
    if "://" in path:
        return PyFileSystem(DeltaStorageHandler(path))
    # Not through Python: Arrow's own threads would ask for the interpreter lock while we exit, and abort.
    return SubTreeFileSystem(path, LocalFileSystem())


def dataset_of(table: DeltaTable) -> ds.Dataset:
    """All rows of `table` at the version at which it is loaded, read when they are asked for."""
    where = urlsplit(table.table_uri)
    path = unquote(where.path) if where.scheme == "file" else table.table_uri
    return table.to_pyarrow_dataset(filesystem=table_storage(path))
