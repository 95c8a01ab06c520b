"""FetchRule: decides how many stored blocks of a prompt an engine fetches; it computes the rest.

Fetching is not always faster than computing. For example, to read the KV of 8,192 tokens of an 8B
model from a 40 Gb/s disk takes longer than to compute it on an H100. The rule learns both costs
from the engine's own fetches and steps, and makes the cheaper choice.

It does no I/O; the caller passes the time.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import islice
from math import inf
from typing import NamedTuple

import msgspec

from kvtransfer.store.cost_fit import DECAY, CostFit
from kvtransfer.store.store_index import IN_MEMORY

FIRST_READS = (1 / 64, 1 / 16, 1 / 4)
"""Sizes of the first reads from a disk, as shares of a prompt's stored blocks.

The disk's speed is not known yet, so these reads are small and grow.
"""

FIRST_READ_COST = 0.25
"""Maximum expected cost of an early read that only measures the disk.

It applies from the second read on. The cost is the read's expected seconds, divided by those of
computing the whole prompt.
"""

STALE_S = 30.0
"""Seconds after which a tier that was not read is measured again.

Without this, a tier that seemed slow once would never be read again.
"""

STALE_READ_COST = 0.05
"""Maximum expected cost of a read that measures a tier again after STALE_S.

The cost is the read's expected seconds, divided by those of computing the prompt. The limit applies
at the age STALE_S, and grows in proportion to the age, up to 1.
"""

CHANGE = 0.5
"""Relative error of a predicted read time that shows that a tier's speed has changed.

The error is divided by the measured time. Above this error, the tier's earlier measurements are
dropped.
"""

_MEMORY, _DISK = 1, 2
_TIER_OF_BITS = bytes(_MEMORY if bits & IN_MEMORY else _DISK * (bits > 0) for bits in range(256))
_MAX_RUNS = 64
"""Maximum number of runs (consecutive blocks in one tier) that a choice considers.

