"""RankBalancer: chooses the data-parallel rank of a request that does not name one, as vLLM does.

It chooses the rank with the smallest `4 * waiting + running` requests. The counts are those of the
last statistics, which vLLM's coordinator publishes every 100 ms, plus the requests sent since then.
Prompt lengths and caches have no influence. Source: vLLM 0.32, v1/engine/core_client.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

STATISTICS_S = 0.1
WAITING_WEIGHT = 4


class RankBalancer:
    """Chooses ranks by counts of requests that are up to STATISTICS_S seconds old.

    Ranks with equal scores take turns. Otherwise all requests to an idle engine would go to its
    first rank.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._counts: list[tuple[int, int]] = []
        self._read_s = -inf
        self._sent = [0] * ranks
        self._last = ranks - 1

    def pick(self, now: float, read: Callable[[], Sequence[tuple[int, int]]]) -> int:
        """Return the number of the rank for a request that arrives now.

        `read()` returns the numbers of waiting and of running requests of every rank.
        """
        if now - self._read_s >= STATISTICS_S:
            self._counts, self._read_s = list(read()), now
            self._sent = [0] * self._ranks
        scores = [
            WAITING_WEIGHT * (waiting + sent) + running
            for (waiting, running), sent in zip(self._counts, self._sent, strict=True)
        ]
        least = min(scores)
        while True:
            self._last = (self._last + 1) % self._ranks
            if scores[self._last] == least:
                break
        self._sent[self._last] += 1
        return self._last
