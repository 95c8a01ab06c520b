"""Limits the number of sessions, so that the contexts of all of them fit the fleet's KV memory.

A session is a series of requests that share a growing context. Beyond the limit, every request
would evict a context that another one needs, and goodput would collapse (CONCUR, ICML 2026;
Dynamo's session-aware queue). WorkingSet counts the active sessions of all gateways. It learns for
how long an idle session counts, and what share of the KV memory sessions may fill. The refusal
itself is in priced_admission.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from math import exp, inf
from typing import Annotated

import msgspec

from policies.admission.drain_rate import DrainRate
from policies.param_types import Fraction, Positive, PositiveCount
from policies.routing_types import Candidate, SessionHints

CONTINUING_SHARE = 0.5
"""A request that names no session counts as a continued one if this share of its prompt is
cached.
"""

QUEUED = 2.0
"""Number of waiting prompts per endpoint from which evicted session contexts count as harmful.

It is a mean over time. Without queues, recomputing a context delays no other request.
"""

FIRST_SHARE = 0.7
"""Share of the fleet's KV memory, 0 to 1, that sessions may fill at the beginning of a limit."""

RELAX = 1.05
"""Factor by which the limit on sessions rises if it refused a session although no prompt waited.

The factor is applied once per period (`SessionGate.period_s`).
"""


CALM = 0.5
"""Number of waiting prompts per endpoint below which a session may exceed the limit.

It is a mean over the endpoints.
"""

EXTRA_S = 2.0
"""Minimum seconds between two sessions that one endpoint admits beyond the limit.

A pool of n endpoints may therefore admit n sessions in this time.
"""


class SessionGate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of a limit on the number of sessions that a pool serves at a time.

    A session is a series of requests with a growing context, such as a conversation. The limit
    keeps the contexts of all active sessions in the engines' KV caches: together they may fill
    `memory_share` of the fleet's KV memory. That share is adjusted while requests run. It shrinks
    if too many tokens that should have been cached had been evicted ("lost"), and grows if few
    were.

    start       initial memory_share. None: there is no limit at first. It begins when returning
                sessions lose more than lost_most while prompts queue at the engines. It ends when
                nothing queues and no session was refused for period_s
    least       smallest memory_share
    most        largest memory_share
    memory_s    seconds for which an idle session counts as active, until it is learned from the
                times after which sessions return
    shortest_s  smallest learned value of memory_s
    longest_s   largest value of memory_s
    returning   memory_s is learned so that this share of returning sessions still counts as active
    lost_most   lost share above which memory_share is reduced
    lost_least  lost share below which memory_share is increased
    period_s    minimum seconds between changes of memory_share
    remembered  maximum number of sessions stored, including expired ones
    """

    start: Positive | None = FIRST_SHARE
    least: Positive = 0.5
    most: Positive = 0.9
    memory_s: Positive = 180.0
    shortest_s: Positive = 60.0
    longest_s: Positive = 600.0
    returning: Fraction = 0.95
    lost_most: Fraction = 0.05
    lost_least: Fraction = 0.01
    period_s: Positive = 15.0
    remembered: PositiveCount = 65_536

    def __post_init__(self) -> None:
        start = self.least if self.start is None else self.start
        if not self.least <= start <= self.most:
            raise ValueError(
                f"invalid session limits: start ({start}) must be between least ({self.least}) "
                f"and most ({self.most})"
            )
        if self.shortest_s > self.longest_s:
            raise ValueError(
                f"invalid session limits: shortest_s ({self.shortest_s}) must not exceed "
                f"longest_s ({self.longest_s})"
            )
        if self.lost_least > self.lost_most:
            raise ValueError(
                f"invalid session limits: lost_least ({self.lost_least}) must not exceed "
                f"lost_most ({self.lost_most})"
            )


SessionKey = str | int
"""The key of a session: its name or, where gateways share sessions, a hash of the name.

