"""Updates for the other gateways: the path of a request only appends to these lists.

Encoding and sending happen later (gateway/peers/view.py, sync_loop.py).
"""

from __future__ import annotations

from collections.abc import Callable

from policies.model import Endpoint
from policies.prefix.fingerprint import Fingerprint


class News:
    """The updates between two flushes. Without shared state there is no such object.

    prompts         (fingerprint, endpoint, prompt tokens, cached tokens): cached tokens are None
                    for a pick; else the prompt was not computed, and at most so many of its tokens
                    are cached
    cache_reports   (endpoint, believed cached share, reported share)
    health_changes  (endpoint, state, cause)
    charges         (pool, tenant) -> tokens
    quota_use       tenant -> requests and tokens taken from its quota
    session_digest  maps a session to the number that all gateways use for it
    """

    __slots__ = ("charged", "confirmed", "moved", "named", "prompts", "taken")

    def __init__(self, session_digest: Callable[[str], int]) -> None:
        self.named = session_digest
        self.prompts: list[tuple[Fingerprint, Endpoint, int, int | None]] = []
        self.confirmed: list[tuple[Endpoint, float, float]] = []
        self.moved: list[tuple[Endpoint, str, str]] = []
        self.charged: dict[tuple[str, str], float] = {}
        self.taken: dict[str, tuple[int, int]] = {}

    def charge(self, pool: str, tenant: str, tokens: float) -> None:
        key = pool, tenant
        self.charged[key] = self.charged.get(key, 0.0) + tokens

    def take(self, tenant: str, requests: int, tokens: int) -> None:
        before = self.taken.get(tenant, (0, 0))
        self.taken[tenant] = before[0] + requests, before[1] + tokens
