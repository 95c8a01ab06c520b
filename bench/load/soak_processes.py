"""The processes of a soak test: mock engines, a gateway, and its configuration file.

Clients are in bench/load/soak_clients.py, faults in bench/load/soak_churn.py.
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
from tests.metrics_page import total

SERVED = "demo-8b"
WHOLE, SPLIT = "whole", "split"
LEASE_S = 10.0
PATIENCE_S = 60.0
WHOLE_OPTIONS = ("--kv-tokens", "65536")
SPLIT_OPTIONS = (*WHOLE_OPTIONS, "--dialect", "vllm_nixl", "--kv-lease", str(LEASE_S))
ROLES = (("both", 3, WHOLE_OPTIONS), ("prefill", 2, SPLIT_OPTIONS), ("decode", 2, SPLIT_OPTIONS))

TRANSIENT_GAUGES = (
    *(
        "penstock_open_streams",
        "penstock_connections",
        "penstock_body_bytes",
        "penstock_split_live",
    ),
    *("penstock_inflight", "penstock_waiting", "penstock_queued_tokens"),
    *("penstock_endpoint_prefill_backlog_tokens", "penstock_endpoint_context_tokens"),
)
"""Names of the gateway's gauges that are 0 while there are no requests."""

STABLE_GAUGES = ("penstock_tasks", "process_open_fds")
"""Names of gauges that must return to their initial values once there are no requests."""


@dataclass(frozen=True)
class Group:
    """A mock engine of a soak test, with its name and its role in the gateway's configuration."""

    name: str
    role: str
    mock: MockProcess

    @property
    def pool(self) -> str:
        return WHOLE if self.role == "both" else SPLIT

    @property
    def line(self) -> str:
        fields = (
            f"name: {self.name}, role: {self.role}, served_model: {SERVED}, max_concurrency: 16"
        )
        return f"      - {{url: '{self.mock.url}', {fields}}}\n"


class SoakFleet:
    """The running gateway of a soak test, and its engines, which can be added and removed."""

    def __init__(
        self, groups: list[Group], running: GatewayProcess, file: Path, http: aiohttp.ClientSession
    ) -> None:
        self.groups = groups
        self.gateway = running
        self.policy = "prefix_aware"
        self.http = http
        self._file = file

    async def reload(self, *, bad: bool = False) -> None:
        """Rewrite the configuration file, and wait until the gateway uses it.

        bad  True to write an invalid file, and to wait until the gateway has rejected it
        """
        before = (await self.config())["version"]
        text = configuration(self.groups, self.policy) + (
            "timeouts: {stall: 2secs}\n" if bad else ""
        )
        draft = self._file.with_suffix(".new")
        draft.write_text(processes.complete_config(text))
        draft.rename(self._file)

        async def is_processed() -> bool:
            state = await self.config()
            return state["last_error"] is not None if bad else state["version"] > before

        await eventually(is_processed, PATIENCE_S)

    async def config(self) -> dict[str, Any]:
        return await self._json(f"{self.gateway.admin_url}/config")

    async def endpoint(self, group: Group) -> dict[str, Any] | None:
        """Return what the gateway reports about the engine `group`; None: it is unknown."""
        reply = await self._json(f"{self.gateway.admin_url}/endpoints")
        return next((item for item in reply["endpoints"] if item["name"] == group.name), None)

    async def wait_until(
        self, group: Group, holds: Callable[[dict[str, Any] | None], bool]
    ) -> None:
        async def is_reached() -> bool:
            return holds(await self.endpoint(group))

        await eventually(is_reached, PATIENCE_S)

    async def drain(self, group: Group, what: str) -> None:
        async with self.http.post(
            f"{self.gateway.admin_url}/endpoints/{group.name}/{what}"
        ) as answer:
            assert answer.status == 200, await answer.text()

    async def stable_gauges(self) -> dict[str, float]:
        """Return the numbers of tasks and file descriptors that the gateway uses, by name.

        Each is the lowest value within 5 s, because health checks use more of them for short
        moments.
        """
        pages = []
        for _ in range(10):
            pages.append(await self._page())
            await asyncio.sleep(0.5)
        return {name: min(total(page, name) for page in pages) for name in STABLE_GAUGES}

    async def in_use(self) -> dict[str, float]:
        """Return the numbers of resources that gateway and engines hold for requests, by name.

        All are zero while no request runs.
        """
        page = await self._page()
        resources = {name: total(page, name) for name in TRANSIENT_GAUGES}
        for group in self.groups:
            state = await self._json(f"{group.mock.url}/mock/state")
            parts = [
                state["jobs"],
                state["blocks_in_use"],
                state["blocks_kept"],
                state.get("transfers", 0),
            ]
            parts += [
                *(state.get("leases") or {}).values(),
                *(state.get("reservations") or {}).values(),
            ]
            resources[f"{group.name}: jobs, KV blocks, leases, transfers"] = float(sum(parts))
            resources[f"{group.name}: answers from wrong KV"] = float(state["tainted_answers"])
        return resources

    async def _page(self) -> str:
        async with self.http.get(f"{self.gateway.admin_url}/metrics") as answer:
            return await answer.text()

    async def _json(self, url: str) -> dict[str, Any]:
        async with self.http.get(url) as answer:
            reply: dict[str, Any] = await answer.json()
            return reply


def configuration(groups: list[Group], policy: str) -> str:
    """Return the configuration file: a pool that serves whole requests, and one that splits them.

    The first pool can continue broken streams. The index of cached prompts is small, so that it is
    full before the measurement begins.
    """
    pools = {
        WHOLE: f"    policy: {policy}\n    admission: priced\n    shadow: [least_loaded]\n",
        SPLIT: "",
    }
    text = (
        "prefix: {index: 256KiB}\n"
        f"models:\n  - {{name: {WHOLE}, pool: {WHOLE}, resume: {{}}}}\n"
        f"  - {{name: {SPLIT}, pool: {SPLIT},"
        " split: {dialect: vllm_nixl, threshold_tokens: 64, hysteresis: 0}}\n"
        "pools:\n"
    )
    for name, settings in pools.items():
        text += f"  {name}:\n{settings}    endpoints:\n" + "".join(
            group.line for group in groups if group.pool == name
        )
    return text


def start_group(name: str, role: str, speed: float) -> Group:
    """Start a mock engine as a process. The caller has to wait until it is ready, and to end it."""
    options = next(options for known, _, options in ROLES if known == role)
    return Group(name, role, MockProcess(speed, *options, "--role", role))


@asynccontextmanager
async def run_fleet(speed: float, longest_s: float) -> AsyncIterator[SoakFleet]:
    """Run engines and a gateway during an `async with` block, for at most `longest_s` seconds."""
    processes.AT_MOST_S = longest_s
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    with ExitStack() as stack:
        groups = []
        for role, count, _ in ROLES:
            for number in range(1, count + 1):
                groups.append(start_group(f"{role}-{number}", role, speed))
                stack.callback(groups[-1].mock.end)
        for group in groups:
            group.mock.wait_until_ready()
        folder = Path(stack.enter_context(TemporaryDirectory()))
        running = stack.enter_context(
            gateway_process(folder, configuration(groups, "prefix_aware"), patience="")
        )
        async with aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
        ) as http:
            yield SoakFleet(groups, running, folder / processes.FILE, http)
