"""Start, await and kill real vLLM engines on 127.0.0.1, and read their metrics.

`make real` installs them. Requests are in tests/real/asking.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import aiohttp

ROOT = Path(__file__).parents[2]
REAL = ROOT / "build" / "real"
MODEL = "tiny"
BLOCKS, BLOCK_TOKENS = (
    256,
    128,
)  # a small cache, so that a single block is visible in kv_cache_usage_perc
DTYPE = "float32"  # so that prefill and decode of the same tokens give the same next token
READY_WITHIN_S = 600.0

CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # threads that spin for each other block each other on few cores
    "TORCHDYNAMO_DISABLE": "1",  # otherwise the first logprobs wait a minute for a compiler
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "UCX_NET_DEVICES": "lo",
    "UCX_TLS": "tcp,self",
}


class Engine:
    """A vLLM server with the NixlConnector; a restart keeps its ports and changes its engine id."""

    def __init__(self, name: str, port: int, side_port: int, index: int) -> None:
        self.name, self.port, self.side_port, self._index = name, port, side_port, index
        self.url = f"http://127.0.0.1:{port}"
        self.log = REAL / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    def start(self) -> None:
        """Start the process without waiting; see `ready`."""
        self._output = self.log.open("wb")
        self._process = subprocess.Popen(
            self._command(),
            env={**os.environ, **ENV, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_port)},
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
                str(REAL / "model"),
                "--served-model-name",
                MODEL,
            ),
            *("--host", "127.0.0.1", "--port", str(self.port), "--seed", "7", "--dtype", DTYPE),
            *("--max-model-len", "4096", "--num-gpu-blocks-override", str(BLOCKS)),
            *("--enforce-eager", "--enable-prompt-tokens-details"),
            *("--kv-transfer-config", json.dumps(CONNECTOR)),
        ]

    def _cores(self) -> str:
        """Return this engine's half of the cores.

        An engine that waits for KV spins; an engine on the same core could make no progress until
        its leases had expired.
        """
        cores = sorted(os.sched_getaffinity(0))
        return ",".join(map(str, cores[self._index :: 2] or cores))

    async def ready(self) -> None:
        """Wait until /health is answered. Raises AssertionError with the log's end if it is not."""
        deadline = time.monotonic() + READY_WITHIN_S
        async with aiohttp.ClientSession() as http:
            while not await _is_answering(http, f"{self.url}/health"):
                assert self._process is not None
                assert self._process.poll() is None, f"{self.name} ended: {self._log_end()}"
                assert time.monotonic() < deadline, f"{self.name} is not ready: {self._log_end()}"
                await asyncio.sleep(0.5)

    def _log_end(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def kill(self) -> None:
        """Send SIGKILL to the process group of the server, its core and its worker."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._output is not None:
            self._output.close()
            self._output = None

    async def metrics_by_name(self) -> dict[str, float]:
        """Return its metrics without the prefix `vllm:`, summed over labels."""
        async with aiohttp.ClientSession() as http, http.get(f"{self.url}/metrics") as answer:
            text = await answer.text()
        metrics: dict[str, float] = {}
        for name, value in re.findall(r"^vllm:(\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE):
            metrics[name] = metrics.get(name, 0.0) + float(value)
        return metrics

    async def blocks_in_use(self) -> int:
        """Return the number of blocks that requests or leases use."""
        return round((await self.metrics_by_name())["kv_cache_usage_perc"] * BLOCKS)

    async def await_blocks(self, seconds: float) -> None:
        """Wait until a block is in use; the metrics are updated after each step."""
        async with asyncio.timeout(seconds):
            while not await self.blocks_in_use():
                await asyncio.sleep(0.02)

    async def await_idle(self, seconds: float) -> float:
        """Wait until there are no blocks in use and no requests; return the seconds.

        Raises AssertionError with the remaining ones after `seconds`.
        """
        started = time.monotonic()
        while True:
            now = await self.metrics_by_name()
            in_use = {name: now[name] for name in IN_USE_METRICS if now[name]}
            waited = time.monotonic() - started
            if not in_use:
                return waited
            assert waited < seconds, f"{self.name} still has {in_use} after {waited:.1f} s"
            await asyncio.sleep(0.05)


IN_USE_METRICS = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
FAILURE_METRICS = (
    "nixl_num_kv_expired_reqs_total",
    "nixl_num_failed_transfers_total",
    "nixl_num_failed_notifications_total",
)


async def _is_answering(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url) as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def count_transfers(engines: Sequence[Engine]) -> float:
    """Return the number of successful KV transfers from the engines' metrics."""
    return sum(
        [
            (await engine.metrics_by_name()).get("nixl_xfer_time_seconds_count", 0.0)
            for engine in engines
        ]
    )


async def failure_counts(engines: Sequence[Engine]) -> dict[str, float]:
    """Return the expired leases, failed transfers and failed notifications of the engines."""
    pages = [await engine.metrics_by_name() for engine in engines]
    return {name: sum(page.get(name, 0.0) for page in pages) for name in FAILURE_METRICS}


def free_ports(count: int) -> list[int]:
    """Return ports that are unused now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports
