"""Helpers of the mock engine's HTTP handlers: forms, JSON responses, and broken connections."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import msgspec
from aiohttp import web

from mockgpu.fault_grammar import FaultKind
from mockgpu.http.response_sinks import break_off, reset_connection
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


def reset_now(request: web.Request) -> NoReturn:
    """Reset the client's TCP connection, and raise CancelledError to end the handler."""
    reset_connection(transport_of(request))
    raise asyncio.CancelledError


async def break_whole(request: web.Request, body: bytes, kind: FaultKind) -> NoReturn:
    """Send a part of a response, then break the connection in the way that `kind` specifies.

    request  the request to respond to
    body     the complete body; depending on the fault, none or half of it is sent after the headers
    kind     the kind of fault

    Always raises CancelledError, which ends the handler.
    """
    response = web.StreamResponse(headers={"Content-Type": JSON, "Content-Length": str(len(body))})
    await response.prepare(request)
    if kind is not FaultKind.RESET_AFTER_HEADERS:
        await response.write(body[: len(body) // 2])
    break_off(transport_of(request), kind)
    raise asyncio.CancelledError


def transport_of(request: web.Request) -> asyncio.Transport:
    """Return the asyncio transport of the client's connection.

    Raises CancelledError if the client has disconnected.
    """
    if request.transport is None:
        raise asyncio.CancelledError
    return request.transport
