"""Traffic as the fleet takes it: open arrivals that come whatever happens, and closed loops that wait for answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from random import Random

import msgspec

from planner.traces.shape import PART_BITS, PRIVATE, TRACE_BITS, TraceRequest, folded

_OWN_IDS = 1 << TRACE_BITS
_COPY_SHIFT = TRACE_BITS + PART_BITS


class ClosedLoop(msgspec.Struct, frozen=True):
    """One who asks, waits for the answer, thinks, and asks again: the first at `begins_s`, then each after its think_s.

    `requests` begins anew at every call: a traffic is replayed many times.
    """

    begins_s: float
    requests: Callable[[], Iterator[TraceRequest]]


class Traffic(msgspec.Struct, frozen=True):
    """Open arrivals in any order, and closed loops."""

    arrivals: Sequence[TraceRequest] = ()
    loops: Sequence[ClosedLoop] = ()


def traffic(requests: Iterable[TraceRequest]) -> Traffic:
    """What a trace says: a session with think times is a closed loop that begins when its first request came."""
    alone: list[TraceRequest] = []
    sessions: dict[str, list[TraceRequest]] = {}
    for request in requests:
        if request.think_s is not None and request.session in sessions:
            sessions[request.session].append(request)
        elif request.session:
            if request.session in sessions:  # its requests come whatever happens, or begin anew
                alone += sessions.pop(request.session)
            sessions[request.session] = [request]
        else:
            alone.append(request)
    loops = []
    for members in sessions.values():
        if len(members) > 1:
            loops.append(ClosedLoop(members[0].arrival_s, members.__iter__))
        else:
            alone += members
    return Traffic(alone, loops)


def users(requests: Iterable[TraceRequest], count: int, seed: int = 0, ramp_s: float = 120.0) -> Traffic:
    """So many users, each going through sessions of the trace one after another, 1 s between two of them, for ever.

    Each begins somewhere within a session, as one finds a fleet that has been busy for long, at a moment of the first
    `ramp_s`. When there are no more sessions they come again as others: all blocks but those shared get new names.
    A request that belongs to no session is one by itself.
    """
    rng = Random(f"users {seed}")
    sessions = _sessions(requests)
    rng.shuffle(sessions)
    if not sessions:
        return Traffic()
    cuts = [rng.randrange(len(sessions[user % len(sessions)])) for user in range(count)]
    begins = [rng.uniform(0.0, ramp_s) for _ in range(count)]
    loops = [ClosedLoop(begins[user], partial(_user, sessions, user, count, cuts[user])) for user in range(count)]
    return Traffic((), loops)


def _sessions(requests: Iterable[TraceRequest]) -> list[list[TraceRequest]]:
    found: list[list[TraceRequest]] = []
    known: dict[str, list[TraceRequest]] = {}
    for request in requests:
        if request.session in known:
            known[request.session].append(request)
            continue
        found.append([request])
        if request.session:
            known[request.session] = found[-1]
    return found


def _user(sessions: Sequence[Sequence[TraceRequest]], user: int, count: int, cut: int) -> Iterator[TraceRequest]:
    place = user
    while True:
        copy = place // len(sessions)
        for request in sessions[place % len(sessions)][cut:]:
            yield _copied(request, copy, 1.0 if request.think_s is None else request.think_s)
        place, cut = place + count, 0


def _copied(request: TraceRequest, copy: int, think_s: float) -> TraceRequest:
    if not copy and request.think_s is not None:
        return request
    blocks = tuple(
        each if each % _OWN_IDS < PRIVATE else folded(each + (copy << _COPY_SHIFT)) for each in request.blocks
    )
    name = f"{request.session}#{copy}" if copy else request.session
    return msgspec.structs.replace(request, blocks=blocks, session=name, think_s=think_s)
