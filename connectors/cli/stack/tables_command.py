"""Registers the tables in a catalog, in which Spark SQL and its like find them by name.

  trunkline tables register                                  in a catalog of its own below the data directory
  trunkline tables register --metastore thrift://HOST:9083   in yours, a Hive metastore

'register' makes the database 'trunkline' (--database) with the ledger and each view as external Delta tables.
The rows stay where they are; each column has its description. Repeat it after an upgrade: it adds what is new,
and drops nothing. A table of this name at another place is refused. It starts Spark, which takes some seconds.
It prints the file of properties with which 'spark-sql' finds the tables.
Exit codes: 0; 2 wrong settings; 3 no table yet; 4 refused, with the reason; 5 the metastore does not answer.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from connectors.cli.shared.actions import Actions, argument
from connectors.cli.shared.call import Call
from trunkline_agent.errors import BackboneUnreachable, UsageError

if TYPE_CHECKING:
    from schemas.settings.settings import Settings

_ANSWER_S: Final = 5.0
ACTIONS: Final = Actions()


@ACTIONS.add(
    argument("--database", "the tables' database (default: trunkline)", default="trunkline", metavar="NAME"),
    argument("--metastore", "the address of a Hive metastore", metavar="thrift://HOST:PORT"),
    example="trunkline tables register --metastore thrift://metastore:9083",
)
def _register(call: Call) -> int:
    """Register the ledger and all views, and print their database."""
    from connectors.cli.stack.fold_command import answer_of_job
    from connectors.programs.local_stack.part_plan import reader_environment

    if call.metastore is not None:
        _check_answers(call.metastore)
    conf = _catalog_conf(call.settings, call.metastore)
    with tempfile.TemporaryDirectory(prefix="trunkline-spark-") as scratch:
        environment = reader_environment(call.settings, scratch, conf)
        job, arguments = "register_tables", ("--database", call.database)
        found = answer_of_job(call.settings, job, *arguments, environment=environment)
    properties = _write_properties(call.settings, conf)
    text = (
        f"{len(found['tables'])} tables are in {found['database']}, {len(found['new'])} of them new; "
        f"spark-sql --properties-file {properties} finds them"
    )
    return call.print_answer(found | {"properties": str(properties)}, text)


def _check_answers(metastore: str) -> None:
    """Raise BackboneUnreachable if no server is at the addresses of a metastore. Spark would try for long."""
    why: Exception | None = None
    for address in metastore.split(","):
        where = urlsplit(address.strip())
        if where.scheme != "thrift" or not where.hostname:
            raise UsageError(f"--metastore {metastore!r}: expected thrift://HOST:PORT, or several by commas")
        try:
            socket.create_connection((where.hostname, where.port or 9083), timeout=_ANSWER_S).close()
        except (OSError, ValueError) as error:
            why = error
        else:
            return
    raise BackboneUnreachable(f"the metastore {metastore} does not answer: {why}")


def _catalog_conf(settings: Settings, metastore: str | None) -> dict[str, str]:
    """Return Spark's properties, by name, for a catalog: a metastore, or our own if `metastore` is None."""
    if metastore is not None:
        return {"spark.sql.catalogImplementation": "hive", "spark.hadoop.hive.metastore.uris": metastore}
    own = settings.data_path / "catalog"
    own.mkdir(parents=True, exist_ok=True, mode=0o700)
    place = own / "metastore"
    return {
        "spark.sql.catalogImplementation": "hive",
        "spark.sql.warehouse.dir": str(own / "warehouse"),
        "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={place};create=true",
        "spark.driver.extraJavaOptions": f'"-Dderby.stream.error.file={own / "derby.log"}"',
    }


def _write_properties(settings: Settings, conf: Mapping[str, str]) -> Path:
    """Write the properties for `spark-sql`, and return the path of their file. It has no secret."""
    from connectors.programs.local_stack.part_plan import DELTA_CONF, object_store_conf, reader_class_path

    file = settings.data_path / "catalog" / "spark.properties"
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    store = object_store_conf(settings.tables_root)
    found = {"spark.driver.extraClassPath": reader_class_path(settings), **DELTA_CONF, **store, **conf}
    file.write_text("".join(f"{name} {value}\n" for name, value in found.items()), encoding="utf-8")
    return file
