"""Clients that are slow, silent or gone, against a real gateway with small limits before a recording engine.

The gateway's own clock decides (one sweep each quarter of a second), so these tests wait for what it does and measure
when it came; they never sleep for a guess, and what is late because others had the processor is not too late: that time
is left out where Linux counts it, and of three tries one has to be in time.
"""

from __future__ import annotations

import asyncio
import re
import socket
import urllib.request
from collections.abc import Iterator
from statistics import median
from time import monotonic
from typing import Any, NamedTuple

import pytest

from gateway.app import App
from gateway.config import Config
from tests.e2e.processes import Gateway, gateway
from tests.e2e.stub import MODEL, TEXT, Recorded, Stub, recording_stub
from tests.e2e.wire import Wire, post
from tests.fair_time import PATIENCE_S, Stopwatch, once_within, pace

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
SWEEP_S = 0.25
SLACK_S = SWEEP_S + 0.45 * pace()  # a sweep, and what a busy machine takes to do it
LIMITS = {
    "headers_timeout": "300ms",
    "body_timeout": "1900ms",
    "body_min_rate": "1KiB",
    "idle_timeout": "1200ms",
    "slow_reader": "500ms",
}
CONFIG = """
models: [{{name: demo, pool: main}}]
pools:
  main:
    policy: round_robin
    endpoints: [{{url: '{url}', max_concurrency: {places}}}]
limits: {limits}
"""


class Line(NamedTuple):
    gateway: Gateway
    stub: Stub

    def stopwatch(self) -> Stopwatch:
        return Stopwatch(self.gateway.pid)

    def connect(self, receive_bytes: int | None = None) -> Wire:
        return Wire(self.gateway.port, receive_bytes)

    def recorded(self, user: str, count: int = 1) -> Recorded:
        """The newest request of this user, once so many of them came."""

        def found() -> list[Recorded]:
            return [each for each in self.stub.requests if each.json.get("user") == user]

        assert self.stub.wait(lambda: len(found()) >= count)
        return found()[-1]

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.gateway.admin_url}/metrics") as answer:
            found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", answer.read().decode(), re.MULTILINE)
        assert found, name
        return float(found[1])


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    """A gateway with the limits above."""
    with recording_stub() as stub:
        limits = "{" + ", ".join(f"{name}: {value}" for name, value in LIMITS.items()) + "}"
        config = CONFIG.format(url=stub.url, places=24, limits=limits)
        with gateway(tmp_path_factory.mktemp("deadlines"), config) as running:
            yield Line(running, stub)
            assert running.alive
            assert "Traceback" not in running.said, running.said


def ask(line: Line, **changes: Any) -> bytes:
    with line.connect() as wire:
        wire.send(post({**CHAT, **changes}))
        answer = wire.answer()
    assert answer.status == 200
    return answer.body


def drip(wire: Wire, data: bytes, every_s: float) -> None:
    """Send byte by byte until the other side answers or closes."""
    wire.socket.settimeout(every_s)
    for at in range(len(data)):
        wire.send(data[at : at + 1])
        try:
            if wire.socket.recv(1, socket.MSG_PEEK) is not None:
                break
        except TimeoutError:
            continue
        except ConnectionError:
            break
    wire.socket.settimeout(10)


def test_a_silent_connection_is_closed_without_a_word(line: Line) -> None:
    def closed_after_s() -> float:
        took = line.stopwatch()
        with line.connect() as wire:
            assert wire.ended()
            assert took.wall_s >= 0.3
            return took.fair_s

    once_within(0.3 + SLACK_S, closed_after_s)


def test_dripped_headers_are_cut_off_however_steadily_they_drip(line: Line) -> None:
    def cut_off_after_s() -> float:
        with line.connect() as wire:
            took = line.stopwatch()
            drip(wire, b"POST /v1/chat/completions HTTP/1.1\r\nX-Slow: " + b"a" * 1000, every_s=0.02)
            fair_s = took.fair_s
            assert took.wall_s >= 0.3
            answer = wire.answer()
            assert wire.ended()
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert answer.headers["x-should-retry"] == "false"
        return fair_s

    once_within(0.3 + SLACK_S, cut_off_after_s)


def test_a_body_slower_than_the_rate_is_refused_before_its_time_is_up(line: Line) -> None:
    def refused_after_s() -> float:
        with line.connect() as wire:
            wire.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5000\r\n\r\n")
            took = line.stopwatch()
            drip(wire, b" " * 5000, every_s=0.02)
            fair_s = took.fair_s
            assert took.wall_s >= 1.0
            answer = wire.answer()
            assert wire.ended()
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert answer.headers["x-request-id"].startswith("req_")
        return fair_s

    once_within(1.8, refused_after_s)  # which is before body_timeout


def test_a_partial_body_is_refused_when_its_time_is_up(line: Line) -> None:
    def refused_after_s() -> float:
        with line.connect() as wire:
            took = line.stopwatch()
            wire.send(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n" + b" " * 60_000
            )
            answer = wire.answer()
            fair_s = took.fair_s
            assert took.wall_s >= 1.9
            assert wire.ended()
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        return fair_s

    once_within(1.9 + SLACK_S, refused_after_s)