All gateways compute the same hash.
"""


class SessionUpdate(msgspec.Struct, frozen=True, array_like=True):
    """An active session, as one gateway reports it to the others.

    session   hash of the session's name
    tokens    tokens of its context; 0: the session has ended
    silent_s  seconds since its last request
    """

    session: Annotated[int, msgspec.Meta(ge=0)]
    tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
    silent_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class ActiveSession:
    """A session whose context counts towards the used KV memory of the fleet.

    tokens                  tokens of its context, as far as known
    expected_cached_tokens  prompt tokens of its last request that were expected to be cached
    in_flight               number of its running requests
    last_used_s             time of its last request, on the policy clock
    keep_s                  seconds of idleness for which its client asked to keep the context;
                            None: `memory_s` applies
    is_ending               whether its client has sent its last request
    """

    __slots__ = (
        "expected_cached_tokens",
        "in_flight",
        "is_ending",
        "keep_s",
        "last_used_s",
        "tokens",
    )

    def __init__(self, now: float) -> None:
        self.tokens = self.expected_cached_tokens = self.in_flight = 0
        self.last_used_s = now
        self.keep_s: float | None = None
        self.is_ending = False


class WorkingSet:
    """The active sessions, whose contexts count towards the used KV memory of the fleet.

    A session is active from its first request until it has been idle for `memory_s` seconds.
    Sessions are ordered by last use, oldest first. Recently expired ones are kept too, to learn
    `memory_s`.

    tokens        context tokens of all active sessions
    memory_share  share of the fleet's KV memory that active sessions may fill; inf: no limit
    memory_s      seconds for which an idle session stays active
    gate          the parameters of the limit on sessions
    """

    __slots__ = (
        "_active",
        "_changed_s",
        "_drain",
        "_due",
        "_ended",
        "_expected_tokens",
        "_expired",
        "_extra_at",
        "_has_refused",
        "_key_of",
        "_lost_tokens",
        "_queued",
        "_updates",
        "gate",
        "memory_s",
        "memory_share",
        "tokens",
    )

    def __init__(self, gate: SessionGate | None = None) -> None:
        self.gate = gate or SessionGate()
        self._active: dict[SessionKey, ActiveSession] = {}
        self._expired: dict[SessionKey, float] = {}
        self._key_of: Callable[[str], SessionKey] | None = None
        self._updates: dict[SessionKey, None] = {}
        # sessions that have ended since the last updates were taken
        self._ended: dict[SessionKey, None] = {}
        self._due: list[tuple[float, int, SessionKey]] = []  # heap of ends of `keep_s`
        self.tokens = 0
        self.memory_share = inf if self.gate.start is None else self.gate.start
        self.memory_s = self.gate.memory_s
        self._lost_tokens = self._expected_tokens = 0.0
        self._has_refused = False
        self._changed_s = 0.0
        self._extra_at = -inf
        self._drain = DrainRate(self.gate.memory_s)
        self._queued = DecayingMean(self.gate.period_s)

    def __len__(self) -> int:
        return len(self._active)

    @property
    def is_limited(self) -> bool:
        """Return whether new sessions are refused if their contexts do not fit."""
        return self.memory_share < inf

    def contains(self, session: str) -> bool:
        """Return whether the session is active: it has a running request, or has ended one
        recently.
        """
        return self._key(session) in self._active

    def can_admit(self, session: str, tokens: int, kv_tokens: float | None) -> bool:
        """Return whether a session may enter: it is active already, or its context still fits.

        tokens     tokens of the session's context
        kv_tokens  the fleet's KV capacity in tokens; None: unknown, and every session may enter

        If no other session is active, it may enter even if its context exceeds the limit.
        """
        if not session or kv_tokens is None or not self._active or self.contains(session):
            return True
        if self.tokens + tokens <= self.memory_share * kv_tokens:
            return True
        self._has_refused = True
        return False

    def can_enter_beyond(self, candidates: Sequence[Candidate], now: float) -> bool:
        """Return whether a session may enter although its context does not fit; if so, count it.

        This exception keeps an idle fleet from refusing clients until ended sessions expire,
        minutes after their last answer. It applies only if the limit has begun because of losses
        (`start` is None), and hardly any prompt waits at the engines. One session may then enter
        every EXTRA_S seconds per endpoint.

        candidates  the endpoints of the pool
        now         the time in seconds
        """
        if self.gate.start is not None or waiting_prompts(candidates) >= CALM:
            return False
        if (now - self._extra_at) * max(1, len(candidates)) < EXTRA_S:
            return False
        self._extra_at = now
        return True

    def seconds_until_room(self, tokens: int, kv_tokens: float, now: float) -> float | None:
        """Estimate the seconds until enough sessions have expired for a context of `tokens` tokens.

        Returns None if the rate at which sessions expire is not known yet. `kv_tokens` is the
        fleet's KV capacity in tokens.
        """
        return self._drain.seconds_for(
            max(1.0, self.tokens + tokens - self.memory_share * kv_tokens), now
        )

    def on_reserved(
        self,
        session: str,
        prompt_tokens: int,
        most_cached_tokens: int,
        picked_cached_tokens: int,
        now: float,
    ) -> None:
        """Record that a request of the session was sent to an endpoint.

        most_cached_tokens    the largest number of prompt tokens that any candidate has cached
        picked_cached_tokens  prompt tokens that the picked endpoint is believed to have cached
        """
        name = self._key(session)
        one = self._active.pop(name, None)
        if one is None:
            one = ActiveSession(now)
            self._learn_retention(self._expired.pop(name, None), now)
        else:
            if not one.in_flight:
                self._learn_retention(one.last_used_s, now)
            expected = min(one.tokens, prompt_tokens)
            self._count_lost(expected, expected - most_cached_tokens)
        one.in_flight += 1
        one.is_ending = False
        one.expected_cached_tokens = picked_cached_tokens
        self._resize(one, prompt_tokens)
        self._touch(name, one, now)

    def on_ended(
        self, session: str, context_tokens: int | None, cached_tokens: int | None, now: float
    ) -> None:
        """Record the end of a request of the session.

        context_tokens  tokens of prompt and answer; None if there was no answer
        cached_tokens   prompt tokens that the engine reported as cached; None if it reported none
        """
        name = self._key(session)
        one = self._active.pop(name, None)
        if one is None:
            return
        one.in_flight = max(0, one.in_flight - 1)
        self._touch(name, one, now)
        if context_tokens is not None:
            self._resize(one, context_tokens)
        if cached_tokens is not None and one.expected_cached_tokens > cached_tokens:
            self._count_lost(0, one.expected_cached_tokens - cached_tokens)
        if one.is_ending and not one.in_flight:
            self._end(name, now)

    def apply_hints(self, session: str, hints: SessionHints, now: float) -> None:
        """Apply what a client has announced about its session with the request that has just ended.

        If that was the last request, the session ends when it has no running request any more. If
        the client asked to keep the context for some time, this time replaces `memory_s`, up to
        `longest_s`.
        """
        name = self._key(session)
        one = self._active.get(name)
        if one is None:
            return
        if hints.keep_s is not None:
            one.keep_s = min(hints.keep_s, self.gate.longest_s)
            if one.keep_s < self.memory_s and len(self._due) < self.gate.remembered:
                heappush(self._due, (now + one.keep_s, len(self._due), name))
        one.is_ending = hints.is_last
        if one.is_ending and not one.in_flight:
            self._end(name, now)

    def _end(self, name: SessionKey, now: float) -> None:
        # Remove a session that its client has ended, and report that to other gateways.
        one = self._active.pop(name)
        self.tokens -= one.tokens
        self._drain.record(now, one.tokens)
        self._updates.pop(name, None)
        if self._key_of is not None and len(self._ended) < self.gate.remembered:
            self._ended[name] = None

    # Several gateways

    def set_key_function(self, named: Callable[[str], SessionKey]) -> None:
        """Set how a session's name is hashed, so that several gateways recognise the same session.

        `named` is a function from the name to the hash. All gateways must compute the same hash.
        Call this method before any session enters.
        """
        self._key_of = named

    def apply_peer_sessions(
        self, members: Iterable[SessionUpdate], age_s: float, now: float
    ) -> None:
        """Count sessions that another gateway reported as active `age_s` seconds ago.

        The gateways share the engines, whose caches contain these contexts. The sessions expire
        like own ones after they have been idle for too long. If this gateway has more recent data
        about a session, it keeps that.
        """
        for member in members:
            seen_s = now - age_s - member.silent_s
            one = self._active.get(member.session)
            if (one is not None and one.last_used_s >= seen_s) or seen_s + self.memory_s <= now:
                continue
            if not member.tokens:
                if one is not None and not one.in_flight:
                    self.tokens -= self._active.pop(member.session).tokens
                continue
            self._expired.pop(member.session, None)
            self._active.pop(member.session, None)
            one = self._active[member.session] = one or ActiveSession(seen_s)
            one.last_used_s = seen_s
            self._resize(one, member.tokens)

    def take_updates(self, now: float) -> list[SessionUpdate]:
        """Return the sessions that this gateway has served or ended since the last call."""
        names, self._updates = self._updates, {}
        ended, self._ended = self._ended, {}
        return [
            *_members(((name, self._active[name]) for name in names), now),
            *(SessionUpdate(name, 0, 0.0) for name in ended if isinstance(name, int)),
        ]

    def all_sessions(self, now: float) -> Iterator[SessionUpdate]:
        """Yield all active sessions as messages for another gateway that has just started."""
        return _members(tuple(self._active.items()), now)

    # Time

    def tick(self, now: float, candidates: Sequence[Candidate] = ()) -> None:
        """Expire idle sessions, and change memory_share if too many or too few tokens were evicted.

        Call it regularly. `candidates` are the pool's endpoints. Only a limit that begins because
        of losses (`start` is None) needs them.
        """
        self._expire(now)
        gate = self.gate
        if gate.start is None and self._active:
            self._queued.record(waiting_prompts(candidates), now)
        if now - self._changed_s < gate.period_s or not self._expected_tokens:
            return
        lost = self._lost_tokens / self._expected_tokens
        if gate.start is None:
            self._adapt_on_evidence(lost, fleet_kv_tokens(candidates))
        elif lost > gate.lost_most:
            self.memory_share = max(gate.least, 0.9 * self.memory_share)
        else:
            self._grow_carefully(lost)
        fade = exp(-gate.period_s / self.memory_s)
        self._lost_tokens = self._lost_tokens * fade
        self._expected_tokens = self._expected_tokens * fade
        self._changed_s, self._has_refused = now, False

    def _adapt_on_evidence(self, lost: float, kv_tokens: float | None) -> None:
        # Limit sessions while evicted contexts make prompts queue; otherwise lift the limit.
        #
        # Contexts that are evicted on a fleet without queues harm no one, and refusals would.
        gate, queued = self.gate, self._queued.mean
        is_harmful = lost > gate.lost_most and queued >= QUEUED
        if not self.is_limited:
            if is_harmful and kv_tokens and self.tokens > gate.least * kv_tokens:
                self.memory_share = FIRST_SHARE
        elif is_harmful:
            self.memory_share = max(gate.least, 0.9 * self.memory_share)
        elif queued < 0.1 * QUEUED:
            self.memory_share = RELAX * self.memory_share if self._has_refused else inf
        else:
            self._grow_carefully(lost)

    def _grow_carefully(self, lost: float) -> None:
        if lost < self.gate.lost_least and self._has_refused:
            self.memory_share = min(self.gate.most, self.memory_share + 0.01)

    def _expire(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            _, _, name = heappop(self._due)
            hinted = self._active.get(name)
            if hinted is not None and not hinted.in_flight and not self._remaining_s(hinted, now):
                self._drop(name, now)
        for _ in range(len(self._active)):
            name, one = next(iter(self._active.items()))
            too_many = len(self._active) > self.gate.remembered // 2
            if one.last_used_s + self.memory_s > now and not too_many:
                return
            if too_many or not (one.in_flight or self._remaining_s(one, now)):
                self._drop(name, now)
            elif one.in_flight:
                self._touch(name, self._active.pop(name), now)
            else:  # the session's own keep time is longer: check it again in the next round
                self._active[name] = self._active.pop(name)

    def _remaining_s(self, one: ActiveSession, now: float) -> float:
        # Return the seconds that the session stays active if no further request comes.
        keep_s = self.memory_s if one.keep_s is None else one.keep_s
        return max(0.0, one.last_used_s + keep_s - now)

    def _drop(self, name: SessionKey, now: float) -> None:
        one = self._active.pop(name)
        self.tokens -= one.tokens
        self._updates.pop(name, None)
        self._drain.record(now, one.tokens)
        self._expired[name] = one.last_used_s
        if len(self._expired) > self.gate.remembered // 2:
            del self._expired[next(iter(self._expired))]

    def _key(self, session: str) -> SessionKey:
        return session if self._key_of is None else self._key_of(session)

    def _touch(self, name: SessionKey, one: ActiveSession, now: float) -> None:
        self._active[name] = one
        one.last_used_s = now
        if self._key_of is not None:
            self._updates[name] = None
            self._ended.pop(name, None)

    def _learn_retention(self, left_s: float | None, now: float) -> None:
        # Move memory_s towards a quantile of the time after which sessions return.
        #
        # `left_s` is when the returning session was last used; None if unknown. A later return than
        # memory_s raises memory_s; an earlier one lowers it.
        gate = self.gate
        if left_s is None or now - left_s > 2 * gate.longest_s:
            return
        late = now - left_s > self.memory_s
        step = 0.05 * (gate.returning if late else gate.returning - 1.0)
        self.memory_s = min(gate.longest_s, max(gate.shortest_s, self.memory_s * exp(step)))

    def _count_lost(self, expected: int, lost: int) -> None:
        self._expected_tokens += expected
        self._lost_tokens += max(0, lost)

    def _resize(self, one: ActiveSession, tokens: int) -> None:
        self.tokens += tokens - one.tokens
        one.tokens = tokens


def _members(
    sessions: Iterable[tuple[SessionKey, ActiveSession]], now: float
) -> Iterator[SessionUpdate]:
    for name, one in sessions:
        if isinstance(name, int):
            yield SessionUpdate(name, one.tokens, max(0.0, now - one.last_used_s))


def fleet_kv_tokens(candidates: Sequence[Candidate]) -> float | None:
    """Return the sum of the KV capacities of all available endpoints, in tokens.

    Returns None if the capacity of one of them is unknown.
    """
    total = 0.0
    for candidate in candidates:
        load = candidate.load
        if load.is_available:
            if load.kv_tokens is None:
                return None
            total += load.kv_tokens
    return total or None


def waiting_prompts(candidates: Sequence[Candidate]) -> float:
    """Return the mean number of waiting prompts per available endpoint.

    The engine reports this number. For an engine that does not, requests without a first token are
    counted.
    """
    loads = [candidate.load for candidate in candidates if candidate.load.is_available]
    waiting = [
        load.in_flight - load.decoding if load.waiting is None else load.waiting for load in loads
    ]
    return sum(waiting) / len(waiting) if waiting else 0.0


class DecayingMean:
    """The mean of a changing value over about the last `tau_s` seconds.

    mean  the current mean; 0.0 at the start
    """

    __slots__ = ("_at", "_tau_s", "mean")

    def __init__(self, tau_s: float) -> None:
        self._tau_s, self._at, self.mean = tau_s, 0.0, 0.0

    def record(self, value: float, now: float) -> None:
        """Record the value at `now`, to update the mean.

        The value is assumed to have been constant since the previous record.
        """
        self.mean += (value - self.mean) * (1.0 - exp((self._at - now) / self._tau_s))
        self._at = now


def is_continuation(prompt_tokens: int, cached_tokens: int) -> bool:
    """Return whether a request without a session key seems to continue a session.

    That is assumed if an endpoint has most of the request's prompt cached.
    """
    return cached_tokens >= CONTINUING_SHARE * prompt_tokens
