"""The MCP tools of blobs (DL-25): contents in parts, over a log in memory and by the official client."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from connectors.doors.mcp_tools.agents import blob_tools
from connectors.doors.mcp_tools.agents.blob_tools import BlobTools
from connectors.doors.mcp_tools.agents.tool_arguments import (
    GetMyMessages,
    PublishMessage,
    ReadBlob,
    SendToAgent,
    Subscribe,
    UploadBlob,
)
from connectors.hub.serving.answers import ApiError
from schemas.settings.settings import LimitSettings
from schemas.streams.control.organism import ListenerAdded
from tests.connectors.doors.mcp_tools.conftest import Agent, McpGateway
from tests.connectors.doors.mcp_tools.delivery_calls import called
from tests.connectors.doors.mcp_tools.folded_hub import FoldedHub
from tests.schemas.hub_records import PUMP_GOOD, public_key

pytestmark = pytest.mark.requirement("DL-25")

PART = 2000
GIVEN = random.Random(1).randbytes(2 * PART + 100)
DIGEST = hashlib.sha256(GIVEN).hexdigest()


def hub_of(folder: Path, *agents: str) -> FoldedHub:
    """A hub in memory in which these agents take part, with small limits."""
    hub = FoldedHub(folder)
    limits = LimitSettings(payload_bytes=PART, blob_bytes=10 * PART)
    hub.settings = hub.settings.model_copy(update={"limits": limits})
    for agent in agents:
        hub.join(agent, public_key())
    return hub


def part(given: bytes = GIVEN[:PART], **more: Any) -> UploadBlob:
    """The arguments of a part, by default of the first and not the last."""
    arguments = {"content": base64.b64encode(given).decode(), "isLast": False, **more}
    return UploadBlob.model_validate(arguments)


async def uploaded(tools: BlobTools, agent: str = "ann", given: bytes = GIVEN) -> dict[str, Any]:
    """Upload a content in parts; the answer to the last one."""
    answer: dict[str, Any] = {}
    for at in range(0, len(given), PART):
        last = at + PART >= len(given)
        about = {"uploadId": answer.get("uploadId"), "offset": at, "isLast": last, "contentType": "image/png"}
        answer = await tools.upload_blob(agent, part(given[at : at + PART], **about))
    return answer


async def read(tools: BlobTools, agent: str, message_id: str) -> bytes:
    """Read the blob of a message in parts."""
    found = b""
    while True:
        asked = ReadBlob.model_validate({"messageId": message_id, "offset": len(found), "limit": PART})
        answer = await tools.read_blob(agent, asked)
        found += base64.b64decode(answer["content"])
        if answer["isLast"]:
            return found


def files(hub: FoldedHub) -> list[str]:
    """The names of all files in the store of a hub."""
    return [path.name for path in Path(hub.blob_store.root).rglob("*") if path.is_file()]


async def refused(call: Any) -> tuple[int, str]:
    """Status and reason of a tool's refusal."""
    with pytest.raises(ApiError) as found:
        await call
    return found.value.status_code, found.value.reason


def test_an_agent_uploads_in_parts_and_another_reads_in_parts(tmp_path: Path) -> None:
    hub = hub_of(tmp_path, "ann", "bo")

    async def talk() -> None:
        tools = hub.blob_tools
        blob = await uploaded(tools)
        assert (blob["digest"], blob["bytes"], blob["contentType"]) == (DIGEST, len(GIVEN), "image/png")
        asked = SendToAgent.model_validate({"targetAgentId": "bo", "message": "see this", "blob": DIGEST})
        sent = await hub.tools.send_to_agent("ann", asked)
        (message,) = (await hub.tools.get_my_messages("bo", GetMyMessages()))["messages"]
        assert message["blob"] == {"digest": DIGEST, "bytes": len(GIVEN), "contentType": "image/png"}
        assert await read(tools, "bo", sent["messageId"]) == GIVEN
        assert await refused(read(tools, "ann", sent["messageId"])) == (404, "not_found")
        assert len(files(hub)) == 1

    asyncio.run(talk())


def test_subscribers_of_a_topic_get_the_reference(tmp_path: Path) -> None:
    hub = hub_of(tmp_path, "ann", "bo")

    async def talk() -> None:
        await uploaded(hub.blob_tools)
        await hub.tools.subscribe("bo", Subscribe(topic="news"))
        asked = PublishMessage.model_validate({"topic": "news", "message": "see", "blob": DIGEST})
        assert (await hub.tools.publish_message("ann", asked))["recipientCount"] == 1
        unknown = PublishMessage.model_validate({"topic": "news", "message": "see", "blob": "ab" * 32})
        assert await refused(hub.tools.publish_message("ann", unknown)) == (404, "not_found")

    asyncio.run(talk())


