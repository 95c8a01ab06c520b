"""Tests of pulls between two real engines with our KV connector, through a gateway.

One engine has the beginning of a prompt in its prefix cache, and generates answers in three of the
four slots that its label states. So the other engine costs less. It fetches the beginning, and computes the rest. The engines' own counters show
which tokens were fetched and which were computed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from tests.e2e.processes import GatewayProcess
from tests.metrics_page import total
from tests.real.engine_requests import Answer, ask, body, differences, prompt
from tests.real.engines import BLOCK_TOKENS, Engine, idle_around
from tests.real.gateway_process import gateway
from tests.real.replies import send
from tests.real.test_connector import LEASE_S, started

REQUESTS, WORDS = 20, 800
CONFIG = """
models: [{{name: tiny, pool: main, split: {{dialect: penstock, transfer_timeout: 60s}}}}]
pools:
  main:
    policy: priced
    endpoints:
      - {{name: KP, url: '{0}', max_concurrency: 4, kv_tokens: 32768, labels: {{max_num_seqs: "4"}}}}
      - {{name: KD, url: '{1}', max_concurrency: 4, kv_tokens: 32768, labels: {{max_num_seqs: "4"}}}}
health: {{timeout: 5s, progress: 60s, interval: 500ms, slow_factor: 0}}
scrape: {{timeout: 5s, interval: 500ms}}
"""
EXPECTED_COUNTS = {"kv_handoffs_accepted_total": 1, "kv_ranks_not_received_total": 0}
TENANTS = """
cache: {isolate: required, secret: a-secret-of-this-test}
tenants: [{name: acme, key: sk-acme}, {name: zeta, key: sk-zeta}]
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # for /reset_prefix_cache
    try:
        with started(tmp_path_factory.mktemp("kv"), 1, model="deep") as engines:
            yield engines
    finally:
        del os.environ["VLLM_SERVER_DEV_MODE"]


@pytest.fixture
async def idle(pair: tuple[Engine, Engine]) -> AsyncIterator[tuple[Engine, Engine]]:
    async with idle_around(pair, 20.0, LEASE_S / 2):
        yield pair


class Sources(NamedTuple):
    """How many prompt tokens an engine has computed, found in its cache, and fetched."""

    computed: float
    cached: float
    fetched: float

    def since(self, before: Sources) -> Sources:
        return Sources(*(now - then for now, then in zip(self, before, strict=True)))


async def sources(engine: Engine) -> Sources:
    async with aiohttp.ClientSession() as http, http.get(f"{engine.url}/metrics") as answer:
        page = await answer.text()
    name = "vllm:prompt_tokens_by_source_total"
    kinds = ("local_compute", "local_cache_hit", "external_kv_transfer")
    return Sources(*(total(page, name, source=kind) for kind in kinds))


class Place(NamedTuple):
    """The engine that has a beginning cached, and the other one."""

    holder: Engine
    other: Engine


@asynccontextmanager
async def busy_holder(
    front: GatewayProcess, pair: tuple[Engine, Engine], beginning: str
) -> AsyncIterator[Place]:
    # Have the beginning computed by one engine, three of whose slots that request then uses.
    began, heard = asyncio.Event(), list[str]()

    def on_event(endpoint: str) -> None:
        heard.append(endpoint)
        began.set()

    # Requests with several choices are never split, so this one occupies one engine.
    asked = body(f"{beginning} fill", max_tokens=1500, stream=True, n=3, temperature=1)
    fill = asyncio.ensure_future(ask(front.url, asked, heard=on_event))
    waiting = asyncio.ensure_future(began.wait())
    await asyncio.wait((fill, waiting), return_when=asyncio.FIRST_COMPLETED)
    assert not fill.done(), fill.result()
    holder, other = pair if pair[0].name == heard[0] else pair[::-1]
    try:
        yield Place(holder, other)
    finally:
        fill.cancel()
        await asyncio.gather(fill, return_exceptions=True)
        for engine in pair:
            await engine.idle_within(LEASE_S / 2)


