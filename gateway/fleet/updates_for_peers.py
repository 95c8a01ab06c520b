"""Collects what other gateways must learn (prompts, charges, health), until it is sent to them.

Code that serves a request only appends to lists here, which is cheap. peers/state_exchange.py and
peers/sync_loop.py encode and send the updates.
"""

from __future__ import annotations

from collections.abc import Callable

from policies.prefix.fingerprint import Fingerprint
from policies.routing_types import Endpoint


class OutgoingUpdates:
    """What other gateways must learn from this one, collected since it sent the last updates.

    prompts         (fingerprint, endpoint, prompt tokens, cached tokens); cached tokens are None
                    when a prompt is sent to an endpoint. An entry with a number corrects an
                    earlier one: the prompt was not computed after all, and at most this many of its
                    tokens are cached
    cache_reports   (endpoint, predicted cached share of a prompt, share that its engine reported)
    health_changes  (endpoint, new state, cause)
    charges         tokens computed for each (pool, tenant)
    quota_use       requests and tokens that each tenant used from its quota
    session_digest  function from a session's name to the number that all gateways use for it
    """

    __slots__ = (
        "cache_reports",
        "charges",
        "health_changes",
        "prompts",
        "quota_use",
        "session_digest",
    )

    def __init__(self, session_digest: Callable[[str], int]) -> None:
        self.session_digest = session_digest
        self.prompts: list[tuple[Fingerprint, Endpoint, int, int | None]] = []
        self.cache_reports: list[tuple[Endpoint, float, float]] = []
        self.health_changes: list[tuple[Endpoint, str, str]] = []
        self.charges: dict[tuple[str, str], float] = {}
        self.quota_use: dict[str, tuple[int, int]] = {}

    def add_charge(self, pool: str, tenant: str, tokens: float) -> None:
        key = pool, tenant
        self.charges[key] = self.charges.get(key, 0.0) + tokens

    def add_quota_use(self, tenant: str, requests: int, tokens: int) -> None:
        before = self.quota_use.get(tenant, (0, 0))
        self.quota_use[tenant] = before[0] + requests, before[1] + tokens
