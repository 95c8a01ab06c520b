"""Health: from what happened at an endpoint to whether it may be asked.

Lives here: one state machine per endpoint, as a table, and the rule for a whole pool. Not here: who probes and when
events arrive (gateway/endpoints.py).

    UP         asked. Failures in a row are counted, a success forgets them.
    EJECTED    not asked. A probe that goes well after `until` ends it. The pool's rule may overrule
               it, unless the cause is CONNECT_FAILED: no engine answers at that address.
    DEAD       the same, but on the engine's own word (its /health said so): nothing overrules it.
    RETURNING  a probe went well: asked again, and one failure is enough to leave again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from random import Random
from types import MappingProxyType

import msgspec


class State(StrEnum):
    UP = "up"
    EJECTED = "ejected"
    DEAD = "dead"
    RETURNING = "returning"


class Event(StrEnum):
    """What can happen at an endpoint. A 4xx answer or a client that left says nothing about it: IGNORED.

    CONNECT_FAILED   a connection was refused, timed out, or was reset before any byte of an answer
    PROBE_OK_NEEDED  a probe went well, and no endpoint of the pool with its role is available
    """

    SUCCEEDED = "succeeded"
    IGNORED = "ignored"
    CONNECT_FAILED = "connect_failed"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    PROBE_OK = "probe_ok"
    PROBE_OK_NEEDED = "probe_ok_needed"
    PROBE_FAILED = "probe_failed"
    ENGINE_DEAD = "engine_dead"
    SLOW = "slow"


class HealthLimits(msgspec.Struct, frozen=True):
    """When to eject and for how long.

    failures_in_a_row    this many eject; a refused connection ejects at once, it is a fact and no statistic
    first_s, longest_s   the first ejection's length; each further one doubles, up to the longest.
                         A failed probe doubles it only for a slow endpoint, a bad return always
    jitter               each length is spread by up to this share either way, so that returns do not coincide
    successes_to_return  good answers after a probe before the endpoint counts as up
    forgive_s            time up without an ejection after which the doubling starts anew
    ejected_share        share of a pool that passive evidence may eject (at least one endpoint, never the last)
    """

    failures_in_a_row: int = 3
    first_s: float = 1.0
    longest_s: float = 300.0
    jitter: float = 0.2
    successes_to_return: int = 3
    forgive_s: float = 60.0
    ejected_share: float = 0.5


class Health(msgspec.Struct, frozen=True):
    """One endpoint's standing.

    since      when the state began; until: when an ejection ends (both seconds on the caller's clock)
    failures   in a row while UP; successes: since the probe while RETURNING
    ejections  not yet forgiven: the exponent of the next length
    cause      the event that ejected it, before it was seen well again
    """

    state: State = State.UP
    since: float = 0.0
    until: float = 0.0
    failures: int = 0
    successes: int = 0
    ejections: int = 0
    cause: Event | None = None


class _Happening(msgspec.Struct, frozen=True):
    event: Event
    now: float
    rng: Random
    limits: HealthLimits


def advance(health: Health, event: Event, now: float, rng: Random, limits: HealthLimits) -> Health:
    """The endpoint's standing after `event` at `now`. Pairs not in the table change nothing.

    What an ejected endpoint's earlier requests still report is not in the table on purpose: twenty streams that die
    together are one event, and must not double the backoff twenty times.
    """
    rule = _TABLE.get((health.state, event))
    return rule(health, _Happening(event, now, rng, limits)) if rule else health


def probe_due(health: Health, now: float) -> bool:
    """An ejection has run out and a probe may now decide whether the endpoint returns."""
    return health.state in (State.EJECTED, State.DEAD) and now >= health.until


def is_unreachable(health: Health) -> bool:
    """Whether the endpoint is out because no engine answers at its address."""
    return health.state is State.EJECTED and health.cause is Event.CONNECT_FAILED


def is_proven(health: Health) -> bool:
    """Whether the endpoint has had no failure, or a success since its last failure."""
    if health.state is State.UP:
        return not health.failures
    return health.state is State.RETURNING and health.successes > 0


def available(pool: Sequence[Health], limits: HealthLimits) -> list[bool]:
    """Return which endpoints of a pool may be asked, aligned with the argument.

    Endpoints that are up or returning may; dead and unreachable ones may not. Of the rest, ejected
    by passive evidence, at most `ejected_share` stay out (at least one, but never all of them): if
    half a pool seems to fail, the cause is more likely in front of it than in it. Those whose
    ejection ends first are asked again first.
    """
    living = [not (health.state is State.DEAD or is_unreachable(health)) for health in pool]
    most_out = min(sum(living) - 1, max(1, int(sum(living) * limits.ejected_share)))
    ejected = [index for index, health in enumerate(pool) if health.state is State.EJECTED and living[index]]
    ejected.sort(key=lambda index: pool[index].until, reverse=True)
    out = frozenset(ejected[: max(0, most_out)])
    return [alive and index not in out for index, alive in enumerate(living)]


def _count_failure(health: Health, what: _Happening) -> Health:
    failures = health.failures + 1
    if failures >= what.limits.failures_in_a_row:
        return _eject(health, what)
    return msgspec.structs.replace(health, failures=failures)


def _eject(health: Health, what: _Happening) -> Health:
    return _leave(health, what, State.EJECTED)


def _die(health: Health, what: _Happening) -> Health:
    return _leave(health, what, State.DEAD)


def _leave(health: Health, what: _Happening, state: State) -> Health:
    limits = what.limits
    spread = 1.0 + limits.jitter * (2.0 * what.rng.random() - 1.0)
    doubled = limits.first_s * 2.0 ** min(health.ejections, 64)
    until = what.now + min(limits.longest_s, doubled * spread)
    return Health(state, what.now, until, ejections=health.ejections + 1, cause=what.event)


def _lose(health: Health, what: _Happening) -> Health:
    """A connection failed while ejected: the endpoint is unreachable now; its time out stays."""
    if is_unreachable(health):
        return health
    return msgspec.structs.replace(health, cause=Event.CONNECT_FAILED)


def _stay_out(health: Health, what: _Happening) -> Health:
    """A probe failed: the endpoint stays out for what it left; a new endpoint gets its first cause.

    Only a probe of a slow endpoint costs the engine work: those become rarer.
    """
    if health.cause is None:
        return msgspec.structs.replace(health, cause=what.event)
    if health.cause is not Event.SLOW or what.now < health.until:
        return health
    again = _leave(health, what, health.state)
    return msgspec.structs.replace(again, since=health.since, cause=health.cause)


def _return(health: Health, what: _Happening) -> Health:
    """A probe went well. Before `until` it is too early: a flapping endpoint would come back at every flap."""
    if what.now < health.until:
        return health
    return Health(State.RETURNING, what.now, ejections=health.ejections, cause=health.cause)


def _return_needed(health: Health, what: _Happening) -> Health:
    """A probe went well and the pool has no other endpoint: no back-off, or a second if it flaps."""
    if health.ejections > 1 and what.now < min(health.until, health.since + what.limits.first_s):
        return health
    return Health(State.RETURNING, what.now, ejections=health.ejections, cause=health.cause)


def _recover(health: Health, what: _Happening) -> Health:
    if health.successes + 1 < what.limits.successes_to_return:
        return msgspec.structs.replace(health, successes=health.successes + 1)
    return Health(State.UP, what.now, ejections=health.ejections, cause=health.cause)


def _forget(health: Health, what: _Happening) -> Health:
    """A success while up ends a row of failures, and in time the memory of ejections; mostly it builds nothing."""
    if health.ejections and what.now - health.since >= what.limits.forgive_s:
        return Health(State.UP, health.since)
    return msgspec.structs.replace(health, failures=0) if health.failures else health


_Rule = Callable[[Health, _Happening], Health]

_TABLE: Mapping[tuple[State, Event], _Rule] = MappingProxyType(
    {
        (State.UP, Event.SUCCEEDED): _forget,
        (State.UP, Event.CONNECT_FAILED): _eject,
        (State.UP, Event.FAILED): _count_failure,
        (State.UP, Event.TIMED_OUT): _count_failure,
        (State.UP, Event.PROBE_FAILED): _count_failure,
        (State.UP, Event.ENGINE_DEAD): _die,
        (State.UP, Event.SLOW): _eject,
        (State.RETURNING, Event.SUCCEEDED): _recover,
        (State.RETURNING, Event.CONNECT_FAILED): _eject,
        (State.RETURNING, Event.FAILED): _eject,
        (State.RETURNING, Event.TIMED_OUT): _eject,
        (State.RETURNING, Event.PROBE_FAILED): _eject,
        (State.RETURNING, Event.ENGINE_DEAD): _die,
        (State.RETURNING, Event.SLOW): _eject,
        (State.EJECTED, Event.PROBE_OK): _return,
        (State.EJECTED, Event.PROBE_OK_NEEDED): _return_needed,
        (State.EJECTED, Event.PROBE_FAILED): _stay_out,
        (State.EJECTED, Event.CONNECT_FAILED): _lose,
        (State.EJECTED, Event.ENGINE_DEAD): _die,
        (State.DEAD, Event.PROBE_OK): _return,
        (State.DEAD, Event.PROBE_OK_NEEDED): _return_needed,
    }
)
