"""Where a soak happens: mock groups in processes of their own, a gateway before them, and a configuration to rewrite.

Lives here: what runs, what the file says, and everything that somebody holds. Not here: who asks (bench/load/soak_clients.py) and
what breaks (bench/load/soak_churn.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from tests.chaos.fleet_processes import MockProcess, eventually
from tests.e2e import processes
from tests.e2e.processes import GatewayProcess, gateway_process
from tests.scraped import total

SERVED = "demo-8b"
WHOLE, SPLIT = "whole", "split"
LEASE_S = 10.0
PATIENCE_S = 60.0
WHOLE_OPTIONS = ("--kv-tokens", "65536")
SPLIT_OPTIONS = (*WHOLE_OPTIONS, "--dialect", "vllm_nixl", "--kv-lease", str(LEASE_S))
ROLES = (("both", 3, WHOLE_OPTIONS), ("prefill", 2, SPLIT_OPTIONS), ("decode", 2, SPLIT_OPTIONS))

HELD = (
    *("penstock_open_streams", "penstock_connections", "penstock_body_bytes", "penstock_split_live"),
    *("penstock_inflight", "penstock_waiting", "penstock_queued_tokens"),
    *("penstock_endpoint_prefill_backlog_tokens", "penstock_endpoint_context_tokens"),
)
"""Gauges of the gateway that are 0 when nobody asks for anything."""

KEPT = ("penstock_tasks", "process_open_fds")
"""Gauges that are as at the start when nobody asks for anything."""


@dataclass(frozen=True)
class Group:
    """A mock TP group and what the gateway calls it."""

    name: str
    role: str
    mock: MockProcess

    @property
    def pool(self) -> str:
        return WHOLE if self.role == "both" else SPLIT

    @property
    def line(self) -> str:
        """Its entry in the configuration."""
        known = f"name: {self.name}, role: {self.role}, served_model: {SERVED}, max_concurrency: 16"
        return f"      - {{url: '{self.mock.url}', {known}}}\n"


class House:
    """`groups` are those of the file. Owner of the file."""

    def __init__(self, groups: list[Group], running: GatewayProcess, file: Path, http: aiohttp.ClientSession) -> None:
        self.groups = groups
        self.gateway = running
        self.policy = "prefix_aware"
        self.http = http
        self._file = file

    async def reload(self, *, bad: bool = False) -> None:
        """Put a new file in the old one's place, and wait until it is in force; a `bad` one, until it is refused."""
        before = (await self.config())["version"]
        text = configuration(self.groups, self.policy) + ("timeouts: {stall: 2secs}\n" if bad else "")
        draft = self._file.with_suffix(".new")
        draft.write_text(processes.whole(text))
        draft.rename(self._file)

        async def taken() -> bool:
            told = await self.config()
            return told["last_error"] is not None if bad else told["version"] > before

        await eventually(taken, PATIENCE_S)

    async def config(self) -> dict[str, Any]:
        return await self._json(f"{self.gateway.admin_url}/config")

    async def endpoint(self, group: Group) -> dict[str, Any] | None:
        """What the gateway says of it; None once it is gone."""
        told = await self._json(f"{self.gateway.admin_url}/endpoints")
        return next((each for each in told["endpoints"] if each["name"] == group.name), None)

    async def until(self, group: Group, holds: Callable[[dict[str, Any] | None], bool]) -> None:
        """Wait until this is so of what the gateway says of the group."""

        async def asked() -> bool:
            return holds(await self.endpoint(group))

        await eventually(asked, PATIENCE_S)

    async def drain(self, group: Group, what: str) -> None:
        async with self.http.post(f"{self.gateway.admin_url}/endpoints/{group.name}/{what}") as answer:
            assert answer.status == 200, await answer.text()

    async def kept(self) -> dict[str, float]:
        """Tasks and descriptors; the least of some seconds, since probes have some for moments."""
        pages = []
        for _ in range(10):
            pages.append(await self._page())
            await asyncio.sleep(0.5)
        return {name: min(total(page, name) for page in pages) for name in KEPT}

    async def held(self) -> dict[str, float]:
        """Everything that the gateway and the groups hold for requests, by name."""
        page = await self._page()
        found = {name: total(page, name) for name in HELD}
        for group in self.groups:
            told = await self._json(f"{group.mock.url}/mock/state")
            parts = [told["jobs"], told["blocks_in_use"], told["blocks_kept"], told.get("transfers", 0)]
            parts += [*(told.get("leases") or {}).values(), *(told.get("reservations") or {}).values()]
            found[f"{group.name}: jobs, KV blocks, leases, transfers"] = float(sum(parts))
            found[f"{group.name}: answers from wrong KV"] = float(told["tainted_answers"])
        return found

    async def _page(self) -> str:
        async with self.http.get(f"{self.gateway.admin_url}/metrics") as answer:
            return await answer.text()

    async def _json(self, url: str) -> dict[str, Any]:
        async with self.http.get(url) as answer:
            found: dict[str, Any] = await answer.json()
            return found


def configuration(groups: list[Group], policy: str) -> str:
    """The file: a pool for whole requests, whose streams go on elsewhere, and one for split ones, whose end. The index
    is small, so that it is soon full."""
    pools = {
        WHOLE: f"    policy: {policy}\n    admission: priced\n    shadow: [least_loaded]\n",
        SPLIT: "",
    }
    text = (
        "prefix: {index: 256KiB}\n"
        f"models:\n  - {{name: {WHOLE}, pool: {WHOLE}, resume: {{}}}}\n"
        f"  - {{name: {SPLIT}, pool: {SPLIT}, split: {{dialect: vllm_nixl, threshold_tokens: 64, hysteresis: 0}}}}\n"
        "pools:\n"
    )
    for name, said in pools.items():
        text += f"  {name}:\n{said}    endpoints:\n" + "".join(each.line for each in groups if each.pool == name)
    return text


def started(name: str, role: str, speed: float) -> Group:
    """A group that begins to run; to be waited for and ended by whoever asked for it."""
    options = next(options for each, _, options in ROLES if each == role)
    return Group(name, role, MockProcess(speed, *options, "--role", role))


@asynccontextmanager
async def house(speed: float, longest_s: float) -> AsyncIterator[House]:
    """Everything that runs, ended at the end; `longest_s` is when it is ended in any case."""
    processes.AT_MOST_S = longest_s
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    with ExitStack() as stack:
        groups = []
        for role, count, _ in ROLES:
            for number in range(1, count + 1):
                groups.append(started(f"{role}-{number}", role, speed))
                stack.callback(groups[-1].mock.end)
        for group in groups:
            group.mock.wait_until_ready()
        folder = Path(stack.enter_context(TemporaryDirectory()))
        running = stack.enter_context(gateway_process(folder, configuration(groups, "prefix_aware"), patience=""))
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
            yield House(groups, running, folder / processes.FILE, http)
