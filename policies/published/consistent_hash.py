"""Consistent hashing: all requests of a session go to the same endpoint while it is available."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import ceil

from policies import scorers
from policies.builtin_policies import DEFAULT_FILTERS, PolicyParams
from policies.param_types import Factor
from policies.policy_types import Policy, WeightedScorer
from policies.routing_types import Candidate, RoutingQuery

_WORD = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15
_MOST_SALTS = 8192


class ConsistentHash(PolicyParams, frozen=True):
    """A policy that picks the endpoint by a hash of the session.

    A request without a session may go to any endpoint. If an endpoint is ejected or at its cap, the
    session goes to the next endpoint in its own order.

    Sources: `consistent_hash` of vLLM's router, `consistent_hashing` and `manual` of SMG, and
    `session` of the vLLM production stack. Rendezvous hashing (Thaler and Ravishankar 1998)
    replaces their rings: if an endpoint is added or removed, only the sessions of that endpoint
    move.

    load_factor  endpoints with more than this multiple of the mean number of requests are skipped
                 too (Mirrokni et al., "Consistent Hashing with Bounded Loads", SODA 2018); None:
                 loads are ignored, as in those routers
    """

    load_factor: Factor | None = None

    def build(self) -> Policy:
        return Policy(
            name="consistent_hash",
            filters=DEFAULT_FILTERS,
            scorers=(WeightedScorer(scorers.constant()),),
            picker=SessionHashPicker(self.load_factor).pick,
        )


class SessionHashPicker:
    """Picks an endpoint by a hash of the session and the endpoint's name: the highest hash wins.

    So a session keeps its endpoint. The object caches the hashes of names, so each policy needs its
    own.
    """

    __slots__ = ("_load_factor", "_salts")

    def __init__(self, load_factor: float | None) -> None:
        self._load_factor = load_factor
        self._salts: dict[str, int] = {}

    def pick(
        self, query: RoutingQuery, candidates: Sequence[Candidate], scores: Sequence[float]
    ) -> int:
        """Return the index of the highest hash among the endpoints that are not overloaded."""
        session = query.request.session
        key = _hash(session) if session else int(query.rng.random() * (_WORD + 1))
        factor = self._load_factor
        allowed = range(len(candidates)) if factor is None else _light(candidates, factor)
        return max(allowed, key=lambda index: self._draw(key, candidates[index].endpoint.name))

    def _draw(self, key: int, name: str) -> int:
        salt = self._salts.get(name)
        if salt is None:
            if len(self._salts) >= _MOST_SALTS:
                self._salts.clear()
            salt = self._salts[name] = _hash(name)
        mixed = (key ^ salt) * _MULTIPLIER & _WORD
        return (mixed ^ mixed >> 32) * _MULTIPLIER & _WORD


def _hash(text: str) -> int:
    return int.from_bytes(
        blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
    )


def _light(candidates: Sequence[Candidate], factor: float) -> list[int]:
    # Return the indices of candidates that have fewer requests than the load bound.
    #
    # The bound is `factor` times the mean number of requests, counting one more.
    loads = [candidate.load.in_flight for candidate in candidates]
    most = ceil(factor * (sum(loads) + 1) / len(loads))
    return [index for index, load in enumerate(loads) if load < most]
