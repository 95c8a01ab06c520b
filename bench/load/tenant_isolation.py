"""`make isolation`: tests whether a tenant can find out another tenant's prompts, by the KV cache.

    python -m bench.load.tenant_isolation [--real | --engine URL ...] [--model NAME]
                                          [--probes 1000] [--json FILE]

In each trial, one tenant (the victim) sends a prompt. Then the other one (the prober) sends the
same prompt, or its words in another order, or an unrelated prompt. If the KV cache were shared, the
same prompt would be faster and have more cached tokens.

The report shows how well the cases can be told apart, by the cached tokens in `usage` and by the
time to first token. It gives the area under the ROC curve (AUC) with DeLong's 95% interval: 0.5
means a guess. A second measurement without isolation shows that the test works.

A reordered prompt has the same number of tokens, so only the prefix differs. An unrelated one has
another length too, and engines keep work by length: its AUC is printed, but not judged.

The cost of isolation is measured as the difference in cache hits of one tenant's own prompts.

Engines are mock engines, a real vLLM (--real; `make real` installs it) or given ones (--engine).
The logs are build/isolation and build/real/isolated.log. Exit status: 1 if an interval of the
reordered prompts excludes 0.5 or ends above 0.55, or if hits differ by more than 3%.
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

from tests.e2e import processes
from tests.e2e.processes import ROOT, GatewayProcess, gateway_process, mock_fleet

MAX_AUC, MAX_HITS_DIFFERENCE = 0.55, 0.03
Z = 1.959964
WORDS = (ROOT / "docs" / "life-of-a-request.md").read_text().split()
SECRET = "a-secret-of-this-measurement"
WARM_UP = 8
LOGS = ROOT / "build" / "isolation"
ENDS_WITHIN_S = 1.0
LONGEST_S = 6 * 3600.0


class Area(msgspec.Struct, frozen=True):
    """How well a score separates two kinds of prompts, as the area under the ROC curve (AUC)."""

    auc: float
    low: float
    high: float

    @property
    def is_a_guess(self) -> bool:
        return self.low <= 0.5 <= self.high <= MAX_AUC


class AnswerFacts(msgspec.Struct, frozen=True):
    """What one answer revealed: its time to first token in seconds, and its token counts."""

    ttft_s: float
    cached_tokens: int
    prompt_tokens: int


class Scores(msgspec.Struct, frozen=True):
    """How much an attacker learns about another tenant's prompts from cached tokens and from times.

    Both are given as the area under the ROC curve (AUC): 0.5 means nothing, 1 everything.
    """

    by_usage: Area
    by_ttft: Area

    @property
    def is_a_guess(self) -> bool:
        return self.by_usage.is_a_guess and self.by_ttft.is_a_guess


class Figures(msgspec.Struct, frozen=True):
    """What all trials of one mode found: do answers reveal the prompts of another tenant?

    isolate       whether tenants were isolated
    probes        number of trials of each kind
    reordered     how well the same prompt can be told from its words in another order
    unrelated     how well it can be told from an unrelated prompt, which has another length
    cached_share  share of the prompt tokens that was cached
    """

    isolate: str
    probes: int
    reordered: Scores
    unrelated: Scores
    cached_share: float


def area(sent: Sequence[float], unsent: Sequence[float]) -> Area:
    above = np.greater.outer(np.array(sent), np.array(unsent)) + 0.5 * np.equal.outer(
        np.array(sent), np.array(unsent)
    )
    auc, by_sent, by_unsent = float(above.mean()), above.mean(axis=1), above.mean(axis=0)
    variance = by_sent.var(ddof=1) / len(sent) + by_unsent.var(ddof=1) / len(unsent)
    half = Z * math.sqrt(float(variance))
    return Area(auc, max(0.0, auc - half), min(1.0, auc + half))


class TenantClient:
    """A client that sends prompts to the gateway as either of the two tenants."""

    def __init__(self, http: aiohttp.ClientSession, url: str, model: str) -> None:
        self._http, self._url, self._model = http, url, model

    async def send(self, tenant: str, prompt: str) -> AnswerFacts:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 2,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"authorization": f"Bearer sk-{tenant}"}
        started, first = time.perf_counter(), 0.0
        usage: dict[str, Any] = {}
        async with self._http.post(
            f"{self._url}/v1/chat/completions", json=body, headers=headers
        ) as answer:
            if answer.status != 200:
                raise RuntimeError(
                    f"the gateway answered with status {answer.status}: {await answer.text()}"
                )
            async for line in answer.content:
                event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
                if not first and any(
                    choice.get("delta", {}).get("content") for choice in event.get("choices", ())
                ):
                    first = time.perf_counter()
                usage = event.get("usage") or usage
        details = usage.get("prompt_tokens_details") or {}
        return AnswerFacts(
            (first or time.perf_counter()) - started,
            details.get("cached_tokens") or 0,
            usage["prompt_tokens"],
        )


async def run_probes(
    client: TenantClient, count: int, words: int, rng: random.Random
) -> tuple[Scores, Scores]:
    """Try in many trials whether one tenant's answers show which prompt another tenant has sent.

    client  sends prompts as either tenant
    count   number of trials of each kind: the same prompt, a reordered one, an unrelated one
    words   number of words in a prompt
    rng     random source for prompts and order

    Returns two scores: how well timing distinguishes the same prompt from a reordered one, and from
    an unrelated one. Raises RuntimeError if a reordered prompt has another number of tokens.
    """
    kinds = ["same", "reordered", "unrelated"] * count
    rng.shuffle(kinds)
    for _ in range(WARM_UP):
        await client.send("victim", text(rng, words))
        await client.send("prober", text(rng, words))
    answers: dict[str, list[AnswerFacts]] = {kind: [] for kind in kinds}
    for kind in kinds:
        # Create all texts before the victim sends one, so that the pause is equal in all trials.
        secret = text(rng, words)
        probes = {"same": secret, "reordered": reorder(rng, secret), "unrelated": text(rng, words)}
        sent = await client.send("victim", secret)
        answer = await client.send("prober", probes[kind])
        if kind == "reordered" and answer.prompt_tokens != sent.prompt_tokens:
            raise RuntimeError(
                f"a prompt of {sent.prompt_tokens} tokens has {answer.prompt_tokens} with its "
                "words in another order; both must be equal"
            )
        answers[kind].append(answer)
    same = answers["same"]
    return compare(same, answers["reordered"]), compare(same, answers["unrelated"])


def compare(sent: Sequence[AnswerFacts], unsent: Sequence[AnswerFacts]) -> Scores:
    return Scores(
        area([each.cached_tokens for each in sent], [each.cached_tokens for each in unsent]),
        area([-each.ttft_s for each in sent], [-each.ttft_s for each in unsent]),
    )


async def measure_hits(client: TenantClient, count: int, words: int, rng: random.Random) -> float:
    """Send `count` prompts of two tenants in turn, and return the share of cached tokens.

    Each prompt is sent twice, and then with more words. The share is from 0 to 1.
    """
    cached = total = 0
    for number in range(count):
        tenant, prompt = ("victim", "prober")[number % 2], text(rng, words)
        for variant in (prompt, prompt, prompt + " " + text(rng, words // 2)):
            answer = await client.send(tenant, variant)
            cached, total = cached + answer.cached_tokens, total + answer.prompt_tokens
    return cached / total


def text(rng: random.Random, words: int) -> str:
    return f"{rng.getrandbits(64):x} " + " ".join(rng.choices(WORDS, k=words))


def reorder(rng: random.Random, prompt: str) -> str:
    # Keep the first word in its place, because tokenizers divide a word at the start of a text
    # differently from a word after a space.
    first, *words = prompt.split(" ")
    rng.shuffle(words)
    return " ".join((first, *words))


async def measure_mode(
    engines: Sequence[str], options: argparse.Namespace, isolate: str, probes_a_side: int
) -> Figures:
    rng = random.Random(f"{options.seed} {isolate}")
    with (
        tempfile.TemporaryDirectory() as folder,
        gateway_process(Path(folder), config(engines, isolate)) as running,
        kept_stderr(running, LOGS / f"gateway-{isolate}.log"),
    ):
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            client = TenantClient(http, running.url, options.model)
            await client.send("victim", "hello")
            reordered, unrelated = await run_probes(client, probes_a_side, options.words, rng)
            # Use the same prompts with and without isolation, so that block boundaries are equal.
            texts = random.Random(f"{options.seed} hits")
            share = await measure_hits(client, options.documents, options.words, texts)
    return Figures(isolate, probes_a_side, reordered, unrelated, share)


@contextmanager
def kept_stderr(running: GatewayProcess, log: Path) -> Iterator[None]:
    """Write the gateway's stderr to a file, and note there if the gateway ends unexpectedly."""
    try:
        yield
    except aiohttp.ClientError:
        time.sleep(ENDS_WITHIN_S)  # a process that has closed its sockets may not have ended yet
        raise
    finally:
        ended = "" if running.is_alive else f"the gateway ended with status {running.wait()}\n"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(running.stderr_text + ended)
        if ended:
            print(f"{ended.strip()}; its stderr is in {log}", file=sys.stderr)


