"""Tests of scaling, slicing and mixing traces, with service classes and tenants."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.replay import traffic, users
from planner.traces import (
    MixPart,
    TraceError,
    TraceRequest,
    mix_parts,
    read_trace,
    scale_rate,
    slice_span,
)
from planner.traces.recorded_request import PRIVATE


def every(second: float, count: int = 10, **other: object) -> list[TraceRequest]:
    return [TraceRequest(second * number, 600, 5, (number,), **other) for number in range(count)]  # type: ignore[arg-type]


def turns(session: str, count: int) -> list[TraceRequest]:
    return [
        TraceRequest(
            0.0,
            1024,
            5,
            (3, PRIVATE + turn),
            session=session,
            think_s=None if turn == 0 else float(turn),
        )
        for turn in range(count)
    ]


def test_a_rate_brings_moments_closer_and_a_slice_begins_at_nought() -> None:
    assert [request.arrival_s for request in scale_rate(every(1.0, 3), 4.0)] == [0.0, 0.25, 0.5]
    assert [request.arrival_s for request in slice_span(every(1.0), 2.0, 5.0)] == [0.0, 1.0, 2.0]


def test_a_slice_keeps_or_leaves_whole_sessions() -> None:
    early, late = turns("early", 3), turns("late", 3)
    late[0] = TraceRequest(9.0, 1024, 5, session="late")
    assert {request.session for request in slice_span(early + late, 0.0, 5.0)} == {"early"}
    assert [request.session for request in slice_span(early + late, 5.0)] == ["late"] * 3


def test_parts_of_a_mix_come_together_and_share_nothing() -> None:
    requests = mix_parts(
        [
            MixPart(every(1.0), slo="fast", tenant="a"),
            MixPart(every(1.0), rate=2.0, tenant="b", priority=1),
        ]
    )
    assert [request.arrival_s for request in requests] == sorted(
        request.arrival_s for request in requests
    )
    blocks = [
        {block for request in requests if request.tenant == tenant for block in request.blocks}
        for tenant in "ab"
    ]
    assert blocks[0] & blocks[1] == set()
    assert {(request.tenant, request.slo, request.priority) for request in requests} == {
        ("a", "fast", 0),
        ("b", "", 1),
    }
    assert max(request.arrival_s for request in requests if request.tenant == "b") == 4.5


def test_a_mix_is_a_file_of_traces_beside_it(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n"
    )
    mix = tmp_path / "mix.yaml"
    mix.write_text("- {trace: a.csv, slo: chat, tenant: x}\n- {trace: a.csv, rate: 2, tenant: y}\n")
    assert [(request.tenant, request.slo, request.input_tokens) for request in read_trace(mix)] == [
        ("x", "chat", 374),
        ("y", "", 374),
    ]
    mix.write_text("- {trace: a.csv, speed: 3}\n")
    with pytest.raises(TraceError, match=r"mix\.yaml: .*speed"):
        read_trace(mix)


@pytest.mark.parametrize("rate", ["0", "-1", ".nan", ".inf"])
def test_a_mix_with_a_rate_that_is_none_is_refused_by_name(tmp_path: Path, rate: str) -> None:
    (tmp_path / "a.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n"
    )
    mix = tmp_path / "mix.yaml"
    mix.write_text(f"- {{trace: a.csv, rate: {rate}}}\n")
    with pytest.raises(TraceError, match=r"mix\.yaml: .*rate"):
        read_trace(mix)


def test_a_mix_that_is_a_part_of_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "inner.yaml").write_text("- {trace: outer.yaml}\n")
    (tmp_path / "outer.yaml").write_text("- {trace: inner.yaml}\n")
    with pytest.raises(TraceError, match=r"outer\.yaml: .*cannot contain itself"):
        read_trace(tmp_path / "outer.yaml")


def test_no_more_parts_are_mixed_than_block_ids_can_tell_apart() -> None:
    with pytest.raises(ValueError, match="at most 256 parts"):
        mix_parts([MixPart([])] * 257)


def test_sessions_with_think_times_are_closed_loops_and_all_else_comes_whatever_happens() -> None:
    load = traffic(every(1.0, 3) + turns("s", 3) + turns("alone", 1))
    assert (len(load.arrivals), len(load.loops)) == (4, 1)
    assert [request.blocks[1] - PRIVATE for request in load.loops[0].requests()] == [0, 1, 2]
    assert len(list(load.loops[0].requests())) == 3  # a traffic is replayed many times


def test_repeated_sessions_get_new_ids_for_their_own_blocks() -> None:
    load = users(turns("s", 4), 3, seed=1)
    first = [
        [next(requests) for _ in range(9)] for requests in (loop.requests() for loop in load.loops)
    ]
    names = {request.session for user in first for request in user}
    assert len(names) > 3
    by_session: dict[int, set[str]] = {}
    for user in first:
        for request in user:
            assert request.think_s is not None
            assert request.blocks[0] == 3
            by_session.setdefault(request.blocks[1], set()).add(request.session)
    assert all(len(sessions) == 1 for sessions in by_session.values())
    again = users(turns("s", 4), 3, seed=1)
    assert [loop.begins_s for loop in load.loops] == [loop.begins_s for loop in again.loops]


def test_requests_without_a_session_are_gone_through_one_by_one_by_all_users_together() -> None:
    load = users(every(1.0, 6), 3, seed=1)
    result = [
        next(requests).blocks
        for requests in [loop.requests() for loop in load.loops]
        for _ in range(2)
    ]
    assert sorted(result) == [(number,) for number in range(6)]


def test_copies_of_a_session_keep_names_of_their_own_however_often_users_go_through_it() -> None:
    (loop,) = users([TraceRequest(0.0, 1024, 5, (3, PRIVATE), session="s")], 1).loops
    names = [request.blocks[1] for request, _ in zip(loop.requests(), range(1000), strict=False)]
    assert len(set(names)) == len(names)
    assert all(0 <= name < 1 << 64 for name in names)
