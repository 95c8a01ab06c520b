"""Tests that requests routed by their prefix find their prompts cached at real engines."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.real.engine_requests import ask, body, differences, prompt
from tests.real.engines import BLOCK_TOKENS, Engine, transfers
from tests.real.gateway_process import config, gateway

TRUNKS, TURNS = 4, 4


async def test_conversations_return_to_the_engine_that_holds_them(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    p, d = engines
    served: dict[int, set[str]] = {}
    with gateway(
        tmp_path, config({"P": (p.url, "both"), "D": (d.url, "both")}, serving="")
    ) as front:

        async def ask_of(trunk: int, turn: int) -> None:
            answer = await ask(front.url, body(f"{prompt(350, seed=5000 + trunk)} turn {turn}"))
            assert answer.status == 200, answer.error
            served.setdefault(trunk, set()).add(answer.headers["x-penstock-endpoint"])
            if turn:
                assert answer.cached_tokens > answer.prompt_tokens - 2 * BLOCK_TOKENS

        await asyncio.gather(*(ask_of(trunk, 0) for trunk in range(TRUNKS)))
        for turn in range(1, TURNS):
            for trunk in range(TRUNKS):
                await ask_of(trunk, turn)
    assert all(len(engines_of_trunk) == 1 for engines_of_trunk in served.values())
    assert len(set().union(*served.values())) == 2


async def test_what_the_decoder_holds_already_is_not_split_again(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    p, d = engines
    with gateway(tmp_path, config({"P": (p.url, "prefill"), "D": (d.url, "decode")})) as front:
        moved = await transfers(engines)
        first = await ask(front.url, body(prompt(400, seed=5100)))
        assert await transfers(engines) == moved + 1
        second = await ask(front.url, body(prompt(400, seed=5100)))
        assert await transfers(engines) == moved + 1
    assert differences(second, first) == []
    assert second.cached_tokens > 0
