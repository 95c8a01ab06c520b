"""What this gateway has to tell the others, as it happens: lists that a request's path appends to, and nothing more.

Encoding and sending come later and elsewhere (view.py, pump.py).
"""

from __future__ import annotations

from collections.abc import Callable

from policies.fingerprint import Fingerprint
from policies.model import Endpoint


class News:
    """Gathered between two flushes. Without a shared view there is none of it: one test for None per event.

    prompts    (fingerprint, endpoint, prompt tokens, kept): kept is None for a pick, else what is held at most
    confirmed  (endpoint, share believed, share found)
    moved      (endpoint, state, cause) of endpoints whose health changed
    charged    (pool, tenant) -> tokens
    taken      tenant -> requests and tokens taken from its quota
    named      what all gateways call a session
    """

    __slots__ = ("charged", "confirmed", "moved", "named", "prompts", "taken")

    def __init__(self, named: Callable[[str], int]) -> None:
        self.named = named
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
