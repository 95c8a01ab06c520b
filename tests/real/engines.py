"""Runs two real vLLM engines on free ports of 127.0.0.1; `make real` installs vLLM.

This module starts the engines, waits until they serve, reads their metrics, and kills them with all
of their processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO

import aiohttp

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
REAL = ROOT / "build" / "real"
MODEL = "tiny"
BLOCKS, BLOCK_TOKENS = (
    256,
    128,
)  # a small cache, so that one block held shows in kv_cache_usage_perc
DTYPE = "float32"  # a recomputed prompt must produce the tokens that decoding produced one by one
READY_WITHIN_S = 1800.0  # a start takes minutes beside other work
POLL_S = 0.25  # a poll counts as at most this, so that time without a processor hardly counts

CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


def penstock_connector(key_file: Path, **extra: object) -> dict[str, object]:
    # Return vLLM's configuration for our own KV connector; `extra` are further options of it.
    return {
        "kv_connector": "PenstockConnector",
        "kv_connector_module_path": "penstock_kv.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"key_file": str(key_file), **extra},
    }


ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # threads that spin for each other stand still where cores are scarce
    "TORCHDYNAMO_DISABLE": "1",  # the first logprobs would wait a minute for a compiler, or kill the engine
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "UCX_NET_DEVICES": "lo",
    "UCX_TLS": "tcp,self",
}


class Engine:
    """A vLLM server of one model, with or without a KV connector.

    After a restart it has the same ports, but a new engine identifier.
    """

    def __init__(
        self,
        name: str,
        port: int,
        side_port: int,
        place: int,
        connector: Mapping[str, object] | None = CONNECTOR,
        tp: int = 1,
        options: Sequence[str] = (),
        model: str = "model",
        env: Mapping[str, str] = {},
    ) -> None:
        self._connector, self._tp, self._options = connector, tp, options
        self._model, self._env = REAL / model, env
        self.name, self.port, self.side_port, self._place = name, port, side_port, place
        self.url = f"http://127.0.0.1:{port}"
        self.log = REAL / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    def start(self) -> None:
        # Start the process and return at once; `ready` waits for it.
        self._output = self.log.open("wb")
        self._process = subprocess.Popen(
            self._command(),
            env={
                **os.environ,
                **ENV,
                **self._env,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_port),
                "PYTHONPATH": str(ROOT),
            },
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _command(self) -> list[str]:
        return [
            *("taskset", "--cpu-list", self._cores()),
            *(
                str(REAL / "venv" / "bin" / "vllm"),
                "serve",
                str(self._model),
                "--served-model-name",
                MODEL,
            ),
            *("--host", "127.0.0.1", "--port", str(self.port), "--seed", "7", "--dtype", DTYPE),
            *("--max-model-len", "4096", "--num-gpu-blocks-override", str(BLOCKS)),
            *("--enforce-eager", "--enable-prompt-tokens-details"),
            *(("--kv-transfer-config", json.dumps(self._connector)) if self._connector else ()),
            *("--tensor-parallel-size", str(self._tp)),
            *self._options,
        ]

    def _cores(self) -> str:
        # Return the CPU cores of this engine as a list for taskset: every second one.
        #
        # The engines share no core: an engine that waits for KV spins, and would stop the other
        # engine (seen on two cores, Linux 6.18).
        cores = sorted(os.sched_getaffinity(0))
        return ",".join(map(str, cores[self._place :: 2] or cores))

    async def ready(self) -> None:
        # Wait until the engine answers /health. Raises AssertionError with the end of its log.
        deadline = time.monotonic() + READY_WITHIN_S
        async with aiohttp.ClientSession() as http:
            while not await _answers(http, f"{self.url}/health"):
                assert self._process is not None
                assert self._process.poll() is None, f"{self.name} ended: {self._said()}"
                assert time.monotonic() < deadline, f"{self.name} does not come up: {self._said()}"
                await asyncio.sleep(0.5)

    def _said(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    @property
    def running(self) -> bool:
        return self._process is not None

    def send_signal(self, number: int) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        if self._process is not None:
            # An engine that ended by itself may have left no process.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._output is not None:
            self._output.close()
            self._output = None

    async def numbers(self) -> dict[str, float]:
        # Return the engine's metrics, summed over labels.
        #
        # Names are without the prefix `vllm:`. Histogram buckets are left out.
        async with aiohttp.ClientSession() as http, http.get(f"{self.url}/metrics") as answer:
            text = await answer.text()
        found: dict[str, float] = {}
        for name, value in re.findall(r"^vllm:(\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    async def blocks_held(self) -> int:
        return round((await self.numbers())["kv_cache_usage_perc"] * BLOCKS)

    async def holds_within(self, seconds: float) -> None:
        # Wait until the engine holds a KV block. Raises TimeoutError after `seconds`.
        async with asyncio.timeout(seconds):
            while not await self.blocks_held():
                await asyncio.sleep(0.02)

    async def idle_within(self, seconds: float) -> float:
        # Wait until the engine holds no block and no request; return the seconds that this took.
        #
        # Raises AssertionError with what it still holds after `seconds`.
        waited, before = 0.0, time.monotonic()
        while True:
            page = await self.numbers()
            held = {name: page[name] for name in HELD if page[name]}
            now = time.monotonic()
            waited, before = waited + min(now - before, POLL_S), now
            if not held:
                return waited
            assert waited < seconds, f"{self.name} still holds {held} after {waited:.1f} s"
            await asyncio.sleep(0.05)


HELD = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
TROUBLES = (
    "nixl_num_kv_expired_reqs_total",
    "nixl_num_failed_transfers_total",
    "nixl_num_failed_notifications_total",
)


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url) as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def transfers(engines: Sequence[Engine]) -> float:
    return sum(
        [(await engine.numbers()).get("nixl_xfer_time_seconds_count", 0.0) for engine in engines]
    )


async def troubles(engines: Sequence[Engine]) -> dict[str, float]:
    pages = [await engine.numbers() for engine in engines]
    return {name: sum(page.get(name, 0.0) for page in pages) for name in TROUBLES}


@asynccontextmanager
async def idle_around(
    engines: Iterable[Engine], before_s: float, after_s: float, *, may_be_killed: bool = False
) -> AsyncIterator[None]:
    """Check that the engines hold no KV and no request before and after a test.

    before_s, after_s  maximum seconds to wait for that
    may_be_killed      whether an engine that the test has killed is left out afterwards
    """
    engines = tuple(engines)
    for engine in engines:
        await engine.idle_within(before_s)
    yield
    for engine in engines:
        if engine.running or not may_be_killed:
            await engine.idle_within(after_s)


def free_ports(count: int) -> list[int]:
    # Return ports that no other process takes while an engine is killed and started again.
    return [free_port() for _ in range(count)]
