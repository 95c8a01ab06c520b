"""What is counted of policies that are tried beside the one that serves: shadows, and both sides of a canary.
"""

from __future__ import annotations

from gateway.meters import Counter, Family, Histogram, Label, Meters
from gateway.observe.labels import POOL, RESULT, Row

POLICY = Label("policy", 64)
WAY = Label("way", 4)
SIDE = Label("side", 2)
KEPT = Label("kept", 16)


class Trials:
    """Families of policies on trial. Made by the catalogue."""

    def __init__(self, meters: Meters, ttft_buckets_s: tuple[float, ...]) -> None:
        shadow = meters.section(Row.CONFIGURATION, "shadow.py")
        self.picks: Family[Counter] = shadow.counter(
            "penstock_shadow_picks_total",
            "Picks that a shadow policy was asked about: agreed, differed, nobody (nowhere to send), failed.",
            *(POOL, POLICY, RESULT),
        )
        self.ttft: Family[Counter] = shadow.counter(
            "penstock_shadow_ttft_seconds_total",
            "By how much sooner, or later, a shadow policy's picks would have had their first tokens, by the beliefs.",
            *(POOL, POLICY, WAY),
        )
        self.tokens: Family[Counter] = shadow.counter(
            "penstock_shadow_cached_tokens_total",
            "How many more, or fewer, prompt tokens were believed to be cached where a shadow policy would have sent.",
            *(POOL, POLICY, WAY),
        )
        self.cost: Family[Counter] = shadow.counter(
            "penstock_shadow_cost_seconds_total", "Time spent on a shadow policy's answers.", *(POOL, POLICY)
        )
        canary = meters.section(Row.CONFIGURATION, "canary.py")
        self.requests: Family[Counter] = canary.counter(
            "penstock_canary_requests_total",
            "Requests of a pool with a canary by side (primary, canary) and what became of their promise, as in "
            "penstock_goodput_total; untold where nothing can be said of it.",
            *(POOL, SIDE, KEPT),
        )
        self.first_tokens: Family[Histogram] = canary.histogram(
            "penstock_canary_ttft_seconds",
            "Time from the last byte of a request to its first token, by side of its pool's canary.",
            ttft_buckets_s,
            *(POOL, SIDE),
            marked=True,
        )
