"""Sends the two requests of a KV handoff between real engines by hand, without a gateway.

It uses the protocol of our KV connector for vLLM (dialect `penstock`).
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import aiohttp

from tests.real.engine_requests import Answer, ask, body
from tests.real.engines import Engine

SERVING = "split: {dialect: penstock, threshold_tokens: 128, hysteresis: 0, transfer_timeout: 60s}"


async def prefill(engine: Engine, asked: dict[str, Any], transfer: str) -> dict[str, Any]:
    # Send the prefill request; return its kv_transfer_params.
    params = {"do_remote_decode": True, "do_remote_prefill": False, "kv_transfer": transfer}
    leg = asked | {"max_tokens": 1, "stream": False, "kv_transfer_params": params}
    for name in ("stream_options", "logprobs", "top_logprobs"):
        leg.pop(name, None)
    url = f"{engine.url}/v1/chat/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=leg) as answer:
        found: dict[str, Any] = (await answer.json())["kv_transfer_params"]
    return found


async def card_of(p: Engine, d: Engine) -> str:
    # Return the prefill engine's card, after a first handoff, which connects both engines.
    transfer = f"first-{os.urandom(4).hex()}"
    asked = body(transfer, max_tokens=2)
    card = str((await prefill(p, asked, transfer))["kv_engine"])
    assert (await decode(d, asked, transfer, card)).status == 200
    return card


def decode(engine: Engine, asked: dict[str, Any], transfer: str, card: str) -> asyncio.Task[Answer]:
    # Begin to send the decode request.
    take = {"do_remote_prefill": True, "kv_transfer": transfer, "kv_engine": card}
    return asyncio.create_task(ask(engine.url, asked | {"kv_transfer_params": take}))


async def push(p: Engine, d: Engine, asked: dict[str, Any], transfer: str, card: str) -> Answer:
    # Send the decode request, then the prefill request; return the answer.
    answer = decode(d, asked, transfer, card)
    await d.holds_within(30.0)
    await prefill(p, asked, transfer)
    return await answer