Blocks after them are computed.
"""
_RUN = re.compile(rb"\x01+|\x02+")


class StoredPrefix(msgspec.Struct, frozen=True):
    """A prompt for which to decide how much to fetch, and where its KV blocks are stored.

    start   number of tokens whose KV the engine has
    tokens  number of tokens of the prompt
    places  one byte per further block: the bits IN_MEMORY and ON_DISK for the tiers that have it. 0
            means missing; blocks after a missing one are not used
    busy_s  seconds that the engine will first spend on other prompts
    """

    start: int
    tokens: int
    places: bytes
    busy_s: float = 0.0


class PendingFetch(msgspec.Struct, eq=False):
    """A fetch of stored blocks that is in progress, with its expected duration.

    blocks       number of blocks that are fetched
    disk_blocks  number of these blocks that are only on disk
    expected_s   expected duration in seconds
    began_s      time of the beginning, on the caller's clock
    """

    blocks: int
    disk_blocks: int
    expected_s: float
    began_s: float


class TierRun(NamedTuple):
    """Consecutive blocks [first, last) of a prompt that are all in the same tier (memory or disk).

    disk_blocks  number of the prompt's blocks before `first` that are on disk
    """

    first: int
    last: int
    is_on_disk: bool
    disk_blocks: int

    def disk_blocks_before(self, count: int) -> int:
        """Return how many of the prompt's first `count` blocks are on disk.

        `count` must be from `first` to `last`.
        """
        return self.disk_blocks + (count - self.first) * self.is_on_disk


class TierSpeed:
    """The measured read speed of one tier (memory or disk): a latency, and a time per block.

    reads    number of measured reads
    largest  size of the largest read in blocks; with each later read it is multiplied by DECAY
    last_s   time at which the last read ended
    """

    def __init__(self) -> None:
        self._fit = CostFit(2)
        self.reads = 0
        self.largest = 0.0
        self.last_s = -inf

    def add(self, blocks: int, seconds: float, measured_s: float, now: float) -> None:
        """Add a measured read of `blocks` blocks that ended at `now`.

        seconds     time that this tier took in the read
        measured_s  duration of the whole read; errors are relative to it
        """
        error_s = abs(seconds - self.read_s(blocks))
        if blocks <= self.largest and error_s > CHANGE * measured_s:
            self._fit, self.largest = CostFit(2), 0.0
        self._fit.add((1.0, blocks), seconds, measured_s)
        self.reads += 1
        self.largest = max(float(blocks), self.largest * DECAY)
        self.last_s = now

    def read_s(self, blocks: int) -> float:
        """Return the expected seconds of a read, or 0 if none was measured.

        A read that is larger than all measured ones is expected to take proportionally longer,
        because small reads do not show which part of their time is latency.
        """
        if not blocks or not self.reads:
            return 0.0
        latency_s, block_s = self._fit.rates()
        excess = max(1.0, blocks / self.largest)
        return (latency_s + blocks / excess * block_s) * excess


class FetchRule:
    """Decides for one engine how many stored blocks of a prompt to fetch; it computes the others.

    It learns from measurements how fast the engine fetches and computes.

    block_tokens  tokens of a block
    step_tokens   maximum number of prompt tokens that one step of the engine computes

    The expected duration of a fetch is the time to read the blocks that are only on disk, plus the
    time to read all blocks from memory. Fetches are served one after another. Memory counts as
    infinitely fast until it was measured.

    The expected duration of a computation is a cost per step, plus one per token, plus one per pair
    of tokens (attention).
    """

    def __init__(self, block_tokens: int, step_tokens: int) -> None:
        self._block_tokens, self._step_tokens = block_tokens, step_tokens
        self._computing = CostFit(3)
        self._memory, self._disk = TierSpeed(), TierSpeed()
        self._queue: dict[PendingFetch, None] = {}
        self._last_end_s = -inf

    # Learning

    def on_step(self, tokens: int, pairs: float, seconds: float) -> None:
        """Learn from a measured step of the engine how fast it computes prompts.

        tokens   number of prompt tokens that the step computed
        pairs    sum of these tokens' positions in their prompts, which is what attention reads
        seconds  duration of the step
        """
        self._computing.add((1.0, tokens, pairs), seconds, seconds)

    def begin(self, places: bytes, now: float) -> PendingFetch:
        """Record that a fetch of stored blocks begins now; pass the returned object to end() later.

        places  one byte per block, as in StoredPrefix
        """
        disk_blocks = places.translate(_TIER_OF_BITS).count(_DISK)
        expected_s = self.fetch_s(len(places), disk_blocks)
        pending = PendingFetch(len(places), disk_blocks, expected_s, now)
        self._queue[pending] = None
        return pending

    def end(
        self, pending: PendingFetch, now: float, *, is_complete: bool, seconds: float | None = None
    ) -> None:
        """End a fetch, and learn from its duration if all of its blocks arrived (`is_complete`).

        seconds  its duration without waiting for other fetches; None: the time since it began, or
                 since the previous fetch ended
        """
        del self._queue[pending]
        if seconds is None:
            seconds = now - max(pending.began_s, self._last_end_s)
        self._last_end_s = now
        if not is_complete or not pending.blocks:
            return
        if pending.disk_blocks:
            disk_s = max(0.0, seconds - self._memory.read_s(pending.blocks))
            self._disk.add(pending.disk_blocks, disk_s, seconds, now)
        else:
            self._memory.add(pending.blocks, seconds, seconds, now)

    # Estimates

    def compute_s(self, start: int, end: int) -> float:
        """Return the expected seconds in which the engine computes KV for tokens [start, end)."""
        step, token, pair = self._computing.rates()
        tokens = end - start
        return tokens * (token + step / self._step_tokens) + pair * tokens * (start + end) / 2

    def fetch_s(self, blocks: int, disk_blocks: int) -> float:
        """Return the expected seconds of fetching `blocks` blocks.

        `disk_blocks` of them are on disk but not in memory.
        """
        return self._memory.read_s(blocks) + self._disk.read_s(disk_blocks)

    def _queue_s(self, now: float) -> float:
        # Return the expected seconds until the fetches that have begun are over.
        if not self._queue:
            return 0.0
        first = next(iter(self._queue))
        served_s = now - max(first.began_s, self._last_end_s)
        all_s = sum(pending.expected_s for pending in self._queue)
        return all_s - min(first.expected_s, served_s)

    # The choice

    def choose(self, prefix: StoredPrefix, now: float) -> int:
        """Decide how many of a prompt's stored blocks to fetch; the engine computes the others.

        The result minimises the expected time until the prompt is complete. Of equal choices the
        larger one is made, because it leaves more of the engine's time to other prompts. As an
        exception, a few small reads are made to measure a tier.
        """
        runs = _runs(prefix.places)
        usable = 0
        while usable < len(runs) and not (runs[usable].is_on_disk and self._is_disk_unknown):
            usable += 1
        count = self._cheapest(prefix, runs[:usable], now)
        for run in runs:
            if run.first == count:
                return count + self._measured_blocks(prefix, run, now)
        return count

    @property
    def _is_disk_unknown(self) -> bool:
        return self._disk.reads < len(FIRST_READS)

    def _cheapest(self, prefix: StoredPrefix, runs: Sequence[TierRun], now: float) -> int:
        # In a run each further block saves more computing than the one before. So the best number
        # is at an end of the run, or where blocks begin to cost more than those before.
        queue_s = self._queue_s(now)
        best, best_s = 0, prefix.busy_s + self._rest_s(prefix, 0)
        for run in runs:
            for count in self._candidates(run, prefix.busy_s - queue_s):
                total_s = max(queue_s + self._first_s(run, count), prefix.busy_s)
                total_s += self._rest_s(prefix, count)
                if total_s <= best_s:
                    best, best_s = count, total_s
        return best

    def _first_s(self, run: TierRun, count: int) -> float:
        # Return the expected seconds of fetching the first `count` blocks, which end in this run.
        return self.fetch_s(count, run.disk_blocks_before(count))

    def _rest_s(self, prefix: StoredPrefix, fetched: int) -> float:
        return self.compute_s(prefix.start + fetched * self._block_tokens, prefix.tokens)

    def _candidates(self, run: TierRun, hidden_s: float) -> Sequence[int]:
        # hidden_s  seconds that a fetch may take without delaying the prompt
        turns = [run.first + self._blocks_within(run, hidden_s), int(self._memory.largest)]
        if run.is_on_disk:
            turns.append(run.first - run.disk_blocks + int(self._disk.largest))
        around = {count for turn in turns for count in (turn, turn + 1)}
        inside = (count for count in around if run.first < count < run.last)
        return sorted({run.first + 1, *inside, run.last})

    def _blocks_within(self, run: TierRun, seconds: float) -> int:
        # Return how many blocks of the run can be fetched in this time, after all before it.
        counts = range(run.first + 1, run.last + 1)
        return bisect_right(counts, seconds, key=lambda count: self._first_s(run, count))

    def _measured_blocks(self, prefix: StoredPrefix, run: TierRun, now: float) -> int:
        # Return how many blocks of a run that is not worth fetching are fetched to measure its
        # tier, because its speed is not known, or was measured long ago.
        if not self._computing.samples or any(pending.disk_blocks for pending in self._queue):
            return 0
        wanted, share = run.last - run.first, 0.0
        if run.is_on_disk and self._is_disk_unknown:
            wanted = min(wanted, max(1, int(len(prefix.places) * FIRST_READS[self._disk.reads])))
            if not self._disk.reads:
                return wanted
            share = FIRST_READ_COST
        age_s = now - (self._disk if run.is_on_disk else self._memory).last_s
        if age_s >= STALE_S:
            share = max(share, min(1.0, STALE_READ_COST * age_s / STALE_S))
        if not share:
            return 0
        before_s = self._first_s(run, run.first)
        allowed_s = before_s + share * self.compute_s(prefix.start, prefix.tokens)
        return min(wanted, self._blocks_within(run, allowed_s))


def _runs(places: bytes) -> list[TierRun]:
    tiers = places.translate(_TIER_OF_BITS).partition(b"\0")[0]
    runs: list[TierRun] = []
    disk_blocks = 0
    for match in islice(_RUN.finditer(tiers), _MAX_RUNS):
        is_on_disk = tiers[match.start()] == _DISK
        runs.append(TierRun(match.start(), match.end(), is_on_disk, disk_blocks))
        disk_blocks += (match.end() - match.start()) * is_on_disk
    return runs
