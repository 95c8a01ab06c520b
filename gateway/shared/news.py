"""What this gateway has to tell the others, as it happens: lists that a request's path appends to, and nothing more.

Encoding and sending come later and elsewhere (view.py, pump.py).
"""

from __future__ import annotations

from policies.fingerprint import Fingerprint
from policies.model import Endpoint


class News:
    """Gathered between two flushes. Without a shared view there is none of it: one test for None per event.

    prompts    (fingerprint, endpoint, prompt tokens, kept): kept is None for a pick, else what is held at most
    confirmed  (endpoint, share believed, share found)
    moved      (endpoint, state, cause) of endpoints whose health changed
    charged    (pool, tenant) -> tokens
    """

    __slots__ = ("charged", "confirmed", "moved", "prompts")

    def __init__(self) -> None:
        self.prompts: list[tuple[Fingerprint, Endpoint, int, int | None]] = []
        self.confirmed: list[tuple[Endpoint, float, float]] = []
        self.moved: list[tuple[Endpoint, str, str]] = []
        self.charged: dict[tuple[str, str], float] = {}

    def charge(self, pool: str, tenant: str, tokens: float) -> None:
        key = pool, tenant
        self.charged[key] = self.charged.get(key, 0.0) + tokens