def test_a_part_that_comes_again_counts_once_and_one_out_of_turn_is_refused(tmp_path: Path) -> None:
    hub = hub_of(tmp_path, "ann")

    async def talk() -> None:
        tools = hub.blob_tools
        first = await tools.upload_blob("ann", part())
        upload = first["uploadId"]
        assert await tools.upload_blob("ann", part(uploadId=upload)) == first
        late = part(uploadId=upload, offset=PART + 1)
        assert await refused(tools.upload_blob("ann", late)) == (409, "seq_conflict")
        rest = part(GIVEN[PART : 2 * PART], uploadId=upload, offset=PART)
        assert (await tools.upload_blob("ann", rest))["bytes"] == 2 * PART
        end = part(GIVEN[2 * PART :], uploadId=upload, offset=2 * PART, isLast=True, digest=DIGEST)
        assert (await tools.upload_blob("ann", end))["digest"] == DIGEST
        assert await refused(tools.upload_blob("ann", end)) == (404, "not_found")

    asyncio.run(talk())


def test_a_bad_upload_ends_and_leaves_nothing(tmp_path: Path) -> None:
    hub = hub_of(tmp_path, "ann", "bo")

    async def talk() -> None:
        tools = hub.blob_tools
        long = part(b"x" * (PART + 1))
        assert await refused(tools.upload_blob("ann", long)) == (413, "too_large")
        assert await refused(uploaded(tools, given=b"x" * (10 * PART + 1))) == (413, "too_large")
        other = part(digest="ab" * 32, isLast=True)
        assert await refused(tools.upload_blob("ann", other)) == (400, "malformed")
        bad = UploadBlob(content="no base64!")
        assert await refused(tools.upload_blob("ann", bad)) == (400, "malformed")
        assert await refused(tools.upload_blob("ann", part(offset=1))) == (400, "malformed")
        upload = (await tools.upload_blob("ann", part()))["uploadId"]
        assert await refused(tools.upload_blob("bo", part(uploadId=upload))) == (404, "not_found")
        assert len(files(hub)) == 1
        for _ in range(3):
            await tools.upload_blob("ann", part())
        assert await refused(tools.upload_blob("ann", part())) == (503, "busy")
        for one in list(tools._begun):
            tools._drop(one)

    asyncio.run(talk())


def test_a_listener_gets_no_blob(tmp_path: Path) -> None:
    hub = hub_of(tmp_path, "ann")
    body = ListenerAdded.model_validate(PUMP_GOOD["listener.added"][1])
    assert hub.add(body.record(door="commands", principal="operator")).verdict == "accepted"

    async def talk() -> None:
        await uploaded(hub.blob_tools)
        asked = SendToAgent.model_validate({"targetAgentId": "slow", "message": "see this", "blob": DIGEST})
        assert await refused(hub.tools.send_to_agent("ann", asked)) == (400, "malformed")

    asyncio.run(talk())


def test_an_upload_to_a_store_that_fails_is_refused_for_now(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    hub = hub_of(tmp_path / "file", "ann")
    assert asyncio.run(refused(hub.blob_tools.upload_blob("ann", part()))) == (503, "unreachable")


@pytest.mark.long
def test_an_upload_without_a_further_part_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = hub_of(tmp_path, "ann")
    monkeypatch.setattr(blob_tools, "PART_TIMEOUT_S", 0.1)

    async def talk() -> None:
        tools = hub.blob_tools
        for _ in range(5):
            upload = (await tools.upload_blob("ann", part()))["uploadId"]
            await asyncio.sleep(0.3)
            assert files(hub) == []
            rest = part(uploadId=upload, offset=PART)
            assert await refused(tools.upload_blob("ann", rest)) == (404, "not_found")

    asyncio.run(talk())


@pytest.mark.kafka
def test_agents_exchange_a_blob_by_the_official_client(
    shared_gateway: McpGateway, new_agent: Callable[[str], Agent]
) -> None:
    ann, bo = new_agent("ann"), new_agent("bo")
    given = base64.b64encode(GIVEN).decode()

    async def talk() -> None:
        async with ann.client(shared_gateway, "http") as a, bo.client(shared_gateway, "http") as b:
            blob = await called(a, "upload_blob", content=given)
            about = {"targetAgentId": bo.name, "message": "see this", "blob": blob["digest"]}
            await called(a, "send_to_agent", **about)
            (message,) = (await called(b, "wait_for_messages", timeoutSeconds=20))["messages"]
            found = await called(b, "read_blob", messageId=message["id"])
            assert (found["content"], found["isLast"], found["digest"]) == (given, True, DIGEST)

    anyio.run(talk)
