"""The life of a split request, as a table: every state with its owner and deadline, every event with what is due.

Nothing is done here: pair.py carries out what a row says. States that nobody owns are ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple


class _Word(StrEnum):
    """A word of the table."""

    __hash__ = str.__hash__  # Enum's own is a call of Python, and the table is looked up at every event


class State(_Word):
    """Where a pair is with its request."""

    BOOKED = "booked"  # both places are taken, nothing was sent
    ASKING = "asking"  # the prefill endpoint's bootstrap server is asked who it is
    PREFILLING = "prefilling"  # P computes; D knows of nothing yet
    PAIRED = "paired"  # both have the request, D waits for P's KV
    HANDED_OVER = "handed_over"  # P is done and holds KV under its lease; the decode request has not left yet
    TRANSFERRING = "transferring"  # D has the request and fetches the KV, or awaits it
    RECOMPUTING = "recomputing"  # D has the whole request, without any handoff
    DECODING = "decoding"  # the client has tokens
    DONE = "done"
    FAILED = "failed"
    GONE = "gone"


class Event(_Word):
    """What can happen to a pair."""

    START_PREFILL = "sequential, or the first request to a prefill endpoint nobody knows yet"
    START_BOTH = "concurrent"
    START_ASKING = "concurrent, and the bootstrap server was not asked yet"
    KNOWN = "the bootstrap server has told who the prefill endpoint is"
    PREFILLED = "the prefill answer is whole, and the KV is there for its decoder"
    UNUSABLE = "the prefill answer holds nothing a decoder may be given"
    FINISHED = "the prefill answer is the whole answer"
    PREFILL_REFUSED = "P says that the request is wrong"
    PREFILL_BROKE = "P failed"
    SENT = "the decode request has left"
    UNREACHED = "the decode request could not be sent"
    FIRST_TOKEN = "the first token has come"  # noqa: S105
    DECODED = "the answer is whole"
    DECODE_REFUSED = "D says that the request is wrong"
    DECODE_BROKE = "D failed"
    NOBODY = "there is no other decode endpoint"
    OVERDUE = "the state has lasted too long"
    CLIENT_GONE = "the client has left"


class Act(_Word):
    """What is due."""

    ASK = "ask the bootstrap server"
    STOP_ASKING = "wait no more for the bootstrap server's answer: it is asked on if another pair waits for it"
    SEND_PREFILL = "send the prefill request"
    SEND_DECODE = "send the decode request with its handoff"
    SEND_WHOLE = "send the client's request to D as it is"
    OTHER_DECODE = "book another decode endpoint and send it the same handoff"
    ANSWER = "give the client the prefill answer"
    PASS_ON = "give the client the refusal"  # noqa: S105
    CLOSE_PREFILL = "close P's connection: engines take that as the abort"
    CLOSE_DECODE = "close D's connection"
    CALL_OFF_PREFILL = "tell P that nobody asks any more; is its answer on its way already, have D free the KV"
    FREE_BY_DECODE = "close D's connection once its engine has surely seen the handoff: then it tells P to free the KV"
    FREE_BY_REFUSER = "D is asked for one token alone, with the handoff: then it tells P to free the KV"
    FREE_ELSEWHERE = "another decoder tells P to free the KV, once D has surely done with it"
    BLAME_PREFILL = "the failure is evidence about P"
    BLAME_DECODE = "the failure is evidence about D"
    BLAME_NOBODY = "nobody knows whose fault it was: the request is computed in one place, P is not asked again"


class Owner(StrEnum):
    """Who brings a state to its end: a leg, both, or the line itself."""

    PREFILL = "prefill leg"
    DECODE = "decode leg"
    BOTH = "both legs"
    LINE = "the line"


class Deadline(StrEnum):
    """How long a state may last; in the words of the configuration, where it has one.

    Connecting holds CONNECT, the gateway's sweep FIRST_BYTE, STALL and TRANSFER, the query BOOTSTRAP.
    """

    TURN = "the turn of the event loop in which it began"
    BOOTSTRAP = "one second after the bootstrap server was asked"
    CONNECT = "timeouts.connect"
    FIRST_BYTE = "timeouts.first_byte"
    TRANSFER = "split.transfer_timeout"
    STALL = "timeouts.stall"


class Row(NamedTuple):
    """What follows an event: the next state, and what is due, in order."""

    state: State
    acts: tuple[Act, ...] = ()


KEPT: Mapping[State, tuple[Owner, Deadline]] = MappingProxyType(
    {
        State.BOOKED: (Owner.LINE, Deadline.TURN),
        State.ASKING: (Owner.LINE, Deadline.BOOTSTRAP),
        State.PREFILLING: (Owner.PREFILL, Deadline.FIRST_BYTE),
        State.PAIRED: (Owner.BOTH, Deadline.FIRST_BYTE),
        State.HANDED_OVER: (Owner.DECODE, Deadline.CONNECT),
        State.TRANSFERRING: (Owner.DECODE, Deadline.TRANSFER),
        State.RECOMPUTING: (Owner.DECODE, Deadline.FIRST_BYTE),
        State.DECODING: (Owner.DECODE, Deadline.STALL),
    }
)

ENDS = frozenset(State) - KEPT.keys()

# The end of a leg that an event is: its role, and how.
LEG_ENDS: Mapping[Event, tuple[str, str]] = MappingProxyType(
    {
        Event.PREFILLED: ("prefill", "served"),
        Event.UNUSABLE: ("prefill", "unusable"),
        Event.FINISHED: ("prefill", "finished"),
        Event.PREFILL_REFUSED: ("prefill", "refused"),
        Event.PREFILL_BROKE: ("prefill", "broke"),
        Event.UNREACHED: ("decode", "unreached"),
        Event.DECODED: ("decode", "served"),
        Event.DECODE_REFUSED: ("decode", "refused"),
        Event.DECODE_BROKE: ("decode", "broke"),
    }
)

TABLE: Mapping[tuple[State, Event], Row] = MappingProxyType(
    {
        (State.BOOKED, Event.START_PREFILL): Row(State.PREFILLING, (Act.SEND_PREFILL,)),
        (State.BOOKED, Event.START_BOTH): Row(State.PAIRED, (Act.SEND_DECODE, Act.SEND_PREFILL)),
        (State.BOOKED, Event.START_ASKING): Row(State.ASKING, (Act.ASK,)),
        (State.ASKING, Event.KNOWN): Row(State.PAIRED, (Act.SEND_DECODE, Act.SEND_PREFILL)),
        (State.ASKING, Event.PREFILL_BROKE): Row(State.FAILED, (Act.BLAME_PREFILL,)),
        (State.ASKING, Event.CLIENT_GONE): Row(State.GONE, (Act.STOP_ASKING,)),
        # One after the other
        (State.PREFILLING, Event.PREFILLED): Row(State.HANDED_OVER, (Act.SEND_DECODE,)),
        (State.PREFILLING, Event.UNUSABLE): Row(State.RECOMPUTING, (Act.SEND_WHOLE,)),
        (State.PREFILLING, Event.FINISHED): Row(State.DONE, (Act.ANSWER,)),
        (State.PREFILLING, Event.PREFILL_REFUSED): Row(State.DONE, (Act.PASS_ON,)),
        (State.PREFILLING, Event.PREFILL_BROKE): Row(State.FAILED, (Act.BLAME_PREFILL,)),
        (State.PREFILLING, Event.CLIENT_GONE): Row(State.GONE, (Act.CALL_OFF_PREFILL,)),
        (State.HANDED_OVER, Event.SENT): Row(State.TRANSFERRING),
        (State.HANDED_OVER, Event.UNREACHED): Row(State.HANDED_OVER, (Act.BLAME_DECODE, Act.OTHER_DECODE)),
        (State.HANDED_OVER, Event.NOBODY): Row(State.FAILED, (Act.FREE_ELSEWHERE,)),
        (State.HANDED_OVER, Event.CLIENT_GONE): Row(State.GONE, (Act.FREE_BY_DECODE,)),
        # Both at once
        (State.PAIRED, Event.SENT): Row(State.PAIRED),
        (State.PAIRED, Event.PREFILLED): Row(State.TRANSFERRING),
        (State.PAIRED, Event.UNUSABLE): Row(State.RECOMPUTING, (Act.CLOSE_DECODE, Act.SEND_WHOLE)),
        (State.PAIRED, Event.PREFILL_REFUSED): Row(State.DONE, (Act.CLOSE_DECODE, Act.PASS_ON)),
        (State.PAIRED, Event.PREFILL_BROKE): Row(State.FAILED, (Act.CLOSE_DECODE, Act.BLAME_PREFILL)),
        (State.PAIRED, Event.FIRST_TOKEN): Row(State.DECODING),
        (State.PAIRED, Event.DECODED): Row(State.DONE, (Act.CLOSE_PREFILL,)),
        (State.PAIRED, Event.DECODE_REFUSED): Row(State.DONE, (Act.CLOSE_PREFILL, Act.PASS_ON)),
        (State.PAIRED, Event.DECODE_BROKE): Row(State.FAILED, (Act.CLOSE_PREFILL, Act.BLAME_DECODE)),
        (State.PAIRED, Event.UNREACHED): Row(State.FAILED, (Act.CLOSE_PREFILL, Act.BLAME_DECODE)),
        (State.PAIRED, Event.CLIENT_GONE): Row(State.GONE, (Act.CLOSE_PREFILL, Act.FREE_BY_DECODE)),
        # From here on both orders are the same
        (State.TRANSFERRING, Event.SENT): Row(State.TRANSFERRING),
        (State.TRANSFERRING, Event.FIRST_TOKEN): Row(State.DECODING),
        (State.TRANSFERRING, Event.DECODED): Row(State.DONE),
        (State.TRANSFERRING, Event.DECODE_REFUSED): Row(State.DONE, (Act.PASS_ON, Act.FREE_BY_REFUSER)),
        (State.TRANSFERRING, Event.DECODE_BROKE): Row(State.FAILED, (Act.BLAME_DECODE, Act.FREE_ELSEWHERE)),
        (State.TRANSFERRING, Event.UNREACHED): Row(State.FAILED, (Act.BLAME_DECODE, Act.FREE_ELSEWHERE)),
        (State.TRANSFERRING, Event.OVERDUE): Row(State.FAILED, (Act.CLOSE_DECODE, Act.BLAME_NOBODY)),
        (State.TRANSFERRING, Event.CLIENT_GONE): Row(State.GONE, (Act.FREE_BY_DECODE,)),
        (State.RECOMPUTING, Event.SENT): Row(State.RECOMPUTING),
        (State.RECOMPUTING, Event.FIRST_TOKEN): Row(State.DECODING),
        (State.RECOMPUTING, Event.DECODED): Row(State.DONE),
        (State.RECOMPUTING, Event.DECODE_REFUSED): Row(State.DONE, (Act.PASS_ON,)),
        (State.RECOMPUTING, Event.DECODE_BROKE): Row(State.FAILED, (Act.BLAME_DECODE,)),
        (State.RECOMPUTING, Event.UNREACHED): Row(State.FAILED, (Act.BLAME_DECODE,)),
        (State.RECOMPUTING, Event.CLIENT_GONE): Row(State.GONE, (Act.CLOSE_DECODE,)),
        # P's answer may come after D's first token; it changes nothing any more
        (State.DECODING, Event.SENT): Row(State.DECODING),
        (State.DECODING, Event.PREFILLED): Row(State.DECODING),
        (State.DECODING, Event.UNUSABLE): Row(State.DECODING),
        (State.DECODING, Event.PREFILL_REFUSED): Row(State.DECODING),
        (State.DECODING, Event.PREFILL_BROKE): Row(State.DECODING, (Act.BLAME_PREFILL,)),
        (State.DECODING, Event.DECODED): Row(State.DONE, (Act.CLOSE_PREFILL,)),
        (State.DECODING, Event.DECODE_BROKE): Row(State.FAILED, (Act.CLOSE_PREFILL, Act.BLAME_DECODE)),
        (State.DECODING, Event.OVERDUE): Row(State.DECODING),
        (State.DECODING, Event.CLIENT_GONE): Row(State.GONE, (Act.CLOSE_PREFILL, Act.CLOSE_DECODE)),
    }
)
