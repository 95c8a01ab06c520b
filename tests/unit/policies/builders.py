"""Creates endpoints, requests and queue states for tests of policies and admission rules."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from policies.admission.admission_policy import Shed, Verdict, WaitQueueLimits
from policies.admission.drain_rate import DrainRate
from policies.endpoint_load import EndpointLoad
from policies.routing_types import Candidate, Endpoint, Request, RoutingQuery


def candidate(slot: int, cap: int = 1000, **load: object) -> Candidate:
    # Return a candidate for endpoint `tp<slot>`; keywords set its live load numbers.
    numbers = EndpointLoad(slot)
    for name, value in load.items():
        setattr(numbers, name, value)
    return Candidate(
        Endpoint(
            f"tp{slot}", f"http://127.0.0.1:{9000 + slot}", "pool", "model", max_concurrency=cap
        ),
        numbers,
    )


def outlook(slot: int, **numbers: object) -> Candidate:
    # Return a candidate with about 20 ms per step and 60 us per prompt token.
    #
    # Keyword arguments set further numbers of its load.
    usual: dict[str, object] = {
        "prefill_done_at": 0.0,
        "prefill_s_per_token": 6e-5,
        "attention_s_per_pair": 1e-9,
        "fixed_ttft_s": 0.03,
        "decode_s_per_token": 0.02,
        "decode_s_per_sequence": 1e-5,
        "decode_s_per_context_token": 1e-8,
        "kv_tokens": 600_000.0,
    }
    return candidate(slot, cap=1000, **(usual | numbers))


def ask(
    prompt_tokens: int = 1000,
    output_tokens: int = 100,
    cached: Sequence[int] = (),
    tried: Sequence[str] = (),
    now: float = 100.0,
    seed: int = 1,
) -> RoutingQuery:
    request = Request("id", "model", "tenant", prompt_tokens, output_tokens)
    return RoutingQuery(request, now, Random(seed), cached, frozenset(tried))


class View:
    def __init__(
        self,
        busy: int = 0,
        capacity: int = 48,
        waiting: int = 0,
        drain: DrainRate | None = None,
        waiting_s: float = 0.0,
        is_new_arrival: bool = True,
    ) -> None:
        self.busy_permits, self.capacity, self.waiting, self.waiting_s = (
            busy,
            capacity,
            waiting,
            waiting_s,
        )
        self.is_new_arrival = is_new_arrival
        self.drain_rate = drain or DrainRate()
        self.limits = WaitQueueLimits(size=3, timeout_s=10.0)

    def full_rate(self, now: float) -> float | None:
        return self.drain_rate.per_s(now)

    def count_ahead(self, tenant: str) -> float:
        return self.waiting

    def is_next(self, tenant: str) -> bool:
        return not self.waiting


def draining(per_s: float, seconds: float = 60.0, since: float = 0.0) -> DrainRate:
    drain = DrainRate()
    for number in range(int(seconds * per_s) + 1):
        drain.record(since + number / per_s)
    return drain


def shed(verdict: Verdict) -> Shed:
    # Return the verdict. Asserts that it is a refusal.
    assert isinstance(verdict, Shed), verdict
    return verdict
