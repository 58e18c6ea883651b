"""The HTTP routes of the contracts below `/contracts`. As `/openapi.json`, they need no token."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Final

from fastapi import FastAPI, Request, Response

from connectors.doors.http_api.contracts.contract_files import ASYNCAPI_FILE, SCHEMAS_FOLDER, contract_files
from connectors.hub.serving.admission import open_to_all
from connectors.hub.serving.answers import json_answer, not_found
from connectors.hub.serving.served_files import PageFile
from schemas.settings.settings import Settings

CONTRACTS: Final = "/contracts"
_HEADERS: Final = {"X-Content-Type-Options": "nosniff"}


def add_contract_routes(app: FastAPI, settings: Settings) -> None:
    """Add the index of the contracts and the route of each file. The first request makes the documents.

    Args:
        app: the application, whose OpenAPI document the index names.
        settings: the topics in the AsyncAPI document follow them.
    """

    @cache
    def files() -> dict[str, PageFile]:
        return {path: PageFile.of(content, ".json") for path, content in contract_files(settings).items()}

    async def answer(path: str, request: Request) -> Response:
        file = (await asyncio.to_thread(files)).get(path)
        if file is None:
            raise not_found(f"there is no such contract; GET {CONTRACTS} lists all")
        return file.answer(request, _HEADERS)

    @app.get(CONTRACTS, include_in_schema=False)
    @open_to_all
    async def list_contracts() -> Response:
        paths = await asyncio.to_thread(files)
        schemas = [f"{CONTRACTS}/{path}" for path in paths if path != ASYNCAPI_FILE]
        return json_answer(
            {"asyncapi": f"{CONTRACTS}/{ASYNCAPI_FILE}", "openapi": app.openapi_url, "schemas": schemas}
        )

    @app.get(f"{CONTRACTS}/{ASYNCAPI_FILE}", include_in_schema=False)
    @open_to_all
    async def show_asyncapi(request: Request) -> Response:
        return await answer(ASYNCAPI_FILE, request)

    @app.get(f"{CONTRACTS}/{SCHEMAS_FOLDER}/{{name}}", include_in_schema=False)
    @open_to_all
    async def show_schema(request: Request, name: str) -> Response:
        return await answer(f"{SCHEMAS_FOLDER}/{name}", request)
