"""The options of one benchmark run, and the rules for combining them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from planner.bench.workloads import shapes


class PlanError(ValueError):
    """Raised if the options of a benchmark are invalid.

    The message has the option and the reason.
    """


class BenchSlo(msgspec.Struct, frozen=True):
    """Latency limits within which a request counts as good, in seconds. None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None


class BenchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one benchmark run.

    With `rate` or `trace`, requests are sent at given times (open loop). Otherwise, users wait for
    each answer before the next request (closed loop).

    url          scheme, host and port; /v1/chat/completions is appended
    model        model to request; None: the first one that /v1/models lists
    rate         requests per second of an open loop
    concurrency  number of users of a closed loop
    duration_s   no request is sent after so many seconds; None with `requests`: no limit
    requests     maximum number of requests
    trace        path of a Mooncake trace to replay instead of a shape, with `speed` and `limit`
    think        factor on the pauses between the turns of a session; 0: no pauses
    ignore_eos   makes engines that support it generate exactly the requested length
    warmup       requests sent before the run, one after another, and not counted
    seed         seed of the workload and of the arrivals
    slo          limits within which a request counts as good
    api_key      bearer token; None: none is sent
    timeout_s    maximum seconds of one request
    """

    url: str
    model: str | None = None
    shape: str = "chat"
    rate: float | None = None
    concurrency: int | None = None
    duration_s: float | None = None
    requests: int | None = None
    trace: Path | None = None
    speed: float = 1.0
    limit: int | None = None
    warmup: int = 0
    seed: int = 0
    slo: BenchSlo = BenchSlo()
    think: float = 1.0
    ignore_eos: bool = False
    api_key: str | None = None
    timeout_s: float = 600.0

    @property
    def is_open(self) -> bool:
        """Return whether requests are sent at given times, not after answers (open loop)."""
        return self.rate is not None or self.trace is not None


def with_defaults(plan: BenchPlan) -> BenchPlan:
    """Return the plan with defaults filled in: 8 users if it has no load, 30 s if it has no end.

    Raises PlanError if options are invalid or exclude each other.
    """
    if not plan.url.startswith(("http://", "https://")):
        raise PlanError(f"--url must have the form http://host:port, not {plan.url}")
    if plan.shape not in shapes():
        raise PlanError(f"unknown --shape {plan.shape}; known shapes: {', '.join(shapes())}")
    if plan.concurrency is not None and plan.is_open:
        raise PlanError(
            "--concurrency (closed loop) cannot be combined with --rate or --trace (open loop)"
        )
    if plan.rate is not None and plan.trace is not None:
        raise PlanError(
            "--rate cannot be combined with --trace, which has its own arrival "
            "times; use --speed instead"
        )
    if plan.trace is None and plan.limit is not None:
        raise PlanError("--limit requires --trace; use --requests with a shape")
    if not plan.is_open and plan.concurrency is None:
        plan = msgspec.structs.replace(plan, concurrency=8)
    if plan.duration_s is None and plan.requests is None and plan.trace is None:
        plan = msgspec.structs.replace(plan, duration_s=30.0)
    return plan
