"""Look-ups in the mailbox table, for ids of old messages that the fold may no longer remember (FQ-15)."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from schemas.settings.settings import Settings
from schemas.streams.mailboxes.message import MAILBOX_VIEW
from schemas.tables.delta_files import dataset_of
from trunkline_agent.errors import TrunklineError


class ViewUnreadable(TrunklineError):
    """The mailbox table exists but cannot be read at present. A later attempt may succeed."""


def known_messages(settings: Settings, realm: str, message_ids: Sequence[str]) -> set[tuple[str, str]]:
    """Return the recipient and the id of each message in `message_ids` that the mailbox table already has.

    `realm` is a realm of mailboxes; for the bridge it is the name of a session of the queue. Mailboxes of other
    realms do not count. The set is empty while there is no table. Raises ViewUnreadable if the table cannot be
    read.
    """
    path = settings.table_path(MAILBOX_VIEW)
    try:
        if not DeltaTable.is_deltatable(path):
            return set()
        wanted = (pc.field("realm") == realm) & pc.field("message_id").isin(pa.array(message_ids, pa.string()))
        found = dataset_of(DeltaTable(path)).to_table(filter=wanted, columns=["recipient", "message_id"])
    except (DeltaError, OSError, pa.ArrowException) as error:
        raise ViewUnreadable(f"the mailbox view at {path} cannot be read: {error}") from error
    return set(zip(*(found.column(name).to_pylist() for name in ("recipient", "message_id")), strict=True))
