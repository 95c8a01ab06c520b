"""Runs a gateway and its engines in one process, and disturbs them: faults, drains, reloads."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from random import Random

from bench.virtual_traffic import VirtualEngine
from gateway.app import App
from gateway.config.loader import load_with_warnings
from gateway.restart.start_options import StartOptions

ROLES = (("both", 3), ("prefill", 2), ("decode", 2))
FAULTS = ("reset", "silent", "cut", "error")
FAULTY_S, SETTLING_S = 8.0, 6.0


class VirtualFleet:
    """A gateway and its engines, in two pools: one serves whole requests, one splits them.

    A split request computes its prompt on one engine and its answer on another one.

    done         number of disturbances by kind
    undisturbed  lock that is held during each disturbance
    """

    def __init__(self, work: Path, rng: Random) -> None:
        self.done: Counter[str] = Counter()
        self.undisturbed = asyncio.Lock()
        self._file, self._rng = work / "gateway.yaml", rng
        self._engines: dict[str, tuple[str, VirtualEngine]] = {}
        self._policy, self._added = "prefix_aware", 0
        self._app: App | None = None

    async def start(self) -> App:
        """Start the engines and the gateway, and return the running gateway."""
        for role, count in ROLES:
            for number in range(count):
                await self._start_engine(f"{role}-{number}", role)
        self._file.write_text(self._config())
        loaded = load_with_warnings(self._file, {})
        self._app = App(loaded.config, StartOptions(loaded, self._file))
        await self._app.start()
        return self._app

    async def stop(self) -> None:
        assert self._app is not None
        await self._app.stop()
        for _, engine in self._engines.values():
            await engine.stop()

    async def disturb(self) -> None:
        """Cause faults, drains and reloads of the fleet in turn, until this task is cancelled."""
        others = {"add": self._add, "policy": self._change_policy, "drain": self._drain}
        while True:
            kind = self._rng.choice((*FAULTS, *others, "bad"))
            async with self.undisturbed:
                if kind in FAULTS:
                    await self._fail(kind)
                elif kind == "bad":
                    await self._reload("rejected", "timeouts: {stall: 2secs}\n")
                else:
                    await others[kind]()
            self.done[kind] += 1
            await asyncio.sleep(self._rng.uniform(0.5, 2.0))

    async def _start_engine(self, name: str, role: str) -> None:
        engine = VirtualEngine(Random(self._rng.random()))
        await engine.start()
        self._engines[name] = role, engine

    def _config(self) -> str:
        text = (
            "version: 1\nlisteners: {api: {port: 0}, admin: {port: 0}}\n"
            "observability: {access_log: 'off'}\nprefix: {index: 256KiB}\n"
            "models:\n  - {name: whole, pool: whole, resume: {}}\n"
            "  - {name: split, pool: split,"
            " split: {dialect: vllm_nixl, threshold_tokens: 64, hysteresis: 0}}\n"
            "tenants: [{name: a, key: sk-a}, {name: b, key: sk-b}]\npools:\n"
        )
        own = f"    policy: {self._policy}\n    admission: priced\n    shadow: [least_loaded]\n"
        for pool, settings in (("whole", own), ("split", "")):
            text += f"  {pool}:\n{settings}    endpoints:\n"
            for name, (role, engine) in self._engines.items():
                if (role == "both") == (pool == "whole"):
                    text += f"      - {{url: '{engine.url}', name: {name}, role: {role},"
                    text += " served_model: m, max_concurrency: 16}\n"
        return text

    async def _reload(self, result: str = "applied", more: str = "") -> None:
        assert self._app is not None
        self._file.write_text(self._config() + more)
        outcome = await self._app.reloader.reload("command")
        if outcome.result not in (result, "unchanged"):
            raise RuntimeError(
                f"the reload should have had the result {result!r}, but was: {outcome}"
            )
        self._file.write_text(self._config())

    async def _fail(self, kind: str) -> None:
        _, engine = self._rng.choice(list(self._engines.values()))
        engine.fault = kind
        if kind == "reset":
            engine.break_connections()
        await asyncio.sleep(FAULTY_S)
        engine.fault = ""
        await asyncio.sleep(SETTLING_S)

    async def _add(self) -> None:
        # Give every added endpoint a new name, as Kubernetes does with pods.
        self._added += 1
        name = f"added-{self._added}"
        await self._start_engine(name, self._rng.choice([role for role, _ in ROLES]))
        await self._reload()
        await asyncio.sleep(SETTLING_S)
        _, engine = self._engines.pop(name)
        await self._reload()
        await asyncio.sleep(SETTLING_S)
        await engine.stop()

    async def _change_policy(self) -> None:
        self._policy = "least_loaded" if self._policy == "prefix_aware" else "prefix_aware"
        await self._reload()

    async def _drain(self) -> None:
        assert self._app is not None
        table = self._app.gateway.endpoints
        live = self._rng.choice([live for live in table.all() if not live.is_leaving])
        table.set_drained(live, is_drained=True)
        await asyncio.sleep(2.0)
        table.set_drained(live, is_drained=False)
