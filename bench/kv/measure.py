"""What is measured on a pair: passes over scattered blocks, and blocks one after another. Every block is verified."""

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
}  # 4 KiB: fewer, or the slow ones take minutes
POSTS = 1000
ENOUGH_S, MOST_PASSES = 0.25, 4
QUIET = 0.1  # of the machine to others


@dataclass(frozen=True)
class Moved:
    """GB per second of wall clock, and processor seconds of both processes per GB (1e9 bytes)."""

    gb_s: float
    cpu_s_per_gb: float


@dataclass(frozen=True)
class Waited:
    """Microseconds from the post of one block until the initiator knew that it was in place."""

    p50_us: float
    p99_us: float


def bandwidth(pair: Pair, block_bytes: int, pool_bytes: int, rng: random.Random) -> Moved:
    """Passes with new slots each until there is enough to divide by. Drawing and verifying are outside the clock."""
    n_bytes, seconds, cpu_s = 0, 0.0, 0.0
    size = min(PASS_BYTES[block_bytes], pool_bytes)
    for _ in range(MOST_PASSES):
        pair.both(
            "prepare",
            block_bytes=block_bytes,
            count=size // block_bytes,
            seed=rng.getrandbits(32),
            each=False,
        )
        pair.both("begin")
        seconds += pair.initiator.ask("run")
        cpu_s += sum(pair.both("finish"))
        n_bytes += size
        _verify(pair)
        if seconds >= ENOUGH_S:
            break
    return Moved(n_bytes / seconds / 1e9, cpu_s / n_bytes * 1e9)


def latency(pair: Pair, block_bytes: int, pool_bytes: int, rng: random.Random) -> Waited:
    """One block at a time, every one to another slot."""
    count = min(POSTS, pool_bytes // block_bytes)
    pair.both("prepare", block_bytes=block_bytes, count=count, seed=rng.getrandbits(32), each=True)
    pair.both("begin")
    cuts = quantiles(pair.initiator.ask("posts"), n=100)
    pair.both("finish")
    _verify(pair)
    return Waited(cuts[49], cuts[98])


LAYERED_BLOCK_BYTES = 256 << 10
PREFILL_SHARE = (
    1.5  # a prefill takes so much longer than its transfer here: the transfer fits under it
)


def exposed_share(pair: Pair, pool_bytes: int, rng: random.Random) -> float:
    """What is left of a transfer after the prefill when layers leave as they are computed, of what it takes alone."""
    alone_s = _request(pair, pool_bytes, rng, 0.0)
    return _request(pair, pool_bytes, rng, PREFILL_SHARE * alone_s) / alone_s


def _request(pair: Pair, pool_bytes: int, rng: random.Random, prefill_s: float) -> float:
    """The sink waits for the offer, as a reserved decode group does. Seconds after the last layer."""
    count = pool_bytes // LAYERED_BLOCK_BYTES
    pair.both(
        "prepare",
        block_bytes=LAYERED_BLOCK_BYTES,
        count=count,
        seed=rng.getrandbits(32),
        each=False,
    )
    pair.sink.tell("custom", what="fetch")
    seconds: float = pair.source.ask("custom", what="offer", prefill_s=prefill_s)
    pair.sink.answer()
    _verify(pair)
    return seconds


def _verify(pair: Pair) -> None:
    """Raw TCP moves no blocks: it only says what the wire could carry."""
    if pair.who.name != "raw tcp" and (wrong := pair.sink.ask("verify")):
        raise NotMeasurable(f"{pair.who.name} delivered {wrong} wrong blocks")


def least_disturbed(
    pair: Pair, task: Callable[[], dict[str, float]], retakes: int
) -> tuple[float, dict[str, float]]:
    """What the task measured, and the share of the machine that others used meanwhile. Too much: taken again."""
    best = _watched(pair, task)
    for _ in range(retakes):
        if best[0] <= QUIET:
            break
        best = min(best, _watched(pair, task), key=lambda taken: taken[0])
    return best


def _watched(pair: Pair, task: Callable[[], dict[str, float]]) -> tuple[float, dict[str, float]]:
    started, busy, own = time.monotonic(), _busy_s(), _own_s(pair)
    numbers = task()
    theirs = _busy_s() - busy - (_own_s(pair) - own)
    return max(0.0, theirs / ((time.monotonic() - started) * (os.cpu_count() or 1))), numbers


def _busy_s() -> float:
    """Processor seconds that everything on the machine has used so far."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _own_s(pair: Pair) -> float:
    used = time.process_time()
    for side in pair.sides:
        after_name = Path(f"/proc/{side.popen.pid}/stat").read_text().rpartition(")")[2].split()
        used += (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")
    return used
