"""The table of an attempt at a split request: states, events, next states and names of actions.

pair_attempt.py carries out the rows of the table. States outside LIVE_STATES are end states.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple


class _Word(StrEnum):
    __hash__ = (
        str.__hash__
    )  # Enum's own is a Python call, and the table is looked up at every event


class State(_Word):
    """The state of an attempt at a split request.

    In the comments, P is the prefill endpoint and D is the decode endpoint.
    """

    RESERVED = "reserved"  # capacity is reserved at P and D; nothing was sent
    QUERYING = "querying"  # P's bootstrap server was asked for P's identity
    PREFILLING = "prefilling"  # P computes; D has received nothing
    # P was asked for the KV of the prompt's beginning, which it has cached; D has received nothing.
    PULLING = "pulling"
    PAIRED = "paired"  # P and D have the request; D waits for P's KV
    # P holds the KV under its lease; the decode request is not sent yet.
    HANDED_OVER = "handed_over"
    TRANSFERRING = "transferring"  # D has the request and fetches the KV, or waits for it
    RECOMPUTING = "recomputing"  # D has the whole request, without a handoff
    DECODING = "decoding"  # the client has tokens
    DONE = "done"
    FAILED = "failed"
    GONE = "gone"


class Event(_Word):
    """An event in an attempt at a split request.

    In the values, P is the prefill endpoint and D is the decode endpoint.
    """

    START_PREFILL = (
        "sequential dialect, or the first request to a prefill endpoint of unknown identity"
    )
    START_PULL = "D is to fetch the beginning of the prompt from P, and to compute the rest"
    START_BOTH = "concurrent dialect"
    START_QUERY = "concurrent dialect, and the bootstrap server was not asked yet"
    KNOWN = "the bootstrap server has identified P"
    PREFILLED = "the prefill answer is complete, and the KV is there for D"
    UNUSABLE = "the prefill answer contains nothing that D may be given"
    FINISHED = "the prefill answer is the whole answer"
    PREFILL_REFUSED = "P refuses the request as invalid"
    PREFILL_BROKE = "P failed"
    SENT = "the decode request was sent"
    UNREACHED = "the decode request could not be sent"
    FIRST_TOKEN = "the first token has come"  # noqa: S105
    DECODED = "the answer is complete"
    DECODE_REFUSED = "D refuses the request as invalid"
    DECODE_BROKE = "D failed"
    NO_OTHER_DECODE = "there is no other decode endpoint"
    OVERDUE = "the state has lasted too long"
    CLIENT_GONE = "the client has left"


class Act(_Word):
    """An action that follows an event in an attempt at a split request.

    In the values, P is the prefill endpoint and D is the decode endpoint.
    """

    QUERY_BOOTSTRAP = "ask the bootstrap server"
    LEAVE_QUERY = (
        "stop waiting for the bootstrap server; the query goes on if another attempt waits"
    )
    SEND_PREFILL = "send the prefill request"
    SEND_DECODE = "send the decode request with its handoff"
    SEND_WHOLE = "send the client's request to D without a handoff"
    OTHER_DECODE = "reserve another decode endpoint and send it the same handoff"
    ANSWER = "send the prefill answer to the client"
    PASS_ON = "send the refusal to the client"  # noqa: S105
    CLOSE_PREFILL = "close P's connection, which engines treat as an abort"
    CLOSE_DECODE = "close D's connection"
    ABORT_PREFILL = "abort P's request after a while; if its answer comes first, have D free the KV"
    FREE_BY_DECODE = (
        "close D's connection once its engine must have the handoff: D then has P free the KV"
    )
    FREE_BY_REFUSER = "ask D for one token with the handoff: D then has P free the KV"
    FREE_ELSEWHERE = "have another decode endpoint free the KV, once D must be done with it"
    BLAME_PREFILL = "count the failure against P"
    BLAME_DECODE = "count the failure against D"
    SUSPECT_BOTH = "P or D failed: compute the request at one endpoint, and do not ask P again"


class Owner(StrEnum):
    """The source of the event that ends a state of the attempt.

    The source is one of the two requests to engines (legs), both legs, or the coroutine that serves
    the client's request (REQUEST).
    """

    PREFILL = "prefill leg"
    DECODE = "decode leg"
    BOTH = "both legs"
    REQUEST = "the request"


class Deadline(StrEnum):
    """The time limits of states. A limit that is a setting has the setting's name as its value.

    These parts of the gateway enforce the limits:

    CONNECT     the code that connects
    FIRST_BYTE  the periodic check of all connections
    STALL       the periodic check of all connections
    TRANSFER    the periodic check of all KV transfers
    PULL        the periodic check of all KV transfers
    BOOTSTRAP   the query of the bootstrap server
    """

    TURN = "the turn of the event loop in which it began"
    BOOTSTRAP = "one second after the bootstrap server was asked"
    CONNECT = "timeouts.connect"
    FIRST_BYTE = "timeouts.first_byte"
    TRANSFER = "split.transfer_timeout"
    PULL = "the time in which D is expected to answer without a pull"
    STALL = "timeouts.stall"


class Row(NamedTuple):
    """One row of the state table: the state after an event, and the actions to carry out."""

    state: State
    acts: tuple[Act, ...] = ()


LIVE_STATES: Mapping[State, tuple[Owner, Deadline]] = MappingProxyType(
    {
        State.RESERVED: (Owner.REQUEST, Deadline.TURN),
        State.QUERYING: (Owner.REQUEST, Deadline.BOOTSTRAP),
        State.PREFILLING: (Owner.PREFILL, Deadline.FIRST_BYTE),
        State.PULLING: (Owner.PREFILL, Deadline.PULL),
        State.PAIRED: (Owner.BOTH, Deadline.FIRST_BYTE),
        State.HANDED_OVER: (Owner.DECODE, Deadline.CONNECT),
        State.TRANSFERRING: (Owner.DECODE, Deadline.TRANSFER),
        State.RECOMPUTING: (Owner.DECODE, Deadline.FIRST_BYTE),
        State.DECODING: (Owner.DECODE, Deadline.STALL),
    }
)

END_STATES = frozenset(State) - LIVE_STATES.keys()

# The events that are the end of a leg: its role, and how it ended (labels of
# penstock_split_legs_total).
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
        (State.RESERVED, Event.START_PREFILL): Row(State.PREFILLING, (Act.SEND_PREFILL,)),
        (State.RESERVED, Event.START_PULL): Row(State.PULLING, (Act.SEND_PREFILL,)),
        (State.RESERVED, Event.START_BOTH): Row(State.PAIRED, (Act.SEND_DECODE, Act.SEND_PREFILL)),
        (State.RESERVED, Event.START_QUERY): Row(State.QUERYING, (Act.QUERY_BOOTSTRAP,)),
        (State.QUERYING, Event.KNOWN): Row(State.PAIRED, (Act.SEND_DECODE, Act.SEND_PREFILL)),
        (State.QUERYING, Event.PREFILL_BROKE): Row(State.FAILED, (Act.BLAME_PREFILL,)),
        (State.QUERYING, Event.CLIENT_GONE): Row(State.GONE, (Act.LEAVE_QUERY,)),
        # P first; D gets its request after P has answered
        (State.PREFILLING, Event.PREFILLED): Row(State.HANDED_OVER, (Act.SEND_DECODE,)),
        (State.PREFILLING, Event.UNUSABLE): Row(State.RECOMPUTING, (Act.SEND_WHOLE,)),
        (State.PREFILLING, Event.FINISHED): Row(State.DONE, (Act.ANSWER,)),
        (State.PREFILLING, Event.PREFILL_REFUSED): Row(State.DONE, (Act.PASS_ON,)),
        (State.PREFILLING, Event.PREFILL_BROKE): Row(State.FAILED, (Act.BLAME_PREFILL,)),
        (State.PREFILLING, Event.CLIENT_GONE): Row(State.GONE, (Act.ABORT_PREFILL,)),
        # a pull: D computes the prompt if anything fails
        (State.PULLING, Event.PREFILLED): Row(State.HANDED_OVER, (Act.SEND_DECODE,)),
        (State.PULLING, Event.UNUSABLE): Row(State.RECOMPUTING, (Act.SEND_WHOLE,)),
        (State.PULLING, Event.PREFILL_REFUSED): Row(State.RECOMPUTING, (Act.SEND_WHOLE,)),
        (State.PULLING, Event.PREFILL_BROKE): Row(
            State.RECOMPUTING, (Act.BLAME_PREFILL, Act.SEND_WHOLE)
        ),
        (State.PULLING, Event.OVERDUE): Row(
            State.RECOMPUTING, (Act.ABORT_PREFILL, Act.CLOSE_PREFILL, Act.SEND_WHOLE)
        ),
        (State.PULLING, Event.CLIENT_GONE): Row(State.GONE, (Act.ABORT_PREFILL,)),
        (State.HANDED_OVER, Event.SENT): Row(State.TRANSFERRING),
        (State.HANDED_OVER, Event.UNREACHED): Row(
            State.HANDED_OVER, (Act.BLAME_DECODE, Act.OTHER_DECODE)
        ),
        (State.HANDED_OVER, Event.NO_OTHER_DECODE): Row(State.FAILED, (Act.FREE_ELSEWHERE,)),
        (State.HANDED_OVER, Event.CLIENT_GONE): Row(State.GONE, (Act.FREE_BY_DECODE,)),
        # P and D get their requests at the same time
        (State.PAIRED, Event.SENT): Row(State.PAIRED),
        (State.PAIRED, Event.PREFILLED): Row(State.TRANSFERRING),
        (State.PAIRED, Event.UNUSABLE): Row(State.RECOMPUTING, (Act.CLOSE_DECODE, Act.SEND_WHOLE)),
        (State.PAIRED, Event.PREFILL_REFUSED): Row(State.DONE, (Act.CLOSE_DECODE, Act.PASS_ON)),
        (State.PAIRED, Event.PREFILL_BROKE): Row(
            State.FAILED, (Act.CLOSE_DECODE, Act.BLAME_PREFILL)
        ),
        (State.PAIRED, Event.FIRST_TOKEN): Row(State.DECODING),
        (State.PAIRED, Event.DECODED): Row(State.DONE, (Act.CLOSE_PREFILL,)),
        (State.PAIRED, Event.DECODE_REFUSED): Row(State.DONE, (Act.CLOSE_PREFILL, Act.PASS_ON)),
        (State.PAIRED, Event.DECODE_BROKE): Row(
            State.FAILED, (Act.CLOSE_PREFILL, Act.BLAME_DECODE)
        ),
        (State.PAIRED, Event.UNREACHED): Row(State.FAILED, (Act.CLOSE_PREFILL, Act.BLAME_DECODE)),
        (State.PAIRED, Event.CLIENT_GONE): Row(State.GONE, (Act.CLOSE_PREFILL, Act.FREE_BY_DECODE)),
        # In either order
        (State.TRANSFERRING, Event.SENT): Row(State.TRANSFERRING),
        (State.TRANSFERRING, Event.FIRST_TOKEN): Row(State.DECODING),
        (State.TRANSFERRING, Event.DECODED): Row(State.DONE),
        (State.TRANSFERRING, Event.DECODE_REFUSED): Row(
            State.DONE, (Act.PASS_ON, Act.FREE_BY_REFUSER)
        ),
        (State.TRANSFERRING, Event.DECODE_BROKE): Row(
            State.FAILED, (Act.BLAME_DECODE, Act.FREE_ELSEWHERE)
        ),
        (State.TRANSFERRING, Event.UNREACHED): Row(
            State.FAILED, (Act.BLAME_DECODE, Act.FREE_ELSEWHERE)
        ),
        (State.TRANSFERRING, Event.OVERDUE): Row(
            State.FAILED, (Act.CLOSE_DECODE, Act.SUSPECT_BOTH)
        ),
        (State.TRANSFERRING, Event.CLIENT_GONE): Row(State.GONE, (Act.FREE_BY_DECODE,)),
        (State.RECOMPUTING, Event.SENT): Row(State.RECOMPUTING),
        (State.RECOMPUTING, Event.FIRST_TOKEN): Row(State.DECODING),
        (State.RECOMPUTING, Event.DECODED): Row(State.DONE),
        (State.RECOMPUTING, Event.DECODE_REFUSED): Row(State.DONE, (Act.PASS_ON,)),
        (State.RECOMPUTING, Event.DECODE_BROKE): Row(State.FAILED, (Act.BLAME_DECODE,)),
        (State.RECOMPUTING, Event.UNREACHED): Row(State.FAILED, (Act.BLAME_DECODE,)),
        (State.RECOMPUTING, Event.CLIENT_GONE): Row(State.GONE, (Act.CLOSE_DECODE,)),
        # P's answer may come after D's first token, and then changes nothing
        (State.DECODING, Event.SENT): Row(State.DECODING),
        (State.DECODING, Event.PREFILLED): Row(State.DECODING),
        (State.DECODING, Event.UNUSABLE): Row(State.DECODING),
        (State.DECODING, Event.PREFILL_REFUSED): Row(State.DECODING),
        (State.DECODING, Event.PREFILL_BROKE): Row(State.DECODING, (Act.BLAME_PREFILL,)),
        (State.DECODING, Event.DECODED): Row(State.DONE, (Act.CLOSE_PREFILL,)),
        (State.DECODING, Event.DECODE_BROKE): Row(
            State.FAILED, (Act.CLOSE_PREFILL, Act.BLAME_DECODE)
        ),
        (State.DECODING, Event.OVERDUE): Row(State.DECODING),
        (State.DECODING, Event.CLIENT_GONE): Row(State.GONE, (Act.CLOSE_PREFILL, Act.CLOSE_DECODE)),
    }
)
