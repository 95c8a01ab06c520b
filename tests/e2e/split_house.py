"""A whole gateway in front of mock halves that really hand KV over, in the test's own loop.

The mock's words are drawn from the KV that a group holds, so an answer is the aggregated one only if every byte of the
cache came to its place (mockgpu/text.py).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from typing import Any
from unittest.mock import patch

import aiohttp

from gateway.app import App
from gateway.config import Config
from gateway.disagg import bootstrap_client
from mockgpu.fleet import FleetGroup, run_fleet
from mockgpu.gpus import gpu_named
from mockgpu.group import GroupSpec
from mockgpu.handoff_options import TransferSpec
from mockgpu.model_shapes import model_named
from mockgpu.text import expected_text
from tests.fair_time import PATIENCE_S, within
from tests.patient import patient
from tests.scraped import total

MODEL = "m"
SENTENCE = "The reservoir behind the dam is deep, and the gate stands open. "
ENGINES = {"sglang": "sglang", "trtllm": "trtllm"}
NEED_BOOTSTRAP = ("sglang", "mooncake")


class SplitHouse:
    """The gateway `app`, `prefill` and `decode` groups, and a client."""

    def __init__(self, app: App, prefill: list[FleetGroup], decode: list[FleetGroup], http: aiohttp.ClientSession) -> None:
        self.app = app
        self.prefill = prefill
        self.decode = decode
        self.http = http

    async def ask(self, body: Mapping[str, Any], path: str = "/v1/completions") -> tuple[int, str]:
        """Status and text of one answer; of a refusal its message."""
        async with self.http.post(self.app.url + path, json={"model": MODEL} | dict(body)) as answer:
            raw = await answer.read()
        return answer.status, text_of(raw) if answer.status == 200 else raw.decode()

    async def right(self, body: Mapping[str, Any], path: str = "/v1/completions") -> None:
        """The answer is word for word what one group alone would have said."""
        status, text = await self.ask(body, path)
        assert status == 200, text
        assert text == expected_text(dict(body), body["max_tokens"])

    @property
    def members(self) -> list[FleetGroup]:
        return [*self.prefill, *self.decode]

    async def state(self, member: FleetGroup) -> dict[str, Any]:
        async with self.http.get(f"{member.url}/mock/state") as answer:
            told: dict[str, Any] = await answer.json()
            return told

    async def held(self) -> list[int]:
        """Whatever anybody holds for anybody, here or there. All zero at rest."""
        gate = self.app.gateway.gate
        found = [gate.active_requests, gate.body_bytes, gate.retries_running]
        for live in self.app.gateway.endpoints.all():
            load = live.load
            found += [load.in_flight, load.prefill_tokens, load.decode_tokens, load.expected_tokens]
        for member in self.members:
            state = await self.state(member)
            found += [state["blocks_in_use"], state["transfers"], state["jobs"]]
        return found

    async def _heard(self, held: Callable[[], Awaitable[list[int]]]) -> list[int]:
        """[1] while somebody does not even listen: a group that refused everybody is just opening its door."""
        try:
            return await held()
        except aiohttp.ClientConnectorError:
            return [1]

    async def at_rest(self, within_s: float = 5.0) -> None:
        """Nothing is held any more, and no engine was ever sent what would have hurt a real one."""

        async def emptied() -> None:
            while any(await self._heard(self.held)):
                await asyncio.sleep(0.005)

        try:
            await within(within_s, emptied())
        except AssertionError:
            raise AssertionError(f"still held: {await self.held()}") from None
        for member in self.members:
            assert (await self.state(member))["malformed_handoffs"] == 0

    def metric(self, name: str, **labels: str) -> float:
        return total(self.app.metrics.render().decode(), name, **labels)


def text_of(raw: bytes) -> str:
    """The words of an answer, whole or as events; an error event is an AssertionError."""
    if not raw.startswith(b"data:"):
        return _said(json.loads(raw)["choices"][0])
    events = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event]
    assert events[-1] == b"[DONE]", raw[-300:]
    choices = [json.loads(event)["choices"] for event in events[:-1]]
    return "".join(_said(choice[0]) for choice in choices if choice)


def _said(choice: Mapping[str, Any]) -> str:
    told = choice.get("message") or choice.get("delta") or choice
    return str(told.get("content") or told.get("text") or "")


@asynccontextmanager
async def split_house(
    dialect: str,
    tps: tuple[int, int] = (1, 1),
    groups: tuple[int, int] = (2, 2),
    *,
    kv: Mapping[str, Any] | None = None,
    split: Mapping[str, Any] | None = None,
    model: str = "demo-8b",
    speed: float = inf,
    kv_tokens: int = 65_536,
    log: str = "off",
    **sections: Any,
) -> AsyncIterator[SplitHouse]:
    """So many prefill and decode groups of these TP sizes, split from 64 uncached tokens on."""
    transfer = TransferSpec(**({"dialect": dialect, "transport": "inproc"} | dict(kv or {})))
    shape, gpu = model_named(model), gpu_named("h100")
    specs = [
        GroupSpec(MODEL, shape, gpu, tp, role, speed=speed, kv_tokens=kv_tokens, transfer=transfer)
        for role, tp, count in zip(("prefill", "decode"), tps, groups, strict=True)
        for _ in range(count)
    ]
    async with AsyncExitStack() as stack:
        stack.enter_context(patch.object(bootstrap_client, "ANSWER_S", 10.0))  # the servers are slow when this loop is
        members = await stack.enter_async_context(run_fleet(specs))
        rule = {"dialect": dialect, "threshold_tokens": 64, "hysteresis": 0.0} | dict(split or {})
        config = Config.model_validate(
            {
                "version": 1,
                "listeners": {"api": {"port": 0}, "admin": {"port": 0}},
                "observability": {"access_log": log, "access_flush": "10ms"},
                "models": [{"name": MODEL, "pool": "main", "split": rule}],
                "pools": {"main": {"endpoints": [_endpoint(dialect, member) for member in members]}},
            }
            | patient(sections)
        )
        app = App(config)
        await app.start()
        stack.push_async_callback(app.stop)
        http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(3 * PATIENCE_S)
        )
        await stack.enter_async_context(http)
        yield SplitHouse(app, members[: groups[0]], members[groups[0] :], http)


def _endpoint(dialect: str, member: FleetGroup) -> dict[str, Any]:
    role = member.group.spec.role
    endpoint = {"url": member.url, "role": role, "engine": ENGINES.get(dialect, "vllm"), "max_concurrency": 64}
    if role == "prefill" and dialect in NEED_BOOTSTRAP:
        assert member.pd_role is not None
        endpoint["bootstrap"] = member.pd_role.bootstrap_url.removeprefix("http://")
    return endpoint
