"""`make isolation`: whether one tenant can tell what another has sent, and what isolation costs in cache hits.

    python -m bench.load.tenant_isolation [--real | --engine URL ...] [--model NAME] [--probes 1000] [--json FILE]

A gateway before mock TP groups, before one real vLLM (`make real` installs it), or before the engines given, with two
tenants. In each trial the victim sends a prompt, then the prober sends one: in half of the trials the same prompt, in
the others one that no tenant has sent. The sides alternate in random order. The prober's scores are the cached tokens
that `usage` reports and the time to the first token. Printed is the area under the ROC curve (AUC) of each with
DeLong's 95 % interval; 0.5 is a guess. Then the same without isolation, which shows that the probe works.

Hits within a tenant: prompts that a tenant repeats and extends, with isolation and without.
Exit status: 1 when an interval does not include 0.5 or ends above 0.55, or when hits differ by more than 3 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np

from tests.e2e.processes import ROOT, gateway_process, mock_fleet

BOUND, HITS_WITHIN = 0.55, 0.03
Z = 1.959964
WORDS = (ROOT / "docs" / "life-of-a-request.md").read_text().split()
SECRET = "a-secret-of-this-measurement"
WARM_UP = 8


class Area(msgspec.Struct, frozen=True):
    """An AUC and its 95 % interval."""

    auc: float
    low: float
    high: float

    @property
    def tells_nothing(self) -> bool:
        return self.low <= 0.5 <= self.high <= BOUND


class Heard(msgspec.Struct, frozen=True):
    """What one answer tells its client."""

    ttft_s: float
    cached_tokens: int
    prompt_tokens: int


class Figures(msgspec.Struct, frozen=True):
    """One mode: both scores of the probes, and the share of prompt tokens that were hits within a tenant."""

    isolate: str
    probes: int
    by_usage: Area
    by_ttft: Area
    hits: float


def area(sent: Sequence[float], unsent: Sequence[float]) -> Area:
    """How well a higher score tells `sent` from `unsent`, with DeLong's interval; ties count half."""
    above = np.greater.outer(np.array(sent), np.array(unsent)) + 0.5 * np.equal.outer(np.array(sent), np.array(unsent))
    auc, by_sent, by_unsent = float(above.mean()), above.mean(axis=1), above.mean(axis=0)
    variance = by_sent.var(ddof=1) / len(sent) + by_unsent.var(ddof=1) / len(unsent)
    half = Z * math.sqrt(float(variance))
    return Area(auc, max(0.0, auc - half), min(1.0, auc + half))


class Asker:
    """Asks the gateway as one tenant or the other."""

    def __init__(self, http: aiohttp.ClientSession, url: str, model: str) -> None:
        self._http, self._url, self._model = http, url, model

    async def ask(self, tenant: str, prompt: str) -> Heard:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 2,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"authorization": f"Bearer sk-{tenant}"}
        began, first, usage = time.perf_counter(), 0.0, {}
        async with self._http.post(f"{self._url}/v1/chat/completions", json=body, headers=headers) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {await answer.text()}")
            async for line in answer.content:
                event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
                if not first and any(choice.get("delta", {}).get("content") for choice in event.get("choices", ())):
                    first = time.perf_counter()
                usage = event.get("usage") or usage
        details = usage.get("prompt_tokens_details") or {}
        return Heard((first or time.perf_counter()) - began, details.get("cached_tokens") or 0, usage["prompt_tokens"])


async def probes(asker: Asker, count: int, words: int, rng: random.Random) -> tuple[Area, Area]:
    """The AUC by usage and by time to the first token, of `count` probes a side, interleaved."""
    sides = [True, False] * count
    rng.shuffle(sides)
    for _ in range(WARM_UP):
        await asker.ask("victim", text(rng, words))
        await asker.ask("prober", text(rng, words))
    heard: dict[bool, list[Heard]] = {True: [], False: []}
    for was_sent in sides:
        secret = text(rng, words)
        await asker.ask("victim", secret)
        heard[was_sent].append(await asker.ask("prober", secret if was_sent else text(rng, words)))
    by_usage, by_ttft = (
        area([score(each) for each in heard[True]], [score(each) for each in heard[False]])
        for score in (lambda each: float(each.cached_tokens), lambda each: -each.ttft_s)
    )
    return by_usage, by_ttft


