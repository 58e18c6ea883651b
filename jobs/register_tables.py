"""Registers the tables in a catalog, where Spark SQL finds them; `./trunkline tables register` runs it.

Reads: the places of ledger and views. The environment has Spark's options, which say where the catalog is.
Owns: a database of external Delta tables in the catalog. To drop them deletes no row.
Guarantees: a table of the same name at another place is not touched. Nothing is dropped.
On restart: starts again, and adds what is missing.

Exit codes: 0 registered; 3 no table yet; 4 a table is at another place; 5 the catalog does not answer.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Final

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from jobs.driver.programs import exit_code_of
from schemas.settings.settings import Settings, load_settings
from schemas.streams.fold import VIEW_TABLES
from schemas.tables.delta_files import is_table
from schemas.tables.ledger import LEDGER
from trunkline_agent.errors import BackboneUnreachable, NotFound, Refused
from trunkline_agent.private_files import keep_files_private

_ABOUT: Final = "The ledger of Trunkline, and the views of it. External tables: to drop them deletes no row."


def register(settings: Settings, database: str) -> dict[str, Any]:
    """Register the ledger and all views that there are.

    Args:
        settings: The settings of the tables.
        database: The name of the database, which is made if it is missing.

    Returns:
        A JSON object: `database`, `tables`, and the `new` ones among them.

    Raises:
        NotFound: There is no table yet.
        Refused: The database has such a table at another place.
        BackboneUnreachable: The catalog does not answer.
    """
    places = {name: settings.table_path(name) for name in sorted((LEDGER, *VIEW_TABLES))}
    tables = {name: place for name, place in places.items() if is_table(place)}
    if not tables:
        raise NotFound(f"there is no table at {settings.tables_root} yet: 'streams' makes them")
    spark = SparkSession.builder.appName("trunkline tables").getOrCreate()
    try:
        spark.sql(f"CREATE DATABASE IF NOT EXISTS {database} COMMENT '{_ABOUT}'")
    except (Py4JError, PySparkException) as error:
        raise BackboneUnreachable(f"the catalog does not answer: {str(error).partition(chr(10))[0]}") from None
    before = {row["tableName"] for row in spark.sql(f"SHOW TABLES IN {database}").collect()}
    for name, place in tables.items():
        if name in before:
            found = spark.sql(f"DESCRIBE DETAIL {database}.{name}").first()
            if found is None or found["location"].removeprefix("file:").rstrip("/") != place.rstrip("/"):
                where = "nowhere" if found is None else found["location"]
                raise Refused(f"{database}.{name} is at {where}, not at {place}: drop it there first")
        else:
            escaped = place.replace("\\", "\\\\").replace("'", "\\'")
            spark.sql(f"CREATE TABLE {database}.{name} USING DELTA LOCATION '{escaped}'")
    new = sorted(tables.keys() - before)
    return {"database": database, "tables": sorted(tables), "new": new}


def main(arguments: list[str] | None = None) -> int:
    """Register the tables, and print what was done as one JSON object.

    Args:
        arguments: The options. None: those of the command line.

    Returns:
        The exit code: 0 registered, 3 no table, 4 refused, 5 the catalog does not answer.
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
