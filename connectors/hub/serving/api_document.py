"""The OpenAPI document of the hub: what FastAPI makes of routes and models, with roles and examples added."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from fastapi import FastAPI

from connectors.hub.serving.example_values import EXAMPLES, MOMENT, TEXTS

Schema = dict[str, Any]
BEARER: Final = "HTTPBearer"
ROLES_LINE: Final = "\n\nRoles: "
_ABOUT: Final = (
    "The HTTP API of Trunkline. Each request carries the token of a principal or of a task's agent. Each "
    "operation lists the roles that may use it; `own` means only for things that the caller made or holds."
)


class MissingExample(LookupError):
    """A field or path parameter of the API has no example value. Add one to `example_values`."""


def documented(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of an application, with groups, roles, examples and the bearer token added.

    Use it as the application's method `openapi`. The document is made once.

    Raises:
        MissingExample: A field or path parameter has no example.
    """
    if app.openapi_schema is None:
        page = FastAPI.openapi(app)
        page["info"]["description"] = _ABOUT
        bearer = {"type": "http", "scheme": "bearer", "description": "A principal's token."}
        page.setdefault("components", {})["securitySchemes"] = {BEARER: bearer}
        for path, methods in page["paths"].items():
            for operation in methods.values():
                _complete(operation, path, page["components"]["schemas"])
    return app.openapi_schema or {}


def _complete(operation: dict[str, Any], path: str, schemas: dict[str, Any]) -> None:
    parts = [part for part in path.split("/") if part not in {"", "api", "hub"}]
    operation["tags"] = parts[:1]
    roles = operation.get("x-trunkline-roles")
    said = "all, without a token" if roles is None else ", ".join(_with_reach(roles))
    operation["description"] = f"{operation.get('description', '')}{ROLES_LINE}{said}."
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            before = path.split(f"/{{{parameter['name']}}}")[0].rpartition("/")[2]
            parameter["example"] = _example(parameter["schema"], {}, f"{before}.{parameter['name']}")
    for media in operation.get("requestBody", {}).get("content", {}).values():
        if "example" not in media:
            media["example"] = _example(media["schema"], schemas, is_request=True)
    for answer in operation["responses"].values():
        for media_type, media in answer.get("content", {}).items():
            if "example" not in media:
                is_text = media["schema"].get("type") == "string"
                media["example"] = TEXTS[media_type] if is_text else _example(media["schema"], schemas)


def _with_reach(roles: dict[str, str]) -> Iterator[str]:
    return (role if reach == "all" else f"{role} ({reach})" for role, reach in roles.items())


def _example(schema: Schema, schemas: Schema, name: str = "", *, is_request: bool = False) -> Any:
    """Return an example of a schema, from the examples of its fields.

    Args:
        schema: The schema.
        schemas: The schemas of the document, by name.
        name: The place of the schema, as `Model.field`; empty for a whole body.
        is_request: Leave out the fields that may be null, because a client need not send them.
    """
    if name in EXAMPLES:
        return EXAMPLES[name]
    match schema:
        case {"examples": [first, *_]}:
            return first
        case {"$ref": ref}:
            model = ref.rpartition("/")[2]
            fields, required = schemas[model].get("properties", {}), schemas[model].get("required", ())
            return {
                field: _example(one, schemas, f"{model}.{field}", is_request=is_request)
                for field, one in fields.items()
                if field in required or not (is_request and {"type": "null"} in one.get("anyOf", ()))
            }
        case {"items": {"$ref": _} as item}:
            return [_example(item, schemas, is_request=is_request)]
        case {"anyOf": [first, *_]}:
            return _example(first, schemas, name, is_request=is_request)
        case {"type": "null"}:
            return None
    short = name.rpartition(".")[2]
    if short in EXAMPLES:
        return EXAMPLES[short]
    match schema:
        case {"enum": [first, *_]} | {"const": first}:
            return first
        case {"format": "date-time"}:
            return MOMENT
        case {"type": "boolean"}:
            return schema.get("default", False)
    raise MissingExample(f"no example for {name or schema}: add it to connectors.hub.serving.example_values")
