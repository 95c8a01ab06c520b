"""Tests that `penstock golden` finds quantised weights on real engines, and raises no false alarm.

The engines compute in bfloat16, in which another batch may round differently.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from planner.golden.cli import report_of
from planner.golden.client import ComparedEngine, send_to_all
from policies.golden.answers import GoldenAnswer
from tests.real.engine_requests import body, prompt
from tests.real.engines import MODEL, REAL, ROOT, Engine, free_ports

PROMPTS, POOL = 200, 240
MAX_TOKENS, CONCURRENCY = 16, 4
REPEATS = 2  # answers of each engine to each prompt, for resampled runs
BESIDE = 4  # streams beside the candidate's answers
RUNS, MOST_ALARMS = 100, 1


def prompts(count: int) -> list[dict[str, Any]]:
    lengths = Random(23)
    return [
        {"messages": [{"role": "user", "content": prompt(lengths.randint(10, 120), seed=n)}]}
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def rounded_model() -> str:
    if not (REAL / "installed").exists():
        pytest.fail("the real engines are not installed; `make real` does it")
    if not (REAL / "rounded").exists():
        script = ROOT / "deploy" / "real" / "rounded_copy.py"
        command = (REAL / "venv" / "bin" / "python", script, REAL / "model", REAL / "rounded", "4")
        subprocess.run(list(map(str, command)), check=True)
    return "rounded"


@pytest.fixture(scope="module")
def three(rounded_model: str) -> Iterator[tuple[Engine, Engine, Engine]]:
    # The base, the same model again, and the rounded copy.
    ports = free_ports(6)
    models = ("model", "model", rounded_model)
    trio = [
        Engine(
            *(f"golden-{place}", ports[2 * place], ports[2 * place + 1], place, None),
            options=("--dtype", "bfloat16"),
            model=model,
        )
        for place, model in enumerate(models)
    ]
    try:
        for engine in trio:
            engine.start()
        asyncio.run(_all_ready(trio))
        yield trio[0], trio[1], trio[2]
    finally:
        for engine in trio:
            engine.kill()


async def _all_ready(engines: list[Engine]) -> None:
    for engine in engines:
        await engine.ready()


def golden_run(folder: Path, base: Engine, candidate: Engine) -> tuple[int, dict[str, Any]]:
    # Run the command as a user does; return its exit status and its report.
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, prompts(PROMPTS))))
    options = ("--base", base.url, "--candidate", candidate.url, "--json")
    tokens = ("--max-tokens", str(MAX_TOKENS), "--concurrency", str(CONCURRENCY))
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "golden", "run", str(file), *options, *tokens],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_weights_rounded_to_4_bits_are_found_with_200_prompts(
    three: tuple[Engine, Engine, Engine], tmp_path: Path
) -> None:
    base, _, rounded = three
    status, report = golden_run(tmp_path, base, rounded)
    assert (status, report["is_worse"]) == (3, True), report


async def test_another_batch_load_raises_at_most_one_alarm_in_100_runs(
    three: tuple[Engine, Engine, Engine],
) -> None:
    base, same, _ = three
    asked = prompts(POOL)
    pair = [ComparedEngine(engine.url, MODEL) for engine in (base, same)]
    async with _load_on(same):
        answers = await send_to_all(
            pair * REPEATS, asked, MAX_TOKENS, CONCURRENCY, lambda share: None
        )
    assert not any(answer.error for each in answers for answer in each)
    of_base, of_same = answers[::2], answers[1::2]
    alarms = sum(_is_alarm(asked, of_base, of_same, Random(run)) for run in range(RUNS))
    assert alarms <= MOST_ALARMS


def _is_alarm(
    asked: list[dict[str, Any]],
    of_base: list[list[GoldenAnswer]],
    of_same: list[list[GoldenAnswer]],
    random: Random,
) -> bool:
    # Judge a run of 200 prompts, with one of the recorded answers to each.
    chosen = random.sample(range(len(asked)), PROMPTS)
    firsts, agains, others = [], [], []
    for index in chosen:
        first, again = random.sample(of_base, 2)
        firsts.append(first[index])
        agains.append(again[index])
        others.append(random.choice(of_same)[index])
    report = report_of([asked[index] for index in chosen], firsts, others, agains, 0.0)
    return report.is_worse


@asynccontextmanager
async def _load_on(engine: Engine) -> AsyncIterator[None]:
    # Keep BESIDE other requests in the engine's batches.
    async with aiohttp.ClientSession() as http:

        async def stream(place: int) -> None:
            number = 0
            while True:
                number += 1
                members = body(prompt(60, seed=10_000 * (place + 1) + number), max_tokens=64)
                url = f"{engine.url}/v1/chat/completions"
                async with http.post(url, json=members) as answer:
                    await answer.read()

        tasks = [asyncio.create_task(stream(place)) for place in range(BESIDE)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
