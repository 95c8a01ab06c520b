"""Tests of the KV store of a host, with two real engines.

Answers from stored KV equal computed ones. Tenants do not share stored KV. Without the store, KV is
computed.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvtransfer.store.client import StoreClient
from tests.real.engine_requests import Answer, ask, body, differences, prompt
from tests.real.engines import (
    BLOCK_TOKENS,
    REAL,
    ROOT,
    Engine,
    free_ports,
    idle_around,
    penstock_connector,
)
from tests.real.gateway_process import gateway
from tests.real.replies import send
from tests.real.test_connector import handoff_of

TENANTS = """
models: [{{name: tiny, pool: main}}]
pools: {{main: {{endpoints: [{{url: '{0}', max_concurrency: 8}}]}}}}
cache: {{isolate: required, secret: a-secret-of-this-test}}
tenants: [{{name: acme, key: sk-acme}}, {{name: zeta, key: sk-zeta}}]
health: {{timeout: 5s, progress: 60s, interval: 500ms}}
scrape: {{timeout: 5s, interval: 500ms}}
"""
WORDS = 1500  # number of words of the longest prompts
ROUNDS = 12
WAIT_S = 30.0


class Store:
    """The process of the KV store on this host, which a test kills and restarts."""

    def __init__(self, folder: Path) -> None:
        self.path, self._folder = folder / "s", folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "kvtransfer.store", str(self.path)),
                *("--block", "1MiB", "--memory", "512MiB", "--disk", "1GiB"),
                *("--directory", str(self._folder / "disk")),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline().startswith(b"ready")

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(how)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def counts(self) -> dict[str, int]:
        with StoreClient(self.path) as client:
            return client.stats()

    async def saved_to_disk(self) -> None:
        # Wait until every block in memory is on disk, too.
        for _ in range(round(10 * WAIT_S)):
            counts = self.counts()
            if counts["stored"] <= counts["saved"]:
                return
            await asyncio.sleep(0.1)
        pytest.fail(f"blocks are not copied to the disk: {counts}")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, Engine, Engine]]:
    if not (REAL / "installed").exists():
        pytest.fail("the real engines are not installed; `make real` does it")
    folder = tmp_path_factory.mktemp("store")
    (folder / "key").write_bytes(b"the key of this fleet, 32 bytes.")
    store, ports = Store(folder), free_ports(2)
    connector = penstock_connector(folder / "key", store=str(store.path))
    env = {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache
    engines = [
        Engine(name, ports[place], 0, place, connector, env=env)
        for place, name in enumerate(("S1", "S2"))
    ]
    try:
        store.start()
        for engine in engines:
            engine.start()
        for engine in engines:
            asyncio.run(engine.ready())
        yield store, engines[0], engines[1]
    finally:
        for engine in engines:
            engine.kill()
        store.kill()


@pytest.fixture
async def idle(
    host: tuple[Store, Engine, Engine],
) -> AsyncIterator[tuple[Store, Engine, Engine]]:
    async with idle_around(host[1:], WAIT_S, WAIT_S, may_be_killed=True):
        yield host


async def forget_prompts(engine: Engine) -> None:
    # Empty the engine's own prefix cache, once its ended requests are saved.
    await engine.idle_within(WAIT_S)
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{engine.url}/reset_prefix_cache") as answer,
    ):
        assert answer.status == 200


async def loaded(engine: Engine) -> float:
    return (await engine.numbers())["external_prefix_cache_hits_total"]


async def found(engine: Engine) -> float:
    # Return the stored tokens that were loaded, or computed because that seemed faster.
    return await loaded(engine) + (await engine.numbers())["kv_store_declined_tokens_total"]


async def store_in_use(store: Store, engine: Engine) -> None:
    # Wait until the engine has connected to a store that was started again.
    for attempt in range(20):
        await ask(engine.url, body(prompt(150, seed=8000 + attempt), max_tokens=1))
        await engine.idle_within(WAIT_S)
        if store.counts()["stored"]:
            return
        await asyncio.sleep(2.0)
    pytest.fail("the engine does not use the store that came back")


async def timed(engine: Engine, asked: dict[str, Any]) -> tuple[Answer, float]:
    # Return a streamed answer and its TTFT in seconds.
    began, stamps = time.perf_counter(), list[float]()
    answer = await ask(engine.url, asked, heard=lambda _: stamps.append(time.perf_counter()))
    assert (answer.status, answer.error) == (200, "")
    return answer, stamps[0] - began


def full_blocks(answer: Answer) -> int:
    return (answer.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


async def test_a_returning_prompt_is_loaded_and_answered_as_if_computed(
    idle: tuple[Store, Engine, Engine],
) -> None:
    _, engine, other = idle
    in_all, of_these = 0, 0.0
    for seed in range(7000, 7010):
        asked = body(prompt(150 + 90 * (seed % 10), seed=seed))
        computed = await ask(engine.url, asked)
        await forget_prompts(engine)
        for server in (engine, other):
            before, loaded_before = await found(server), await loaded(server)
            returned = await ask(server.url, asked)
            assert (returned.status, differences(returned, computed)) == (200, [])
            assert await found(server) - before == full_blocks(computed)
            assert returned.cached_tokens == await loaded(server) - loaded_before
            in_all, of_these = in_all + full_blocks(computed), of_these + returned.cached_tokens
    print(f"{of_these:.0f} of {in_all} stored tokens were loaded")
    assert of_these > 0


async def test_a_conversation_finds_the_answer_of_its_last_turn(
    idle: tuple[Store, Engine, Engine],
) -> None:
    _, engine, other = idle
    first = body(prompt(300, seed=7101), max_tokens=300)
    answer = await ask(engine.url, first)
    turns = [
        *first["messages"],
        {"role": "assistant", "content": answer.text},
        {"role": "user", "content": "and then?"},
    ]
    await forget_prompts(engine)
    before = await found(other)
    second = body("", max_tokens=16) | {"messages": turns}
    returned = await ask(other.url, second)
    whole = await ask(engine.url, second | {"cache_salt": "whole"})
    assert differences(returned, whole) == []
    # The hits may be fewer: the tokenizer may divide the answer's text into other tokens than the
    # model generated.
    assert await found(other) - before >= full_blocks(answer)


async def test_another_tenant_never_gets_stored_blocks(
    idle: tuple[Store, Engine, Engine],
) -> None:
    _, engine, other = idle
    asked = body(prompt(400, seed=7201))
    mine = await ask(engine.url, asked | {"cache_salt": "mine"})
    await forget_prompts(engine)
    for salt, wanted in (("theirs", 0), (None, 0), ("mine", full_blocks(mine))):
        before = await found(other)
        answer = await ask(other.url, asked | ({"cache_salt": salt} if salt else {}))
        assert differences(answer, mine) == []
        assert await found(other) - before == wanted


async def test_a_gateway_s_tenants_find_their_own_stored_blocks_and_no_others(
    idle: tuple[Store, Engine, Engine], tmp_path: Path
) -> None:
    # Two gateways with one secret, each before one engine.
    _, engine, other = idle
    asked = body(prompt(400, seed=7251))

    async def ask_as(tenant: str, url: str) -> dict[str, Any]:
        headers = {"authorization": f"Bearer sk-{tenant}"}
        reply = await send(url, "/v1/chat/completions", asked, headers=headers)
        assert reply.status == 200, reply
        answer: dict[str, Any] = reply.body
        return answer

    folders = tmp_path / "first", tmp_path / "second"
    for folder in folders:
        folder.mkdir()
    with (
        gateway(folders[0], TENANTS.format(engine.url)) as first,
        gateway(folders[1], TENANTS.format(other.url)) as second,
    ):
        computed = await ask_as("acme", first.url)
        stored = (computed["usage"]["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        await forget_prompts(engine)
        for tenant, wanted in (("zeta", 0), ("acme", stored)):
            before = await found(other)
            answer = await ask_as(tenant, second.url)
            assert await found(other) - before == wanted
            text = answer["choices"][0]["message"]["content"]
            assert text == computed["choices"][0]["message"]["content"]


async def test_a_restarted_engine_finds_what_it_had_stored(
    idle: tuple[Store, Engine, Engine],
) -> None:
    _, engine, _ = idle
    asked = body(prompt(500, seed=7301))
    computed = await ask(engine.url, asked)
    await engine.idle_within(WAIT_S)
    engine.kill()
    engine.start()
    await engine.ready()
    before = await found(engine)
    assert differences(await ask(engine.url, asked), computed) == []
    assert await found(engine) - before == full_blocks(computed)


async def test_a_prefill_is_offered_to_a_decode_engine_and_saved(
    idle: tuple[Store, Engine, Engine],
) -> None:
    _, p, d = idle
    asked = body(prompt(500, seed=7401))
    whole = await ask(d.url, asked | {"cache_salt": "whole"})
    handoff = await handoff_of(p, asked)
    answer = await ask(d.url, asked | {"kv_transfer_params": handoff})
    assert differences(answer, whole) == []
    await forget_prompts(p)
    before = await found(p)
    assert differences(await ask(p.url, asked), whole) == []
    assert await found(p) - before == full_blocks(whole)


async def test_a_killed_store_costs_computations_and_no_error(
    idle: tuple[Store, Engine, Engine],
) -> None:
    store, engine, other = idle
    asked = [body(prompt(300, seed=7500 + i), stream=bool(i % 2)) for i in range(6)]
    computed = [await ask(engine.url, each) for each in asked]
    await forget_prompts(engine)
    store.kill()
    before = await found(engine)
    for each, whole in zip(asked, computed, strict=True):
        answer = await ask(engine.url, each)
        assert (answer.status, answer.error, differences(answer, whole)) == (200, "", [])
    assert await found(engine) == before
    assert (await engine.numbers())["kv_store_lost_calls_total"] > 0
    store.start()
    await asyncio.sleep(2.0)  # let the engines connect again
    for _ in range(20):
        await ask(other.url, body(prompt(20, seed=7599), max_tokens=1))
        await ask(other.url, asked[0])
        await forget_prompts(other)
        before = await found(other)
        assert differences(await ask(other.url, asked[0]), computed[0]) == []
        if await found(other) - before:
            return
        await asyncio.sleep(2.0)
    pytest.fail("the engine does not use the store that came back")


async def test_prompts_that_only_the_disk_has_are_answered_as_if_computed(
    idle: tuple[Store, Engine, Engine],
) -> None:
    store, engine, other = idle
    asked = [body(prompt(WORDS, seed=7900 + i), stream=bool(i % 2)) for i in range(4)]
    computed = [await ask(engine.url, each) for each in asked]
    await forget_prompts(engine)
    loaded_tokens = read_blocks = 0.0
    restarts = 4
    failed_before = (await other.numbers()).get("kv_store_failed_loads_total", 0)
    for _ in range(restarts):
        await store.saved_to_disk()
        store.kill(signal.SIGTERM)
        store.start()  # the memory of the new process is empty
        await store_in_use(store, other)
        await forget_prompts(other)
        before, found_before = await loaded(other), await found(other)
        for each, whole in zip(asked, computed, strict=True):
            assert differences(await ask(other.url, each), whole) == []
        assert await found(other) - found_before == sum(map(full_blocks, computed))
        loaded_tokens += await loaded(other) - before
        counts = store.counts()
        read_blocks += counts["loaded"]
        assert (counts["corrupt"], counts["failed"]) == (0, 0)
    print(f"{loaded_tokens:.0f} tokens were loaded, {read_blocks:.0f} blocks read from the disk")
    assert read_blocks > 0
    # Each restart may cost one failed load, by which the worker notices it.
    failed = (await other.numbers()).get("kv_store_failed_loads_total", 0)
    assert failed - failed_before <= restarts


async def test_a_store_killed_under_load_never_changes_an_answer(
    idle: tuple[Store, Engine, Engine],
) -> None:
    store, engine, other = idle
    asked = [body(prompt(200 + 40 * i, seed=7600 + i), max_tokens=8) for i in range(8)]
    computed = [await ask(engine.url, each) for each in asked]
    for delay_s in (0.02, 0.1, 0.3):
        for server in (engine, other):
            await forget_prompts(server)
        answers = asyncio.gather(
            *(ask((engine, other)[i % 2].url, each) for i, each in enumerate(asked))
        )
        await asyncio.sleep(delay_s)
        store.kill()
        store.start()
        for answer, whole in zip(await answers, computed, strict=True):
            assert (answer.status, answer.error, differences(answer, whole)) == (200, "", [])


async def test_a_loaded_prompt_has_its_first_token_before_a_computed_one(
    idle: tuple[Store, Engine, Engine],
) -> None:
    _, engine, _ = idle
    ratios = []
    for seed in range(7700, 7700 + ROUNDS):
        asked = body(prompt(WORDS, seed=seed), max_tokens=2, stream=True)
        computed, computed_s = await timed(engine, asked)
        await forget_prompts(engine)
        before = await loaded(engine)
        returned, returned_s = await timed(engine, asked)
        share = (await loaded(engine) - before) / full_blocks(computed)
        assert differences(returned, computed) == []
        ratios.append(returned_s / computed_s)
        print(
            f"{computed.prompt_tokens} tokens: TTFT {computed_s * 1e3:.1f} ms computed, "
            f"{returned_s * 1e3:.1f} ms returning, {share:.2f} loaded"
        )
    print(f"median ratio {statistics.median(ratios):.2f}")
    assert statistics.median(ratios) < 1.0


def test_each_of_two_ranks_loads_its_own_part(tmp_path: Path) -> None:
    store, (port,) = Store(tmp_path), free_ports(1)
    (tmp_path / "key").write_bytes(b"the key of this fleet, 32 bytes.")
    connector = penstock_connector(tmp_path / "key", store=str(store.path))
    engine = Engine("S3", port, 0, 0, connector, 2, env={"VLLM_SERVER_DEV_MODE": "1"})

    async def played() -> None:
        await engine.ready()
        for seed in range(7800, 7806):
            asked = body(prompt(WORDS, seed=seed))
            computed = await ask(engine.url, asked)
            await forget_prompts(engine)
            before = await found(engine)
            returned = await ask(engine.url, asked)
            assert (returned.status, differences(returned, computed)) == (200, [])
            assert await found(engine) - before == full_blocks(computed)
        numbers = await engine.numbers()
        assert numbers["kv_store_loaded_blocks_total"] > 0
        assert numbers.get("kv_store_failed_loads_total", 0) == 0

    try:
        store.start()
        engine.start()
        asyncio.run(played())
    finally:
        engine.kill()
        store.kill()
