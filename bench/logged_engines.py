"""Serves mock engines with a generation log, as `penstock mock` does, for bench/batch.py.

    python -m bench.logged_engines COUNT SPEED FILE

It prints the URL of each engine on a line of its own, and serves until SIGTERM.
"""

from __future__ import annotations

import asyncio
import signal
import sys

import uvloop

from mockgpu.fleet import run_fleet
from mockgpu.tp_group import GroupSpec
from policies.sizing.gpus import gpu_named
from policies.sizing.model_shapes import model_named


def logged_spec(speed: float, log: str) -> GroupSpec:
    """Return the settings of a mock engine that logs each generated sequence to the file `log`."""
    shape, card = model_named("demo-8b"), gpu_named("h100")
    return GroupSpec("demo-8b", shape, card, speed=speed, generation_log=log)


async def serve(count: int, spec: GroupSpec) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with run_fleet([spec] * count) as members:
        for member in members:
            print(member.url, flush=True)
        await stop.wait()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), logged_spec(float(sys.argv[2]), sys.argv[3])))
