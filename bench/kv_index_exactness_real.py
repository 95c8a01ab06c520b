"""`make events`: measures how well the gateway knows the caches of two real vLLM engines.

    python -m bench.kv_index_exactness_real [--seconds 600] [--seed 1]

Engines report cached blocks to the gateway as KV events. Clients ask about documents that need at
least three times the cache memory of both engines. During pauses in the traffic, the gateway's
index of cached blocks is compared with the true content of the caches.

Afterwards the connections for KV events are cut in two ways: closed, and silent. It prints one JSON
object per comparison or cut, and a summary. Exit status: 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import msgspec

from bench.kv_index_exactness import Predictions
from gateway.app import App
from gateway.config import Config
from tests.real.engines import BLOCKS, MODEL, REAL, ROOT, Engine, free_ports, penstock_connector
from tests.real.relay import Relay, relay

BLOCK_TOKENS = 128
DOCUMENTS, DOCUMENT_WORDS, TURNS, CLIENTS = 300, 450, 4, 6
PERIOD_S, SETTLE_S = 20.0, 2.5
LEAST_RECALL, LEAST_PRECISION, LEAST_WITHIN_ONE_BLOCK = 0.99, 0.995, 0.99
LEAST_TURNOVER = 3.0
BELIEF_WITHIN_S = 5.0
WORDS = (ROOT / "docs" / "life-of-a-request.md").read_text().split()


class EventEngine(msgspec.Struct, frozen=True):
    """A real vLLM engine whose reports of cached blocks (KV events) pass a relay that can be cut.

    It also has the path of the socket from which the true list of its cached blocks can be read.
    """

    engine: Engine
    relays: tuple[Relay, Relay]
    report: Path

    async def cached(self) -> Counter[int]:
        """Count the engine's cached copies of each block, by the hash that KV events use."""
        reader, writer = await asyncio.open_unix_connection(str(self.report))
        state = json.loads(await reader.read())
        writer.close()
        return Counter(state["cached"])


@contextmanager
def started_engine(folder: Path, place: int, ports: list[int]) -> Iterator[Engine]:
    """Run a vLLM engine that publishes KV events.

    A client of the Unix socket `folder`/{place}.sock receives the list of its cached blocks.
    """
    key = folder / "key"
    key.write_bytes(b"the key of this fleet, 32 bytes.")
    connector = penstock_connector(key)
    extra: Any = connector["kv_connector_extra_config"]
    extra["block_report"] = str(folder / f"{place}.sock")
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports[1]}",
        "replay_endpoint": f"tcp://*:{ports[2]}",
        "topic": "kv",
    }
    options = ("--kv-events-config", json.dumps(events))
    engine = Engine(f"E{place}", ports[0], 0, place, connector, options=options)
    engine.start()
    try:
        yield engine
    finally:
        engine.kill()


@asynccontextmanager
async def event_engines(count: int = 2) -> AsyncIterator[list[EventEngine]]:
    if not (REAL / "installed").exists():
        raise SystemExit("the real engines are not installed; install them with `make real`")
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-")))
        found = []
        for place in range(count):
            ports = free_ports(3)
            engine = stack.enter_context(started_engine(folder, place, ports))
            relays = [await stack.enter_async_context(relay(port)) for port in ports[1:]]
            found.append(EventEngine(engine, (relays[0], relays[1]), folder / f"{place}.sock"))
        for each in found:
            await each.engine.ready()
        yield found


@asynccontextmanager
async def running_gateway(engines: list[EventEngine]) -> AsyncIterator[App]:
    endpoints = [
        {
            "url": each.engine.url,
            "name": each.engine.name,
            "kv_tokens": BLOCKS * BLOCK_TOKENS,
            "kv_events": {
                "publisher": f"127.0.0.1:{each.relays[0].port}",
                "replay": f"127.0.0.1:{each.relays[1].port}",
            },
        }
        for each in engines
    ]
    config = {
        "version": 1,
        "observability": {"access_log": "off"},
        "health": {"timeout": "5s", "progress": "60s", "interval": "500ms"},
        "scrape": {"timeout": "5s", "interval": "500ms"},
        "pools": {"main": {"policy": "prefix_aware", "endpoints": endpoints}},
        "listeners": {"api": {"port": 0}, "admin": {"port": 0}},
    }
    app = App(Config.model_validate(config))
    await app.start()
    try:
        yield app
    finally:
        await app.stop()


def document(number: int) -> str:
    rng = random.Random(f"document {number}")
    return f"{rng.getrandbits(48):x} " + " ".join(rng.choices(WORDS, k=DOCUMENT_WORDS))


async def converse(http: aiohttp.ClientSession, url: str, rng: random.Random, ends: float) -> int:
    """Send chats about long documents to the gateway until the monotonic time `ends`.

    Each document gets several questions. Returns the number of answers.
    """
    answers = 0
    while monotonic() < ends:
        number = min(int(rng.paretovariate(0.4)), rng.randrange(1, DOCUMENTS + 1))
        messages = [{"role": "system", "content": document(number)}]
        for _ in range(rng.randint(1, TURNS)):
            question = f"{rng.getrandbits(32):x} " + " ".join(
                rng.choices(WORDS, k=rng.randint(5, 80))
            )
            messages.append({"role": "user", "content": question})
            body = {
                "model": MODEL,
                "messages": messages,
                "max_tokens": rng.randint(8, 60),
                "ignore_eos": True,
            }
            async with http.post(f"{url}/v1/chat/completions", json=body) as response:
                answer = await response.json()
            if response.status != 200:
                raise RuntimeError(
                    f"the engine answered a chat completion with status {response.status}: {answer}"
                )
            answers += 1
            text = answer["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": text})
    return answers


class Moment(msgspec.Struct, frozen=True):
    """One comparison of the gateway's index of cached blocks with the engines' caches.

    exact   number of endpoints whose cache the gateway claims to know exactly
    both    number of blocks that are in the index and in a cache
    index   number of blocks in the index
    pools   number of different blocks in the caches
    copies  number of second and further copies of blocks in a cache, which KV events cannot express
    """

    exact: int
    both: int
    index: int
    pools: int
    copies: int

    @property
    def recall(self) -> float:
        return self.both / self.pools if self.pools else 1.0

    @property
    def precision(self) -> float:
        return self.both / self.index if self.index else 1.0


async def compare(app: App, engines: list[EventEngine]) -> Moment:
    """Compare the gateway's index of cached blocks with the caches of all engines.

    The index of an endpoint counts as empty unless the gateway claims that it is exact.
    """
    exact = app.gateway.endpoints.prefixes.exact
    counts = Counter[str]()
    for live in app.gateway.endpoints.all():
        slot = live.load.slot
        (engine,) = (each for each in engines if each.engine.name == live.endpoint.name)
        truth = await engine.cached()
        is_exact = exact.is_exact(slot)
        if not is_exact:
            print(f"{live.endpoint.name}: {exact.describe(slot, monotonic())}", file=sys.stderr)
        (source,) = exact.endpoints[slot].sources
        index = source.blocks.hashes() if is_exact else frozenset()
        counts.update(
            exact=is_exact,
            both=len(truth.keys() & index),
            index=len(index),
            pools=len(truth),
            copies=truth.total() - len(truth),
        )
    names = ("exact", "both", "index", "pools", "copies")
    return Moment(*(counts[name] for name in names))


async def churn(
    app: App, engines: list[EventEngine], seconds: float, seed: int
) -> tuple[list[Moment], int]:
    """Send requests in periods; after each, compare the gateway's index with the true caches.

    The requests need more cache memory than there is, so blocks come and go. Returns the
    comparisons and the number of answers.
    """
    moments: list[Moment] = []
    answers, ends = 0, monotonic() + seconds
    async with aiohttp.ClientSession() as http:
        while monotonic() < ends:
            until = min(ends, monotonic() + PERIOD_S)
            rngs = [random.Random(f"{seed}/{len(moments)}/{client}") for client in range(CLIENTS)]
            answers += sum(
                await asyncio.gather(*(converse(http, app.url, rng, until) for rng in rngs))
            )
            for each in engines:
                await each.engine.idle_within(30.0)
            await asyncio.sleep(SETTLE_S)
            moment = await compare(app, engines)
            moments.append(moment)
            facts = msgspec.to_builtins(moment) | {
                "recall": round(moment.recall, 4),
                "precision": round(moment.precision, 4),
                "load": round(os.getloadavg()[0], 1),
            }
            print(json.dumps(facts), flush=True)
    return moments, answers


