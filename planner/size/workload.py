"""The input of a sizing plan: traffic, promised latencies and limits."""

from __future__ import annotations

import msgspec

MAX_BATCH = 256  # vLLM's max_num_seqs; larger batches change a static estimate little


class Promise(msgspec.Struct, frozen=True):
    """The promised latencies of a class of requests.

    name        name of the class
    ttft_s      maximum seconds to the first token; None: no promise
    tpot_s      maximum seconds per further token; None: no promise
    percentile  percentage of requests that must stay within each limit
    """

    name: str = "default"
    ttft_s: float | None = None
    tpot_s: float | None = None
    percentile: float = 95.0


class Workload(msgspec.Struct, frozen=True):
    """The traffic to plan a fleet for. Either `rate_s` or `concurrency` is given.

    prompt           prompt tokens of a typical request
    output           output tokens of a typical request
    cached_share     share of the prompt that is found in a prefix cache, 0 to 1
    context          maximum tokens of prompt plus answer to serve
    rate_s           requests per second
    concurrency      number of requests in progress at the same time
    max_concurrency  the gateway's cap per replica; None: as many as memory and promises allow
    headroom         share of KV to keep free, 0 to 1
    """

    prompt: int
    output: int
    context: int
    rate_s: float | None = None
    concurrency: float | None = None
    cached_share: float = 0.0
    max_concurrency: int | None = None
    headroom: float = 0.15
    promises: tuple[Promise, ...] = ()

    @property
    def cached(self) -> int:
        """Return the number of cached prompt tokens. At least one token is never cached."""
        return min(self.prompt - 1, round(self.prompt * self.cached_share))

    @property
    def uncached(self) -> int:
        """Return the number of prompt tokens to compute; the others are in the prefix cache."""
        return self.prompt - self.cached

    @property
    def mean_context(self) -> int:
        """Return the mean number of KV tokens of a request while it decodes."""
        return self.prompt + self.output // 2

    @property
    def ttft_s(self) -> float | None:
        """Return the shortest TTFT that any class promises, in seconds; None: no promise."""
        return min((p.ttft_s for p in self.promises if p.ttft_s is not None), default=None)

    @property
    def tpot_s(self) -> float | None:
        """Return the shortest TPOT that any class promises, in seconds; None: no promise."""
        return min((p.tpot_s for p in self.promises if p.tpot_s is not None), default=None)

    @property
    def limits(self) -> dict[str, float]:
        """Return the strictest promised latencies in seconds, by name ("TTFT", "TPOT")."""
        pairs = (("TPOT", self.tpot_s), ("TTFT", self.ttft_s))
        return {name: limit for name, limit in pairs if limit is not None}

    @property
    def percentile(self) -> float:
        return max((p.percentile for p in self.promises if p.ttft_s == self.ttft_s), default=95.0)
