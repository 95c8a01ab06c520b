"""A gateway with mock prefill and decode engines that transfer real KV bytes, on one event loop.

A mock engine computes its answer from the KV bytes that it has. So a split request gets the same
text as a whole request only if every byte arrived in its place (mockgpu/mock_tokenizer.py).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from typing import Any
from unittest.mock import patch

import aiohttp

from gateway.app import App
from gateway.config import Config
from gateway.disagg import bootstrap_client
from mockgpu.fleet import FleetGroup, run_fleet
from mockgpu.kv_options import TransferSpec
from mockgpu.mock_tokenizer import expected_text
from mockgpu.tp_group import GroupSpec
from policies.sizing.gpus import gpu_named
from policies.sizing.model_shapes import model_named
from tests.duration_limits import PATIENCE_S, within
from tests.long_timeouts import patient
from tests.metrics_page import total

MODEL = "m"
SENTENCE = "The reservoir behind the dam is deep, and the gate stands open. "
ENGINES = {"sglang": "sglang", "trtllm": "trtllm"}
NEED_BOOTSTRAP = ("sglang", "mooncake")


class SplitFleet:
    def __init__(
        self,
        app: App,
        prefill: list[FleetGroup],
        decode: list[FleetGroup],
        http: aiohttp.ClientSession,
    ) -> None:
        self.app = app
        self.prefill = prefill
        self.decode = decode
        self.http = http

    async def ask(self, body: Mapping[str, Any], path: str = "/v1/completions") -> tuple[int, str]:
        # Send one request; return its status, and its text or the error body.
        async with self.http.post(
            self.app.url + path, json={"model": MODEL} | dict(body)
        ) as answer:
            raw = await answer.read()
        return answer.status, text_of(raw) if answer.status == 200 else raw.decode()

    async def assert_right_answer(
        self, body: Mapping[str, Any], path: str = "/v1/completions"
    ) -> None:
        # Send one request and assert that its text is what one engine alone would return.
        status, text = await self.ask(body, path)
        assert status == 200, text
        assert text == expected_text(dict(body), body["max_tokens"])

    @property
    def members(self) -> list[FleetGroup]:
        return [*self.prefill, *self.decode]

    async def state(self, member: FleetGroup) -> dict[str, Any]:
        async with self.http.get(f"{member.url}/mock/state") as answer:
            state: dict[str, Any] = await answer.json()
            return state

    async def used_resources(self) -> list[int]:
        # Return the counters of all resources that gateway and engines use for requests.
        #
        # All are zero when no request is in progress.
        gate = self.app.gateway.gate
        amounts = [gate.active_requests, gate.bodies.used_bytes, gate.retries.running]
        for live in self.app.gateway.endpoints.all():
            load = live.load
            amounts += [
                load.in_flight,
                load.prefill_tokens,
                load.decode_tokens,
                load.expected_tokens,
            ]
        for member in self.members:
            state = await self.state(member)
            amounts += [state["blocks_in_use"], state["transfers"], state["jobs"]]
        return amounts

    async def _used_or_unreachable(self) -> list[int]:
        # Return used_resources(), or [1] while an engine does not listen after a fault.
        try:
            return await self.used_resources()
        except aiohttp.ClientConnectorError:
            return [1]

    async def at_rest(self, within_s: float = 5.0) -> None:
        # Wait until no resource is in use.
        #
        # This also asserts that no engine received a malformed handoff.
        async def wait_until_empty() -> None:
            while any(await self._used_or_unreachable()):
                await asyncio.sleep(0.005)

        try:
            await within(within_s, wait_until_empty())
        except AssertionError:
            raise AssertionError(
                "the engines still hold resources after the last request: "
                f"{await self.used_resources()}"
            ) from None
        for member in self.members:
            assert (await self.state(member))["malformed_handoffs"] == 0

    def metric(self, name: str, **labels: str) -> float:
        self.app.gateway.accounts.account_ended()  # as a page does
        return total(self.app.metrics.render().decode(), name, **labels)


def text_of(raw: bytes) -> str:
    # Return the text of a response, streamed or not. Raises AssertionError on an error event.
    if not raw.startswith(b"data:"):
        return _choice_text(json.loads(raw)["choices"][0])
    events = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event]
    assert events[-1] == b"[DONE]", raw[-300:]
    choices = [json.loads(event)["choices"] for event in events[:-1]]
    return "".join(_choice_text(choice[0]) for choice in choices if choice)


def _choice_text(choice: Mapping[str, Any]) -> str:
    message = choice.get("message") or choice.get("delta") or choice
    return str(message.get("content") or message.get("text") or "")


@asynccontextmanager
async def split_fleet(
    dialect: str,
    tps: tuple[int, int] = (1, 1),
    groups: tuple[int, int] = (2, 2),
    *,
    roles: tuple[str, str] = ("prefill", "decode"),
    kv: Mapping[str, Any] | None = None,
    pool: Mapping[str, Any] | None = None,
    split: Mapping[str, Any] | None = None,
    model: str = "demo-8b",
    speed: float = inf,
    kv_tokens: int = 65_536,
    log: str = "off",
    **sections: Any,
) -> AsyncIterator[SplitFleet]:
    # Start engines and a gateway that splits prompts of 64 uncached tokens or more.
    #
    # dialect   handoff protocol of the engines
    # tps       TP size of the prefill and of the decode engines
    # groups    number of prefill and of decode engines
    # roles     roles of the engines of both groups
    # kv        options of KV transfer
    # pool      further settings of the pool
    transfer = TransferSpec(**({"dialect": dialect, "transport": "inproc"} | dict(kv or {})))
    shape, gpu = model_named(model), gpu_named("h100")
    specs = [
        GroupSpec(MODEL, shape, gpu, tp, role, speed=speed, kv_tokens=kv_tokens, transfer=transfer)
        for role, tp, count in zip(roles, tps, groups, strict=True)
        for _ in range(count)
    ]
    async with AsyncExitStack() as stack:
        # The bootstrap servers share this event loop, so they are as slow as the test.
        stack.enter_context(patch.object(bootstrap_client, "ANSWER_S", 10.0))
        members = await stack.enter_async_context(run_fleet(specs))
        rule = {"dialect": dialect, "threshold_tokens": 64, "hysteresis": 0.0} | dict(split or {})
        config = Config.model_validate(
            {
                "version": 1,
                "listeners": {"api": {"port": 0}, "admin": {"port": 0}},
                "observability": {"access_log": log, "access_flush": "10ms"},
                "models": [{"name": MODEL, "pool": "main", "split": rule}],
                "pools": {
                    "main": {"endpoints": [_endpoint(dialect, member) for member in members]}
                    | dict(pool or {})
                },
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
        yield SplitFleet(app, members[: groups[0]], members[groups[0] :], http)


def _endpoint(dialect: str, member: FleetGroup) -> dict[str, Any]:
    role = member.group.spec.role
    endpoint = {
        "url": member.url,
        "role": role,
        "engine": ENGINES.get(dialect, "vllm"),
        "max_concurrency": 64,
    }
    if role == "prefill" and dialect in NEED_BOOTSTRAP:
        assert member.pd_role is not None
        endpoint["bootstrap"] = member.pd_role.bootstrap_url.removeprefix("http://")
    return endpoint
