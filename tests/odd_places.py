"""Another user's account and odd names for folders: a user without a name, a home or a locale."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

# A user and a group as OpenShift gives them: a number without an entry in /etc/passwd, and root's group.
UID, GID = 123456, 0
# Every character that all programs of a stack take, beside letters and digits.
ODD_NAME = "größe a,b=c'e\"f%g$h;i&j{k}*<~> :%é%zz"
# A user without a name and with no place for files; another clock than UTC; the locale of a bare container.
NO_PLACE = {"HOME": "?", "LC_ALL": "C", "TZ": "<+0545>-5:45"}


# The user may read all files, because the tests' interpreter may be in root's home, and write none of others.
AS_ANOTHER_USER = (
    *("setpriv", "--reuid", str(UID), "--regid", str(GID), "--clear-groups"),
    *("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search", "--"),
)


@contextmanager
def folder_of_another_user() -> Iterator[Path]:
    """A new folder of that user; not below the folder of pytest, which is for root alone."""
    with TemporaryDirectory(prefix="trunkline-odd-") as folder:
        shutil.chown(folder, UID, GID)
        yield Path(folder)
