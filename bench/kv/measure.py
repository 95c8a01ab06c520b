"""Measures transfers of KV blocks between two processes: bandwidth, latency, and layer by layer.

The content of every transferred block is verified.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

from contestants import NotMeasurable, Pair

PASS_BYTES = {
    4 << 10: 64 << 20,
    64 << 10: 256 << 20,
    2 << 20: 256 << 20,
}  # fewer bytes for 4 KiB, since slow contestants would take minutes
POSTS = 1000
ENOUGH_S, MOST_PASSES = 0.25, 4
MAX_OTHERS = 0.1
"""Share of the machine (0 to 1) that other processes may use during a measurement.

Above it, the measurement is repeated.
"""


@dataclass(frozen=True)
class Throughput:
    """The result of a bandwidth measurement.

    gb_s          GB (1e9 bytes) per second
    cpu_s_per_gb  CPU seconds of both processes per GB
    """

    gb_s: float
    cpu_s_per_gb: float


@dataclass(frozen=True)
class Latency:
    """The time from the start of a block's transfer until the initiator knows that it is complete.

    p50_us  median in microseconds
    p99_us  99th percentile in microseconds
    """

    p50_us: float
    p99_us: float


def bandwidth(pair: Pair, block_bytes: int, pool_bytes: int, rng: random.Random) -> Throughput:
    """Measure the bandwidth of transfers of scattered blocks, repeated for at least ENOUGH_S
    seconds.

    The time to choose and to verify blocks is not included.
    """
    n_bytes, seconds, cpu_s = 0, 0.0, 0.0
    size = min(PASS_BYTES[block_bytes], pool_bytes)
    for _ in range(MOST_PASSES):
        pair.call_both(
            "prepare",
            block_bytes=block_bytes,
            count=size // block_bytes,
            seed=rng.getrandbits(32),
            each=False,
        )
        pair.call_both("begin")
        seconds += pair.initiator.call("run")
        cpu_s += sum(pair.call_both("finish"))
        n_bytes += size
        _verify(pair)
        if seconds >= ENOUGH_S:
            break
    return Throughput(n_bytes / seconds / 1e9, cpu_s / n_bytes * 1e9)


def latency(pair: Pair, block_bytes: int, pool_bytes: int, rng: random.Random) -> Latency:
    count = min(POSTS, pool_bytes // block_bytes)
    pair.call_both(
        "prepare", block_bytes=block_bytes, count=count, seed=rng.getrandbits(32), each=True
    )
    pair.call_both("begin")
    cuts = quantiles(pair.initiator.call("posts"), n=100)
    pair.call_both("finish")
    _verify(pair)
    return Latency(cuts[49], cuts[98])


LAYERED_BLOCK_BYTES = 256 << 10
PREFILL_SHARE = 1.5
"""Duration of the simulated prefill, divided by that of the transfer.

It is above 1, so that the whole transfer could take place during the prefill.
"""


def exposed_share(pair: Pair, pool_bytes: int, rng: random.Random) -> float:
    """Measure the part of a KV transfer that remains when the prompt has been computed.

    KV is sent layer by layer while the prompt is computed (prefill). Only the remaining part delays
    the client. Returns its duration, divided by that of the same transfer without a prefill.

    pair        the two processes
    pool_bytes  size of the memory from which blocks are chosen, in each process
    rng         random source for the choice of blocks
    """
    alone_s = _request(pair, pool_bytes, rng, 0.0)
    return _request(pair, pool_bytes, rng, PREFILL_SHARE * alone_s) / alone_s


def _request(pair: Pair, pool_bytes: int, rng: random.Random, prefill_s: float) -> float:
    # Transfer one request layer by layer and return the seconds after its last layer.
    #
    # The sink fetches before the source offers, as a decode engine with reserved blocks does.
    count = pool_bytes // LAYERED_BLOCK_BYTES
    pair.call_both(
        "prepare",
        block_bytes=LAYERED_BLOCK_BYTES,
        count=count,
        seed=rng.getrandbits(32),
        each=False,
    )
    pair.sink.send("custom", what="fetch")
    seconds: float = pair.source.call("custom", what="offer", prefill_s=prefill_s)
    pair.sink.receive()
    _verify(pair)
    return seconds


def _verify(pair: Pair) -> None:
    # Raise an error unless the sink has the right blocks (raw TCP, without blocks, is exempt).
    if pair.contestant.name != "raw tcp" and (wrong := pair.sink.call("verify")):
        raise NotMeasurable(f"{pair.contestant.name} delivered {wrong} blocks with wrong content")


def least_disturbed(
    pair: Pair, task: Callable[[], dict[str, float]], retakes: int
) -> tuple[float, dict[str, float]]:
    """Run a measurement; repeat it up to `retakes` times while other processes disturb it.

    A run is disturbed if other processes use more than MAX_OTHERS of the machine. Returns the share
    that they used, and the result, of the least disturbed run.
    """
    best = _run_watched(pair, task)
    for _ in range(retakes):
        if best[0] <= MAX_OTHERS:
            break
        best = min(best, _run_watched(pair, task), key=lambda result: result[0])
    return best


def _run_watched(
    pair: Pair, task: Callable[[], dict[str, float]]
) -> tuple[float, dict[str, float]]:
    started, busy, own = time.monotonic(), _machine_cpu_s(), _own_cpu_s(pair)
    numbers = task()
    theirs = _machine_cpu_s() - busy - (_own_cpu_s(pair) - own)
    return max(0.0, theirs / ((time.monotonic() - started) * (os.cpu_count() or 1))), numbers


def _machine_cpu_s() -> float:
    # Return the processor time in seconds that all processes have used since boot.
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _own_cpu_s(pair: Pair) -> float:
    used = time.process_time()
    for side in pair.sides:
        after_name = Path(f"/proc/{side.popen.pid}/stat").read_text().rpartition(")")[2].split()
        used += (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")
    return used
