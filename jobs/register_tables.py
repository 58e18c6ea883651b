"""Registers the tables in a catalog, where Spark SQL finds them; `./trunkline tables register` runs it.

Reads: the places of ledger and views. The environment has Spark's options, which say where the catalog is.
Owns: a database of external Delta tables in the catalog. To drop them deletes no row.
Guarantees: a table of the same name at another place is not touched. Nothing is dropped.
On restart: starts again, and adds what is missing.

Exit codes: 0 registered; 2 a wrong name; 3 no table yet; 4 a table is elsewhere; 5 Spark or the catalog fails.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from jobs.driver.programs import exit_code_of
from schemas.settings.settings import Settings, load_settings
from schemas.streams.fold import VIEW_TABLES
from schemas.tables.delta_files import is_table
from schemas.tables.ledger import LEDGER
from trunkline_agent.errors import BackboneUnreachable, NotFound, Refused, UsageError
from trunkline_agent.private_files import keep_files_private

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*").fullmatch
_ABOUT: Final = "The ledger of Trunkline, and the views of it. External tables: to drop them deletes no row."


def register(settings: Settings, database: str) -> dict[str, Any]:
    """Register the ledger and all views that there are.

    Args:
        settings: The settings of the tables.
        database: The name of the database, which is made if it is missing.

    Returns:
        A JSON object: `database`, `tables`, and the `new` ones among them.

    Raises:
        UsageError: The name of the database is not one that SQL takes without quotes.
        NotFound: There is no table yet.
        Refused: The database has such a table at another place.
        BackboneUnreachable: Spark or the catalog fails.
    """
    if not _NAME(database):
        raise UsageError(f"--database {database!r}: expected letters of ASCII, digits and _")
    places = {name: settings.table_path(name) for name in sorted((LEDGER, *VIEW_TABLES))}
    tables = {name: place for name, place in places.items() if is_table(place)}
    if not tables:
        raise NotFound(f"there is no table at {settings.tables_root} yet: 'streams' makes them")
    try:
        spark = SparkSession.builder.appName("trunkline tables").getOrCreate()
        spark.sql(f"CREATE DATABASE IF NOT EXISTS {database} COMMENT '{_ABOUT}'")
        before = {row["tableName"] for row in spark.sql(f"SHOW TABLES IN {database}").collect()}
        for name in sorted(before & tables.keys()):
            found = _location(spark, f"{database}.{name}")
            if not _forms(found) & _forms(tables[name]):
                raise Refused(f"{database}.{name} is at {found}, not at {tables[name]}: drop it there first")
        new = sorted(tables.keys() - before)
        for name in new:
            escaped = tables[name].replace("\\", "\\\\").replace("'", "\\'")
            spark.sql(f"CREATE TABLE {database}.{name} USING DELTA LOCATION '{escaped}'")
    except (Py4JError, PySparkException) as error:
        raise BackboneUnreachable(f"Spark or its catalog fails: {str(error).partition(chr(10))[0]}") from error
    return {"database": database, "tables": sorted(tables), "new": new}


def _location(spark: SparkSession, table: str) -> str:
    """Return where the catalog says that a table is, whether it is there or not."""
    rows = spark.sql(f"DESCRIBE TABLE EXTENDED {table}").collect()
    return next((row["data_type"] for row in rows if row["col_name"] == "Location"), "nowhere")


def _forms(place: str) -> set[str]:
    """Return the paths that a place can be: `file:/a`, `file:///a/` and `/a` are the same."""
    where = urlsplit(place)
    if where.scheme not in {"", "file"}:
        return {place.rstrip("/")}
    path = place.removeprefix(f"{where.scheme}:").strip("/")
    return {path, unquote(path)} if where.scheme else {path}


def main(arguments: list[str] | None = None) -> int:
    """Register the tables, and print what was done as one JSON object.

    Args:
        arguments: The options. None: those of the command line.

    Returns:
        The exit code: 0 registered, 3 no table, 4 refused, 5 Spark or the catalog fails.
    """
    parser = argparse.ArgumentParser(prog="register_tables", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--database", default="trunkline", help="the tables' database")
    args = parser.parse_args(arguments)

    def run() -> int:
        print(json.dumps(register(load_settings(), args.database)))
        return 0

    return exit_code_of("register_tables", run)


if __name__ == "__main__":
    keep_files_private()
    sys.exit(main())
