"""Tests of passing on the KV of a model whose attention has a sliding window.

vLLM frees the blocks whose tokens have left the window, and lists block 0 in their place. The
engines are simulated, in simulated time.
"""

from __future__ import annotations

import pytest

from kvtransfer.engines.vllm.handoff_scheduler import PromptRequest
from kvtransfer.transports.inproc import InprocWire, WireConditions
from kvtransfer.util.clock import VirtualClock
from tests.unit.kvtransfer.engines.test_layerwise import SMALL, Engine, legs

# Blocks of 4 tokens. The last token of the prompt, 20, reads tokens 15 to 20, so the blocks of tokens
# 0 to 11 have left the window. vLLM computes it at the decode engine, whose window is then full.
WINDOW, TOKENS = 6, 21
MOVED = TOKENS - 1
FREED = [0, 0, 0]


@pytest.fixture
def pair() -> tuple[Engine, Engine]:
    clock = VirtualClock()
    wire = InprocWire(clock, WireConditions())
    p, d = (Engine(name, SMALL, wire, clock, window=WINDOW) for name in "pd")
    for block, value in ((5, 50), (6, 60)):
        p.rows[:, block] = value
    return p, d


def run(p: Engine, d: Engine, request: str) -> bool:
    # Run both engines until the fetch has ended; return whether its KV arrived.
    assert p.clock.run(60, lambda: bool(p.step() or d.step() or request in d.received))
    return request not in d.failed


def offer(p: Engine, give: PromptRequest, blocks: list[int]) -> bool:
    # Compute a prompt. Returns whether its KV is offered.
    p.scheduler.begin_prefill(give)
    end = p.scheduler.end_prefill(give.id, blocks, TOKENS, is_whole=True)
    assert end is not None
    return end[0]


def test_only_the_blocks_within_the_window_are_moved(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    give, take = legs(p, 1, TOKENS)
    assert offer(p, give, [*FREED, 5, 6, 7])
    assert d.scheduler.loadable_tokens(take, 0) == MOVED
    d.scheduler.begin_load(take.id, [*FREED, 8, 9], MOVED)
    assert run(p, d, take.id)
    assert (d.rows[:, 8] == 50).all()
    assert (d.rows[:, 9] == 60).all()
    assert not d.rows[:, 0].any()
    assert p.agent.stats()["leases"]["offered"] == 0


def test_blocks_before_the_window_that_the_decode_engine_keeps_are_computed(
    pair: tuple[Engine, Engine],
) -> None:
    # Their KV does not arrive, but vLLM would find it in its prefix cache later.
    p, d = pair
    give, take = legs(p, 2, TOKENS)
    offer(p, give, [*FREED, 5, 6, 7])
    d.scheduler.loadable_tokens(take, 0)
    d.scheduler.begin_load(take.id, [0, 0, 3, 8, 9], MOVED)
    assert not run(p, d, take.id)


def test_the_last_token_reads_a_full_window_at_every_length(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    for tokens in range(2, 40):
        _, take = legs(p, 100 + tokens, tokens)
        moved = d.scheduler.loadable_tokens(take, 0)
        assert moved == tokens - 1
        # vLLM allocates no blocks before this one, as it computes the next token.
        first = max(0, moved - WINDOW + 1) // 4
        needed = max(0, tokens - WINDOW) // 4
        assert first == needed
        blocks = [0] * first + list(range(1, -(-moved // 4) - first + 1))
        d.scheduler.begin_load(take.id, blocks, moved)
        (load,) = d.scheduler.take_orders(False).loads
        assert (load.blocks, load.tokens, load.skip) == (blocks[first:], moved - 4 * first, 0)


def test_cached_blocks_before_the_window_may_stay(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    give, take = legs(p, 3, TOKENS)
    offer(p, give, [*FREED, 5, 6, 7])
    d.scheduler.loadable_tokens(take, 12)
    d.scheduler.begin_load(take.id, [1, 2, 3, 8, 9], MOVED - 12)
    assert run(p, d, take.id)


def test_a_prefill_whose_window_has_moved_on_is_not_offered(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    give, take = legs(p, 4, TOKENS)
    d.scheduler.loadable_tokens(take, 0)
    d.scheduler.begin_load(take.id, [*FREED, 8, 9], MOVED)
    assert not offer(p, give, [*FREED, 0, 6, 7])
    assert not run(p, d, take.id)
