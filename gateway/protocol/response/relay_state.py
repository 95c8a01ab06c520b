"""The states of a relayed response: from its incomplete head to its end."""

from __future__ import annotations

from enum import Enum, auto


class RelayState(Enum):
    """How far a response has been relayed. Only in HEAD and HELD can the request be retried.

    HEAD     the response head is incomplete
    REFUSED  an error response is being collected
    HELD     no byte has been returned for the client
    FLOWING  the body is being forwarded
    BEHIND   the body is being forwarded, and not all received bytes have been processed
    DONE     the response is complete
    """

    HEAD = auto()
    REFUSED = auto()
    HELD = auto()
    FLOWING = auto()
    BEHIND = auto()
    DONE = auto()


# Module-level names, because looking up an Enum member on its class is ten times slower.
HEAD, REFUSED, HELD, FLOWING, BEHIND, DONE = RelayState
