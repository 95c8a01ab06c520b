"""Measures the time to first token of split requests with our KV connector, beside vLLM's NIXL.

Two pairs of engines run at the same time, each behind a gateway. With our connector, KV is sent
while the prompt is computed; with NIXL, afterwards. The rounds alternate between the pairs, and
each compares prompts of one length.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.processes import GatewayProcess
from tests.real.engine_requests import body, prompt
from tests.real.engines import CONNECTOR, REAL, Engine, free_ports, penstock_connector
from tests.real.gateway_process import SPLIT, config, gateway
from tests.real.handoff_by_hand import SERVING

ROUNDS, WARM_UP, WORDS = 15, 3, 700


@contextmanager
def engines(folder: Path, model: str) -> Iterator[dict[str, tuple[Engine, Engine]]]:
    if not (REAL / "installed").exists():
        pytest.fail("the real engines are not installed; `make real` does it")
    key = folder / "key"
    key.write_bytes(b"the key of this fleet, 32 bytes.")
    options = ("--num-gpu-blocks-override", "96")
    pairs = {}
    for name, connector in (("nixl", CONNECTOR), ("penstock", penstock_connector(key))):
        ports = free_ports(4)
        pairs[name] = tuple(
            Engine(f"T{name[0]}{role}", ports[at], ports[at + 2], at, connector, 1, options, model)
            for at, role in enumerate("PD")
        )
    all_engines = [engine for pair in pairs.values() for engine in pair]
    try:
        for engine in all_engines:
            engine.start()
        for engine in all_engines:
            asyncio.run(engine.ready())
        yield {name: (p, d) for name, (p, d) in pairs.items()}
    finally:
        for engine in all_engines:
            engine.kill()


async def first_token_s(url: str, text: str) -> float:
    # Return the seconds from a request to the first token of its streamed answer.
    asked, started = body(text, max_tokens=4, stream=True), time.monotonic()
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/chat/completions", json=asked) as answer,
    ):
        assert answer.status == 200, await answer.text()
        first = None
        async for line in answer.content:
            if first is None and line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                if choices and choices[0].get("logprobs"):
                    first = time.monotonic() - started
    assert first is not None
    return first


async def compare(fronts: dict[str, GatewayProcess]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in fronts}
    names = list(fronts)
    for turn in range(ROUNDS + WARM_UP):
        for number, name in enumerate(names[turn % 3 :] + names[: turn % 3]):
            # Each gateway gets a different prompt, because two gateways share engines.
            text = prompt(WORDS, seed=8500 + 3 * turn + number)
            seconds = await first_token_s(fronts[name].url, text)
            if turn >= WARM_UP:
                times[name].append(seconds)
            await asyncio.sleep(0.2)
    return times


@pytest.mark.parametrize("model", ["model", "deep"])
def test_all_three_move_kv_and_their_times_to_the_first_token_are_measured(
    tmp_path: Path, model: str
) -> None:
    servings = {"nixl": SPLIT, "penstock": SERVING, "afterwards": SPLIT}
    with engines(tmp_path, model) as pairs, ExitStack() as running:
        fronts = {}
        for name, serving in servings.items():
            p, d = pairs["nixl" if name == "nixl" else "penstock"]
            folder = tmp_path / name
            folder.mkdir()
            text = config({"P": (p.url, "prefill"), "D": (d.url, "decode")}, serving=serving)
            fronts[name] = running.enter_context(gateway(folder, text))
        times = asyncio.run(compare(fronts))
        for _, d in pairs.values():
            asyncio.run(d.idle_within(20.0))
        received = asyncio.run(pairs["penstock"][1].numbers())["kv_handoffs_accepted_total"]
        moved = asyncio.run(pairs["nixl"][1].numbers())["nixl_xfer_time_seconds_count"]
    assert received == 2 * moved == 2 * (ROUNDS + WARM_UP)
    medians = {name: round(1e3 * statistics.median(each)) for name, each in times.items()}
    print(f"\n{model}, {ROUNDS} rounds: median ms {medians}")
    for name in ("penstock", "afterwards"):
        ratios = sorted(a / b for a, b in zip(times[name], times["nixl"], strict=True))
        print(
            f"{name}: TTFT {statistics.median(ratios):.3f} of NIXL's in the median of pairs "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
