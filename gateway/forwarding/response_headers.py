"""The response headers that the gateway adds to an answer: request id, endpoint, smaller model."""

from __future__ import annotations

from gateway.http.client_interface import Client
from gateway.protocol.message_bytes import response_lines
from gateway.request_record import Exchange


def response_headers(exchange: Exchange, client: Client, endpoint: str) -> bytes:
    """Return the response headers that the gateway adds, without status line and framing."""
    lines = response_lines(client.response_lines.line, exchange.id, endpoint)
    id_header = exchange.api.errors.id_header
    if id_header:
        lines += f"{id_header}: {exchange.id}\r\n".encode("utf-8", "surrogateescape")
    if exchange.tier:
        lines += b"x-penstock-tier: %b\r\n" % exchange.tier.encode()
    if client.will_close:
        lines += b"connection: close\r\n"
    return lines
