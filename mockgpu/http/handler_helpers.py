"""Helpers of the mock engine's HTTP handlers: content types, forms and JSON responses."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from mockgpu.request_parser import ApiError

JSON = "application/json"


def json_answer(payload: object) -> web.Response:
    """Return a response with status 200 and `payload` as its JSON body."""
    return web.Response(body=msgspec.json.encode(payload), content_type=JSON)


async def form_fields(request: web.Request) -> dict[str, Any]:
    """Parse a submitted form, and return its fields; the content of a file is bytes.

    Raises ApiError if the form is invalid.
    """
    if not request.content_type.startswith("multipart/form-data"):
        raise ApiError(400, "1 validation error: file: field required", "file")
    fields = await request.post()
    return {
        name: value.file.read() if isinstance(value, web.FileField) else value
        for name, value in fields.items()
    }


def check_content_type(request: web.Request) -> None:
    """Raise ApiError if the request does not have the content type application/json."""
    if request.content_type != JSON:
        raise ApiError(400, "Unsupported Media Type: Only 'application/json' is allowed")


def transport_of(request: web.Request) -> asyncio.Transport:
    """Return the asyncio transport of the client's connection.

    Raises CancelledError if the client has disconnected.
    """
    if request.transport is None:
        raise asyncio.CancelledError
    return request.transport
