"""Tests that every KV transport must pass, such as TCP and shared memory, with real bytes.

They check the contract in kvtransfer/transport_interface.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain, count, repeat

import numpy as np
import pytest

from kvtransfer.layout.byte_ranges import ByteRuns
from kvtransfer.layout.memory_regions import GenerationCheck
from kvtransfer.transport_interface import TransportError, WindowHead, WindowSlice, WindowVerdict
from tests.contract.kvtransfer.links import (
    BLOCK_BYTES,
    BLOCKS,
    PATIENCE_S,
    TRANSPORTS,
    Pair,
    expected,
    linked_pair,
    scattered,
    transports,
    window,
)
from tests.duration_limits import Stopwatch

pytestmark = pytest.mark.parametrize("name", TRANSPORTS)


@pytest.fixture
def pair(name: str) -> Iterator[Pair]:
    with linked_pair(name) as connected:
        yield connected


def eventually(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.005)


def test_messages_arrive_whole_and_in_order_in_both_directions(pair: Pair) -> None:
    sent = [bytes([size % 251]) * size for size in (1, 2, 17, 4_000, 5_000, 70_000, 1 << 20, 3)]
    for message in sent:
        pair.sink.send(message)
        pair.source.send(message[::-1])
    assert pair.source_owner.wait("message", len(sent)) == sent
    assert pair.sink_owner.wait("message", len(sent)) == sent


def test_a_message_of_a_million_blocks_arrives(pair: Pair) -> None:
    message = np.arange(1 << 20, dtype="<u4").tobytes() + bytes(60_000)
    pair.sink.send(message)
    assert pair.source_owner.wait("message") == [message]


def test_the_dialled_end_first_gets_the_link_event(pair: Pair) -> None:
    pair.sink.send(b"after")
    pair.source_owner.wait("message")
    assert [heard.kind for heard in pair.source_owner.heard if heard.link is pair.source] == [
        "linked",
        "message",
    ]
    assert not pair.sink_owner.all("linked")


@pytest.mark.parametrize(
    ("runs", "longest"), [(1, 1), (3, 5), (40, 4096), (500, 300), (20, 64 << 10)]
)
def test_bytes_arrive_as_planned_and_nowhere_else(pair: Pair, runs: int, longest: int) -> None:
    moves = scattered(runs, runs, longest)
    head = window(7, moves)
    pair.expect({head: moves})
    pair.admit(7)
    pair.put(head, moves)
    assert pair.sink_owner.wait("landed") == [(head, WindowVerdict.OK)]
    assert pair.source_owner.wait("sent") == [head]
    assert np.array_equal(pair.sink_region.bytes, expected(pair, moves))


def test_many_windows_of_several_transfers_all_arrive(pair: Pair) -> None:
    moves = scattered(3, 600, 2000)
    pieces = [moves.cut(first, 20) for first in range(0, 600, 20)]
    heads = [window(1 + index % 3, runs, group=index // 3) for index, runs in enumerate(pieces)]
    pair.expect(dict(zip(heads, pieces, strict=True)))
    for transfer in (1, 2, 3):
        pair.admit(transfer)
    for head, runs in zip(heads, pieces, strict=True):
        pair.put(head, runs)
    landed = pair.sink_owner.wait("landed", len(heads))
    assert set(landed) == {(head, WindowVerdict.OK) for head in heads}
    assert len(pair.sink_owner.all("landed")) == len(heads)
    assert np.array_equal(pair.sink_region.bytes, expected(pair, moves))


def test_a_message_after_a_window_arrives_after_it(pair: Pair) -> None:
    moves = scattered(5, 20, 4096)
    head = window(1, moves)
    pair.expect({head: moves})
    pair.admit(1)
    pair.source.send(b"before")
    pair.put(head, moves)
    pair.source.send(b"after")
    pair.sink_owner.wait("message", 2)
    pair.sink_owner.wait("landed")
    kinds = [heard.kind for heard in pair.sink_owner.heard]
    assert kinds.index("message") < kinds.index("incoming")
    assert kinds.index("incoming") < len(kinds) - 1 - kinds[::-1].index("message")


def test_an_unexpected_window_is_discarded_and_the_next_arrives(pair: Pair) -> None:
    if pair.name == "rdma":
        pytest.skip("a device writes where it was let; unexpected is what was never granted")
    moves = scattered(6, 30, 3000)
    known, unknown = window(2, moves), window(9, moves)
    pair.expect({known: moves})
    pair.admit(2)
    pair.put(unknown, moves)
    pair.put(known, moves)
    assert pair.sink_owner.wait("landed") == [(known, WindowVerdict.OK)]
    assert np.array_equal(pair.sink_region.bytes, expected(pair, moves))


@pytest.mark.parametrize("answers", [(False,), (True, False)], ids=["before", "while it was read"])
def test_a_window_whose_blocks_changed_owner_is_stale(
    pair: Pair, answers: tuple[bool, ...]
) -> None:
    moves = scattered(8, 10, 4096)
    head = window(1, moves)
    pair.expect({head: moves})
    pair.admit(1)
    replies = chain(answers, repeat(answers[-1]))

    def current() -> bool:
        # Return True the first time only, as if the blocks were reused right after that check.
        pair.source_region.bump(range(BLOCKS))
        return next(replies)

    pair.put(head, moves, current=current)
    assert pair.sink_owner.wait("landed") == [(head, WindowVerdict.STALE)]


def test_dropped_windows_do_not_land_and_later_ones_do(pair: Pair) -> None:
    gate = threading.Event()
    moves = scattered(9, 60, 4096)
    held, dropped, kept = (moves.cut(first, 20) for first in (0, 20, 40))
    heads = window(1, held), window(2, dropped), window(3, kept)
    pair.expect(dict(zip(heads, (held, dropped, kept), strict=True)))
    for transfer in (1, 2, 3):
        pair.admit(transfer)
    calls = count()

    def slowly() -> bool:
        assert next(calls) or gate.wait(PATIENCE_S)
        return True

    pair.put(heads[0], held, current=slowly)
    pair.put(heads[1], dropped)
    pair.source.drop(2)
    gate.set()
    pair.put(heads[2], kept)
    eventually(
        lambda: (heads[2], WindowVerdict.OK) in pair.sink_owner.all("landed"),
        "the third window did not land",
    )
    assert (heads[1], WindowVerdict.OK) not in pair.sink_owner.all(
        "landed"
    ) or pair.source_owner.all("sent").count(heads[1]) == 1


def test_behind_the_fence_nothing_is_written_whatever_the_source_does(pair: Pair) -> None:
    moves = scattered(10, 200, 4096)
    pieces = [moves.cut(first, 10) for first in range(0, 200, 10)]
    heads = [window(1, runs, group=index) for index, runs in enumerate(pieces)]
    pair.expect(dict(zip(heads, pieces, strict=True)))
    pair.admit(1)
    for head, runs in zip(heads[:10], pieces[:10], strict=True):
        pair.put(head, runs)
    pair.sink_owner.wait("landed")
    pair.sink_owner.place = lambda head: None
    pair.sink.fence(1)
    assert pair.sink_owner.wait("fenced") == [1]
    with pair.sink_owner.bell:
        landed_count = len(pair.sink_owner.all("landed"))
        pair.sink_region.bytes[:] = 0
    for head, runs in zip(heads[10:], pieces[10:], strict=True):
        pair.put(head, runs)
    if pair.name != "rdma":
        pair.source.send(b"all was said")
        pair.sink_owner.wait("message")
    else:
        eventually(
            lambda: pair.sink_owner.all("lost") or len(pair.source_owner.all("sent")) >= 10,
            "neither sent nor broken",
        )
    assert not pair.sink_region.bytes.any()
    assert len(pair.sink_owner.all("landed")) == landed_count


def long_windows(pair: Pair, transfer: int) -> dict[WindowHead, ByteRuns]:
    # Return windows of a third of a MiB, which a native pump may move in one batch.
    rng = np.random.default_rng(transfer)
    src, dst = rng.permutation(BLOCKS) * BLOCK_BYTES, rng.permutation(BLOCKS) * BLOCK_BYTES
    size = np.full(BLOCKS, BLOCK_BYTES)
    pieces = [ByteRuns(src, dst, size).cut(first, 10) for first in range(0, 60, 10)]
    return {window(transfer, runs, group=index): runs for index, runs in enumerate(pieces)}


def put_long(pair: Pair, head: WindowHead, runs: ByteRuns) -> None:
    blocks = runs.src // BLOCK_BYTES
    promised = pair.source_region.generations_of(blocks)
    pair.put(head, runs, current=GenerationCheck(pair.source_region, blocks, promised))


def test_long_windows_of_several_transfers_all_arrive(pair: Pair) -> None:
    transfers = [long_windows(pair, transfer) for transfer in (1, 2, 3)]
    for transfer, windows in enumerate(transfers, start=1):
        pair.sink_region.bytes[:] = 0
        pair.expect(windows)
        pair.admit(transfer)
        for head, runs in windows.items():
            put_long(pair, head, runs)
        landed = pair.sink_owner.wait("landed", len(windows) * transfer)[-len(windows) :]
        assert set(landed) == {(head, WindowVerdict.OK) for head in windows}
        assert np.array_equal(pair.sink_region.bytes, expected(pair, *windows.values()))


def test_long_windows_of_which_one_is_reused_all_end(pair: Pair) -> None:
    windows = long_windows(pair, 1)
    pair.expect(windows)
    pair.admit(1)
    heads = list(windows)
    for head, runs in windows.items():
        put_long(pair, head, runs)
    pair.source_region.bump(windows[heads[4]].src // BLOCK_BYTES)
    landed = dict(pair.sink_owner.wait("landed", len(windows)))  # type: ignore[arg-type]
    verdicts = [landed[head] for head in heads]
    assert verdicts[:4] + verdicts[5:] == [WindowVerdict.OK] * 5
    # The fifth window may have been read before it became stale.
    assert verdicts[4] in (WindowVerdict.OK, WindowVerdict.STALE)


@pytest.mark.parametrize("landed", [0, 1, 3])
def test_behind_the_fence_no_long_window_is_written(pair: Pair, landed: int) -> None:
    windows = long_windows(pair, 1)
    pair.expect(windows)
    pair.admit(1)
    for head, runs in windows.items():
        put_long(pair, head, runs)
    pair.sink_owner.wait("landed", landed)
    pair.sink_owner.place = lambda head: None
    pair.sink.fence(1)
    assert pair.sink_owner.wait("fenced") == [1]
    with pair.sink_owner.bell:
        landed_count = len(pair.sink_owner.all("landed"))
        pair.sink_region.bytes[:] = 0
    for head, runs in windows.items():
        put_long(pair, head, runs)
    if pair.name != "rdma":
        pair.source.send(b"all was said")
        pair.sink_owner.wait("message")
    assert not pair.sink_region.bytes.any()
    assert len(pair.sink_owner.all("landed")) == landed_count


@pytest.mark.parametrize("end", ["own", "far"])
def test_a_fence_is_answered_on_a_link_that_is_gone(pair: Pair, end: str) -> None:
    pair.admit(4)
    (pair.sink if end == "own" else pair.source).close()
    if end == "far":
        pair.sink_owner.wait("lost")
    pair.sink.fence(4)
    assert pair.sink_owner.wait("fenced") == [4]


def test_a_fence_is_answered_for_what_was_never_granted(pair: Pair) -> None:
    pair.sink.fence(12_345)
    assert pair.sink_owner.wait("fenced") == [12_345]


def test_a_closed_link_is_reported_lost_once_to_the_other_end_only(pair: Pair) -> None:
    pair.source.close()
    pair.sink_owner.wait("lost")
    pair.source.close()
    pair.sink.close()
    pair.sink.send(b"to nobody")
    pair.sink.put(
        WindowHead(1, 0, 0, 0, 1, 1),
        WindowSlice(scattered(1, 1, 8), pair.sink_region, 0, 0, lambda: True),
    )
    pair.sink_transport.close()
    pair.source_transport.close()
    assert len(pair.sink_owner.all("lost", pair.sink)) == 1
    assert not pair.source_owner.all("lost", pair.source)


def test_any_received_byte_shows_that_the_peer_lives(pair: Pair) -> None:
    before = pair.sink.received_bytes
    pair.source.send(b"beat")
    pair.sink_owner.wait("message")
    assert pair.sink.received_bytes > before


def test_several_threads_may_send_at_once(pair: Pair) -> None:
    def say(sender: int) -> None:
        for index in range(200):
            pair.sink.send(bytes([sender]) + index.to_bytes(2, "big"))

    threads = [threading.Thread(target=say, args=(sender,)) for sender in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    heard = pair.source_owner.wait("message", 800)
    for sender in range(4):
        mine = [data[1:] for data in heard if isinstance(data, bytes) and data[0] == sender]
        assert mine == [index.to_bytes(2, "big") for index in range(200)]


def test_an_absent_peer_is_a_transport_error_soon(pair: Pair) -> None:
    with transports(pair.name) as (one, other):
        one.start(pair.sink_owner, [pair.sink_region])
        address = other.start(pair.source_owner, [pair.source_region])
        other.close()
        took = Stopwatch()
        with pytest.raises(TransportError):
            one.dial(address)
        assert took.fair_s < PATIENCE_S / 4


def test_closing_ends_every_thread(name: str) -> None:
    before = set(threading.enumerate())
    with linked_pair(name) as pair:
        moves = scattered(3, 10, BLOCK_BYTES)
        head = window(1, moves)
        pair.expect({head: moves})
        pair.admit(1)
        pair.put(head, moves)
        pair.sink_owner.wait("landed")
    eventually(
        lambda: set(threading.enumerate()) <= before, f"left: {set(threading.enumerate()) - before}"
    )
