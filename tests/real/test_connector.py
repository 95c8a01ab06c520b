"""Tests of PenstockConnector, our KV connector, between two real vLLM engines.

Answers are right, even if the transfer of KV fails.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.real.engine_requests import Answer, ask, body, differences, prompt
from tests.real.engines import (
    BLOCK_TOKENS,
    REAL,
    Engine,
    free_ports,
    idle_around,
    penstock_connector,
)
from tests.real.gateway_process import config, gateway

REQUESTS, AT_ONCE = 200, 4
LEASE_S = 30.0
_ASK_FOR_HANDOFF = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    with started(tmp_path_factory.mktemp("kv"), 1) as engines:
        yield engines


@contextmanager
def started(
    folder: Path,
    p_ranks: int,
    p_options: Sequence[str] = (),
    d_options: Sequence[str] = (),
    model: str = "model",
    **extra: object,
) -> Iterator[tuple[Engine, Engine]]:
    # Run two engines with our connector, with `extra` as further options of it.
    if not (REAL / "installed").exists():
        pytest.fail("the real engines are not installed; `make real` does it")
    key = folder / "key"
    key.write_bytes(b"the key of this fleet, 32 bytes.")
    ports, connector = free_ports(2), penstock_connector(key, **extra)
    engines = (
        Engine("KP", ports[0], 0, 0, connector, p_ranks, p_options, model),
        Engine("KD", ports[1], 0, 1, connector, 1, d_options, model),
    )
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            asyncio.run(engine.ready())
        yield engines
    finally:
        for engine in engines:
            engine.kill()


@pytest.fixture
async def idle(pair: tuple[Engine, Engine]) -> AsyncIterator[tuple[Engine, Engine]]:
    async with idle_around(pair, 20.0, LEASE_S / 2, may_be_killed=True):
        yield pair


async def handoff_of(engine: Engine, asked: dict[str, Any]) -> dict[str, Any]:
    leg = asked | {"max_tokens": 1, "stream": False, "kv_transfer_params": _ASK_FOR_HANDOFF}
    for name in ("stream_options", "logprobs", "top_logprobs"):
        leg.pop(name, None)
    url = f"{engine.url}/v1/chat/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=leg) as answer:
        params = (await answer.json())["kv_transfer_params"]
        assert isinstance(params, dict)
        return params


async def fetched(engine: Engine) -> float:
    return (await engine.numbers())["external_prefix_cache_hits_total"]


async def all_answers(url: str, **members: object) -> list[Answer]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(i: int) -> Answer:
        async with gate:
            return await ask(url, body(prompt(120 + 4 * i, seed=i), stream=bool(i % 2), **members))

    return list(await asyncio.gather(*map(one, range(REQUESTS))))


async def test_split_answers_equal_the_aggregated_ones(
    idle: tuple[Engine, Engine], tmp_path: Path
) -> None:
    p, d = idle
    aggregated = await all_answers(d.url, cache_salt="aggregated")
    before, counted = await fetched(d), await d.numbers()
    with gateway(tmp_path, config({"P": (p.url, "prefill"), "D": (d.url, "decode")})) as front:
        split = await all_answers(front.url)
    for whole, halved in zip(aggregated, split, strict=True):
        assert (halved.status, halved.error) == (200, "")
        assert differences(halved, whole) == []
        assert halved.finish_reason == whole.finish_reason
    await d.idle_within(10.0)
    now = await d.numbers()
    assert now["kv_handoffs_accepted_total"] - counted["kv_handoffs_accepted_total"] == REQUESTS
    assert now["kv_ranks_received_total"] - counted["kv_ranks_received_total"] == REQUESTS
    assert now["kv_ranks_not_received_total"] == counted["kv_ranks_not_received_total"]
    assert now["kv_received_bytes_total"] > counted["kv_received_bytes_total"]
    # Each prompt begins with its seed, so only a chat template's first tokens are shared.
    assert await fetched(d) - before == sum(answer.prompt_tokens for answer in split)
    lines = [json.loads(line) for line in (tmp_path / "access.jsonl").read_text().splitlines()]
    assert len([line for line in lines if line["status"] == 200]) == REQUESTS


async def test_a_replayed_or_foreign_handoff_gets_the_right_answer(
    idle: tuple[Engine, Engine],
) -> None:
    p, d = idle
    mine, other = body(prompt(300, seed=3001)), body(prompt(280, seed=3002))
    handoff = await handoff_of(p, mine)
    first = await ask(d.url, mine | {"kv_transfer_params": handoff})
    for asked, salt in ((other, "a"), (mine, "b")):
        whole = await ask(d.url, asked | {"cache_salt": salt})
        before = await fetched(d)
        answer = await ask(d.url, asked | {"cache_salt": salt * 2, "kv_transfer_params": handoff})
        assert (answer.status, differences(answer, whole)) == (200, [])
        assert await fetched(d) - before in (0, answer.prompt_tokens)
    assert differences(first, await ask(d.url, mine | {"cache_salt": "c"})) == []
    changed = handoff | {"kv_handoff": handoff["kv_handoff"][:-8] + "AAAAAAAA"}
    answer = await ask(d.url, other | {"cache_salt": "d", "kv_transfer_params": changed})
    assert differences(answer, await ask(d.url, other | {"cache_salt": "e"})) == []


async def test_a_handoff_that_is_not_needed_frees_its_blocks_at_once(
    idle: tuple[Engine, Engine],
) -> None:
    p, d = idle
    asked = body(prompt(600, seed=3101), max_tokens=2)
    await ask(d.url, asked)
    longer = body(prompt(600, seed=3101), max_tokens=2)
    handoff = await handoff_of(p, longer)
    assert await p.blocks_held() > 0
    assert (await ask(d.url, longer | {"kv_transfer_params": handoff})).status == 200
    assert await p.idle_within(5.0) < LEASE_S / 3


async def test_a_client_that_leaves_while_kv_moves_leaves_no_block_behind(
    idle: tuple[Engine, Engine],
) -> None:
    p, d = idle
    asked = body(prompt(900, seed=3201), max_tokens=64, stream=True)
    for delay_s in (0.0, 0.01, 0.05):
        handoff = await handoff_of(p, asked)
        leg = asyncio.ensure_future(ask(d.url, asked | {"kv_transfer_params": handoff}))
        await asyncio.sleep(delay_s)
        leg.cancel()
        await asyncio.gather(leg, return_exceptions=True)
    # If the client left before D saw the request, D frees no KV, and the lease has to expire.
    for engine in (d, p):
        await engine.idle_within(LEASE_S + 5.0)


async def test_a_handoff_whose_lease_has_ended_is_computed(idle: tuple[Engine, Engine]) -> None:
    p, d = idle
    stale = body(prompt(300, seed=3251))
    handoff = await handoff_of(p, stale)
    await p.idle_within(LEASE_S + 20.0)
    # Other prompts take the blocks of the ended handoff.
    for seed in range(3252, 3268):
        assert (await ask(p.url, body(prompt(1200, seed=seed), max_tokens=1))).status == 200
    before = await fetched(d)
    answer = await ask(d.url, stale | {"kv_transfer_params": handoff})
    assert await fetched(d) in (before, before + answer.prompt_tokens)
    whole = await ask(d.url, stale | {"cache_salt": "whole"})
    assert (answer.status, differences(answer, whole)) == (200, [])


async def test_a_dead_prefill_engine_costs_a_computation_and_no_wrong_token(
    idle: tuple[Engine, Engine],
) -> None:
    p, d = idle
    asked, unused = body(prompt(300, seed=3301)), body(prompt(300, seed=3302))
    handoff, stale = await handoff_of(p, asked), await handoff_of(p, unused)
    p.kill()
    answer = await ask(d.url, asked | {"kv_transfer_params": handoff})
    assert (answer.status, answer.error) == (200, "")
    assert differences(answer, await ask(d.url, asked | {"cache_salt": "whole"})) == []
    await d.idle_within(10.0)
    p.start()
    await p.ready()
    # A handoff of the engine's earlier process is refused by the new one.
    old = await ask(d.url, unused | {"kv_transfer_params": stale})
    whole = await ask(d.url, unused | {"cache_salt": "whole"})
    assert (old.status, differences(old, whole)) == (200, [])
    handoff = await handoff_of(p, asked)
    before = await fetched(d)
    again = await ask(d.url, asked | {"cache_salt": "again", "kv_transfer_params": handoff})
    assert differences(again, answer) == []
    assert await fetched(d) - before == again.prompt_tokens


PULLS = 20


async def test_a_cached_prefix_is_pulled_from_the_other_engine(
    idle: tuple[Engine, Engine],
) -> None:
    # The prefill engine computes only what follows the prefix that it has.
    p, d = idle
    for seed in range(3400, 3400 + PULLS):
        prefix = prompt(300 + 20 * (seed % 10), seed=seed)
        known = await ask(p.url, body(prefix, max_tokens=1))
        request = body(f"{prefix} Which pump is it?")
        hits, received = (await p.numbers())["prefix_cache_hits_total"], await fetched(d)
        handoff = await handoff_of(p, request)
        pulled = await ask(d.url, request | {"kv_transfer_params": handoff})
        hits = (await p.numbers())["prefix_cache_hits_total"] - hits
        assert hits == (known.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert await fetched(d) - received == pulled.prompt_tokens
        computed = await ask(d.url, request | {"cache_salt": "computed"})
        assert (pulled.status, differences(pulled, computed)) == (200, [])


RANK_REQUESTS = 8


async def _split_by_hand(p: Engine, d: Engine, seed: int) -> tuple[Answer, list[Answer], bool]:
    # Send a split request without a gateway.
    #
    # Returns its answer, the unsplit answers of both engines, and whether all KV was fetched.
    asked = body(prompt(150 + 40 * (seed % 10), seed=seed), max_tokens=12)
    whole = [await ask(engine.url, asked | {"cache_salt": f"w{seed}"}) for engine in (p, d)]
    handoff, before = await handoff_of(p, asked), await fetched(d)
    answer = await ask(d.url, asked | {"kv_transfer_params": handoff})
    return answer, whole, await fetched(d) - before == answer.prompt_tokens


def test_kv_is_resharded_between_engines_of_two_ranks_and_of_one(tmp_path: Path) -> None:
    # Each rank is a process with its own agent. A wrong head would change every later token.
    with started(tmp_path, 2) as (two, one):
        for source, sink, first in ((two, one, 5000), (one, two, 5100)):
            for seed in range(first, first + RANK_REQUESTS):
                answer, whole, all_fetched = asyncio.run(_split_by_hand(source, sink, seed))
                assert answer.status == 200
                assert any(differences(answer, other) == [] for other in whole)
                assert all_fetched
        for engine in (two, one):
            asyncio.run(engine.idle_within(20.0))


def test_pages_of_another_block_size_are_refused_and_computed(tmp_path: Path) -> None:
    with started(tmp_path, 1, ("--block-size", "32")) as (small, large):
        for source, sink, seed in ((small, large, 6000), (large, small, 6100)):
            before = await_numbers(sink)["kv_handoffs_refused_total"]
            answer, whole, all_fetched = asyncio.run(_split_by_hand(source, sink, seed))
            assert answer.status == 200
            assert differences(answer, whole[1]) == []
            assert not all_fetched
            assert await_numbers(sink)["kv_handoffs_refused_total"] == before + 1
        for engine in (small, large):
            asyncio.run(engine.idle_within(LEASE_S + 5.0))


def await_numbers(engine: Engine) -> dict[str, float]:
    return asyncio.run(engine.numbers())
