"""Property tests of what a KV agent sends next, and of the limit on bytes in flight.

No bytes are lost, and every transfer is sent at some time.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.transfer.send_credits import SendCredits, in_flight_limit
from kvtransfer.transfer.transfer_order import Priority, TransferOrder

events = st.lists(
    st.tuples(
        st.sampled_from(["try_acquire", "give", "forget"]), st.integers(0, 4), st.integers(1, 80)
    ),
    max_size=80,
)


@given(events=events, budget=st.integers(1, 100))
def test_bytes_in_flight_are_what_was_taken_and_not_returned(
    events: list[tuple[str, int, int]], budget: int
) -> None:
    credits, outstanding = SendCredits(budget), dict.fromkeys(range(5), 0)
    for event, transfer, n_bytes in events:
        if event == "try_acquire" and credits.try_acquire(transfer, n_bytes):
            outstanding[transfer] += n_bytes
        elif event == "give" and n_bytes <= outstanding[transfer]:
            credits.put_back(transfer, n_bytes)
            outstanding[transfer] -= n_bytes
        elif event == "forget":
            assert credits.forget(transfer) == outstanding[transfer]
            outstanding[transfer] = 0
        assert credits.in_flight_bytes == sum(outstanding.values())
        assert credits.in_flight_bytes <= max(budget, 80)
    for transfer in outstanding:
        credits.forget(transfer)
    assert credits.in_flight_bytes == 0
    assert credits.try_acquire(9, 10**9), "an idle link always takes one window"


@given(klass=st.sampled_from(Priority), deadline=st.floats(0, 5), rivals_per_s=st.integers(1, 20))
def test_no_transfer_starves_behind_a_stream_of_urgent_ones(
    klass: Priority, deadline: float, rivals_per_s: int
) -> None:
    # Every rival is new and has a second of slack.
    #
    # The tested transfer is served within that second and the promotion time.
    turns, now, number = TransferOrder(promote_s=0.5), 0.0, 1
    turns.add(0, klass, deadline, now)
    while (first := turns.next(now)) != 0:
        if first is not None:
            turns.remove(first)
        now, number = now + 1 / rivals_per_s, number + 1
        turns.add(number, Priority.INTERACTIVE, now + 1.0, now)
        assert now <= max(klass * 0.5, deadline) + 1.1


@given(
    budget=st.integers(1, 1 << 30), window=st.integers(1, 1 << 26), klass=st.sampled_from(Priority)
)
def test_background_transfers_leave_most_of_the_bytes_in_flight_to_others(
    budget: int, window: int, klass: Priority
) -> None:
    limit = in_flight_limit(budget, window, klass)
    assert 0 < limit <= budget
    if klass is Priority.INTERACTIVE:
        assert limit == budget
    elif budget >= 8 * window:
        assert limit == budget // 4
    else:
        assert limit == min(budget, 2 * window)