def config(engines: Sequence[str], isolate: str) -> str:
    endpoints = ", ".join(f"{{url: '{url}'}}" for url in engines)
    return (
        f"pools: {{main: {{endpoints: [{endpoints}]}}}}\n"
        f"cache: {{isolate: '{isolate}', secret: {SECRET}}}\n"
        "tenants: [{name: victim, key: sk-victim}, {name: prober, key: sk-prober}]\n"
    )


@contextmanager
def mocks(options: argparse.Namespace) -> Iterator[list[str]]:
    with mock_fleet("--speed", str(options.speed), "--model", options.model) as urls:
        yield urls[:1]


@asynccontextmanager
async def real_engine() -> AsyncIterator[list[str]]:
    """Run the vLLM that `make real` installs, and yield a list with its URL."""
    from tests.real.engines import REAL, Engine, free_ports

    if not (REAL / "installed").exists():
        raise SystemExit("the real engine is not installed; install it with `make real`")
    (port,) = free_ports(1)
    engine = Engine("isolated", port, 0, 0, connector=None)
    engine.start()
    try:
        await engine.ready()
        yield [engine.url]
    finally:
        engine.kill()


async def run(options: argparse.Namespace, engines: Sequence[str]) -> int:
    figures = [
        await measure_mode(engines, options, "on", options.probes),
        await measure_mode(engines, options, "off", max(50, options.probes // 10)),
    ]
    for mode in figures:
        print_mode(mode)
    on, off = figures
    difference = abs(on.cached_share / off.cached_share - 1.0) if off.cached_share else math.inf
    print(f"hits within a tenant differ by {difference:.2%} (at most {MAX_HITS_DIFFERENCE:.0%})")
    if options.json:
        Path(options.json).write_bytes(msgspec.json.format(msgspec.json.encode(figures)))
    is_met = on.reordered.is_a_guess and difference <= MAX_HITS_DIFFERENCE
    print("passed" if is_met else "FAILED")
    return 0 if is_met else 1


def print_mode(mode: Figures) -> None:
    print(
        f"isolate {mode.isolate}: {mode.probes} probes per side; "
        f"load average {os.getloadavg()[0]:.1f}"
    )
    for kind, scores in (("reordered", mode.reordered), ("unrelated", mode.unrelated)):
        for name, auc in (("usage", scores.by_usage), ("time to first token", scores.by_ttft)):
            print(
                f"  against {kind} prompts, AUC by {name}: {auc.auc:.4f} "
                f"(95 % interval {auc.low:.4f} to {auc.high:.4f})"
            )
    print(f"  prompt tokens cached within a tenant: {mode.cached_share:.4f}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        help="URL of a running engine to use instead of starting one; repeat the option for more",
    )
    parser.add_argument(
        "--real", action="store_true", help="use the vLLM engine that `make real` installs"
    )
    parser.add_argument("--model", help="name of the model to request from the engines")
    parser.add_argument("--json", help="file to which the results are also written, as JSON")
    _add_trial_options(parser)
    options: Any = parser.parse_args()
    if options.engine and not options.model:
        parser.error("--engine needs --model")
    options.model = options.model or ("tiny" if options.real else "demo-8b")
    return options


def _add_trial_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--probes",
        type=int,
        default=1000,
        help=(
            "number of trials of each kind: with the same prompt, with its words in another "
            "order, and with an unrelated prompt (default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--documents",
        type=int,
        default=100,
        help=(
            "number of prompts with which the cost of isolation is measured (default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--words",
        type=int,
        default=300,
        help="number of words in each prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--speed",
        type=float,
        default=1.0,
        help="factor by which the mock engine is faster than real time (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        default="1",
        help="random seed of the prompts and the order of trials (default: %(default)s)",
    )


async def _real(options: argparse.Namespace) -> int:
    async with real_engine() as engines:
        return await run(options, engines)


def main() -> int:
    options = _options()
    processes.AT_MOST_S = LONGEST_S  # on a busy machine the probes take longer than a test
    if options.engine:
        return asyncio.run(run(options, options.engine))
    if options.real:
        return asyncio.run(_real(options))
    with mocks(options) as urls:
        return asyncio.run(run(options, urls))


if __name__ == "__main__":
    sys.exit(main())
