"""Tests of when an endpoint that was ejected because it was slow may be used again."""

from __future__ import annotations

import asyncio

import pytest

from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.fleet.probe_errors import NotSentError
from gateway.fleet.speed_recovery import SpeedRecovery
from policies.health.endpoint_speed import Slowness, SpeedRecord
from policies.health.speed_samples import Measure
from tests.replacement import replace_method
from tests.unit.gateway.fleet.tables import table_of


async def _complete_nothing(live: LiveEndpoint, _: float, __: dict[str, object]) -> int | None:
    return None


@pytest.mark.parametrize(
    ("own_s", "peer_s", "returns"),
    [
        ([0.2, 0.2, 0.2], [0.2, 0.6, 0.3], True),
        ([0.6], [0.2], False),
        ([0.6, 0.6], [0.9, 0.2], False),  # the peer was busy at first
        ([0.2, 0.6], [0.2, 0.9], False),
        (
            [0.2, 0.6, 0.6],
            [0.2, 0.9, 0.9],
            False,
        ),  # the peer's time in the first probe counts in the second
    ],
)
async def test_a_slow_engine_does_not_return_because_its_peer_was_busy_once(
    own_s: list[float], peer_s: list[float], returns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recovery, live, times = measured(own_s, peer_s, monkeypatch)
    result = False
    while times[live]:
        result = await recovery.is_as_fast_as_peer(live)
    assert result is returns


@pytest.mark.parametrize(("third_s", "returns"), [(0.2, True), (0.6, False)])
async def test_a_return_needs_three_good_comparisons_in_a_row(
    third_s: float, returns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recovery, live, times = measured([0.2, 0.2, third_s], [0.2] * 3, monkeypatch)
    assert await recovery.is_as_fast_as_peer(live) is returns
    assert not times[live]


async def test_a_probe_that_cannot_be_sent_gives_no_result_and_leaves_no_request_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recovery, live, _ = measured([], [], monkeypatch)
    ended = list[LiveEndpoint]()

    async def time(endpoint: LiveEndpoint, _: object) -> float:
        if endpoint is live:
            raise NotSentError("Too many open files")
        await asyncio.sleep(0)
        ended.append(endpoint)
        return 0.2

    monkeypatch.setattr(recovery, "_time", time)
    with pytest.raises(NotSentError):
        await recovery.is_as_fast_as_peer(live)
    assert len(ended) == 1


def measured(
    own_s: list[float], peer_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> tuple[SpeedRecovery, LiveEndpoint, dict[LiveEndpoint, list[float]]]:
    # Return an endpoint that was ejected as slow, and the times of its and its peer's next probes.
    table, _, _ = table_of(["http://127.0.0.1:1"])
    (live,) = table.all()
    peer = LiveEndpoint(
        live.endpoint, live.spec, live.load, live.upstream.timeouts, live.upstream.outbox
    )
    live.speed.slowness = Slowness(Measure.TPOT, 3.0, 0.3, 0.1)
    replace_method(monkeypatch, type(table), "find_peer", lambda self, live: peer)
    times = {live: list(own_s), peer: list(peer_s)}

    async def taken(endpoint: LiveEndpoint, _: object) -> float:
        return times[endpoint].pop(0)

    recovery = SpeedRecovery(table, _complete_nothing)
    monkeypatch.setattr(recovery, "_time", taken)
    monkeypatch.setattr(SpeedRecord, "try_start_probe", lambda self, now: True)
    return recovery, live, times
