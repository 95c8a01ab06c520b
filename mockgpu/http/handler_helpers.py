"""Helpers of the mock's HTTP handlers: form parsing, JSON responses, and broken connections."""

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
    """Return an HTTP response with status 200 and this JSON body."""
    return web.Response(body=msgspec.json.encode(payload), content_type=JSON)


async def form_fields(request: web.Request) -> dict[str, Any]:
    """Return the fields of a submitted form, files as bytes. Raises ApiError if invalid."""
    if not request.content_type.startswith("multipart/form-data"):
        raise ApiError(400, "1 validation error: file: field required", "file")
    fields = await request.post()
    return {
        name: value.file.read() if isinstance(value, web.FileField) else value
        for name, value in fields.items()
    }


def check_content_type(request: web.Request) -> None:
    """Raise ApiError if the request's content type is not JSON."""
    if request.content_type != JSON:
        raise ApiError(400, "Unsupported Media Type: Only 'application/json' is allowed")


def reset_now(request: web.Request) -> NoReturn:
    """Reset the client's TCP connection, and leave the HTTP handler by an exception."""
    reset_connection(transport_of(request))
    raise asyncio.CancelledError


async def break_whole(request: web.Request, body: bytes, kind: FaultKind) -> NoReturn:
    """Send the headers of a response and none or half of its body, then close the connection.

    The function never returns: it raises an exception that ends the handler.

    request  the request to answer
    body     the whole body
    kind     the kind of fault, which decides how much is sent
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
