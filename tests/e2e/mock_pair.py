"""Two mock engines, and a client that splits requests into prefill and decode for them.

The client does what a gateway would do for each engine's protocol. The expectations are in the
tests.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from typing import Any

import aiohttp

from mockgpu.fleet import FleetGroup, run_fleet
from mockgpu.kv_options import TransferSpec
from mockgpu.tp_group import GroupSpec
from policies.sizing.gpus import gpu_named
from policies.sizing.model_shapes import model_named
from tests.duration_limits import within

PROMPT = "The reservoir behind the dam is deep, and the gate stands open. " * 12
NULLS = {
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
DIALECTS = ("vllm_nixl", "vllm_push", "penstock", "mooncake", "sglang", "trtllm")
rooms = itertools.count(1 << 41)


class MockPair:
    def __init__(
        self, prefill: FleetGroup, decode: FleetGroup, http: aiohttp.ClientSession
    ) -> None:
        self.prefill, self.decode, self.http = prefill, decode, http
        self.identity: dict[str, Any] | None = None

    async def post(
        self,
        member: FleetGroup,
        body: dict[str, Any],
        request_id: str = "",
        path: str = "/v1/completions",
    ) -> tuple[int, dict[str, Any]]:
        headers = {"X-Request-Id": request_id} if request_id else {}
        async with self.http.post(member.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    def legs(self, body: dict[str, Any], number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        prefill, decode = self.prefill.pd_role, self.decode.pd_role
        assert prefill is not None
        assert decode is not None
        one = body | {"max_tokens": 1, "min_tokens": 1, "stream": False}
        give: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        take: dict[str, Any] = {"do_remote_decode": False, "do_remote_prefill": True}
        match prefill.dialect.name:
            case "vllm_push":
                here = prefill.identity
                take |= {
                    "remote_engine_id": here.engine_id,
                    "remote_host": here.host,
                    "remote_port": here.port,
                }
                take |= {"tp_size": here.tp, "pp_size": 1, "remote_request_id": f"r{number}"}
                return one | {"kv_transfer_params": give}, body | {"kv_transfer_params": take}
            case "penstock":
                here, transfer = prefill.identity, {"kv_transfer": f"r{number}"}
                take |= {"kv_engine": f"{here.engine_id}@{here.address}"}
                return one | {"kv_transfer_params": give | transfer}, body | {
                    "kv_transfer_params": take | transfer
                }
            case "mooncake":
                transfer = {"transfer_id": f"xfer-{number}"}
                take |= {
                    "remote_bootstrap_addr": prefill.bootstrap_url,
                    "remote_engine_id": prefill.identity.engine_id,
                }
                return one | {"kv_transfer_params": give | transfer}, body | {
                    "kv_transfer_params": take | transfer
                }
            case _:
                host, _, port = prefill.bootstrap_url.removeprefix("http://").rpartition(":")
                both = body | {
                    "bootstrap_host": host,
                    "bootstrap_port": int(port),
                    "bootstrap_room": number,
                }
                return both, both

    async def split(
        self, body: dict[str, Any], path: str = "/v1/completions"
    ) -> tuple[int, dict[str, Any]]:
        # Send the prefill and the decode request; return the decode response's status and body.
        assert self.prefill.pd_role is not None
        number = next(rooms)
        match self.prefill.pd_role.dialect.name:
            case "vllm_nixl":
                return await self._pull(body, f"r{number}", path)
            case "trtllm":
                return await self._context_first(body, number, path)
            case _:
                give, take = self.legs(body, number)
                (status, first), answer = await asyncio.gather(
                    self.post(self.prefill, give, f"r{number}", path),
                    self.post(self.decode, take, f"r{number}", path),
                )
                assert status == 200, first
                return answer

    async def _pull(
        self, body: dict[str, Any], request_id: str, path: str
    ) -> tuple[int, dict[str, Any]]:
        params = {"do_remote_decode": True, "do_remote_prefill": False} | NULLS
        one = body | {
            "max_tokens": 1,
            "min_tokens": 1,
            "stream": False,
            "kv_transfer_params": params,
        }
        status, first = await self.post(self.prefill, one, request_id, path)
        assert status == 200, first
        take = body | {"kv_transfer_params": first["kv_transfer_params"]}
        return await self.post(self.decode, take, request_id, path)

    async def _context_first(
        self, body: dict[str, Any], number: int, path: str
    ) -> tuple[int, dict[str, Any]]:
        context_params = {"request_type": "context_only", "disagg_request_id": number}
        status, first = await self.post(
            self.prefill, body | {"disaggregated_params": context_params}, "", path
        )
        assert status == 200, first
        params = first["choices"][0]["disaggregated_params"]
        if first["choices"][0]["finish_reason"] not in ("length", "not_finished"):
            return status, first
        take = body | {"disaggregated_params": params | {"request_type": "generation_only"}}
        ids = first["prompt_token_ids"]
        return await self.post(
            self.decode, take | ({"prompt": ids} if "prompt" in body else {"prompt_token_ids": ids})
        )

    async def state(self, member: FleetGroup) -> dict[str, Any]:
        async with self.http.get(member.url + "/mock/state") as response:
            state: dict[str, Any] = await response.json()
            return state

    async def metric(self, member: FleetGroup, series: str) -> float:
        async with self.http.get(member.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(series))

    async def at_rest(self, within_s: float = 5.0) -> None:
        # Wait until neither engine has KV blocks, transfers or jobs in use.
        await within(within_s, self._wait_until_empty())

    async def _wait_until_empty(self) -> None:
        for member in (self.prefill, self.decode):
            while True:
                state = await self.state(member)
                if not (state["blocks_in_use"] or state["transfers"] or state["jobs"]):
                    break
                await asyncio.sleep(0.002)
            assert state["malformed_handoffs"] == 0


def group_spec(role: str, transfer: TransferSpec, tp: int = 1, **options: Any) -> GroupSpec:
    model = model_named(options.pop("model", "demo-8b"))
    fields: dict[str, Any] = {"speed": inf, "kv_tokens": 16_384} | options
    return GroupSpec("m", model, gpu_named("h100"), tp, role, transfer=transfer, **fields)


@asynccontextmanager
async def mock_pair(
    dialect: str = "vllm_nixl",
    tps: tuple[int, int] = (1, 1),
    *,
    prefill: Any = None,
    decode: Any = None,
    **options: Any,
) -> AsyncIterator[MockPair]:
    kv = {"dialect": dialect, "transport": "inproc"} | options.pop("kv", {})
    specs = [
        group_spec(role, TransferSpec(**(kv | (own or {}))), tp, **options)
        for role, tp, own in (("prefill", tps[0], prefill), ("decode", tps[1], decode))
    ]
    async with run_fleet(specs) as members, aiohttp.ClientSession() as http:
        yield MockPair(members[0], members[1], http)
