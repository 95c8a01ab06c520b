"""The working-set gate: a new session enters only while the contexts of those in fit the fleet's KV memory.

Beyond that point every request evicts what another is about to ask for, and goodput falls off a cliff (CONCUR, ICML
2026; Dynamo's session-aware queue). Lives here: who is in, how long one who thinks is remembered, and how full is too
full, both learnt. Not here: what a refusal says (dual.py), or which engine holds what (prefix_index.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

import msgspec

from policies.admission import DrainRate
from policies.model import Candidate

CONTINUING_SHARE = 0.5
"""A request without a session that finds at least so much of its prompt cached goes on with something."""


class SessionGate(msgspec.Struct, frozen=True):
    """The parameters of the gate.

    start, least, most   phi: the share of the fleet's KV that active sessions may fill
    memory_s             how long after its last answer a session counts as in, until return times were measured;
    shortest_s, longest_s  bounds of that
    returning            the share of returns that should find their session still counted
    lost_most, lost_least  shares of continuing sessions' tokens found evicted above which phi shrinks, below which it
                         grows; period_s: how often at most
    remembered           sessions kept in mind at most, those that are in included
    """

    start: float = 0.7
    least: float = 0.5
    most: float = 0.9
    memory_s: float = 180.0
    shortest_s: float = 60.0
    longest_s: float = 600.0
    returning: float = 0.95
    lost_most: float = 0.05
    lost_least: float = 0.01
    period_s: float = 15.0
    remembered: int = 65_536


class Session:
    """One that is in. `tokens`: its context as far as known; `believed`: cached tokens that its last pick hoped for."""

    __slots__ = ("believed", "in_flight", "seen_s", "tokens")

    def __init__(self, now: float) -> None:
        self.tokens = self.believed = self.in_flight = 0
        self.seen_s = now


class WorkingSet:
    """The sessions that are in, oldest use first, and those that were. One owner.

    tokens    context tokens of the sessions that are in
    phi       the share of the fleet's KV that they may fill
    memory_s  how long a silent session counts as in
    """

    __slots__ = (
        "_changed_s",
        "_drain",
        "_found",
        "_gate",
        "_in",
        "_lost",
        "_refused",
        "_was",
        "memory_s",
        "phi",
        "tokens",
    )

    def __init__(self, gate: SessionGate | None = None) -> None:
        self._gate = gate or SessionGate()
        self._in: dict[str, Session] = {}
        self._was: dict[str, float] = {}
        self.tokens = 0
        self.phi = self._gate.start
        self.memory_s = self._gate.memory_s
        self._lost = self._found = 0.0
        self._refused = False
        self._changed_s = 0.0
        self._drain = DrainRate(self._gate.memory_s)

    def __len__(self) -> int:
        return len(self._in)

    def holds(self, session: str) -> bool:
        """Whether it is in already."""
        return session in self._in

    def admits(self, session: str, tokens: int, kv_tokens: float | None) -> bool:
        """Whether it is in, or may come in with a context of so many tokens. Nothing is refused while the fleet's KV is
        unknown, nor when nobody is in: one that is too large for any share must be served some time."""
        if not session or kv_tokens is None or not self._in or session in self._in:
            return True
        if self.tokens + tokens <= self.phi * kv_tokens:
            return True
        self._refused = True
        return False

    def room_in_s(self, tokens: int, kv_tokens: float, now: float) -> float | None:
        """How long until so many more may enter, at the rate at which contexts have been leaving; None if unknown."""
        return self._drain.seconds_for(max(1.0, self.tokens + tokens - self.phi * kv_tokens), now)

    def began(self, session: str, prompt_tokens: int, held: int, believed: int, now: float) -> None:
        """A request of the session was booked. `held`: the most of its prompt that any candidate holds; `believed`:
        what the picked one does."""
        one = self._in.pop(session, None)
        if one is None:
            one = Session(now)
            self._returned(self._was.pop(session, None), now)
        else:
            if not one.in_flight:
                self._returned(one.seen_s, now)
            expected = min(one.tokens, prompt_tokens)
            self._saw(expected, expected - held)
        self._in[session] = one
        one.in_flight += 1
        one.believed, one.seen_s = believed, now
        self._resize(one, prompt_tokens)

    def ended(self, session: str, context_tokens: int | None, cached_tokens: int | None, now: float) -> None:
        """A request of it is over. `context_tokens`: prompt and answer, None if there was no answer; `cached_tokens`:
        what the engine says it found of the prompt."""
        one = self._in.pop(session, None)
        if one is None:
            return
        self._in[session] = one
        one.in_flight = max(0, one.in_flight - 1)
        one.seen_s = now
        if context_tokens is not None:
            self._resize(one, context_tokens)
        if cached_tokens is not None and one.believed > cached_tokens:
            self._saw(0, one.believed - cached_tokens)

    def tick(self, now: float) -> None:
        """Forget who has been silent for too long, and let phi follow what was lost."""
        self._expire(now)
        gate = self._gate
        if now - self._changed_s < gate.period_s or not self._found:
            return
        lost = self._lost / self._found
        if lost > gate.lost_most:
            self.phi = max(gate.least, 0.9 * self.phi)
        elif lost < gate.lost_least and self._refused:
            self.phi = min(gate.most, self.phi + 0.01)
        fade = exp(-gate.period_s / self.memory_s)
        self._lost, self._found = self._lost * fade, self._found * fade
        self._changed_s, self._refused = now, False

    def _expire(self, now: float) -> None:
        while self._in:
            name, one = next(iter(self._in.items()))
            too_many = len(self._in) > self._gate.remembered // 2
            if one.seen_s + self.memory_s > now and not too_many:
                return
            del self._in[name]
            if one.in_flight and not too_many:
                self._in[name] = one
                one.seen_s = now
                continue
            self.tokens -= one.tokens
            self._drain.completed(now, one.tokens)
            self._was[name] = one.seen_s
            if len(self._was) > self._gate.remembered // 2:
                del self._was[next(iter(self._was))]

    def _returned(self, left_s: float | None, now: float) -> None:
        """Move the memory towards the quantile of return times: up for each that came later, down for others."""
        gate = self._gate
        if left_s is None or now - left_s > 2 * gate.longest_s:
            return
        late = now - left_s > self.memory_s
        step = 0.05 * (gate.returning if late else gate.returning - 1.0)
        self.memory_s = min(gate.longest_s, max(gate.shortest_s, self.memory_s * exp(step)))

    def _saw(self, expected: int, lost: int) -> None:
        self._found += expected
        self._lost += max(0, lost)

    def _resize(self, one: Session, tokens: int) -> None:
        self.tokens += tokens - one.tokens
        one.tokens = tokens


def fleet_kv_tokens(candidates: Sequence[Candidate]) -> float | None:
    """KV tokens of all available candidates; None when one of them is not known."""
    total = 0.0
    for candidate in candidates:
        load = candidate.load
        if load.available:
            if load.kv_tokens is None:
                return None
            total += load.kv_tokens
    return total or None


def continuing(prompt_tokens: int, cached_tokens: int) -> bool:
    """Whether a request that names no session seems to go on with one: nothing is remembered to tell."""
    return cached_tokens >= CONTINUING_SHARE * prompt_tokens
