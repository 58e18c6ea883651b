"""The files of the page, read once; what is not among them is not served."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final, NamedTuple

from fastapi import Request, Response

_FOLDER: Final = Path(__file__).resolve().parent / "page"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX: Final = "index.html"


class PageFile(NamedTuple):
    """One file."""

    content: bytes
    media_type: str
    etag: str

    def answer(self, request: Request) -> Response:
        """The file, or that the browser has it already."""
        headers = {"ETag": self.etag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def page_files() -> dict[str, PageFile]:
    """All files of the page by name."""
    found = {}
    for path in sorted(_FOLDER.iterdir()):
        if path.suffix in _TYPES:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
            found[path.name] = PageFile(content, _TYPES[path.suffix], etag)
    return found
