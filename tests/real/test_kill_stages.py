"""Tests that kill a real engine or one of its ranks at different stages of a KV transfer.

Answers must be right or clean errors, and the other engine must free all blocks. The model is deep,
so that a prompt takes a second or more. A trace file shows which layer is being computed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.real.engine_requests import Answer, ask, body, differences, prompt
from tests.real.engines import REAL, Engine, free_ports, penstock_connector
from tests.real.gateway_process import config, gateway
from tests.real.handoff_by_hand import SERVING, card_of, decode, prefill

WORDS, SIXTH_LAYER, LAST_LAYER = 700, 5, 15
LEASE_S = 30.0
SEEDS = (7000, 7001, 7002, 7003)


@contextmanager
def started(folder: Path, p_ranks: int) -> Iterator[tuple[Engine, Engine]]:
    if not (REAL / "installed").exists():
        pytest.fail("the real engines are not installed; `make real` does it")
    key, ports = folder / "key", free_ports(2)
    key.write_bytes(b"the key of this fleet, 32 bytes.")
    options = ("--num-gpu-blocks-override", "96")
    engines = tuple(
        Engine(
            name,
            ports[place],
            0,
            place,
            penstock_connector(key, trace=str(REAL / f"{name}.trace")),
            ranks,
            options,
            model="deep",
        )
        for place, (name, ranks) in enumerate((("SP", p_ranks), ("SD", 1)))
    )
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            asyncio.run(engine.ready())
        yield engines[0], engines[1]
    finally:
        for engine in engines:
            engine.kill()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    with started(tmp_path_factory.mktemp("kv"), 1) as engines:
        yield engines


def trace_of(engine: Engine) -> Path:
    return REAL / f"{engine.name}.trace"


def trace_bytes(engine: Engine) -> int:
    return trace_of(engine).stat().st_size


async def layer_computed(engine: Engine, offset: int, layer: int) -> None:
    # Wait until the engine has computed this layer since its trace had `offset` bytes.
    async with asyncio.timeout(60.0):
        while True:
            with trace_of(engine).open("rb") as file:
                file.seek(offset)
                lines = file.read().split(b"\n")[:-1]
            if any(json.loads(line).get("layer") == layer for line in lines):
                return
            await asyncio.sleep(0.005)


@pytest.fixture
async def running(pair: tuple[Engine, Engine]) -> tuple[Engine, Engine]:
    # Restart engines that an earlier test has killed.
    for engine in pair:
        if not engine.running:
            engine.start()
    for engine in pair:
        await engine.ready()
    return pair


async def killed(victim: Engine, p: Engine, d: Engine) -> dict[int, Answer]:
    # Kill the victim while four handoffs are at different stages. The first request decodes. The
    # second one's prefill is being computed and sent layer by layer. The third one's prefill waits.
    # The fourth one has only reserved blocks.
    card, answers = await card_of(p, d), dict[int, asyncio.Task[Answer]]()
    for seed in SEEDS:
        asked = body(prompt(WORDS, seed=seed), max_tokens=400 if seed == SEEDS[0] else 16)
        answers[seed] = decode(d, asked | {"stream": True}, f"{victim.name}-{seed}", card)
    await d.holds_within(30.0)
    await asyncio.sleep(1.0)  # let the victim receive all four requests
    await prefill(p, body(prompt(WORDS, seed=SEEDS[0])), f"{victim.name}-{SEEDS[0]}")
    offset = trace_bytes(p)
    legs = [
        asyncio.ensure_future(prefill(p, body(prompt(WORDS, seed=seed)), f"{victim.name}-{seed}"))
        for seed in SEEDS[1:3]
    ]
    await layer_computed(p, offset, SIXTH_LAYER)
    victim.kill()
    await asyncio.gather(*legs, return_exceptions=True)
    return dict(zip(answers, await asyncio.gather(*answers.values()), strict=True))


async def test_a_killed_prefill_engine_costs_computations_and_no_wrong_token(
    running: tuple[Engine, Engine],
) -> None:
    p, d = running
    for seed, answer in (await killed(p, p, d)).items():
        most = 400 if seed == SEEDS[0] else 16
        asked = body(prompt(WORDS, seed=seed), max_tokens=most, cache_salt="whole")
        assert (answer.status, answer.error) == (200, "")
        assert differences(answer, await ask(d.url, asked)) == []
    assert await d.idle_within(10.0) < 10.0


async def test_a_killed_decode_engine_leaves_no_block_behind(
    running: tuple[Engine, Engine],
) -> None:
    p, d = running
    answers = await killed(d, p, d)
    assert [answer.status for answer in answers.values()] == [0] * len(SEEDS)
    # A prefill that is computed after the loss keeps its blocks until its lease ends.
    assert await p.idle_within(LEASE_S + 10.0)


@pytest.mark.parametrize(("victim", "layer"), [("P", LAST_LAYER), ("D", SIXTH_LAYER)])
async def test_the_gateway_answers_right_or_with_an_error(
    running: tuple[Engine, Engine], tmp_path: Path, victim: str, layer: int
) -> None:
    engines = dict(zip("PD", running, strict=True))
    p, d = running
    front_config = config({"P": (p.url, "prefill"), "D": (d.url, "decode")}, serving=SERVING)
    with gateway(tmp_path, front_config) as front:
        assert (await ask(front.url, body(prompt(200, seed=7200), max_tokens=2))).status == 200
        asked, offset = body(prompt(WORDS, seed=7201), max_tokens=16), trace_bytes(p)
        leg = asyncio.ensure_future(ask(front.url, asked))
        await layer_computed(p, offset, layer)
        engines[victim].kill()
        answer = await leg
    if victim == "P":
        whole = await ask(d.url, asked | {"cache_salt": "whole"})
        assert (answer.status, differences(answer, whole)) == (200, [])
    else:
        assert answer.status in (502, 503)
    survivor = d if victim == "P" else p
    assert await survivor.idle_within(10.0) < 10.0


def kill_second_rank(engine: Engine) -> None:
    # Kill the process of rank 1, which vLLM names after its rank.
    assert engine._process is not None
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "-s", str(engine._process.pid)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    (rank,) = [line for line in listed if "Worker_TP1" in line]
    os.kill(int(rank.split()[0]), signal.SIGKILL)


def test_a_killed_rank_costs_a_computation_or_an_error(tmp_path: Path) -> None:
    with started(tmp_path, 2) as (two, one):
        for p, d, seed in ((two, one, 7300), (one, two, 7301)):
            answer, whole = asyncio.run(_rank_killed(p, d, two, seed))
            if d is one:
                assert whole is not None
                assert (answer.status, differences(answer, whole)) == (200, [])
            else:
                assert answer.status in (0, 500)
            assert asyncio.run(one.idle_within(10.0)) < 10.0
            if d is one:
                two.kill()
                two.start()
                asyncio.run(two.ready())


async def _rank_killed(
    p: Engine, d: Engine, victim: Engine, seed: int
) -> tuple[Answer, Answer | None]:
    card, asked = await card_of(p, d), body(prompt(WORDS, seed=seed), stream=True)
    answer, offset = decode(d, asked, f"rank-{seed}", card), trace_bytes(p)
    await d.holds_within(30.0)
    leg = asyncio.ensure_future(prefill(p, asked, f"rank-{seed}"))
    await layer_computed(p, offset, SIXTH_LAYER)
    kill_second_rank(victim)
    await asyncio.gather(leg, return_exceptions=True)
    result = await answer
    if d is victim:
        return result, None
    return result, await ask(d.url, asked | {"cache_salt": "whole"})
