"""The traffic of a replay: requests at given times (open loop), and users that wait for answers.

Users that wait for an answer before the next request are a closed loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from random import Random

import msgspec

from planner.traces.recorded_request import PART_BITS, PRIVATE, TRACE_BITS, TraceRequest, to_64_bits

_OWN_IDS = 1 << TRACE_BITS
_COPY_SHIFT = TRACE_BITS + PART_BITS


class ClosedLoop(msgspec.Struct, frozen=True):
    """A client that sends a request, waits for the answer, pauses, and sends the next one.

    The first request is sent at `begins_s`, each further one `think_s` seconds after the previous
    answer. Each call of `requests` starts with the first request, because traffic is replayed many
    times.
    """

    begins_s: float
    requests: Callable[[], Iterator[TraceRequest]]


class Traffic(msgspec.Struct, frozen=True):
    """The traffic of a replay: requests with arrival times, and users that wait for answers.

    arrivals  requests with arrival times, in any order
    loops     users that send each request only after the answer to the previous one
    """

    arrivals: Sequence[TraceRequest] = ()
    loops: Sequence[ClosedLoop] = ()


def traffic(requests: Iterable[TraceRequest]) -> Traffic:
    """Convert a trace's requests to the traffic of a replay.

    A session with think times (pauses after answers) becomes a closed loop, which begins when its
    first request was recorded.
    """
    alone: list[TraceRequest] = []
    sessions: dict[str, list[TraceRequest]] = {}
    for request in requests:
        if request.think_s is not None and request.session in sessions:
            sessions[request.session].append(request)
        elif request.session:
            # The session's requests do not wait for answers, or the session starts over.
            if request.session in sessions:
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


def users(
    requests: Iterable[TraceRequest], count: int, seed: int = 0, ramp_s: float = 120.0
) -> Traffic:
    """Return `count` users that run sessions of the trace one after another, without end.

    requests  the trace; a request without a session is a session of its own
    seed      random seed for where and when users start
    ramp_s    each user starts at a random moment of this many seconds

    A user pauses 1 s between two sessions. It starts at a random request of its first session, as
    in a fleet that has been busy for a long time. When all sessions are used, they are repeated
    with new ids for all blocks that are not shared.
    """
    rng = Random(f"users {seed}")
    sessions = _sessions(requests)
    rng.shuffle(sessions)
    if not sessions:
        return Traffic()
    cuts = [rng.randrange(len(sessions[user % len(sessions)])) for user in range(count)]
    begins = [rng.uniform(0.0, ramp_s) for _ in range(count)]
    loops = [
        ClosedLoop(begins[user], partial(_user, sessions, user, count, cuts[user]))
        for user in range(count)
    ]
    return Traffic((), loops)


def _sessions(requests: Iterable[TraceRequest]) -> list[list[TraceRequest]]:
    sessions: list[list[TraceRequest]] = []
    known: dict[str, list[TraceRequest]] = {}
    for request in requests:
        if request.session in known:
            known[request.session].append(request)
            continue
        sessions.append([request])
        if request.session:
            known[request.session] = sessions[-1]
    return sessions


def _user(
    sessions: Sequence[Sequence[TraceRequest]], user: int, count: int, cut: int
) -> Iterator[TraceRequest]:
    index = user
    while True:
        copy = index // len(sessions)
        for request in sessions[index % len(sessions)][cut:]:
            yield _copy(request, copy, 1.0 if request.think_s is None else request.think_s)
        index, cut = index + count, 0


def _copy(request: TraceRequest, copy: int, think_s: float) -> TraceRequest:
    if not copy and request.think_s is not None:
        return request
    blocks = tuple(
        block_id if block_id % _OWN_IDS < PRIVATE else to_64_bits(block_id + (copy << _COPY_SHIFT))
        for block_id in request.blocks
    )
    name = f"{request.session}#{copy}" if copy else request.session
    return msgspec.structs.replace(request, blocks=blocks, session=name, think_s=think_s)