async def hits(asker: Asker, count: int, words: int, rng: random.Random) -> float:
    """The share of prompt tokens that were cached, of prompts that a tenant repeats and then extends."""
    cached = asked = 0
    for number in range(count):
        tenant, prompt = ("victim", "prober")[number % 2], text(rng, words)
        for asked_for in (prompt, prompt, prompt + " " + text(rng, words // 2)):
            heard = await asker.ask(tenant, asked_for)
            cached, asked = cached + heard.cached_tokens, asked + heard.prompt_tokens
    return cached / asked


def text(rng: random.Random, words: int) -> str:
    """A prompt that differs from every other one in its first words."""
    return f"{rng.getrandbits(64):x} " + " ".join(rng.choices(WORDS, k=words))


async def measured(engines: Sequence[str], options: argparse.Namespace, isolate: str, probes_a_side: int) -> Figures:
    """One mode, before a gateway of its own."""
    rng = random.Random(f"{options.seed} {isolate}")
    with tempfile.TemporaryDirectory() as folder, gateway_process(Path(folder), config(engines, isolate)) as running:
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            asker = Asker(http, running.url, options.model)
            await asker.ask("victim", "hello")
            by_usage, by_ttft = await probes(asker, probes_a_side, options.words, rng)
            share = await hits(asker, options.documents, options.words, rng)
    return Figures(isolate, probes_a_side, by_usage, by_ttft, share)


def config(engines: Sequence[str], isolate: str) -> str:
    endpoints = ", ".join(f"{{url: '{url}'}}" for url in engines)
    return (
        f"pools: {{main: {{endpoints: [{endpoints}]}}}}\n"
        f"cache: {{isolate: '{isolate}', secret: {SECRET}}}\n"
        "tenants: [{name: victim, key: sk-victim}, {name: prober, key: sk-prober}]\n"
    )


@contextmanager
def mocks(options: argparse.Namespace) -> Iterator[list[str]]:
    """A mock group of which a prompt takes as long as its tokens do."""
    with mock_fleet("--speed", str(options.speed), "--model", options.model) as urls:
        yield urls[:1]


@asynccontextmanager
async def real_engine() -> AsyncIterator[list[str]]:
    """One vLLM as `make real` installs it."""
    from tests.real.engines import REAL, Engine, free_ports

    if not (REAL / "installed").exists():
        raise SystemExit("the real engine is not installed; `make real` does it")
    engine = Engine("P", *free_ports(2), 0)
    engine.start()
    try:
        await engine.ready()
        yield [engine.url]
    finally:
        engine.kill()


async def run(options: argparse.Namespace, engines: Sequence[str]) -> int:
    figures = [
        await measured(engines, options, "on", options.probes),
        await measured(engines, options, "off", max(50, options.probes // 10)),
    ]
    for each in figures:
        tell(each)
    on, off = figures
    difference = abs(on.hits / off.hits - 1.0) if off.hits else math.inf
    print(f"hits within a tenant: {difference:.2%} apart (at most {HITS_WITHIN:.0%})")
    if options.json:
        Path(options.json).write_bytes(msgspec.json.format(msgspec.json.encode(figures)))
    held = on.by_usage.tells_nothing and on.by_ttft.tells_nothing and difference <= HITS_WITHIN
    print("held" if held else "NOT held")
    return 0 if held else 1


def tell(each: Figures) -> None:
    print(f"isolate {each.isolate}: {each.probes} probes a side; load of the machine {os.getloadavg()[0]:.1f}")
    for name, found in (("usage", each.by_usage), ("time to first token", each.by_ttft)):
        print(f"  AUC by {name}: {found.auc:.4f} (95 % interval {found.low:.4f} to {found.high:.4f})")
    print(f"  prompt tokens cached within a tenant: {each.hits:.4f}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="append", default=[], help="URL of an engine; repeat for more")
    parser.add_argument("--real", action="store_true", help="one real vLLM, as `make real` installs it")
    parser.add_argument("--model", help="the name that the engines serve")
    parser.add_argument("--probes", type=int, default=1000, help="probes a side")
    parser.add_argument("--documents", type=int, default=100, help="prompts that are repeated and extended")
    parser.add_argument("--words", type=int, default=300, help="words of a prompt")
    parser.add_argument("--speed", type=float, default=1.0, help="of the mock: 10 is ten times as fast")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--json", help="file for the figures")
    options: Any = parser.parse_args()
    if options.engine and not options.model:
        parser.error("--engine needs --model")
    options.model = options.model or ("tiny" if options.real else "demo-8b")
    return options


async def _real(options: argparse.Namespace) -> int:
    async with real_engine() as engines:
        return await run(options, engines)


def main() -> int:
    options = _options()
    if options.engine:
        return asyncio.run(run(options, options.engine))
    if options.real:
        return asyncio.run(_real(options))
    with mocks(options) as urls:
        return asyncio.run(run(options, urls))


if __name__ == "__main__":
    sys.exit(main())
