"""The responses to a request that an injected fault affects: an error, a reset, or half a body.

response_sinks.py applies the faults of streams.
"""

from __future__ import annotations

import asyncio
from typing import NoReturn

from aiohttp import web

from mockgpu.fault_grammar import FaultKind, InjectedFault
from mockgpu.http.handler_helpers import JSON, transport_of
from mockgpu.http.response_sinks import break_off, reset_connection
from mockgpu.request_parser import ApiError


def raise_injected(fault: InjectedFault | None) -> None:
    """Raise the error response of a fault `5xx`, with its status and Retry-After.

    Does nothing for other faults, and if there is none.
    """
    if fault is None or fault.kind is not FaultKind.ERROR:
        return
    wait_s = fault.retry_after_s
    headers = None if wait_s is None else {"Retry-After": str(wait_s)}
    raise ApiError(fault.status, "Injected fault", headers=headers)


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