def test_a_connection_between_requests_lives_past_the_header_deadline_and_ends_at_the_idle_one(line: Line) -> None:
    def idle_for_s() -> float:
        with line.connect() as wire:
            for _ in range(2):
                wire.send(post(CHAT))
                assert wire.answer().status == 200
                answered = line.stopwatch()
                wire.socket.settimeout(0.3 + SWEEP_S)
                with pytest.raises(TimeoutError):
                    wire.socket.recv(1)
                wire.socket.settimeout(10)
            assert wire.socket.recv(1) == b""
            assert answered.wall_s >= 1.2
            return answered.fair_s

    once_within(1.2 + SLACK_S, idle_for_s)


def test_an_answer_may_take_longer_than_any_of_the_clients_deadlines(line: Line) -> None:
    """Deadlines are for what the client owes; here it owes nothing and waits for the engine."""
    with line.connect() as wire:
        wire.send(post({**CHAT, "user": "hold"}))
        seen = line.recorded("hold")
        wire.socket.settimeout(1.5)
        with pytest.raises(TimeoutError):
            wire.socket.recv(1)
        assert seen.closed_at is None


def test_a_reader_that_stalls_costs_little_memory_and_is_cut_off_and_hurts_nobody(line: Line) -> None:
    ask(line)
    before = line.gateway.resident_bytes
    with line.connect(receive_bytes=4096) as wire:
        took = line.stopwatch()
        wire.send(post({**CHAT, "user": "flood", "stream": True}))
        seen = line.recorded("flood")
        waits: list[float] = []
        peak = before
        while seen.closed_at is None and took.fair_s < 2 * pace():
            asked = line.stopwatch()
            assert TEXT.encode() in ask(line)
            waits.append(asked.fair_s)
            peak = max(peak, line.gateway.resident_bytes)
        assert seen.closed_at is not None, "within two seconds, or what they are here"
    assert seen.closed_at - took.began >= 0.5
    assert seen.sent_bytes < 32 * 2**20  # what the kernel's socket buffers take; a gateway that buffers takes gigabytes
    assert peak - before < 24 * 2**20
    assert median(waits) < 0.25 * pace()


async def test_the_gateway_holds_at_most_one_read_of_the_engine_for_a_stalled_reader() -> None:
    """Looked at from inside: the client's transport is never given more than its high-water mark and one read."""
    with recording_stub() as stub:
        config = Config.model_validate(
            {
                "version": 1,
                "listeners": {"api": {"port": 0}, "admin": {"port": 0}},
                "models": [{"name": MODEL, "pool": "main"}],
                "pools": {"main": {"policy": "round_robin", "endpoints": [{"url": stub.url}]}},
                "limits": {"slow_reader": "500ms"},
                "observability": {"access_log": "off"},
            }
        )
        app = App(config)
        await app.start()
        try:
            with Wire(int(app.url.rpartition(":")[2]), receive_bytes=4096) as wire:
                wire.send(post({**CHAT, "user": "flood", "stream": True}))
                held = await _most_held(app)
        finally:
            await app.stop()
    assert 0 < held <= (64 + 256) * 1024


async def _most_held(app: App) -> int:
    """The largest write buffer seen until the client is cut off."""
    held, seen = 0, False
    async with asyncio.timeout(PATIENCE_S):
        while not seen or app.connections:
            for front in app.connections:
                seen = True
                if front.transport is not None:
                    held = max(held, front.transport.get_write_buffer_size())
            await asyncio.sleep(0)
    return held


@pytest.mark.parametrize("user", ["hold", "drip"], ids=["in prefill", "in mid-stream"])
def test_a_client_that_goes_takes_the_engines_connection_along_within_100_ms(line: Line, user: str) -> None:
    took_s = []
    already = sum(each.json.get("user") == user for each in line.stub.requests)
    for number in range(5):
        wire = line.connect()
        wire.send(post({**CHAT, "user": user, "stream": True}))
        seen = line.recorded(user, already + number + 1)
        if user == "drip":
            assert wire.socket.recv(100)
        left = line.stopwatch()
        wire.close()
        assert line.stub.wait(lambda seen=seen: seen.closed_at is not None)  # type: ignore[misc]
        took_s.append(left.fair_s)
    assert min(took_s) <= 0.1, took_s


def test_a_client_that_goes_while_waiting_for_a_place_is_never_sent_to_the_engine(tmp_path: Any) -> None:
    with recording_stub() as stub, gateway(tmp_path, CONFIG.format(url=stub.url, places=1, limits="{}")) as running:
        line = Line(running, stub)
        with line.connect() as first:
            first.send(post({**CHAT, "user": "hold"}))
            held = line.recorded("hold")
            once_within(0.1, lambda: _left_the_queue_after_s(line))
        assert stub.wait(lambda: held.closed_at is not None)
        assert TEXT.encode() in ask(line, user="last")
        assert [each.json["user"] for each in stub.requests] == ["hold", "last"]


def _left_the_queue_after_s(line: Line) -> float:
    with line.connect() as second:
        second.send(post({**CHAT, "user": "waiting"}))
        _until(line, "penstock_waiting", 1)
    left = line.stopwatch()
    _until(line, "penstock_waiting", 0)
    return left.fair_s


def _until(line: Line, metric: str, value: float) -> None:
    ends = monotonic() + PATIENCE_S
    while line.metric(metric) != value:
        assert monotonic() < ends, metric
