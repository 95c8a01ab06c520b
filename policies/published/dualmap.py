"""DualMap: two hashes of the prefix give two endpoints; the one with more cache unless it would be late."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from hashlib import blake2b

from policies.bounds import Amount, Count, Number, Share
from policies.contract import Policy, Weighted
from policies.fingerprint import Fingerprint
from policies.model import Ask, Candidate
from policies.presets import ORDINARY, Preset
from policies.published.mooncake import soonest
from policies.published.view import held

_WORD = (1 << 64) - 1
_MIX = (
    0x9E3779B97F4A7C15,
    0xC2B2AE3D27D4EB4F,
)  # odd, their bits well spread: two hashes of one key
_MOST_EXPANDED = 4096


class DualMap(Preset, frozen=True):
    """Of two endpoints that two hashes of the prefix name, the one with more of it cached, unless its TTFT is too long.

    DualMap (ICLR'26, arXiv 2602.06502). The hashed prefix is one block, and one more wherever a prefix is hot (a share
    of the last requests, as in AIBrix's port, dualmap.go), so that a system prompt common to all does not send all to
    the same two. Rendezvous hashing takes the place of its rings. What it migrates out of queues stays where it is.

    ttft_slo_s    TTFT beyond which the less loaded of the two is taken; None: the request's own budget
    hot_share     share of the window that makes a prefix hot
    hot_window    requests looked back on
    hot_at_least  requests in the window before anything is hot
    """

    ttft_slo_s: Amount | None = None
    hot_share: Share = 0.0612
    hot_window: Number = 200
    hot_at_least: Count = 20

    def build(self) -> Policy:
        pair = TwoHashes(self)
        return Policy(
            name="dualmap",
            filters=ORDINARY,
            scorers=(Weighted(soonest),),
            picker=pair.pick,
            reads_prefix=True,
            reads_beliefs=True,
        )


class TwoHashes:
    """The picker, with its memory of hot prefixes. Owned by the policy value it was built for."""

    __slots__ = ("_hot", "_salts", "_ttft_slo_s")

    def __init__(self, rule: DualMap) -> None:
        self._hot = HotPrefixes(rule.hot_share, rule.hot_window, rule.hot_at_least)
        self._ttft_slo_s = rule.ttft_slo_s
        self._salts: dict[str, int] = {}

    def pick(self, ask: Ask, candidates: Sequence[Candidate], scores: Sequence[float]) -> int:
        """`scores` are minus the expected TTFTs."""
        if len(candidates) == 1:
            return 0
        first, second = self._pair(self._key(ask), candidates)
        mine = held(ask, (candidates[first], candidates[second]))
        if mine[0] == mine[1]:
            return first if scores[first] >= scores[second] else second
        more, fewer = (first, second) if mine[0] > mine[1] else (second, first)
        slo_s = ask.request.slo.ttft_s if self._ttft_slo_s is None else self._ttft_slo_s
        return fewer if -scores[more] > slo_s and scores[fewer] > scores[more] else more

    def _key(self, ask: Ask) -> int:
        """The hashed prefix; any two endpoints for a prompt too short to have one."""
        if ask.fingerprint is not None and ask.fingerprint.keys:
            return self._hot.key(ask.fingerprint)
        return int(ask.rng.random() * (_WORD + 1))

    def _pair(self, key: int, candidates: Sequence[Candidate]) -> tuple[int, int]:
        """Who wins the first hash, and who of the others wins the second."""
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
    """How long a prefix to hash: one block, and another for every prefix of it that is hot.

    A hot prefix stays longer-hashed until `_MOST_EXPANDED` newer ones have pushed it out.
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
        """The key of the prefix to hash, which is counted as seen."""
        keys, expanded, place = fingerprint.keys, self._expanded, 0
        last, key = len(keys) - 1, keys[0]
        while place < last and key in expanded:
            place += 1
            key = keys[place]
        if self._seen(key) and place < last:
            expanded[key] = None
            if len(expanded) > _MOST_EXPANDED:
                del expanded[next(iter(expanded))]
        return key

    def _seen(self, key: int) -> bool:
        """Counts it; whether it is hot."""
        recent, counts = self._recent, self._counts
        recent.append(key)
        counts[key] += 1
        if len(recent) > self._window:
            oldest = recent.popleft()
            counts[oldest] -= 1
            if not counts[oldest]:
                del counts[oldest]
        return len(recent) >= self._at_least and counts[key] >= self._share * len(recent)
