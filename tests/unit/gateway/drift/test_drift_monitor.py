"""Tests that the gateway soon detects that a pool's traffic has changed, without false alarms."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterator
from math import cos, pi
from random import Random
from typing import Any

import msgspec
import pytest

from gateway.config import Config, load_text
from gateway.drift.drift_monitor import DriftMonitor
from gateway.metrics.drift_metrics import DriftMetrics
from gateway.metrics.metric_types import MetricRegistry
from gateway.restart import handover_channel
from gateway.telemetry.drift_records import ShapeRecord
from policies.sizing.workload_drift import MEASURES, ShapeCounts, ShapeMemory
from tests.unit.policies.sizing.test_workload_drift import sized_for

MONDAY_S = 1_795_996_800.0  # midnight of a day in Unix time
HOUR_S, DAY_S = 3600.0, 86_400.0
Kind = Callable[[float], str]


class Traffic:
    """Simulated conversations or agent sessions. Their requests end one by one, in order of
    time.
    """

    def __init__(self, seed: int, rate: Callable[[float], float], kind: Kind) -> None:
        self._rng, self._rate, self._kind = Random(seed), rate, kind
        self._sessions = 0

    def records(self, from_s: float, until_s: float) -> Iterator[ShapeRecord]:
        rng, begin_s = self._rng, from_s
        waiting: list[tuple[float, int, ShapeRecord]] = []
        while begin_s < until_s:
            while waiting and waiting[0][0] <= begin_s:
                yield heapq.heappop(waiting)[2]
            for record in self._session(begin_s):
                heapq.heappush(waiting, (record.at_s, rng.getrandbits(60), record))
            begin_s += rng.expovariate(self._rate(begin_s))
        while waiting and waiting[0][0] <= until_s:
            yield heapq.heappop(waiting)[2]

    def _session(self, begin_s: float) -> Iterator[ShapeRecord]:
        # Simulate a session whose kind stays the same, and whose prompts grow and share their first
        # blocks.
        rng, is_agent = self._rng, self._kind(begin_s) == "agents"
        self._sessions += 1
        turns = 1 + int(rng.expovariate(1 / 12 if is_agent else 1 / 3))
        blocks = [rng.getrandbits(48) for _ in range(16 if is_agent else 1)]
        at_s = begin_s
        for _ in range(min(turns, 60)):
            blocks = [*blocks, *(rng.getrandbits(48) for _ in range(3 if is_agent else 1))]
            prompt = 512 * len(blocks) + rng.randrange(512)
            output = 1 + int(rng.lognormvariate(4.0 if is_agent else 5.3, 0.6))
            at_s += output * 0.03 + rng.expovariate(1 / 8 if is_agent else 1 / 30)
            yield ShapeRecord("main", at_s, prompt, output, self._sessions, tuple(blocks))


def shares_of(traffic: Traffic, hours: float = 6.0) -> dict[str, list[float]]:
    counts, memory = ShapeCounts(), ShapeMemory()
    for record in traffic.records(0.0, hours * HOUR_S):
        shape = memory.shape(
            record.prompt_tokens, record.output_tokens, record.blocks, record.session
        )
        if record.at_s > HOUR_S:
            counts.add(shape)
    return counts.shares()


CONVERSATION = shares_of(Traffic(4711, lambda _: 0.2, lambda _: "conversation"))


def config(shares: dict[str, list[float]], rates: list[float] | None = None) -> Config:
    block = shares | ({"hourly_rates": rates} if rates else {})
    text = {
        "version": 1,
        "pools": {"main": {"endpoints": [{"url": "http://127.0.0.1:9"}]}},
        "sized_for": {"main": block},
    }
    return load_text(msgspec.json.encode(text), "gateway.yaml", {}).config


def monitor(started_s: float, of: Config) -> DriftMonitor:
    made = DriftMonitor(DriftMetrics(MetricRegistry()))
    made.configure(of, started_s)
    return made


def alarms_at(watched: DriftMonitor, records: Iterator[ShapeRecord]) -> Iterator[float]:
    # Yield the times at which there is an alarm; a gateway advances four times per second.
    for record in records:
        watched.advance(record.at_s)
        watched.feed([record])
        if watched.sentences():
            yield record.at_s


def state(watched: DriftMonitor) -> dict[str, Any]:
    row: dict[str, Any] = watched.as_json()["pools"][0]
    return row


@pytest.mark.parametrize("phase_s", range(0, 600, 100))
@pytest.mark.parametrize("seed", [61, 62])
def test_agents_instead_of_conversations_are_found_within_30_minutes_at_any_phase(
    phase_s: int, seed: int
) -> None:
    turns_at = MONDAY_S + 2 * HOUR_S + phase_s
    watched = monitor(MONDAY_S, config(CONVERSATION))
    kind: Kind = lambda at_s: "agents" if at_s >= turns_at else "conversation"  # noqa: E731
    records = Traffic(seed, lambda _: 0.2, kind).records(MONDAY_S, turns_at + HOUR_S)
    found_s = next(alarms_at(watched, records))
    assert turns_at < found_s <= turns_at + 1800
    assert "prompt" in state(watched)["measures"]
    assert state(watched)["since"] is not None


@pytest.mark.parametrize("seed", [71, 72])
def test_seven_diurnal_days_of_the_same_sessions_raise_no_alarm(seed: int) -> None:
    def rate(at_s: float) -> float:
        return 0.06 - 0.054 * cos(2 * pi * at_s / DAY_S)

    requests_per_session = 4.0
    hourly = [requests_per_session * rate((hour + 0.5) * HOUR_S) for hour in range(24)]
    watched = monitor(MONDAY_S, config(CONVERSATION, hourly))
    records = Traffic(seed, rate, lambda _: "conversation").records(MONDAY_S, MONDAY_S + 7 * DAY_S)
    assert list(alarms_at(watched, records)) == []
    window = state(watched)["window"]
    assert set(window["index"]) == set(MEASURES)
    assert 0.5 < window["rate_ratio"] < 2.0


def test_another_rate_alone_is_shown_and_raises_no_alarm() -> None:
    watched = monitor(MONDAY_S, config(CONVERSATION, [0.8] * 24))
    records = Traffic(5, lambda _: 1.0, lambda _: "conversation").records(
        MONDAY_S, MONDAY_S + 3 * HOUR_S
    )
    assert list(alarms_at(watched, records)) == []
    assert state(watched)["window"]["rate_ratio"] > 3


def test_an_alarm_is_logged_once_and_ends_when_the_shapes_are_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    changes = MONDAY_S + 2 * HOUR_S, MONDAY_S + 4 * HOUR_S
    watched = monitor(MONDAY_S, config(CONVERSATION))
    kind: Kind = lambda at_s: (  # noqa: E731
        "agents" if changes[0] <= at_s < changes[1] else "conversation"
    )
    with caplog.at_level(logging.INFO, "penstock"):
        for record in Traffic(8, lambda _: 0.3, kind).records(MONDAY_S, MONDAY_S + 7 * HOUR_S):
            watched.feed([record])
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "Pool main was sized for other requests: prompt lengths (PSI " in caplog.text
    assert "pool main: requests have again the shapes" in caplog.text
    assert state(watched)["drift"] is False


def test_metrics_show_the_last_window_and_go_with_the_section() -> None:
    registry = MetricRegistry()
    watched = DriftMonitor(DriftMetrics(registry))
    watched.configure(config(CONVERSATION), MONDAY_S)
    for record in Traffic(9, lambda _: 0.3, lambda _: "agents").records(
        MONDAY_S, MONDAY_S + HOUR_S
    ):
        watched.feed([record])
    values = {reading.spec.name: reading.values for reading in registry.collect({})}
    assert values["penstock_drift_alarm"]["main", "prompt"] == 1.0
    assert values["penstock_drift_psi"]["main", "prompt"] > 1.0
    assert values["penstock_drift_windows_total"]["main",] >= 4
    plain = config(CONVERSATION)
    watched.configure(plain.model_copy(update={"sized_for": {}}), MONDAY_S + HOUR_S)
    assert not watched.is_watching
    assert not any(reading.values for reading in registry.collect({}))


def test_another_sized_for_begins_again_and_the_same_one_goes_on() -> None:
    watched = monitor(MONDAY_S, config(CONVERSATION))
    for record in Traffic(9, lambda _: 0.3, lambda _: "agents").records(
        MONDAY_S, MONDAY_S + HOUR_S
    ):
        watched.feed([record])
    watched.configure(config(CONVERSATION), MONDAY_S + HOUR_S)
    assert state(watched)["drift"] is True
    watched.configure(config(sized_for(lambda rng: _agent(rng))), MONDAY_S + HOUR_S)
    assert state(watched)["window"] is None


def _agent(rng: Random) -> Any:
    from policies.sizing.workload_drift import RequestShape

    return RequestShape(9000 + rng.randrange(3000), 50, 0.2, 4)


def test_a_successor_continues_the_open_window_and_the_turns_of_sessions() -> None:
    watched, after = (monitor(MONDAY_S, config(CONVERSATION)) for _ in range(2))
    half = MONDAY_S + HOUR_S + 300
    for record in Traffic(10, lambda _: 0.3, lambda _: "agents").records(MONDAY_S, half):
        watched.feed([record])
    for message in watched.states():
        packed = handover_channel.pack_message(message)
        assert len(packed) < handover_channel.MAX_MESSAGE_BYTES
        after.restore(handover_channel._decoder.decode(packed[handover_channel.LENGTH.size :]))
    assert state(after)["open_window"] == state(watched)["open_window"]
    session = next(iter(watched._memory._turns)) if watched._memory else 0
    later = ShapeRecord("main", half + 1, 100, 10, session, ())
    for each in (watched, after):
        each.feed([later])
    assert state(after)["open_window"] == state(watched)["open_window"]


def test_a_state_for_other_shares_is_ignored() -> None:
    watched = monitor(MONDAY_S, config(CONVERSATION))
    watched.feed([ShapeRecord("main", MONDAY_S + 1, 100, 10, 0, ())])
    other = monitor(MONDAY_S, config(sized_for(_agent)))
    for message in watched.states():
        other.restore(message)
    assert state(other)["open_window"]["requests"] == 0
