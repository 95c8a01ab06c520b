"""Measures how exactly the gateway knows the engines' caches while engines and messages fail.

    python -m bench.kv_index_exactness --seconds 120

Engines report cached blocks to the gateway as KV events, over ZeroMQ. Here messages are lost,
delayed, repeated or reordered, and engines restart. The gateway and the mock engines run in this
process.

During pauses in the traffic, the gateway's index of cached blocks is compared with the true content
of the engines' caches. It prints one JSON object per pause, and a summary.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from random import Random
from time import monotonic
from typing import Any

import aiohttp

from gateway.app import App
from gateway.config import Config
from gateway.fleet.kv_events.event_verification import CacheExpectation, EndpointEvents
from mockgpu.fleet import FleetGroup, run_fleet
from mockgpu.kv_events.numbered_event_batches import KvEventSpec
from mockgpu.tp_group import GroupSpec
from policies.sizing.gpus import gpu_named
from policies.sizing.model_shapes import model_named

FAULTS = (
    "events-lost@0.02,events-late@0.02,events-doubled@0.02,events-reordered@0.02,"
    "events-restarted@0.0003"
)
KV_TOKENS = 24_000
DOCUMENTS, DOCUMENT_WORDS, TURNS = 200, 1200, 4
CLIENTS, SETTLE_S = 16, 2.5


class Predictions:
    """The errors of the gateway's predictions of how many blocks of a prompt are cached.

    errors   for each answer, the distance in blocks between the number that the engine reported and
             the predicted range
    unknown  number of requests without a prediction
    """

    def __init__(self) -> None:
        self.errors: list[float] = []
        self.unknown = 0
        original = EndpointEvents.on_answer

        def noting(
            endpoint: EndpointEvents,
            expected: CacheExpectation,
            prompt: int,
            cached: int,
            now: float,
        ) -> None:
            size = endpoint.block_tokens
            if expected.least is None or not size:
                self.unknown += 1
            else:  # without `most`, the index has no upper bound of the cached tokens
                low, high = expected.least, prompt if expected.most is None else expected.most
                self.errors.append(max(low - cached, cached - high, 0.0) / size)
            original(endpoint, expected, prompt, cached, now)

        setattr(EndpointEvents, "on_answer", noting)  # noqa: B010


async def converse(http: aiohttp.ClientSession, url: str, rng: Random, ends: float) -> int:
    """Send chats about long documents to the gateway until the monotonic time `ends`.

    Each document gets several questions. Returns the number of answers.
    """
    answers = 0
    while monotonic() < ends:
        number = min(int(rng.paretovariate(0.4)), DOCUMENTS)
        document = f"Document {number}: " + " ".join(
            f"w{Random(number * 7919 + i).randrange(4096)}" for i in range(DOCUMENT_WORDS)
        )
        messages: list[dict[str, str]] = [{"role": "system", "content": document}]
        for turn in range(rng.randint(1, TURNS)):
            question = f"Question {rng.randrange(10**9)} of turn {turn}: " + "why " * rng.randint(
                5, 80
            )
            messages.append({"role": "user", "content": question})
            body = {"model": "demo-8b", "messages": messages, "max_tokens": rng.randint(8, 120)}
            async with http.post(f"{url}/v1/chat/completions", json=body) as response:
                answer = await response.json()
            if response.status != 200:
                break
            answers += 1
            messages.append(
                {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
            )
    return answers


def compare(app: App, groups: list[FleetGroup]) -> dict[str, Any]:
    """Compare the gateway's index of cached blocks with the engines' caches.

    Leaves out endpoints whose cache the gateway does not claim to know exactly.
    """
    exact = app.gateway.endpoints.prefixes.exact
    both = held = cached = endpoints = 0
    for slot, member in enumerate(groups):
        if not exact.is_exact(slot) or member.group.kv_events is None:
            continue
        (source,) = exact.endpoints[slot].sources
        truth, index = set(member.group.kv_events.hashes()), source.blocks.hashes()
        both, held, cached = both + len(truth & index), held + len(index), cached + len(truth)
        endpoints += 1
    return {
        "exact": endpoints,
        "recall": round(both / cached, 6) if cached else None,
        "precision": round(both / held, 6) if held else None,
        "blocks": cached,
    }


def _config(urls: Sequence[str], block_bytes: int) -> Config:
    endpoints = [{"url": url, "kv_events": {}} for url in urls]
    return Config.model_validate(
        {
            "version": 1,
            "observability": {"access_log": "off"},
            "prefix": {"block_bytes": block_bytes},
            "pools": {"main": {"policy": "prefix_aware", "endpoints": endpoints}},
            "listeners": {"api": {"port": 0}, "admin": {"port": 0}},
        }
    )


async def run(seconds: float, count: int, faults: str, seed: int, block_bytes: int) -> None:
    """Send requests while faults are injected, with regular pauses, and print the results.

    In a pause, the gateway's index of cached blocks is compared with the engines' caches.

    seconds      total duration
    count        number of engines
    faults       faults to inject, in the grammar of mockgpu/fault_grammar.py
    seed         random seed of the load
    block_bytes  bytes of text per block in the gateway's index
    """
    spec = GroupSpec(
        "demo-8b",
        model_named("demo-8b"),
        gpu_named("h100"),
        speed=20,
        kv_tokens=KV_TOKENS,
        kv_events=KvEventSpec(),
    )
    predictions = Predictions()
    async with run_fleet([spec] * count) as groups, aiohttp.ClientSession() as http:
        app = App(_config([member.url for member in groups], block_bytes))
        await app.start()
        for member in groups:
            member.faults.apply(faults)
        moments: list[dict[str, Any]] = []
        answers, ends = 0, monotonic() + seconds
        while monotonic() < ends:
            until = min(ends, monotonic() + 15)
            rngs = [Random(f"{seed}/{len(moments)}/{client}") for client in range(CLIENTS)]
            answers += sum(
                await asyncio.gather(*(converse(http, app.url, rng, until) for rng in rngs))
            )
            await asyncio.sleep(SETTLE_S)
            moments.append(compare(app, groups))
            print(json.dumps(moments[-1]), flush=True)
        print(json.dumps(summary(app, moments, answers, predictions)), flush=True)
        await app.stop()


def summary(
    app: App, moments: list[dict[str, Any]], answers: int, predictions: Predictions
) -> dict[str, Any]:
    """Return the summary of the run: the worst comparison, fault counts, prediction errors.

    app          the gateway
    moments      the comparisons
    answers      number of answers
    predictions  the predictions that were compared with answers
    """
    events = app.gateway.endpoints.prefixes.exact.endpoints.values()
    sources = [source for endpoint in events for source in endpoint.sources]
    errors = predictions.errors
    known = [moment for moment in moments if moment["recall"] is not None]
    return {
        "moments": len(moments),
        "least_recall": min(moment["recall"] for moment in known),
        "least_precision": min(moment["precision"] for moment in known),
        "least_exact": min(moment["exact"] for moment in moments),
        "answers": answers,
        "predicted": len(errors),
        "within_one_block": round(sum(error <= 1 for error in errors) / max(1, len(errors)), 4),
        "not_predicted": predictions.unknown,
        "learned": len(app.gateway.endpoints.prefixes.exact.prompts),
        "audit_errors": sum(endpoint.errors for endpoint in events),
        **{
            name: sum(getattr(source, name) for source in sources)
            for name in ("batches", "gaps", "duplicates", "restarts")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=120.0,
        help="length of the measurement in seconds (default: %(default)s)",
    )
    parser.add_argument(
        "--groups",
        type=int,
        default=8,
        help="number of mock engines (default: %(default)s)",
    )
    parser.add_argument(
        "--faults",
        default=FAULTS,
        help="faults of the mock engines, such as 5xx@0.1; '' for none",
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="random seed of the requests (default: %(default)s)"
    )
    parser.add_argument(
        "--block-bytes",
        type=int,
        default=512,
        help=(
            "block size of the gateway's prefix index in bytes (the setting prefix.block_bytes; "
            "default: %(default)s)"
        ),
    )
    options = parser.parse_args()
    asyncio.run(
        run(options.seconds, options.groups, options.faults, options.seed, options.block_bytes)
    )


if __name__ == "__main__":
    main()
