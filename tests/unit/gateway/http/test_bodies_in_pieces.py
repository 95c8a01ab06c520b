"""Tests of request bodies that arrive in many pieces or chunks."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from tests.unit.gateway.http.connection_harness import FakeTransport, Harness, request, turns
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME


async def test_a_body_in_tiny_pieces_is_joined_into_few() -> None:
    harness = Harness()
    connection = harness.fast_connection()
    transport = FakeTransport(connection)
    connection.connection_made(transport)
    sent = request(b"x" * 40_000)
    connection.data_received(sent[:-40_000])
    most = 0
    for _ in range(20_000):
        connection.data_received(b"xx")
        most = max(most, len(connection._pieces))
    await turns()
    assert most < 12
    assert [body for _, body, _ in harness.served] == [b"x" * 40_000]
    transport.close()
    await turns()


async def test_a_body_of_many_tiny_chunks_is_parsed_over_many_loop_iterations() -> None:
    harness = Harness()
    connection, other = harness.aiohttp_connection(), harness.fast_connection()
    transports = [FakeTransport(connection), FakeTransport(other)]
    for protocol, transport in zip((connection, other), transports, strict=True):
        protocol.connection_made(transport)
    chunks = b"1\r\nx\r\n" * 10_000 + b"0\r\n\r\n"
    connection.data_received(request(b"", length="Transfer-Encoding: chunked") + chunks)
    for _ in range(5):
        await turns()
        other.data_received(request())
    assert [body for _, body, _ in harness.served] == [b"{}"] * 5
    for _ in range(40):
        await turns()
    assert harness.served[-1][1] == b"x" * 10_000
    for transport in transports:
        transport.close()
    await turns()


@pytest.mark.parametrize(
    ("chunk", "count", "most_bytes", "most_iterations"),
    [
        (b"1\r\nx\r\n", 10_000, 100, 700),
        (b"1000\r\n" + b"x" * 4096 + b"\r\n", 60, 16_384, 30),
        (b"1000\r\n" + b'   "a": 1,  \n\n\n\n' * 256 + b"\r\n", 60, 16_384, 30),
    ],
)
async def test_one_iteration_parses_few_chunks_or_many_bytes(
    chunk: bytes, count: int, most_bytes: int, most_iterations: int
) -> None:
    harness = Harness()
    connection = harness.aiohttp_connection()
    transport = FakeTransport(connection)
    connection.connection_made(transport)
    head = request(b"", length="Transfer-Encoding: chunked")
    parsed = [0]

    def count_parsed() -> None:
        body = connection._newest_body
        parsed.append(parsed[-1] if body is None else body.total_bytes)

    connection.data_received(head + chunk * count + b"0\r\n\r\n")
    count_parsed()
    while not harness.served:
        await asyncio.sleep(0)
        count_parsed()
    assert max(after - before for before, after in pairwise(parsed)) <= most_bytes
    assert len(parsed) <= most_iterations
    transport.close()
    await turns()
