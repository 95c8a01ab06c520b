"""Tests of mock engines that share a KV store on their host; the store is a real process.

Requests are sent over real sockets.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from gateway.fleet.kv_events.event_decoder import StoredBlocks, decode_batch
from mockgpu.fleet import run_fleet
from mockgpu.kv_events.numbered_event_batches import KvEventSpec
from mockgpu.kv_options import StoreSpec
from tests.duration_limits import PATIENCE_S
from tests.e2e.mock_group import SPEC, MockGroup

CPU, STORAGE = 2, 4
PROMPT = "How deep is the reservoir? " * 300
ENDED = 'mock:kv_blocks_in_use{model_name="demo-8b",engine="0"}'


@contextmanager
def store(path: Path) -> Iterator[subprocess.Popen[str]]:
    command = (sys.executable, "-m", "kvtransfer.store", str(path / "s"))
    options = ("--block", "8KiB", "--memory", "16MiB", "--disk", "32MiB")
    started = subprocess.Popen(
        [*command, *options, "--directory", str(path / "disk")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert started.stdout is not None
        assert started.stdout.readline().startswith("ready")
        yield started
    finally:
        started.kill()
        started.communicate()


def request(salt: str = "") -> dict[str, Any]:
    body: dict[str, Any] = {"model": "demo-8b", "prompt": PROMPT, "max_tokens": 20}
    return body | ({"cache_salt": salt} if salt else {})


async def answer(group: MockGroup, salt: str = "") -> tuple[str, int]:
    # Return the text and the cached tokens of an answer, when its KV is saved.
    status, body = await group.answer("/v1/completions", request(salt))
    assert status == 200
    await group.until(ENDED, 0)
    return body["choices"][0]["text"], body["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_engines_share_prompts_and_publish_where_they_are(tmp_path: Path) -> None:
    spec = msgspec.structs.replace(
        SPEC, kv_tokens=8192, kv_store=StoreSpec(str(tmp_path / "s")), kv_events=KvEventSpec()
    )
    with store(tmp_path) as process:
        async with run_fleet([spec, spec]) as members, aiohttp.ClientSession() as http:
            first, second = (MockGroup(member, http) for member in members)
            text, cached = await answer(first)
            assert cached == 0
            assert await answer(second) == (text, 2016), "2,025 tokens: 126 whole blocks"
            assert (await answer(second, salt="other"))[1] == 0
            assert await second.metric("vllm:external_prefix_cache_hits_total") == 2016
            await published(second)
            process.kill()
            process.wait()
            third = await first.answer("/v1/completions", request(salt="third"))
            assert third[0] == 200
            for group in (first, second):
                await group.until(ENDED, 0)
                assert await group.metric("mock:tainted_answers_total") == 0
            assert await first.metric("mock:kv_store_lost_calls_total") > 0


async def published(group: MockGroup) -> None:
    # Wait until events have said that the store has blocks of this engine in both tiers.
    assert group.member.group.kv_events is not None
    stream, media = group.member.group.kv_events.stream, set[int]()
    async with asyncio.timeout(PATIENCE_S):
        while not {CPU, STORAGE} <= media:
            await asyncio.sleep(0.05)
            batches = [decode_batch(payload) for _, payload in stream.replay(0)]
            media = {
                event.medium
                for batch in batches
                for event in batch.events
                if isinstance(event, StoredBlocks)
            }
