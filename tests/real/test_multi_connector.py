"""Tests of PenstockConnector beside other connectors in vLLM's MultiConnector."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.engine_requests import Answer, ask, body, differences, prompt
from tests.real.engines import REAL, Engine, free_ports, penstock_connector
from tests.real.gateway_process import config, gateway

REQUESTS, AT_ONCE = 20, 4
LEASE_S = 30.0
DELAYED = {
    "kv_connector": "DelayedSaves",
    "kv_connector_module_path": "tests.real.delayed_saves",
    "kv_role": "kv_both",
}


def multi_connector(key: Path, saved: Path) -> dict[str, object]:
    # Return vLLM's configuration for our connector, its own one that saves prompts to files, and
    # one that keeps the blocks of ended requests.
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(saved)},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [penstock_connector(key), example, DELAYED]},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("multi")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[tuple[Engine, Engine]]:
    if not (REAL / "installed").exists():
        pytest.fail("the real engines are not installed; `make real` does it")
    key, ports = folder / "key", free_ports(2)
    key.write_bytes(b"the key of this fleet, 32 bytes.")
    engines = tuple(
        Engine(name, ports[place], 0, place, multi_connector(key, folder / name))
        for place, name in enumerate(("MP", "MD"))
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


async def all_answers(url: str, seed: int, **members: object) -> list[Answer]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(i: int) -> Answer:
        async with gate:
            text = prompt(150 + 25 * i, seed=seed + i)
            return await ask(url, body(text, stream=bool(i % 2), **members))

    return list(await asyncio.gather(*map(one, range(REQUESTS))))


# Other prompts for each dialect: an ExampleConnector that loads ends its engine, if the prefix
# cache has a part of the prompt (vLLM 0.32).
@pytest.mark.parametrize(("dialect", "seed"), [("penstock", 9000), ("vllm_nixl", 9100)])
async def test_split_answers_equal_the_aggregated_ones(
    pair: tuple[Engine, Engine], folder: Path, tmp_path: Path, dialect: str, seed: int
) -> None:
    p, d = pair
    aggregated = await all_answers(d.url, seed, cache_salt="aggregated")
    before = await d.numbers()
    serving = f"split: {{dialect: {dialect}, threshold_tokens: 128, hysteresis: 0, transfer_timeout: 60s}}"
    endpoints = {"P": (p.url, "prefill"), "D": (d.url, "decode")}
    with gateway(tmp_path, config(endpoints, serving=serving)) as front:
        split = await all_answers(front.url, seed, cache_salt="split")
    for whole, halved in zip(aggregated, split, strict=True):
        assert (halved.status, halved.error) == (200, "")
        assert differences(halved, whole) == []
        assert halved.finish_reason == whole.finish_reason
    # Other connectors keep blocks as well. A block is free once no connector keeps it any more.
    for engine in pair:
        await engine.idle_within(LEASE_S / 2)
    now = await d.numbers()
    accepted = now["kv_handoffs_accepted_total"] - before.get("kv_handoffs_accepted_total", 0.0)
    # A gateway learns an engine's card from its first answers.
    assert accepted == REQUESTS if dialect == "vllm_nixl" else accepted > REQUESTS / 2
    print(f"\n{dialect}: {accepted:.0f} of {REQUESTS} handoffs were accepted")
    assert now.get("kv_ranks_not_received_total", 0.0) == 0.0
    # vLLM's own connector saved every prompt of the prefill engine.
    assert len(list((folder / "MP").iterdir())) >= REQUESTS
