"""Reads the body of a client's request from aiohttp's parser, and enforces limits that it lacks.

It limits the number of chunks, and refuses large (413) or encoded (415) bodies before they are
received. FastConnection reads the bodies of ordinary requests itself, because these arrive with a
Content-Length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from aiohttp.streams import StreamReader

from gateway.config import Limits
from gateway.http import head_errors
from gateway.http.client_connection import add_piece
from gateway.protocol.errors import Failure, GatewayError

CONTINUE = "100-continue"  # the only value of `Expect` that the gateway supports
CHUNKS_PER_ITERATION = 16  # chunks that are read in one event loop iteration


def check_headers(headers: Mapping[str, str], limits: Limits) -> bool:
    """Return whether the client waits for `100 Continue` before it sends the body.

    Raises GatewayError for a body that is encoded, or whose Content-Length exceeds the limit.
    """
    encoding = headers.get("Content-Encoding")
    if encoding is not None and encoding.lower() != "identity":
        raise GatewayError(
            Failure.UNSUPPORTED_MEDIA,
            "The gateway does not accept a Content-Encoding; send the body unencoded.",
        )
    if int(headers.get("Content-Length", 0)) > limits.body:
        raise _too_large(limits)
    expect = headers.get("Expect")
    if expect is None:
        return False
    if expect.lower() != CONTINUE:
        raise head_errors.expectation_failed()
    return True


async def read_sized(payload: StreamReader, reserve: Callable[[int], None]) -> list[bytes]:
    """Receive a body with a Content-Length, and return its pieces.

    `reserve` is called with the number of bytes received so far; it raises GatewayError if memory
    is short.
    """
    pieces = [payload.read_nowait()]
    total = len(pieces[0])
    reserve(total)
    while not payload.is_eof():
        piece = await payload.readany()
        total += len(piece)
        reserve(total)
        add_piece(pieces, piece)
    pieces.append(payload.read_nowait())
    return pieces


async def read_chunked(
    payload: StreamReader, reserve: Callable[[int], None], limits: Limits
) -> list[bytes]:
    """Receive a body in chunks, and return its pieces.

    `reserve` is as in read_sized(). Raises GatewayError for a body of too many bytes or chunks.
    """
    pieces = [b""]
    total = chunks = 0
    while not payload.at_eof():
        piece, _ = await payload.readchunk()
        add_piece(pieces, piece)
        total += len(piece)
        chunks += 1
        if total > limits.body:
            raise _too_large(limits)
        reserve(total)
        if chunks > limits.body_chunks:
            raise GatewayError(
                Failure.TOO_LARGE,
                f"The body of the request has more than {limits.body_chunks} chunks.",
            )
        if not chunks % CHUNKS_PER_ITERATION:
            await asyncio.sleep(0)
    return pieces


def _too_large(limits: Limits) -> GatewayError:
    return GatewayError(Failure.TOO_LARGE, f"The request body is larger than {limits.body} bytes.")
