"""The page `/docs`, which shows the OpenAPI document and sends requests. It loads nothing from elsewhere.

Swagger UI comes from the package `fastapi-swagger`, which has its files as they were released. Only these files
are used: the package's own page has inline scripts, which the Content-Security-Policy does not allow.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Final

import fastapi_swagger
from fastapi import FastAPI, Request, Response

from connectors.hub.serving.admission import open_to_all
from connectors.hub.serving.answers import not_found
from connectors.hub.serving.served_files import PageFile

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
_HEADERS: Final = {
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
        return files[_INDEX].answer(request, _HEADERS)

    @app.get(f"{API_PAGE}/{{name}}", include_in_schema=False)
    @open_to_all
    async def show_file_of_api_page(request: Request, name: str) -> Response:
        if name not in files:
            raise not_found("the page has no such file")
        return files[name].answer(request, _HEADERS)
