"""Tests of the limits on the memory that clients can use: bodies, responses and connections."""

from __future__ import annotations

import select
from collections.abc import Iterator
from contextlib import ExitStack
from time import monotonic
from typing import NamedTuple

import pytest

from tests.duration_limits import PATIENCE_S, Stopwatch, pace
from tests.e2e.attacks import BODY, CHAT, LENGTH, chat, chunked, head
from tests.e2e.processes import GatewayProcess, gateway_process
from tests.e2e.raw_connection import RawConnection, post
from tests.e2e.recording_engine import RecordingEngine, recording_engine

MIB = 2**20
CONFIG = """
models: [{{name: demo, pool: main}}]
pools: {{main: {{policy: round_robin, endpoints: [{{url: '{url}'}}]}}}}
limits: {{body: 1MiB, body_budget: 4MiB, connections: 16, slow_reader: 1s, idle_timeout: 60s}}
"""


class Setup(NamedTuple):
    gateway: GatewayProcess
    engine: RecordingEngine


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder = tmp_path_factory.mktemp("memory")
    with (
        recording_engine() as engine,
        gateway_process(folder, CONFIG.format(url=engine.url)) as running,
    ):
        yield Setup(running, engine)
        assert running.is_alive
        assert "Traceback" not in running.stderr_text, running.stderr_text


def status_of(setup: Setup, sent: bytes) -> int:
    with RawConnection(setup.gateway.port) as connection:
        connection.send(sent)
        return connection.answer().status


@pytest.mark.parametrize(
    "begun",
    [
        head(f"Content-Length: {MIB}") + b" " * (MIB - 1024),
        chunked(b"%x\r\n%b\r\n" % (MIB - 1024, b" " * (MIB - 1024))),
    ],
    ids=["declared", "in chunks"],
)
def test_uploading_bodies_share_one_budget_and_return_it(setup: Setup, begun: bytes) -> None:
    large = post({**CHAT, "padding": "x" * (MIB - 1024)})
    with ExitStack() as open_connections:
        connections = [
            open_connections.enter_context(RawConnection(setup.gateway.port)) for _ in range(6)
        ]
        for connection in connections:
            connection.send(begun)
        waiting = [connection.socket for connection in connections]
        refused = []
        while len(refused) < 2:
            answered, _, _ = select.select(waiting, [], [], PATIENCE_S)
            assert answered, "two bodies are refused"
            refused += [connection for connection in connections if connection.socket in answered]
            waiting = [sock for sock in waiting if sock not in answered]
        assert not select.select(waiting, [], [], 0.3)[0], "the other four may continue"
        for connection in refused:
            answer = connection.answer()
            assert (answer.status, answer.error["code"]) == (429, "overloaded")
            assert int(answer.headers["retry-after-ms"]) > 0
        assert status_of(setup, large) == 429
    ends = monotonic() + PATIENCE_S
    while (status := status_of(setup, large)) != 200:
        assert (status, monotonic() < ends) == (429, True)


def test_announcing_large_bodies_uses_none_of_the_budget(setup: Setup) -> None:
    with ExitStack() as open_connections:
        for _ in range(8):
            open_connections.enter_context(RawConnection(setup.gateway.port)).send(
                head(f"Content-Length: {MIB}") + b" " * 9
            )
        assert status_of(setup, post(CHAT)) == 200


def test_unread_responses_do_not_accumulate(setup: Setup) -> None:
    # The client pipelines bad requests and reads nothing.
    #
    # The gateway stops reading, then closes.
    before, peak, took = setup.gateway.resident_bytes, 0, Stopwatch(setup.gateway.pid)
    with RawConnection(setup.gateway.port, receive_bytes=4096) as connection:
        connection.socket.settimeout(0.1)
        while took.wall_s < PATIENCE_S:
            try:
                connection.socket.send(post(b"{}") * 500)
            except TimeoutError:
                pass
            except ConnectionError:
                break
            peak = max(peak, setup.gateway.resident_bytes)
    assert took.wall_s >= 1
    assert took.fair_s < 4 * pace()
    assert peak - before < 16 * MIB


def test_a_connection_over_the_limit_is_closed_and_the_others_are_served(setup: Setup) -> None:
    with ExitStack() as open_connections:
        connections = [
            open_connections.enter_context(RawConnection(setup.gateway.port)) for _ in range(16)
        ]
        for connection in connections:
            connection.send(chat())
            assert connection.answer().status == 200
        with RawConnection(setup.gateway.port) as one_too_many:
            assert one_too_many.is_closed()
        connections[0].send(chat())
        assert connections[0].answer().status == 200


def test_connection_close_closes_the_connection_after_the_response(setup: Setup) -> None:
    with RawConnection(setup.gateway.port) as connection:
        connection.send(head("Connection: close", LENGTH) + BODY)
        assert connection.answer().status == 200
        assert connection.is_closed()
