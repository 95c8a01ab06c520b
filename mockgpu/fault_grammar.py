"""The kinds of injected faults, and the parser of their syntax, such as `5xx@0.1,stall:after=3`.

    SPEC    = fault ["," fault]...
    fault   = name [":" option]... ["@" chance | "@" start "-" [end]]...
    option  = key "=" value | "hang" | "prefill" | "decode"

For example, `5xx@0.1,stall:after=3@10-20` fails one request in ten, and stalls streams after three
tokens. The stalls occur from 10 to 20 seconds of wall time after the faults were set.

The effects are in mockgpu/http (one request), tp_group.py (lost rank, slow), job_faults.py (KV of
one request), handoff/faulty_link.py (bytes between KV agents) and kv_events/delivery_faults.py.
This module does no I/O.
"""

from __future__ import annotations

from enum import StrEnum
from math import inf
from random import Random

import msgspec


class FaultKind(StrEnum):
    """The kinds of faults that can be injected into a mock engine.

    GROUP_FAULTS affect the whole engine, the others one request at a time.
    """

    REFUSE = "refuse"
    ERROR = "5xx"
    RESET_BEFORE_HEADERS = "reset-before-headers"
    RESET_AFTER_HEADERS = "reset-after-headers"
    RESET_MID_STREAM = "reset-mid-stream"
    CUT = "cut"
    STALL = "stall"
    SPLIT = "split"
    COMMENTS = "comments"
    SLOW = "slow"
    LOST_RANK = "lost-rank"
    DIE_IN_PREFILL = "die-in-prefill"
    DIE_IN_TRANSFER = "die-in-transfer"
    DIE_IN_PULL = "die-in-pull"
    DIE_MID_DECODE = "die-mid-decode"
    KV_CORRUPT = "kv-corrupt"
    KV_LOST = "kv-lost"
    FREEZE = "freeze"
    PARTITION = "partition"
    WIRE_CORRUPT = "wire-corrupt"
    WIRE_CUT = "wire-cut"
    WIRE_REPLAY = "wire-replay"
    WIRE_STALL = "wire-stall"
    EVENTS_LOST = "events-lost"
    EVENTS_LATE = "events-late"
    EVENTS_DOUBLED = "events-doubled"
    EVENTS_REORDERED = "events-reordered"
    EVENTS_RESTARTED = "events-restarted"


class InjectedFault(msgspec.Struct, frozen=True):
    """A fault that was set for a mock engine, with its options, probability and period.

    after          where the fault starts: after so many tokens of the answer, or bytes between KV
                   agents
    status         HTTP status of the error response
    retry_after_s  seconds in the Retry-After of the error response; None: it has no such header
    factor         how many times as long each engine step takes
    only           the steps that the fault `slow` affects: "prefill" (steps with prompt tokens),
                   "decode" (other steps), or "" (all steps)
    rank           number of the lost rank
    hang           whether the jobs of a lost rank stop without an error instead of failing
    chance         probability (0 to 1) that the fault affects a request
    start_s        seconds from the injection until the fault begins
    end_s          seconds from the injection until the fault ends; inf: it does not end
    """

    kind: FaultKind
    after: int = 1
    status: int = 500
    retry_after_s: int | None = None
    factor: float = 10.0
    only: str = ""
    rank: int = 0
    hang: bool = False
    chance: float = 1.0
    start_s: float = 0.0
    end_s: float = inf

    def should_strike(self, elapsed_s: float, rng: Random) -> bool:
        """Decide whether the fault affects a request that arrives now.

        elapsed_s  seconds since the fault was set; outside the fault's period, the result is False
        rng        random source for the probability `chance`
        """
        return self.start_s <= elapsed_s < self.end_s and (
            self.chance >= 1 or rng.random() < self.chance
        )


