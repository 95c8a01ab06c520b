"""The working-set gate: a new session enters only while the contexts of those in fit the fleet's KV memory.

Beyond that point every request evicts what another is about to ask for, and goodput falls off a cliff (CONCUR, ICML
2026; Dynamo's session-aware queue). Lives here: who is in, at whichever gateway, how long one who thinks is remembered,
and how full is too full, both learnt. Not here: what a refusal says (dual.py), which engine holds what
(prefix_index.py), or how gateways hear of each other (gateway/shared).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import exp
from typing import Annotated

import msgspec

from policies.admission import DrainRate
from policies.bounds import Number, Positive, Share
from policies.model import Candidate

CONTINUING_SHARE = 0.5
"""A request without a session that finds at least so much of its prompt cached goes on with something."""


class SessionGate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of the gate.

    start, least, most   phi: the share of the fleet's KV that active sessions may fill
    memory_s             how long after its last answer a session counts as in, until return times were measured;
    shortest_s, longest_s  bounds of that
    returning            the share of returns that should find their session still counted
    lost_most, lost_least  shares of continuing sessions' tokens found evicted above which phi shrinks, below which it
                         grows; period_s: how often at most
    remembered           sessions kept in mind at most, those that are in included
    """

    start: Positive = 0.7
    least: Positive = 0.5
    most: Positive = 0.9
    memory_s: Positive = 180.0
    shortest_s: Positive = 60.0
    longest_s: Positive = 600.0
    returning: Share = 0.95
    lost_most: Share = 0.05
    lost_least: Share = 0.01
    period_s: Positive = 15.0
    remembered: Number = 65_536

    def __post_init__(self) -> None:
        if not (self.least <= self.start <= self.most and self.shortest_s <= self.longest_s):
            raise ValueError(f"least, start and most ascend, and so do shortest_s and longest_s, not {self}")
        if self.lost_least > self.lost_most:
            raise ValueError(f"lost_least is {self.lost_least} and more than lost_most, {self.lost_most}")


Name = str | int
"""What a session is known by: its own name or, among several gateways, a digest on which all of them agree."""


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A session that is in, as other gateways hear of it. `silent_s`: since when nothing was heard of it."""

    session: Annotated[int, msgspec.Meta(ge=0)]
    tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
    silent_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)]


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
        "_named",
        "_refused",
        "_untold",
        "_was",
        "memory_s",
        "phi",
        "tokens",
    )

    def __init__(self, gate: SessionGate | None = None) -> None:
        self._gate = gate or SessionGate()
        self._in: dict[Name, Session] = {}
        self._was: dict[Name, float] = {}
        self._named: Callable[[str], Name] | None = None
        self._untold: dict[Name, None] = {}
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
        return self._name(session) in self._in

    def admits(self, session: str, tokens: int, kv_tokens: float | None) -> bool:
        """Whether it is in, or may come in with a context of so many tokens. Nothing is refused while the fleet's KV is
        unknown, nor when nobody is in: one that is too large for any share must be served some time."""
        if not session or kv_tokens is None or not self._in or self.holds(session):
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
        name = self._name(session)
        one = self._in.pop(name, None)
        if one is None:
            one = Session(now)
            self._returned(self._was.pop(name, None), now)
        else:
            if not one.in_flight:
                self._returned(one.seen_s, now)
            expected = min(one.tokens, prompt_tokens)
            self._saw(expected, expected - held)
        one.in_flight += 1
        one.believed = believed
        self._resize(one, prompt_tokens)
        self._seen(name, one, now)

    def ended(self, session: str, context_tokens: int | None, cached_tokens: int | None, now: float) -> None:
        """A request of it is over. `context_tokens`: prompt and answer, None if there was no answer; `cached_tokens`:
        what the engine says it found of the prompt."""
        name = self._name(session)
        one = self._in.pop(name, None)
        if one is None:
            return
        one.in_flight = max(0, one.in_flight - 1)
        self._seen(name, one, now)
        if context_tokens is not None:
            self._resize(one, context_tokens)
        if cached_tokens is not None and one.believed > cached_tokens:
            self._saw(0, one.believed - cached_tokens)

    # Several gateways

    def share(self, named: Callable[[str], Name]) -> None:
        """Other gateways serve the same sessions, and call them so. To be called before anybody is in."""
        self._named = named

    def elsewhere(self, members: Iterable[Member], age_s: float, now: float) -> None:
        """Other gateways served these, as they said so long ago. They count as one's own do, until they have been
        silent for too long: it is engines that hold their contexts. What is known better here stays."""
        for member in members:
            seen_s = now - age_s - member.silent_s
            one = self._in.get(member.session)
            if (one is not None and one.seen_s >= seen_s) or seen_s + self.memory_s <= now:
                continue
            self._was.pop(member.session, None)
            self._in.pop(member.session, None)
            one = self._in[member.session] = one or Session(seen_s)
            one.seen_s = seen_s
            self._resize(one, member.tokens)

    def untold(self, now: float) -> list[Member]:
        """Who was served here since this was last asked."""
        names, self._untold = self._untold, {}
        return list(_members(((name, self._in[name]) for name in names), now))

    def members(self, now: float) -> Iterator[Member]:
        """All that are in now, for one who knows nobody."""
        return _members(tuple(self._in.items()), now)

    # Time

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
                self._seen(name, one, now)
                continue
            self.tokens -= one.tokens
            self._untold.pop(name, None)
            self._drain.completed(now, one.tokens)
            self._was[name] = one.seen_s
            if len(self._was) > self._gate.remembered // 2:
                del self._was[next(iter(self._was))]

    def _name(self, session: str) -> Name:
        return session if self._named is None else self._named(session)

    def _seen(self, name: Name, one: Session, now: float) -> None:
        """Something was heard of it here: it is the last to be forgotten, and the others will hear of it."""
        self._in[name] = one
        one.seen_s = now
        if self._named is not None:
            self._untold[name] = None

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


def _members(sessions: Iterable[tuple[Name, Session]], now: float) -> Iterator[Member]:
    for name, one in sessions:
        if isinstance(name, int):
            yield Member(name, one.tokens, max(0.0, now - one.seen_s))


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
