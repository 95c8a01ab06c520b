"""The bytes of KV that decode engines tell of, shared among the pairs they are half of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.admin.kv_flow import received, shared
from tests.unit.gateway.admin.empty import mark

PAIRS = [(prefill, decode) for prefill in ("p0", "p1") for decode in ("d0", "d1")]
COUNTS = st.integers(0, 10**12)


def test_a_decoders_bytes_go_to_its_pairs_by_the_tokens_that_travelled() -> None:
    before = mark(pairs={("p0", "d0"): (1, 0, 100)}, received={"d0": 1000, "d1": 5000})
    pairs = {("p0", "d0"): (2, 0, 400), ("p1", "d0"): (1, 0, 100), ("p1", "d1"): (0, 1, 0), ("p1", "mute"): (1, 0, 9)}
    now = mark(pairs=pairs, received={"d0": 5000, "d1": 5000})
    assert shared(now, before) == {("p0", "d0"): 3000.0, ("p1", "d0"): 1000.0, ("p1", "d1"): 0.0}


def test_an_engine_that_began_anew_counts_from_nothing_and_one_that_never_told_is_unknown_yet() -> None:
    assert received({"a": 70, "b": 900, "c": 5}, {"a": 100, "b": 400}) == {"a": 70, "b": 500, "c": 0}


@given(st.dictionaries(st.sampled_from(PAIRS), COUNTS), st.dictionaries(st.sampled_from(["d0", "d1"]), COUNTS))
def test_pairs_never_share_more_than_came(tokens: dict[tuple[str, str], int], came: dict[str, int]) -> None:
    before = mark(received=dict.fromkeys(came, 0))
    found = shared(mark(pairs={names: (0, 0, count) for names, count in tokens.items()}, received=came), before)
    for decode, count in came.items():
        parts = [part for (_, to), part in found.items() if to == decode]
        travelled = sum(count for (_, to), count in tokens.items() if to == decode)
        assert abs(sum(parts) - (count if travelled else 0)) <= 1e-9 * count
