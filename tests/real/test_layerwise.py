"""Tests of KV that a real prefill engine sends layer by layer while it computes the prompt.

The model has 16 layers, and each prompt has more than 6 MiB of KV per layer, so that each layer is
sent separately. Two prefill engines share a core. One of them sends its KV only at the end.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.real.engine_requests import Answer, ask, body, differences, prompt
from tests.real.engines import REAL, Engine, free_ports, idle_around, penstock_connector
from tests.real.gateway_process import config, gateway
from tests.real.handoff_by_hand import SERVING, card_of, push

LAYERS, ROUNDS, WORDS = 16, 10, 700


@dataclass(frozen=True)
class Trio:
    # A decode engine, and prefill engines that send KV by layers, or at the end of the prefill.

    d: Engine
    by_layers: Engine
    afterwards: Engine

    @property
    def all(self) -> tuple[Engine, Engine, Engine]:
        return self.d, self.by_layers, self.afterwards


def trace_of(engine: Engine) -> Path:
    return REAL / f"{engine.name}.trace"


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    if not (REAL / "installed").exists():
        pytest.fail("the real engines are not installed; `make real` does it")
    key = tmp_path_factory.mktemp("kv") / "key"
    key.write_bytes(b"the key of this fleet, 32 bytes.")
    ports = free_ports(3)
    engines = []
    for name, port, place, layerwise in zip(
        ("LD", "LP", "LA"), ports, (1, 0, 0), (True, True, False), strict=True
    ):
        trace = REAL / f"{name}.trace"
        trace.unlink(missing_ok=True)
        connector = penstock_connector(key, trace=str(trace), layerwise=layerwise)
        options = ("--num-gpu-blocks-override", "96")
        engines.append(Engine(name, port, 0, place, connector, 1, options, model="deep"))
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            asyncio.run(engine.ready())
        yield Trio(*engines)
    finally:
        for engine in engines:
            engine.kill()


@pytest.fixture
async def idle(trio: Trio) -> AsyncIterator[Trio]:
    async with idle_around(trio.all, 20.0, 15.0):
        yield trio


@dataclass(frozen=True)
class Times:
    # The times of one handoff, in seconds after its last layer was computed.

    first_arrived: float
    all_arrived: float
    first_layers: int


def lines_since(path: Path, offset: int) -> list[dict[str, Any]]:
    with path.open("rb") as file:
        file.seek(offset)
        return [json.loads(line) for line in file]


async def timed(trio: Trio, p: Engine, card: str, seed: int) -> tuple[Answer, Times]:
    traces = trace_of(p), trace_of(trio.d)
    offsets = [path.stat().st_size for path in traces]
    asked, transfer = body(prompt(WORDS, seed=seed), max_tokens=8), f"transfer-{p.name}-{seed}"
    answer = await push(p, trio.d, asked | {"cache_salt": transfer}, transfer, card)
    computed, arrived = (
        lines_since(path, offset) for path, offset in zip(traces, offsets, strict=True)
    )
    last = max(line["t"] for line in computed if line.get("layer") == LAYERS - 1)
    begun = next(line for line in arrived if line["event"] == "arrived" and line["layers"])
    ended = [line["t"] for line in arrived if line["event"] == "arrived" and line["end"]]
    return answer, Times(begun["t"] - last, max(ended) - last, begun["layers"])


async def test_layers_arrive_while_later_ones_are_computed(idle: Trio) -> None:
    cards = {p.name: await card_of(p, idle.d) for p in (idle.by_layers, idle.afterwards)}
    ratios, times = list[float](), dict[str, list[Times]]()
    for turn in range(ROUNDS + 1):
        pair = (idle.by_layers, idle.afterwards)
        for p in pair if turn % 2 else pair[::-1]:
            seed = 8000 + turn
            answer, measured = await timed(idle, p, cards[p.name], seed)
            whole = await ask(
                idle.d.url, body(prompt(WORDS, seed=seed), max_tokens=8, cache_salt=f"w{p.name}")
            )
            assert (answer.status, differences(answer, whole)) == (200, [])
            if turn:  # the first handoff does not count, because it connects the agents
                times.setdefault(p.name, []).append(measured)
    overlapped, afterwards = times["LP"], times["LA"]
    ratios = [
        one.all_arrived / other.all_arrived
        for one, other in zip(overlapped, afterwards, strict=True)
    ]
    early = [one.first_arrived for one in overlapped]
    print(
        f"\nexposed transfer: {statistics.median(ratios):.2f} of sending afterwards "
        f"({[round(ratio, 2) for ratio in sorted(ratios)]}); "
        f"{1e3 * statistics.median(one.all_arrived for one in overlapped):.0f} ms, afterwards "
        f"{1e3 * statistics.median(one.all_arrived for one in afterwards):.0f} ms; the first layer "
        f"arrived {-1e3 * statistics.median(early):.0f} ms before the last was computed"
    )
    assert all(first < 0 for first in early)
    assert all(one.first_layers < LAYERS for one in overlapped)
    assert statistics.median(ratios) <= 0.5


async def test_split_answers_of_the_gateway_equal_the_aggregated_ones(
    idle: Trio, tmp_path: Path
) -> None:
    d, p = idle.d, idle.by_layers
    before = (await d.numbers())["kv_ranks_received_total"]
    gate = asyncio.Semaphore(4)

    async def one(url: str, seed: int, **members: object) -> Answer:
        async with gate:
            text = prompt(150 + 20 * seed, seed=8100 + seed)
            return await ask(url, body(text, stream=bool(seed % 2), **members))

    seeds = range(20)
    whole = await asyncio.gather(*(one(d.url, seed, cache_salt="whole") for seed in seeds))
    front_config = config({"P": (p.url, "prefill"), "D": (d.url, "decode")}, serving=SERVING)
    with gateway(tmp_path, front_config) as front:
        halved = await asyncio.gather(*(one(front.url, seed) for seed in seeds))
    for answer, aggregated in zip(halved, whole, strict=True):
        assert (answer.status, answer.error) == (200, "")
        assert differences(answer, aggregated) == []
    now = await d.numbers()
    assert now["kv_ranks_received_total"] - before == len(seeds)
    assert now["kv_ranks_not_received_total"] == 0
