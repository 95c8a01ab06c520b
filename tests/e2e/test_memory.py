"""What clients can make a gateway hold: bodies, answers nobody reads, connections. All of it has an end."""

from __future__ import annotations

import select
from collections.abc import Iterator
from contextlib import ExitStack
from time import monotonic
from typing import NamedTuple

import pytest

from tests.e2e.attacks import BODY, CHAT, LENGTH, chat, chunked, head
from tests.e2e.processes import Gateway, gateway
from tests.e2e.stub import Stub, recording_stub
from tests.e2e.wire import Wire, post
from tests.fair_time import PATIENCE_S, Stopwatch, pace

MIB = 2**20
CONFIG = """
models: [{{name: demo, pool: main}}]
pools: {{main: {{policy: round_robin, endpoints: [{{url: '{url}'}}]}}}}
limits: {{body: 1MiB, body_budget: 4MiB, connections: 16, slow_reader: 1s, idle_timeout: 60s}}
"""


class Line(NamedTuple):
    gateway: Gateway
    stub: Stub


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    folder = tmp_path_factory.mktemp("memory")
    with recording_stub() as stub, gateway(folder, CONFIG.format(url=stub.url)) as running:
        yield Line(running, stub)
        assert running.alive
        assert "Traceback" not in running.said, running.said


def served(line: Line, sent: bytes) -> int:
    with Wire(line.gateway.port) as wire:
        wire.send(sent)
        return wire.answer().status


@pytest.mark.parametrize(
    "begun",
    [
        head(f"Content-Length: {MIB}") + b" " * (MIB - 1024),
        chunked(b"%x\r\n%b\r\n" % (MIB - 1024, b" " * (MIB - 1024))),
    ],
    ids=["declared", "in chunks"],
)
def test_bodies_under_way_share_one_budget_and_give_it_back(line: Line, begun: bytes) -> None:
    """Four bodies of 1 MiB fill it; the next is shed with advice to come again, and not read."""
    large = post({**CHAT, "padding": "x" * (MIB - 1024)})
    with ExitStack() as open_wires:
        wires = [open_wires.enter_context(Wire(line.gateway.port)) for _ in range(6)]
        for wire in wires:
            wire.send(begun)
        waiting = [wire.socket for wire in wires]
        refused = []
        while len(refused) < 2:
            answered, _, _ = select.select(waiting, [], [], PATIENCE_S)
            assert answered, "two are refused"
            refused += [wire for wire in wires if wire.socket in answered]
            waiting = [each for each in waiting if each not in answered]
        assert not select.select(waiting, [], [], 0.3)[0], "the others are waited for"
        for wire in refused:
            answer = wire.answer()
            assert (answer.status, answer.error["code"]) == (429, "overloaded")
            assert int(answer.headers["retry-after-ms"]) > 0
        assert served(line, large) == 429
    ends = monotonic() + PATIENCE_S
    while (status := served(line, large)) != 200:
        assert (status, monotonic() < ends) == (429, True)


def test_announcing_large_bodies_takes_nothing_from_the_others(line: Line) -> None:
    """What has come counts, not what was promised: idle uploads of all the budget leave everybody else served."""
    with ExitStack() as open_wires:
        for _ in range(8):
            open_wires.enter_context(Wire(line.gateway.port)).send(head(f"Content-Length: {MIB}") + b" " * 9)
        assert served(line, post(CHAT)) == 200


def test_answers_that_nobody_reads_do_not_pile_up(line: Line) -> None:
    """A client pipelines refusals as fast as it can and reads none: the gateway stops reading, then cuts it off."""
    before, peak, took = line.gateway.resident_bytes, 0, Stopwatch(line.gateway.pid)
    with Wire(line.gateway.port, receive_bytes=4096) as wire:
        wire.socket.settimeout(0.1)
        while took.wall_s < PATIENCE_S:
            try:
                wire.socket.send(post(b"{}") * 500)
            except TimeoutError:
                pass
            except ConnectionError:
                break
            peak = max(peak, line.gateway.resident_bytes)
    assert took.wall_s >= 1
    assert took.fair_s < 4 * pace()
    assert peak - before < 16 * MIB


def test_a_connection_too_many_is_closed_and_the_others_are_served(line: Line) -> None:
    with ExitStack() as open_wires:
        wires = [open_wires.enter_context(Wire(line.gateway.port)) for _ in range(16)]
        for wire in wires:
            wire.send(chat())
            assert wire.answer().status == 200
        with Wire(line.gateway.port) as one_too_many:
            assert one_too_many.ended()
        wires[0].send(chat())
        assert wires[0].answer().status == 200


def test_a_client_that_asks_for_a_close_gets_one(line: Line) -> None:
    with Wire(line.gateway.port) as wire:
        wire.send(head("Connection: close", LENGTH) + BODY)
        assert wire.answer().status == 200
        assert wire.ended()
