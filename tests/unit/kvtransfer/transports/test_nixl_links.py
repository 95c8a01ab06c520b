"""Links whose bytes NIXL moves, with a NIXL of our own that copies: which slots are whose, parts of windows, and lies.

The real one runs through the contract suite and tests/nixl (`make nixl`).
"""

from __future__ import annotations

import ctypes
import hmac
import struct
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.frame import Kind, frame, pack_head
from kvtransfer.lattice import Runs
from kvtransfer.transports import nixl
from kvtransfer.transports.base import TransportError, Verdict, WindowHead
from kvtransfer.transports.nixl import SLOTS
from kvtransfer.transports.nixl_arena import Arena, Writer
from kvtransfer.transports.nixl_out import NO_SLOT, POSTED, WRITTEN, part_of
from tests.contract.kvtransfer.links import BLOCK_BYTES, BLOCKS, Owner, Pair, expected, linked_pair, window

SLOT_BYTES = 100_000
HEAD = WindowHead(1, 0, 0, 0, 1, 10)


class Copying:
    """As much of a NIXL agent as we use: a write is done when the sink has asked for news, and not before."""

    there: ClassVar[dict[str, Copying]] = {}

    def __init__(self, name: str, config: object) -> None:
        self.name, self.arrived, self.ended = name, list[Callable[[], bytes]](), set[int]()
        self.there[name] = self

    def register_memory(self, *_: object) -> None: ...

    def deregister_memory(self, *_: object) -> None: ...

    def release_xfer_handle(self, handle: object) -> None: ...

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        return self.there[metadata.decode()].name

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], _: str) -> tuple[int, int, int]:
        return descs[0]

    def initialize_xfer(self, _: str, ours: Any, theirs: Any, peer: str, notice: bytes) -> dict[str, Any]:
        return {"move": (theirs[0], ours[0], ours[1]), "peer": peer, "notice": notice, "done": False}

    def transfer(self, handle: dict[str, Any]) -> str:
        def land() -> bytes:
            ctypes.memmove(*handle["move"])
            handle["done"] = True
            return bytes(handle["notice"])

        self.there[handle["peer"]].arrived.append(land)
        return "PROC"

    def check_xfer_state(self, handle: dict[str, Any]) -> str:
        return "DONE" if handle["done"] else "PROC"

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        arrived, self.arrived = self.arrived, []
        return {"peer": [land() for land in arrived]}


