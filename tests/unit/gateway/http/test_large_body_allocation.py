"""Tests that large bodies are filled in place, and freed in steps once nothing uses them."""

from __future__ import annotations

import asyncio
import os
import sys
from itertools import pairwise

import pytest

from gateway.admission.body_memory_budget import BodyBudget
from gateway.http import large_body_allocation
from gateway.http.large_body_allocation import FREED_AT_ONCE, BodyMemory, new_body, write_piece
from gateway.util.version import is_compiled
from tests.e2e.process_cost import ProcessCost

MIB = 2**20


def resident_bytes() -> int:
    return ProcessCost(os.getpid()).resident_bytes


def joined(pieces: list[bytes]) -> bytes:
    body, offset = new_body(sum(map(len, pieces))), 0
    for piece in pieces:
        write_piece(body, offset, piece)
        offset += len(piece)
    return body


@pytest.mark.parametrize("sizes", [[2], [1, 1], [5, 0, 3], [4096, 1], [100_000, 70_000, 3]])
def test_a_new_body_holds_its_pieces(sizes: list[int]) -> None:
    pieces = [bytes([65 + number]) * size for number, size in enumerate(sizes)]
    body = joined(pieces)
    assert body == b"".join(pieces)
    assert hash(body) == hash(b"".join(pieces))


@pytest.mark.parametrize(("offset", "piece"), [(0, b"abcde"), (2, b"abc"), (-1, b"a"), (5, b"")])
def test_a_piece_outside_the_body_is_refused(offset: int, piece: bytes) -> None:
    with pytest.raises(ValueError, match="does not lie within a body of 4 bytes"):
        write_piece(joined([b"----"]), offset, piece)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_new_body_takes_memory_only_for_what_was_written() -> None:
    before = resident_bytes()
    body = new_body(64 * MIB)
    write_piece(body, 0, b"a" * 4 * MIB)
    assert resident_bytes() - before < 16 * MIB


async def test_a_body_is_freed_in_steps_when_its_last_user_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_compiled():
        pytest.skip("private functions of compiled modules cannot be replaced")
    steps: list[tuple[int, int]] = []
    monkeypatch.setattr(large_body_allocation, "_discard", lambda _, *step: steps.append(step))
    memory, body = BodyMemory(), joined([b"a" * 3 * MIB, b"b" * 100])
    memory.add(body)
    part = memoryview(body)
    del body
    memory.check_soon()
    for _ in range(10):
        await asyncio.sleep(0)
    assert bytes(part[-1:]) == b"b"
    assert not steps
    del part
    memory.check_soon()
    counts = []
    while len(memory):
        await asyncio.sleep(0)
        counts.append(len(steps))
    assert steps == [(start * FREED_AT_ONCE, (start + 1) * FREED_AT_ONCE) for start in range(4)]
    assert all(later - earlier <= 1 for earlier, later in pairwise(counts))


async def test_unused_bodies_are_found_without_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_body_allocation, "CHECK_S", 0.001)
    memory = BodyMemory()
    kept, dropped = (joined([letter * 2 * MIB, b"-"]) for letter in (b"k", b"d"))
    memory.add(dropped)
    memory.add(kept)
    del dropped
    while len(memory) == 2:
        await asyncio.sleep(0.001)
    assert kept == b"k" * 2 * MIB + b"-"
    del kept
    while len(memory):
        await asyncio.sleep(0.001)
    assert memory._handle is None


async def test_a_small_body_is_left_to_the_interpreter() -> None:
    memory = BodyMemory()
    memory.add(joined([b"a" * FREED_AT_ONCE]))
    assert not len(memory)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_a_step_returns_the_pages_before_the_body_is_freed() -> None:
    memory, body = BodyMemory(), joined([b"a" * 64 * MIB, b"-"])
    memory.add(body)
    before = resident_bytes()
    del body
    memory.check_soon()
    while memory._discarded < 48 * MIB:
        await asyncio.sleep(0)
    assert before - resident_bytes() > 40 * MIB
    assert len(memory) == 1
    while len(memory):
        await asyncio.sleep(0)


async def test_the_end_of_a_request_leads_to_a_look_for_unused_bodies() -> None:
    budget = BodyBudget(4 * MIB)
    memory, reserved = budget.large_bodies.memory, budget.reserve_body(2 * MIB)
    body = await budget.large_bodies.join_in_turn("client", [b"a" * MIB, b"b" * MIB])
    assert len(memory) == 1
    del body
    budget.release_body(reserved)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not len(memory)
