"""The health of an endpoint: a state machine that decides whether the endpoint may be used.

This module has the state machine as a table, and the rule for a whole pool. The gateway sends
health probes and delivers events.

    UP         in use. Consecutive failures are counted; a success resets them.
    EJECTED    not in use. A successful probe after `until` ends it. The pool rule may use the
               endpoint anyway, unless the cause is CONNECT_FAILED: no engine answers there.
    DEAD       not in use, as the engine itself reports (/health). No rule overrides it.
    RETURNING  a probe succeeded: in use again, but one failure ejects it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from random import Random
from types import MappingProxyType

import msgspec


class HealthState(StrEnum):
    """The health states of one endpoint, such as UP, EJECTED, DEAD and RETURNING."""

    UP = "up"
    EJECTED = "ejected"
    DEAD = "dead"
    RETURNING = "returning"


# Looking up a member of an enumeration takes longer than reading a global name.
_UP, _RETURNING = HealthState.UP, HealthState.RETURNING


class HealthEvent(StrEnum):
    """An event at an endpoint that may change its health.

    IGNORED          a 4xx response or a client disconnect, which does not depend on the endpoint's
                     health
    CONNECT_FAILED   a connection was refused, timed out, or was reset before the first byte of a
                     response
    PROBE_OK_NEEDED  a probe succeeded, and no endpoint of the pool with this role is available
    SLOW             a speed review has found the endpoint slower than its peers
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
    """The limits that decide when an endpoint is ejected, and for how long.

    failures_in_a_row    consecutive failures that eject an endpoint; a refused connection ejects it
                         immediately
    first_s              seconds of the first ejection. Each further ejection after a return doubles
                         them. A failed probe doubles them only for a slow endpoint
    longest_s            maximum seconds of an ejection
    jitter               random variation of an ejection's length, as a fraction of it, so that
                         endpoints do not return at the same time
    successes_to_return  successful requests after a probe until the endpoint counts as up
    forgive_s            after this many seconds in use without an ejection, the next one lasts
                         first_s again
    ejected_share        share of a pool that failures of requests may eject (at least one endpoint,
                         never the last)
    """

    failures_in_a_row: int = 3
    first_s: float = 1.0
    longest_s: float = 300.0
    jitter: float = 0.2
    successes_to_return: int = 3
    forgive_s: float = 60.0
    ejected_share: float = 0.5


class Health(msgspec.Struct, frozen=True):
    """The health of one endpoint.

    since      when the state began, in seconds on the caller's clock
    until      when an ejection ends, on the same clock
    failures   consecutive failures in the state UP
    successes  successes since the probe in the state RETURNING
    ejections  number of recent ejections, which lengthen the next one
    cause      the event that ejected the endpoint; None: it has fully recovered
    """

    state: HealthState = HealthState.UP
    since: float = 0.0
    until: float = 0.0
    failures: int = 0
    successes: int = 0
    ejections: int = 0
    cause: HealthEvent | None = None


class _Transition(msgspec.Struct, frozen=True):
    event: HealthEvent
    now: float
    rng: Random
    limits: HealthLimits


def next_health(
    health: Health, event: HealthEvent, now: float, rng: Random, limits: HealthLimits
) -> Health:
    """Return the health of an endpoint after an event, such as a failed request or a good probe.

    health  its health before
    event   what happened, at the time `now`
    rng     random source for the length of an ejection
    limits  when an endpoint is ejected, and for how long

    Events that do not matter in a state change nothing. Among these are results of requests that
    were sent before an ejection: if twenty streams break together, the ejection must not double
    twenty times.
    """
    rule = _TABLE.get((health.state, event))
    return rule(health, _Transition(event, now, rng, limits)) if rule else health


def is_probe_due(health: Health, now: float) -> bool:
    """Return whether an endpoint's ejection time is over, so that a successful probe can end it."""
    return health.state in (HealthState.EJECTED, HealthState.DEAD) and now >= health.until


def is_unreachable(health: Health) -> bool:
    """Return whether the endpoint is ejected because no engine accepts connections at its
    address.
    """
    return health.state is HealthState.EJECTED and health.cause is HealthEvent.CONNECT_FAILED


def is_proven(health: Health) -> bool:
    """Return whether the endpoint's last result was a success, or it has had no failure yet."""
    if health.state is HealthState.UP:
        return not health.failures
    return health.state is HealthState.RETURNING and health.successes > 0


def available_endpoints(pool: Sequence[Health], limits: HealthLimits) -> list[bool]:
    """Return, for each endpoint of a pool, whether it may be used.

    Endpoints that are up or returning may be used. Dead and unreachable ones may not. Of the
    endpoints that were ejected because requests failed, at most `ejected_share` stay ejected (at
    least one, but never all): if half a pool seems to fail, the cause is probably outside the pool.
    The others are used again, those whose ejection ends first.
    """
    for health in pool:
        if health.state is not _UP and health.state is not _RETURNING:
            break
    else:  # nearly always all are in use, and a pool may have a thousand
        return [True] * len(pool)
    living = [not (health.state is HealthState.DEAD or is_unreachable(health)) for health in pool]
    most_out = min(sum(living) - 1, max(1, int(sum(living) * limits.ejected_share)))
    ejected = [
        index
        for index, health in enumerate(pool)
        if health.state is HealthState.EJECTED and living[index]
    ]
    ejected.sort(key=lambda index: pool[index].until, reverse=True)
    out = frozenset(ejected[: max(0, most_out)])
    return [alive and index not in out for index, alive in enumerate(living)]


