"""Tests of the KV traffic on the live page, divided among pairs of prefill and decode engines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.admin.live_kv_flow import counter_growth_by_name, kv_bytes_by_pair
from tests.unit.gateway.admin.empty import mark

PAIRS = [(prefill, decode) for prefill in ("p0", "p1") for decode in ("d0", "d1")]
COUNTS = st.integers(0, 10**12)


def test_bytes_of_a_decode_endpoint_are_divided_by_transferred_tokens() -> None:
    before = mark(pairs={("p0", "d0"): (1, 0, 100)}, received={"d0": 1000, "d1": 5000})
    pairs = {
        ("p0", "d0"): (2, 0, 400),
        ("p1", "d0"): (1, 0, 100),
        ("p1", "d1"): (0, 1, 0),
        ("p1", "mute"): (1, 0, 9),
    }
    now = mark(pairs=pairs, received={"d0": 5000, "d1": 5000})
    assert kv_bytes_by_pair(now, before) == {
        ("p0", "d0"): 3000.0,
        ("p1", "d0"): 1000.0,
        ("p1", "d1"): 0.0,
    }


def test_a_restarted_counter_counts_from_zero_and_a_new_one_has_not_grown() -> None:
    assert counter_growth_by_name({"a": 70, "b": 900, "c": 5}, {"a": 100, "b": 400}) == {
        "a": 70,
        "b": 500,
        "c": 0,
    }


@given(
    st.dictionaries(st.sampled_from(PAIRS), COUNTS),
    st.dictionaries(st.sampled_from(["d0", "d1"]), COUNTS),
)
def test_bytes_of_all_pairs_sum_to_the_received_bytes(
    tokens: dict[tuple[str, str], int], received_bytes: dict[str, int]
) -> None:
    before = mark(received=dict.fromkeys(received_bytes, 0))
    shares = kv_bytes_by_pair(
        mark(
            pairs={names: (0, 0, count) for names, count in tokens.items()}, received=received_bytes
        ),
        before,
    )
    for decode, count in received_bytes.items():
        parts = [part for (_, to), part in shares.items() if to == decode]
        travelled = sum(count for (_, to), count in tokens.items() if to == decode)
        assert abs(sum(parts) - (count if travelled else 0)) <= 1e-9 * count
