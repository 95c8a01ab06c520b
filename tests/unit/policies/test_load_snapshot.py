"""Tests of the records of endpoints' loads that explain past picks."""

from __future__ import annotations

from policies.endpoint_load import LOAD_FIELDS, EndpointLoad
from policies.engine.engine_model_updates import EngineTimeline
from policies.engine.peer_load import PeerLoad
from policies.load_snapshot import LoadSnapshot

NOT_RECORDED = {"belief", "changes", "reservations", "timeline"}
VALUES = [name for name in LOAD_FIELDS if name not in NOT_RECORDED]
WAS_NONE = ("kv_tokens", "kv_usage", "running", "scraped_at", "waiting")


def set_all(load: EndpointLoad, first: int) -> None:
    for number, name in enumerate(VALUES, first):
        now = getattr(load, name)
        if name in ("lockstep_ranks", "peer_load", "slot"):
            continue
        setattr(load, name, not now if isinstance(now, bool) else type(now or 0)(number))
    load.peer_load, load.lockstep_ranks = PeerLoad(), (load, EndpointLoad(5))
    load.timeline.prefill_s = float(first)


def values_of(load: EndpointLoad) -> dict[str, object]:
    return {name: getattr(load, name) for name in VALUES if name != "lockstep_ranks"}


def test_a_snapshot_restores_every_value_although_the_load_changes_later() -> None:
    load = EndpointLoad(3)
    set_all(load, 100)
    before, other_rank = values_of(load), load.lockstep_ranks[1]
    snapshot = LoadSnapshot(load)
    set_all(load, 1000)
    restored = snapshot.restore(load)
    assert values_of(restored) == before
    assert restored.lockstep_ranks == (restored, other_rank)
    assert restored.timeline.prefill_s == 100.0


def test_values_that_are_unknown_are_restored_as_unknown() -> None:
    load = EndpointLoad(0)
    snapshot = LoadSnapshot(load)
    set_all(load, 7)
    restored = snapshot.restore(load)
    assert [getattr(restored, name) for name in WAS_NONE] == [None] * len(WAS_NONE)


def test_a_restored_load_has_its_own_engine_model_and_the_present_speed() -> None:
    load = EndpointLoad(0)
    snapshot = LoadSnapshot(load)
    load.timeline = EngineTimeline(0.0, None)
    restored = snapshot.restore(load)
    assert restored.timeline is not load.timeline
    assert restored.belief is load.belief
    assert restored.reservations == {}
    assert restored.changes is None
