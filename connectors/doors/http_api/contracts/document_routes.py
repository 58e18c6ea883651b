"""The documents of the API over HTTP: the contracts below `/contracts`, and the page `/docs`.

The files are the AsyncAPI document, and a JSON Schema of each record type and MQTT payload. As `/openapi.json`,
the routes need no token.

The page `/docs` shows the OpenAPI document and sends requests. It loads nothing from elsewhere. Swagger UI
comes from the package `fastapi-swagger`, which has its files as they were released. Only these files are used:
the package's own page has inline scripts, which the Content-Security-Policy does not allow.
"""

from __future__ import annotations

import asyncio
import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

import fastapi_swagger
from fastapi import FastAPI, Request, Response

from connectors.doors.http_api.contracts.asyncapi import asyncapi_document
from connectors.doors.http_api.contracts.json_schemas import MQTT_PAYLOADS, payload_schema, record_schema
from connectors.hub.serving.admission import open_to_all
from connectors.hub.serving.answers import json_answer, not_found
from connectors.hub.serving.streaming_answer import PageFile
from schemas.settings.settings import Settings
from schemas.streams.fold import RECORD_TYPES

ASYNCAPI_FILE: Final = "asyncapi.json"
OPENAPI_FILE: Final = "openapi.json"
SCHEMAS_FOLDER: Final = "schemas"


def contract_files(settings: Settings) -> dict[str, bytes]:
    """Return the contents of the files by their paths, such as `schemas/job.event.json`.

    The OpenAPI document is not among them, because the application makes it.

    Args:
        settings: the topics in the AsyncAPI document follow them.
    """
    schemas = {name: record_schema(name) for name in RECORD_TYPES}
    schemas |= {name: payload_schema(name) for name in MQTT_PAYLOADS}
    return {
        ASYNCAPI_FILE: file_of(asyncapi_document(settings)),
        **{f"{SCHEMAS_FOLDER}/{name}.json": file_of(schemas[name]) for name in sorted(schemas)},
    }


def file_of(document: dict[str, Any]) -> bytes:
    """Return a document as the content of a file: JSON with sorted keys. Equal documents give equal files."""
    return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


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


API_PAGE: Final = "/docs"
_FOLDER: Final = Path(__file__).resolve().parent / "api_page"
_INDEX: Final = "index.html"
_OF_SWAGGER_UI: Final = ("swagger-ui.css", "swagger-ui-bundle.js")
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",  # the icons in Swagger UI's style sheet
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_PAGE_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def add_api_page(app: FastAPI) -> None:
    """Add the page `/docs` and its files to an application. As `/openapi.json`, they need no token.

    Raises OSError if a file cannot be read.
    """
    bundled = resources.files(fastapi_swagger) / "resources"
    found = [*_FOLDER.iterdir(), *(bundled / name for name in _OF_SWAGGER_UI)]
    files = {one.name: PageFile.of(one.read_bytes(), Path(one.name).suffix) for one in found}

    @app.get(API_PAGE, include_in_schema=False)
    @open_to_all
    async def show_api_page(request: Request) -> Response:
        return files[_INDEX].answer(request, _PAGE_HEADERS)

    @app.get(f"{API_PAGE}/{{name}}", include_in_schema=False)
    @open_to_all
    async def show_file_of_api_page(request: Request, name: str) -> Response:
        if name not in files:
            raise not_found("the page has no such file")
        return files[name].answer(request, _PAGE_HEADERS)