def _count_failure(health: Health, transition: _Transition) -> Health:
    failures = health.failures + 1
    if failures >= transition.limits.failures_in_a_row:
        return _eject(health, transition)
    return msgspec.structs.replace(health, failures=failures)


def _eject(health: Health, transition: _Transition) -> Health:
    return _put_out(health, transition, HealthState.EJECTED)


def _mark_dead(health: Health, transition: _Transition) -> Health:
    return _put_out(health, transition, HealthState.DEAD)


def _put_out(health: Health, transition: _Transition, state: HealthState) -> Health:
    limits = transition.limits
    jitter = 1.0 + limits.jitter * (2.0 * transition.rng.random() - 1.0)
    backoff_s = limits.first_s * 2.0 ** min(health.ejections, 64)
    until = transition.now + min(limits.longest_s, backoff_s * jitter)
    return Health(
        state, transition.now, until, ejections=health.ejections + 1, cause=transition.event
    )


def _mark_unreachable(health: Health, transition: _Transition) -> Health:
    # Change the cause of an ejection to unreachable; its length stays the same.
    if is_unreachable(health):
        return health
    return msgspec.structs.replace(health, cause=HealthEvent.CONNECT_FAILED)


def _stay_out(health: Health, transition: _Transition) -> Health:
    # Keep the endpoint ejected after a failed probe; a new endpoint gets its first cause.
    #
    # The ejection of a slow endpoint is extended, because its probe costs the engine work.
    if health.cause is None:
        return msgspec.structs.replace(health, cause=transition.event)
    if health.cause is not HealthEvent.SLOW or transition.now < health.until:
        return health
    extended = _put_out(health, transition, health.state)
    return msgspec.structs.replace(extended, since=health.since, cause=health.cause)


def _return(health: Health, transition: _Transition) -> Health:
    # Use the endpoint again after a successful probe, but not before `until`, to damp flapping.
    if transition.now < health.until:
        return health
    return Health(
        HealthState.RETURNING, transition.now, ejections=health.ejections, cause=health.cause
    )


def _return_needed(health: Health, transition: _Transition) -> Health:
    # Use a pool's only endpoint again after a successful probe.
    #
    # It is used again immediately, or after `first_s` seconds if the endpoint flaps.
    if health.ejections > 1 and transition.now < min(
        health.until, health.since + transition.limits.first_s
    ):
        return health
    return Health(
        HealthState.RETURNING, transition.now, ejections=health.ejections, cause=health.cause
    )


def _recover(health: Health, transition: _Transition) -> Health:
    if health.successes + 1 < transition.limits.successes_to_return:
        return msgspec.structs.replace(health, successes=health.successes + 1)
    return Health(HealthState.UP, transition.now, ejections=health.ejections, cause=health.cause)


def _on_success(health: Health, transition: _Transition) -> Health:
    # Reset consecutive failures after a success, and the ejections after `forgive_s` seconds.
    #
    # In the usual case no object is allocated.
    if health.ejections and transition.now - health.since >= transition.limits.forgive_s:
        return Health(HealthState.UP, health.since)
    return msgspec.structs.replace(health, failures=0) if health.failures else health


_Rule = Callable[[Health, _Transition], Health]

_TABLE: Mapping[tuple[HealthState, HealthEvent], _Rule] = MappingProxyType(
    {
        (HealthState.UP, HealthEvent.SUCCEEDED): _on_success,
        (HealthState.UP, HealthEvent.CONNECT_FAILED): _eject,
        (HealthState.UP, HealthEvent.FAILED): _count_failure,
        (HealthState.UP, HealthEvent.TIMED_OUT): _count_failure,
        (HealthState.UP, HealthEvent.PROBE_FAILED): _count_failure,
        (HealthState.UP, HealthEvent.ENGINE_DEAD): _mark_dead,
        (HealthState.UP, HealthEvent.SLOW): _eject,
        (HealthState.RETURNING, HealthEvent.SUCCEEDED): _recover,
        (HealthState.RETURNING, HealthEvent.CONNECT_FAILED): _eject,
        (HealthState.RETURNING, HealthEvent.FAILED): _eject,
        (HealthState.RETURNING, HealthEvent.TIMED_OUT): _eject,
        (HealthState.RETURNING, HealthEvent.PROBE_FAILED): _eject,
        (HealthState.RETURNING, HealthEvent.ENGINE_DEAD): _mark_dead,
        (HealthState.RETURNING, HealthEvent.SLOW): _eject,
        (HealthState.EJECTED, HealthEvent.PROBE_OK): _return,
        (HealthState.EJECTED, HealthEvent.PROBE_OK_NEEDED): _return_needed,
        (HealthState.EJECTED, HealthEvent.PROBE_FAILED): _stay_out,
        (HealthState.EJECTED, HealthEvent.CONNECT_FAILED): _mark_unreachable,
        (HealthState.EJECTED, HealthEvent.ENGINE_DEAD): _mark_dead,
        (HealthState.DEAD, HealthEvent.PROBE_OK): _return,
        (HealthState.DEAD, HealthEvent.PROBE_OK_NEEDED): _return_needed,
    }
)
