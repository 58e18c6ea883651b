"""Finds Mosquitto, Spark, and the jars of Kafka and Spark. `java_programs` finds Java."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from schemas.settings.settings import PROJECT_ROOT
from trunkline_agent.errors import TrunklineError

JARS = PROJECT_ROOT / ".jars"
# A JVM encodes file names by its locale. In any other one than UTF-8 it finds no file with `ö` in its path.
JVM_LOCALE: Final = {"LC_ALL": "C.UTF-8"}
_SET_UP = "run ./trunkline doctor in the checkout, which sets up what is missing"


def find_mosquitto() -> Path:
    """Return the path of the program Mosquitto, from PATH or from folders that are only in root's PATH.

    Raises:
        TrunklineError: There is none.
    """
    found = shutil.which("mosquitto", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if not found:
        raise TrunklineError("Mosquitto is not found: sudo apt-get install -y mosquitto")
    return Path(found)


def spark_home() -> Path:
    """Return the folder of the Spark that the installed Python package pyspark contains.

    Raises:
        TrunklineError: pyspark is not installed.
    """
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise TrunklineError(f"pyspark is not installed: {_SET_UP}")
    return Path(spec.origin).parent


def jar_files(part: str) -> list[Path]:
    """Return the paths of the jars that `./trunkline` has downloaded, sorted by name.

    `part` is `kafka` or `spark`.

    Raises:
        TrunklineError: There are none.
    """
    found = sorted((JARS / part).glob("*.jar"))
    if not found:
        raise TrunklineError(f"no jars in .jars/{part}: {_SET_UP}")
    return found
