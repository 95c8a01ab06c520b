"""Decides where new sessions begin, and recognises their first requests.

The later turns of a session follow its prefix, so its first request also chooses their endpoint.
They meet the queues and answers of that endpoint later, not those of now. The price counts what is
lost now: in a burst of new sessions it would send many short prompts to one endpoint and few long
ones to another, and the later turns would meet the unequal numbers of sessions.
"""

from __future__ import annotations

from collections import deque

from policies.endpoint_load import EndpointLoad
from policies.latency.expected_latency import tpot_s
from policies.pricing.price_loop import patience_s
from policies.routing_types import Request

REMEMBERED = 16_384
"""Number of sessions that are remembered. One that returns after so many new ones counts as new."""


class SessionStarts:
    """Recognises the first request of each session, for the sessions that clients name.

    A session that is recognised by its growing prompt has begun before.
    """

    # _first: the id of the first request, by session
    # _oldest: the sessions, oldest first. The first key of a dictionary takes thousands of steps to
    # find where as many before it were deleted
    __slots__ = ("_first", "_oldest")

    def __init__(self) -> None:
        self._first: dict[str, str] = {}
        self._oldest: deque[str] = deque()

    def is_first(self, request: Request) -> bool:
        """Return whether a request begins a session. The result is the same at each attempt."""
        if not request.session or request.is_session_inferred:
            return False
        first = self._first.get(request.session)
        if first is not None:
            return first == request.id
        self._first[request.session] = request.id
        self._oldest.append(request.session)
        if len(self._oldest) > REMEMBERED:
            del self._first[self._oldest.popleft()]
        return True


def own_delay(
    request: Request, load: EndpointLoad, slow: float, ready_s: float, now: float
) -> float:
    """Return the expected first token and pace of a request as shares of its budgets, added.

    slow     factor on the endpoint's decode steps
    ready_s  seconds until its prompt is computed
    """
    first = (ready_s + load.fixed_ttft_s) / patience_s(request, now)
    return first + slow * tpot_s(load, request.prompt_tokens) / request.slo.tpot_s
