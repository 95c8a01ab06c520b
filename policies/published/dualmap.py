"""DualMap: two hashes of a prompt's prefix select two endpoints, of which the better one is used.

The endpoint with more of the prefix cached is better, unless it is too slow.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from hashlib import blake2b

from policies.builtin_policies import DEFAULT_FILTERS, PolicyParams
from policies.param_types import Fraction, NonNegative, NonNegativeCount, PositiveCount
from policies.policy_types import Policy, WeightedScorer
from policies.prefix.fingerprint import Fingerprint
from policies.published.mooncake import soonest
from policies.published.rule_inputs import cached_tokens
from policies.routing_types import Candidate, RoutingQuery

_WORD = (1 << 64) - 1
_MIX = (
    0x9E3779B97F4A7C15,
    0xC2B2AE3D27D4EB4F,
)  # odd multipliers with well-mixed bits: two hashes of one key
_MOST_EXPANDED = 4096


class DualMap(PolicyParams, frozen=True):
    """A policy that picks one of two endpoints, which hashes of the prompt's prefix select.

    It picks the endpoint with more of the prefix cached, unless its time to first token (TTFT) is
    too long. The hashed prefix is one block of the prompt. If that is a hot prefix, which many
    recent requests share, one more block is hashed. Otherwise a common system prompt would send all
    requests to the same two endpoints.

    Source: DualMap (ICLR'26, arXiv 2602.06502), and AIBrix's port (dualmap.go) for hot prefixes.
    Rendezvous hashing replaces its rings. Its migration of queued requests is left out.

    ttft_slo_s    TTFT in seconds beyond which the less loaded of the two is picked; None: the
                  request's own budget
    hot_share     a prefix is hot if this share (0 to 1) of the window's requests begins with it
    hot_window    number of recent requests in the window
    hot_at_least  number of requests in the window before any prefix is hot
    """

    ttft_slo_s: NonNegative | None = None
    hot_share: Fraction = 0.0612
    hot_window: PositiveCount = 200
    hot_at_least: NonNegativeCount = 20

    def build(self) -> Policy:
        pair = TwoHashPicker(self)
        return Policy(
            name="dualmap",
            filters=DEFAULT_FILTERS,
            scorers=(WeightedScorer(soonest),),
            picker=pair.pick,
            reads_prefix=True,
            reads_forecast=True,
        )


class TwoHashPicker:
    """Picks the better of two endpoints that hashes of the prompt's prefix select (policy DualMap).

    It remembers which prefixes are hot, so each policy needs its own picker.
    """

    __slots__ = ("_hot", "_salts", "_ttft_slo_s")

    def __init__(self, rule: DualMap) -> None:
        self._hot = HotPrefixes(rule.hot_share, rule.hot_window, rule.hot_at_least)
        self._ttft_slo_s = rule.ttft_slo_s
        self._salts: dict[str, int] = {}

    def pick(
        self, query: RoutingQuery, candidates: Sequence[Candidate], scores: Sequence[float]
    ) -> int:
        """Return the index of the better of the two endpoints that the hashes of the prefix select.

        `scores` are the candidates' expected times to first token in seconds, negated.
        """
        if len(candidates) == 1:
            return 0
        first, second = self._pair(self._key(query), candidates)
        cached = cached_tokens(query, (candidates[first], candidates[second]))
        if cached[0] == cached[1]:
            return first if scores[first] >= scores[second] else second
        fuller, other = (first, second) if cached[0] > cached[1] else (second, first)
        slo_s = query.request.slo.ttft_s if self._ttft_slo_s is None else self._ttft_slo_s
        return other if -scores[fuller] > slo_s and scores[other] > scores[fuller] else fuller

    def _key(self, query: RoutingQuery) -> int:
        # Return the key (hash) of the prefix by which to choose endpoints.
        #
        # For a prompt shorter than one block, return a random key.
        if query.fingerprint is not None and query.fingerprint.keys:
            return self._hot.key(query.fingerprint)
        return int(query.rng.random() * (_WORD + 1))

    def _pair(self, key: int, candidates: Sequence[Candidate]) -> tuple[int, int]:
        salted = [key ^ self._salt(candidate.endpoint.name) for candidate in candidates]
        draws = [word * _MIX[0] & _WORD for word in salted]
        first = draws.index(max(draws))
        draws = [word * _MIX[1] & _WORD for word in salted]
        draws[first] = -1
        return first, draws.index(max(draws))

    def _salt(self, name: str) -> int:
        salt = self._salts.get(name)
        if salt is None:
            salt = self._salts[name] = int.from_bytes(
                blake2b(name.encode(), digest_size=8).digest(), "big"
            )
        return salt


class HotPrefixes:
    """Finds prefixes that so many requests share that they need more than two endpoints.

    Such hot prefixes are hashed together with the next block of the prompt, so that their requests
    are spread. A prefix stays hot until `_MOST_EXPANDED` newer ones have replaced it.
    """

    __slots__ = ("_at_least", "_counts", "_expanded", "_recent", "_share", "_window")

    def __init__(self, share: float, window: int, at_least: int) -> None:
        self._share = share
        self._window = window
        self._at_least = at_least
        self._recent: deque[int] = deque()
        self._counts: Counter[int] = Counter()
        self._expanded: dict[int, None] = {}

    def key(self, fingerprint: Fingerprint) -> int:
        """Count the use of a prompt's prefix, and return the hash by which to choose endpoints."""
        keys, expanded, index = fingerprint.keys, self._expanded, 0
        last, key = len(keys) - 1, keys[0]
        while index < last and key in expanded:
            index += 1
            key = keys[index]
        if self._count(key) and index < last:
            expanded[key] = None
            if len(expanded) > _MOST_EXPANDED:
                del expanded[next(iter(expanded))]
        return key

    def _count(self, key: int) -> bool:
        # Count one use of the prefix with this key; return whether the prefix is hot.
        recent, counts = self._recent, self._counts
        recent.append(key)
        counts[key] += 1
        if len(recent) > self._window:
            oldest = recent.popleft()
            counts[oldest] -= 1
            if not counts[oldest]:
                del counts[oldest]
        return len(recent) >= self._at_least and counts[key] >= self._share * len(recent)
