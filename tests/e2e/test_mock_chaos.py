"""Tests of split requests to mock engines under random faults and disconnects: no text is ever
wrong.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import aiohttp
import pytest

from mockgpu.mock_tokenizer import expected_text
from tests.e2e.mock_pair import PROMPT, MockPair, mock_pair

ANYWHERE = (
    "",
    "kv-lost@0.3",
    "die-in-pull@0.1",
    "die-in-transfer@0.1",
    "die-in-prefill@0.1",
    "freeze@0-0.3",
)
ON_THE_WIRE = (
    "wire-corrupt:after=100@0-0.2",
    "wire-cut:after=50@0-0.2",
    "wire-stall@0-0.9",
    "die-mid-decode:after=3@0.1",
)


class FaultInjector:
    def __init__(self, groups: MockPair, faults: tuple[str, ...], rng: Random) -> None:
        self._groups, self._faults, self._rng = groups, faults, rng

    async def run(self) -> None:
        while True:
            member = self._rng.choice([self._groups.prefill, self._groups.decode])
            url = member.url + "/mock/fault"
            async with self._groups.http.post(
                url, json={"spec": self._rng.choice(self._faults)}
            ) as response:
                assert response.status == 200
            await asyncio.sleep(self._rng.random() * 0.4)
            async with self._groups.http.delete(url):
                pass

    async def clear(self) -> None:
        for member in (self._groups.prefill, self._groups.decode):
            async with self._groups.http.delete(member.url + "/mock/fault"):
                pass


async def ask(groups: MockPair, body: dict[str, Any], patience_s: float | None) -> str | None:
    # Return the text of one request, or None if it failed or the client disconnected.
    #
    # `patience_s` is when the client disconnects; None: never.
    request = asyncio.create_task(groups.split(body))
    if patience_s is not None:
        await asyncio.sleep(patience_s)
        request.cancel()
    try:
        status, answer = await request
    except (AssertionError, aiohttp.ClientError, asyncio.CancelledError):
        return None
    return answer["choices"][0]["text"] if status == 200 else None


@pytest.mark.parametrize(
    ("dialect", "transport", "recompute"),
    [
        ("vllm_nixl", "tcp", True),
        ("mooncake", "tcp", False),
        ("sglang", "auto", False),
        ("trtllm", "inproc", True),
    ],
)
async def test_no_response_is_wrong_under_random_faults_and_all_kv_is_freed_after_them(
    dialect: str, transport: str, recompute: bool
) -> None:
    rng = Random(f"{dialect}/{transport}")
    kv = {"transport": transport, "wait_s": 1.0, "lease_s": 1.0, "wire_faults": transport == "tcp"}
    faults = ANYWHERE + (ON_THE_WIRE if transport == "tcp" else ())
    options: dict[str, Any] = {
        "kv": kv,
        "speed": 30.0,
        "kv_tokens": 12_000,
        "decode": {"recompute": recompute},
    }
    async with mock_pair(dialect, (2, 4), **options) as groups:
        injector = FaultInjector(groups, faults, rng)
        injecting = asyncio.create_task(injector.run())
        sent = right = 0

        async def client() -> None:
            nonlocal sent, right
            while sent < 50 or right < 15:
                sent += 1
                prompt = f"{rng.randrange(30)} " + PROMPT * rng.randrange(1, 10)
                body = {"prompt": prompt, "max_tokens": rng.randrange(1, 40)}
                words = await ask(groups, body, rng.random() * 0.1 if rng.random() < 0.3 else None)
                assert words in (None, expected_text(body, body["max_tokens"]))
                right += words is not None
                # A dead group fails requests so fast that it would consume all of them.
                await asyncio.sleep(0.02 if words is None else 0)

        async with asyncio.timeout(60):
            await asyncio.gather(*(client() for _ in range(10)))
        assert not injecting.done()
        injecting.cancel()
        await asyncio.gather(injecting, return_exceptions=True)
        await injector.clear()
        await groups.at_rest(within_s=10)
