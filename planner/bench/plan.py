"""What one benchmark run is asked to do, and the rules between its options."""

from __future__ import annotations

from pathlib import Path

import msgspec

from planner.bench.workloads import shapes


class PlanError(ValueError):
    """A plan that cannot be run; the message says which option and why."""


class Slo(msgspec.Struct, frozen=True):
    """What makes a request good: both, where given."""

    ttft_s: float | None = None
    tpot_s: float | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Open loop with `rate` or `trace`, else closed loop with `concurrency`.

    url          scheme, host and port; /v1/chat/completions is the bench's
    model        None takes the first that /v1/models lists
    duration_s   no request is due after it; None with `requests` is no limit
    requests     no more requests than this
    trace        a Mooncake file in place of a shape; `speed` and `limit` are its own
    think        scales the pauses between the turns of a session; 0 leaves them out
    ignore_eos   asks engines that know the field to generate to the very length asked for
    warmup       requests sent before, one after another, and not counted
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
    slo: Slo = Slo()
    think: float = 1.0
    ignore_eos: bool = False
    api_key: str | None = None
    timeout_s: float = 600.0

    @property
    def is_open(self) -> bool:
        """Whether requests come at moments of their own, whatever the answers do."""
        return self.rate is not None or self.trace is not None


def checked(plan: Plan) -> Plan:
    """The plan with its defaults in place: 8 users where no load is given, 30 s where no end is. Raises PlanError."""
    if not plan.url.startswith(("http://", "https://")):
        raise PlanError(f"--url {plan.url}: write http://host:port")
    if plan.shape not in shapes():
        raise PlanError(f"--shape {plan.shape}: there are {', '.join(shapes())}")
    if plan.concurrency is not None and plan.is_open:
        raise PlanError("--concurrency is a closed loop; --rate and --trace are open ones: give one of them")
    if plan.rate is not None and plan.trace is not None:
        raise PlanError("--trace brings its own moments; --speed makes it faster, --rate is for shapes")
    if plan.trace is None and plan.limit is not None:
        raise PlanError("--limit is for --trace; --requests ends a shape")
    if not plan.is_open and plan.concurrency is None:
        plan = msgspec.structs.replace(plan, concurrency=8)
    if plan.duration_s is None and plan.requests is None and plan.trace is None:
        plan = msgspec.structs.replace(plan, duration_s=30.0)
    return plan