async def measure_cut(app: App, engine: EventEngine, *, is_silent: bool) -> tuple[float, float]:
    """Cut the connection on which an engine sends KV events, and measure how the gateway reacts.

    is_silent  True to keep the connection open without data, False to close it

    Returns two times in seconds:

    1. from the cut until the gateway no longer claims to know the cache exactly
    2. from the end of the cut until it does so again

    Raises TimeoutError after 60 s.
    """
    exact = app.gateway.endpoints.prefixes.exact
    (slot,) = (
        live.load.slot
        for live in app.gateway.endpoints.all()
        if live.endpoint.name == engine.engine.name
    )

    async def wait(*, for_exact: bool) -> float:
        began = monotonic()
        async with asyncio.timeout(60.0):
            while exact.is_exact(slot) is not for_exact:
                await asyncio.sleep(0.05)
        return monotonic() - began

    await wait(for_exact=True)
    for each in engine.relays:
        each.cut(is_silent=is_silent)
    to_belief = await wait(for_exact=False)
    for each in engine.relays:
        each.mend()
    return to_belief, await wait(for_exact=True)


async def turnover(engines: list[EventEngine]) -> float:
    """Return the number of computed prompt tokens, divided by the size of all caches in tokens."""
    pages = [await each.engine.numbers() for each in engines]
    computed = sum(
        page["prefix_cache_queries_total"] - page["prefix_cache_hits_total"] for page in pages
    )
    return computed / (len(engines) * BLOCKS * BLOCK_TOKENS)


async def run(seconds: float, seed: int) -> dict[str, Any]:
    """Send load and compare caches, then cut connections; return the summary's figures by name."""
    predictions = Predictions()
    async with event_engines() as engines, running_gateway(engines) as app:
        moments, answers = await churn(app, engines, seconds, seed)
        turned = await turnover(engines)
        cuts = [
            await measure_cut(app, engines[0], is_silent=is_silent) for is_silent in (False, True)
        ]
    errors = predictions.errors
    return {
        "moments": len(moments),
        "least_recall": round(min(moment.recall for moment in moments), 4),
        "least_precision": round(min(moment.precision for moment in moments), 4),
        "least_exact": min(moment.exact for moment in moments),
        "most_copies": max(moment.copies for moment in moments),
        "answers": answers,
        "predicted": len(errors),
        "not_predicted": predictions.unknown,
        "within_one_block": round(sum(error <= 1 for error in errors) / max(1, len(errors)), 4),
        "turnover": round(turned, 2),
        "cut_closed_s": [round(value, 2) for value in cuts[0]],
        "cut_silent_s": [round(value, 2) for value in cuts[1]],
    }


def missed_goals(summary: dict[str, Any]) -> list[str]:
    """Return the names of the figures in a benchmark summary that miss their goals."""
    is_met = {
        "least_recall": summary["least_recall"] >= LEAST_RECALL,
        "least_precision": summary["least_precision"] >= LEAST_PRECISION,
        "predicted": summary["predicted"] > 0,
        "within_one_block": summary["within_one_block"] >= LEAST_WITHIN_ONE_BLOCK,
        "cut_closed_s": summary["cut_closed_s"][0] <= BELIEF_WITHIN_S,
        "cut_silent_s": summary["cut_silent_s"][0] <= BELIEF_WITHIN_S,
        "turnover": summary["turnover"] >= LEAST_TURNOVER,
    }
    return [name for name, met in is_met.items() if not met]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=600.0,
        help=(
            "seconds during which clients replace the content of the caches (default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="random seed of the requests (default: %(default)s)"
    )
    options = parser.parse_args()
    summary = asyncio.run(run(options.seconds, options.seed))
    print(json.dumps(summary))
    missed = missed_goals(summary)
    print("passed" if not missed else f"FAILED: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