# Faults that break a response off after its headers, and faults that a stream's sink applies.
BREAKING_FAULTS = frozenset(
    (FaultKind.RESET_AFTER_HEADERS, FaultKind.RESET_MID_STREAM, FaultKind.CUT)
)
STREAM_FAULTS = frozenset(
    (
        FaultKind.RESET_MID_STREAM,
        FaultKind.CUT,
        FaultKind.STALL,
        FaultKind.SPLIT,
        FaultKind.COMMENTS,
    )
)
# Faults of one request's KV, or of the group at a moment of one request's life
# (mockgpu/job_faults.py).
KV_FAULTS = frozenset(
    (
        FaultKind.DIE_IN_PREFILL,
        FaultKind.DIE_IN_TRANSFER,
        FaultKind.DIE_IN_PULL,
        FaultKind.DIE_MID_DECODE,
        FaultKind.KV_CORRUPT,
        FaultKind.KV_LOST,
    )
)
# Faults of the bytes between this group's agent and its peers (mockgpu/handoff/faulty_link.py).
WIRE_FAULTS = frozenset(
    (FaultKind.WIRE_CORRUPT, FaultKind.WIRE_CUT, FaultKind.WIRE_REPLAY, FaultKind.WIRE_STALL)
)
# Faults of published KV events, message by message (mockgpu/kv_events/numbered_event_batches.py).
EVENT_FAULTS = frozenset(
    (
        FaultKind.EVENTS_LOST,
        FaultKind.EVENTS_LATE,
        FaultKind.EVENTS_DOUBLED,
        FaultKind.EVENTS_REORDERED,
        FaultKind.EVENTS_RESTARTED,
    )
)
# Faults that lose a rank, and with it the group.
RANK_FAULTS = frozenset((FaultKind.LOST_RANK, FaultKind.FREEZE, FaultKind.PARTITION))
GROUP_FAULTS = RANK_FAULTS | WIRE_FAULTS | {FaultKind.REFUSE, FaultKind.SLOW}

# The options of each fault.
_OPTIONS: dict[FaultKind, tuple[str, ...]] = {
    FaultKind.ERROR: ("status", "retry-after"),
    FaultKind.RESET_MID_STREAM: ("after",),
    FaultKind.CUT: ("after",),
    FaultKind.STALL: ("after",),
    FaultKind.SLOW: ("x", "prefill", "decode"),
    FaultKind.LOST_RANK: ("hang", "rank"),
    FaultKind.DIE_MID_DECODE: ("after",),
    FaultKind.WIRE_CORRUPT: ("after",),
    FaultKind.WIRE_CUT: ("after",),
    FaultKind.WIRE_REPLAY: ("after",),
}


class FaultError(ValueError):
    """Raised for an invalid fault specification.

    The message contains the wrong part and the reason.
    """


def parse_faults(spec: str) -> tuple[InjectedFault, ...]:
    """Parse a fault specification such as `5xx@0.1,stall:after=3@10-20`.

    An empty string is no faults. Raises FaultError if the specification is invalid.
    """
    return tuple(_fault(part.strip()) for part in spec.split(",")) if spec.strip() else ()


def _fault(text: str) -> InjectedFault:
    head, *limits = text.split("@")
    name, *options = head.split(":")
    try:
        kind = FaultKind(name)
    except ValueError:
        raise FaultError(f"unknown fault {name!r}; known faults: {', '.join(FaultKind)}") from None
    values: dict[str, float | int | bool | str] = {}
    for option in options:
        values |= _option(kind, option)
    for limit in limits:
        values |= _limit(limit)
    if kind in GROUP_FAULTS and "chance" in values:
        raise FaultError(
            f"the fault {kind} affects the whole group: give it a period such as @10-20, not a "
            "probability"
        )
    return msgspec.convert({"kind": kind} | values, InjectedFault)


def _option(kind: FaultKind, text: str) -> dict[str, float | int | bool | str]:
    key, _, value = text.partition("=")
    if key not in _OPTIONS.get(kind, ()):
        allowed = ", ".join(_OPTIONS.get(kind, ())) or "none"
        raise FaultError(f"the fault {kind} has no option {key!r}; its options: {allowed}")
    if key in ("hang", "prefill", "decode"):
        if value:
            raise FaultError(f"the option {key!r} of a fault has no value: remove the part after =")
        return {"hang": True} if key == "hang" else {"only": key}
    if key == "x":
        return {"factor": _number(value, "x", least=0.01)}
    number = _number(value, key, least=0)
    is_error = number == 429 or 500 <= number <= 599
    if number != int(number) or (key == "status" and not is_error):
        raise FaultError(
            f"the fault {kind} does not allow the value {value!r} for its option {key!r}"
        )
    return {"retry_after_s" if key == "retry-after" else key: int(number)}


def _limit(text: str) -> dict[str, float | int | bool | str]:
    if "-" in text:
        start, _, end = text.partition("-")
        window = (
            _number(start, "window start", least=0),
            _number(end, "window end", least=0) if end else inf,
        )
        if window[0] >= window[1]:
            raise FaultError(f"the period {text!r} of a fault ends before it starts")
        return {"start_s": window[0], "end_s": window[1]}
    chance = _number(text.removeprefix("p="), "chance", least=0)
    if not 0 < chance <= 1:
        raise FaultError(f"the probability of a fault must be above 0 and at most 1, not {text!r}")
    return {"chance": chance}


def _number(text: str, what: str, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise FaultError(f"{what} of a fault must be a number, not {text!r}") from None
    if not least <= value < inf:
        raise FaultError(f"{what} of a fault is out of range: {text!r}")
    return value