@pytest.fixture(autouse=True)
def copying(monkeypatch: pytest.MonkeyPatch) -> None:
    api = types.SimpleNamespace(nixl_agent=Copying, nixl_agent_config=lambda **_: None)
    monkeypatch.setitem(sys.modules, "nixl", types.ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", api)  # type: ignore[arg-type]
    monkeypatch.setenv("UCX_NET_DEVICES", "none")
    monkeypatch.setattr(Copying, "there", {})
    monkeypatch.setattr(nixl, "SLOT_BYTES", SLOT_BYTES)


@given(st.data(), st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_the_parts_of_a_window_are_its_bytes_in_order(data: st.DataObject, lengths: list[int]) -> None:
    length = np.array(lengths)
    begins = np.cumsum(length) - length
    runs = Runs(begins * 3, begins + 1000, length)
    size = data.draw(st.integers(1, int(length.sum())))
    parts = [part_of(runs, at, min(at + size, runs.n_bytes)) for at in range(0, runs.n_bytes, size)]
    assert {part.n_bytes for part in parts[:-1]} <= {size}
    assert all((part.length > 0).all() for part in parts)
    assert _bytes(runs) == [pair for part in parts for pair in _bytes(part)]


def _bytes(runs: Runs) -> list[tuple[int, int]]:
    rows = zip(runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True)
    return [(src + at, dst + at) for src, dst, length in rows for at in range(length)]


def large() -> Runs:
    size = BLOCKS * BLOCK_BYTES // 3 - 1000
    at = np.arange(3) * (size + 900)
    return Runs(at, at[::-1].copy() + 37, np.full(3, size))


def begun(pair: Pair, moves: Runs) -> WindowHead:
    head = window(1, moves)
    pair.expect({head: moves})
    pair.admit(1)
    return head


def test_a_window_of_more_parts_than_slots_arrives_whole() -> None:
    with linked_pair("nixl") as pair:
        moves = large()
        head = begun(pair, moves)
        assert head.n_bytes > SLOTS * SLOT_BYTES
        pair.put(head, moves)
        assert pair.hears.wait("landed") == [(head, Verdict.OK)]
        assert np.array_equal(pair.into.bytes, expected(pair, moves))


def test_blocks_that_change_hands_between_two_parts_make_the_window_stale_and_the_next_is_well() -> None:
    with linked_pair("nixl") as pair:
        moves = large()
        head, later = window(1, moves), window(2, moves)
        pair.expect({head: moves, later: moves})
        pair.admit(1)
        asked = iter([True] * 7 + [False] * 100)
        pair.put(head, moves, current=lambda: next(asked))
        pair.put(later, moves)
        assert pair.hears.wait("landed", 2) == [(head, Verdict.STALE), (later, Verdict.OK)]


def test_blocks_that_change_hands_while_they_are_read_are_stale_and_never_leave() -> None:
    with linked_pair("nixl") as pair:
        moves = Runs(np.array([5]), np.array([9]), np.array([4000]))
        head = begun(pair, moves)
        asked = iter([True, False])
        pair.put(head, moves, current=lambda: next(asked))
        assert pair.hears.wait("landed") == [(head, Verdict.STALE)]
        assert not any(agent.arrived for agent in Copying.there.values())
        assert not pair.into.bytes.any()


def test_a_fence_between_two_parts_stops_all_writing_there() -> None:
    with linked_pair("nixl") as pair:
        moves = large()
        head = begun(pair, moves)
        asked = 0

        def current() -> bool:
            nonlocal asked
            asked += 1
            if asked == 9:
                pair.sink.fence(1)
                pair.hears.wait("fenced")
                pair.into.bytes[:] = 0
            return True

        pair.put(head, moves, current=current)
        pair.source.send(b"all was said")
        pair.hears.wait("message")
        assert not pair.into.bytes.any()
        assert not pair.hears.all("landed")


def test_a_slot_that_is_not_what_the_source_read_is_corrupt_and_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = Arena.done

    def spoiled(arena: Arena, number: int) -> int:
        slot = honest(arena, number)
        arena.slot(slot, 1)[0] ^= 1
        return slot

    monkeypatch.setattr(Arena, "done", spoiled)
    with linked_pair("nixl") as pair:
        moves = Runs(np.array([5]), np.array([9]), np.array([4000]))
        head = begun(pair, moves)
        pair.put(head, moves)
        assert pair.hears.wait("landed") == [(head, Verdict.CORRUPT)]
        assert not pair.into.bytes.any()


def test_what_nixl_does_not_confirm_does_not_land(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_NOTICE_S", 0.05)
    monkeypatch.setattr(Arena, "written", lambda *_: False)
    with linked_pair("nixl") as pair:
        moves = Runs(np.array([5]), np.array([9]), np.array([4000]))
        head = begun(pair, moves)
        pair.put(head, moves)
        assert "NIXL does not" in str(pair.hears.wait("lost")[0])
        assert not pair.hears.all("landed")


def test_without_word_on_which_interfaces_ucx_listens_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES")
    with pytest.raises(TransportError, match="UCX_NET_DEVICES"):
        nixl.Nixl().start(Owner(), [])


@pytest.mark.parametrize("slots", [0, 1 << 20])
def test_a_grant_of_more_memory_than_anybody_needs_is_refused(slots: int) -> None:
    with pytest.raises(TransportError, match="staging"):
        Writer(struct.pack("<QII", 1 << 20, slots, SLOT_BYTES) + b"name")


@pytest.mark.parametrize("spoiled", ["a byte", "the key", "all"])
def test_a_grant_that_the_peer_has_not_made_never_reaches_nixl(spoiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has to be so: NIXL 1.5.1 takes metadata with a wrong byte in it, and crashes."""
    taken: list[bytes] = []
    monkeypatch.setattr(nixl, "Writer", taken.append)
    with linked_pair("nixl") as pair:
        grant = Arena(1, SLOT_BYTES)
        made = hmac.digest(bytes(32) if spoiled != "the key" else b"another", b"nixl grant" + grant.grant, "sha256")
        said = bytearray(made + grant.grant) if spoiled != "all" else bytearray(400)
        said[-40] ^= spoiled == "a byte"
        pair.sink._out.queue(frame(Kind.REGIONS, bytes(said)))  # type: ignore[attr-defined]
        pair.sink.send(b"and so on")
        pair.gives.wait("lost")
        grant.close()
    assert not taken
    assert not pair.gives.all("message")


@pytest.mark.parametrize(
    ("kind", "header"),
    [
        (Kind.SHARED, POSTED.pack(1, SLOTS)),
        (Kind.SHARED, POSTED.pack(1, 0) * 2),
        (Kind.WRITTEN, pack_head(HEAD) + WRITTEN.pack(1, 0, 0, 0, 0)),
        (Kind.WRITTEN, pack_head(HEAD) + WRITTEN.pack(0, NO_SLOT, 1, 1, 0)),
        (Kind.WRITTEN, pack_head(HEAD) + WRITTEN.pack(0, NO_SLOT, 0, 0, 0)),
        (Kind.WRITTEN, pack_head(HEAD) + WRITTEN.pack(0, 0, 0, 7, 0)),
        (Kind.WRITTEN, b"short"),
        (Kind.TAKEN, struct.pack("<I", 0)),
        (Kind.REGIONS, bytes(100)),
        (Kind.WINDOW, b""),
    ],
    ids=str,
)
def test_a_source_that_says_what_cannot_be_is_out(kind: Kind, header: bytes) -> None:
    with linked_pair("nixl") as pair:
        pair.admit(1)
        pair.source._out.queue(frame(kind, header))  # type: ignore[attr-defined]
        pair.hears.wait("lost")
        assert not pair.hears.all("landed")