async def teach(front: GatewayProcess, seed: int) -> None:
    # Let the gateway learn the engines' speed and the tokens of prompts.
    for number in range(6):
        text = prompt(WORDS // 4 * (1 + number % 4), seed=seed + number)
        await ask(front.url, body(text, max_tokens=1))


async def metrics_of(front: GatewayProcess) -> str:
    async with aiohttp.ClientSession() as http, http.get(f"{front.admin_url}/metrics") as page:
        return await page.text()


def question(number: int, beginning: str) -> dict[str, Any]:
    return body(f"{beginning} question {number} {prompt(60, seed=number)}")


class Round(NamedTuple):
    """One request whose beginning another engine has, and the same one computed."""

    source: str | None
    pulled: Answer
    computed: Answer
    fetched: float
    pulled_s: float
    computed_s: float


async def one_round(front: GatewayProcess, pair: tuple[Engine, Engine], number: int) -> Round:
    beginning = prompt(WORDS, seed=8900 + number)
    asked = question(number, beginning)
    async with busy_holder(front, pair, beginning) as (holder, other):
        before = await sources(other), await sources(holder), await other.numbers()
        began = time.monotonic()
        pulled = await ask(front.url, asked)
        pulled_s = time.monotonic() - began
        there = (await sources(other)).since(before[0])
        sent = (await sources(holder)).since(before[1])
        counts = await other.numbers()
    assert (pulled.status, pulled.headers["x-penstock-endpoint"]) == (200, other.name)
    source = pulled.headers.get("x-penstock-pulled-from")
    assert sum(there) == pulled.prompt_tokens
    if source is not None:
        # The beginning was fetched, and only the rest was computed.
        assert source == holder.name
        assert there.fetched > 1024
        assert there.computed < 4 * BLOCK_TOKENS
        assert sent.computed <= 3 * BLOCK_TOKENS
        for name, count in EXPECTED_COUNTS.items():
            assert counts[name] - before[2].get(name, 0.0) == count
        name = "kv_received_bytes_total"
        assert counts[name] > before[2].get(name, 0.0)
    began = time.monotonic()
    computed = await ask(other.url, asked | {"cache_salt": f"computed-{number}"})
    computed_s = time.monotonic() - began
    assert computed.cached_tokens == 0
    return Round(source, pulled, computed, there.fetched, pulled_s, computed_s)


async def test_answers_after_a_pull_equal_computed_ones(
    idle: tuple[Engine, Engine], tmp_path: Path
) -> None:
    with gateway(tmp_path, CONFIG.format(*(engine.url for engine in idle))) as front:
        await teach(front, 8800)
        rounds = [await one_round(front, idle, number) for number in range(REQUESTS)]
        metrics = await metrics_of(front)
    for one in rounds:
        assert differences(one.pulled, one.computed) == []
    pulled = [one for one in rounds if one.source is not None]
    shares = [one.fetched / one.pulled.prompt_tokens for one in pulled]
    ratios = [one.pulled_s / one.computed_s for one in pulled]
    print(
        f"\n{REQUESTS} answers have the tokens and log probabilities of computed ones; "
        f"{len(pulled)} were pulled, {statistics.median(shares):.2f} of their prompts (median). "
        f"Whole answers took {statistics.median(one.pulled_s for one in pulled):.3f} s with a pull "
        f"and {statistics.median(one.computed_s for one in pulled):.3f} s without one, ratio "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )
    assert total(metrics, "penstock_pulls_total", result="pulled") == len(pulled)
    assert total(metrics, "penstock_pulls_total", result="failed") == 0
    # On a busy machine the holder may be too late.
    assert len(pulled) > REQUESTS / 2


async def test_a_beginning_that_is_gone_or_a_stopped_holder_costs_a_bounded_time(
    idle: tuple[Engine, Engine], tmp_path: Path
) -> None:
    with gateway(tmp_path, CONFIG.format(*(engine.url for engine in idle))) as front:
        await teach(front, 8700)
        for number, trouble in enumerate(("evicted", "stopped")):
            beginning = prompt(WORDS, seed=8750 + number)
            asked = question(number, beginning)
            async with busy_holder(front, idle, beginning) as (holder, other):
                if trouble == "evicted":
                    async with (
                        aiohttp.ClientSession() as http,
                        http.post(f"{holder.url}/reset_prefix_cache") as reply,
                    ):
                        assert reply.status == 200
                else:
                    holder.send_signal(signal.SIGSTOP)
                began = time.monotonic()
                try:
                    answer = await ask(front.url, asked)
                finally:
                    if trouble == "stopped":
                        holder.send_signal(signal.SIGCONT)
                spent_s = time.monotonic() - began
            began = time.monotonic()
            computed = await ask(other.url, asked | {"cache_salt": trouble})
            computed_s = time.monotonic() - began
            assert (answer.status, answer.headers["x-penstock-endpoint"]) == (200, other.name)
            assert differences(answer, computed) == []
            print(f"\n{trouble}: {spent_s:.2f} s, {computed_s:.2f} s computed")
            # Twice the time of computing it, and what a busy machine adds.
            assert spent_s < 3 * computed_s + 3.0
        metrics = await metrics_of(front)
    assert total(metrics, "penstock_pulls_total") == 2
    assert total(metrics, "penstock_pulls_total", result="failed") == 0


async def test_a_tenant_pulls_its_own_beginning_and_no_other_one(
    idle: tuple[Engine, Engine], tmp_path: Path
) -> None:
    path, log = "/v1/completions", tmp_path / "access.jsonl"
    with gateway(tmp_path, CONFIG.format(*(engine.url for engine in idle)) + TENANTS) as front:

        async def send_as(tenant: str, text: str, **members: Any) -> dict[str, Any]:
            # Return the line of the request in the access log.
            asked = {"model": "tiny", "prompt": text, "max_tokens": 4} | members
            headers = {"authorization": f"Bearer sk-{tenant}"}
            reply = await send(front.url, path, asked, headers=headers)
            assert reply.status == 200, reply
            async with asyncio.timeout(30.0):
                while True:
                    for line in map(json.loads, log.read_text().splitlines()):
                        if line["id"] not in ids:
                            ids.add(line["id"])
                            return dict(line)
                    await asyncio.sleep(0.1)

        ids = set[str]()
        beginning = prompt(WORDS, seed=8600)
        for number in range(4):
            await send_as("acme", prompt(WORDS, seed=8610 + number))
        name = (await send_as("acme", f"{beginning} first"))["endpoint"]
        holder, other = idle if idle[0].name == name else idle[::-1]
        fill = asyncio.ensure_future(
            send_as("acme", f"{beginning} fill", max_tokens=1000, ignore_eos=True, n=3)
        )
        await holder.holds_within(30.0)
        try:
            before = await sources(other)
            foreign = await send_as("zeta", f"{beginning} question")
            there = (await sources(other)).since(before)
            assert (foreign["endpoint"], foreign.get("pulled_from")) == (other.name, None)
            assert (there.cached, there.fetched) == (0, 0)
            before, held = await sources(other), await sources(holder)
            own = await send_as("acme", f"{beginning} question")
            there = (await sources(other)).since(before)
            assert (own["endpoint"], own["pulled_from"]) == (other.name, holder.name)
            assert there.fetched > 1024
            assert (await sources(holder)).since(held).computed <= 2 * BLOCK_TOKENS
        finally:
            fill.cancel()
            await asyncio.gather(fill, return_exceptions=True)
