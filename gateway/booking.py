"""Bookings: a place taken at an endpoint for one request, from the pick to the last byte of the answer.

The numbers of the endpoint are changed by policies/ledger.py, its health and the prefix index by endpoints.py.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from gateway.roster import HEALTHY, LiveEndpoint
from gateway.told import Usage
from gateway.upstream import Upstream
from gateway.upstream_error import UpstreamBroke
from policies import ledger
from policies.fingerprint import Fingerprint
from policies.health import Event, State
from policies.ledger import Entry
from policies.load import EndpointLoad
from policies.model import Pick, Request

if TYPE_CHECKING:
    from gateway.endpoints import EndpointTable


class Booking:
    """A place taken at an endpoint, from pick to last byte. Leaving gives back whatever is still held.

    `_tells`: the first token will be seen when it comes. `_awaited`: tokens to compute before it, while it is to come.
    `ahead_tokens` are those of prompts that were to be computed there, its own included.
    `place` is the ledger's entry: what is held, and what was predicted when it was taken.
    """

    __slots__ = (
        *("_awaited", "_booked_at", "_computed", "_fingerprint", "_table", "_tells", "_told", "_usage"),
        *("ahead_tokens", "endpoint", "live", "place", "request", "upstream"),
    )
    _take: Callable[[EndpointLoad, Request, int, float, bool], Entry] = staticmethod(ledger.book)
    _prefills = True

    def __init__(
        self, table: EndpointTable, live: LiveEndpoint, pick: Pick, request: Request, fingerprint: Fingerprint | None
    ) -> None:
        self._table = table
        self._fingerprint = fingerprint
        self.live = live
        self.endpoint = live.endpoint
        self.upstream: Upstream = live.upstream
        self.request = request
        self._computed = self._told = False
        self._usage: Usage | None = None
        self._booked_at = now = monotonic()
        self._tells = tells = request.stream or request.output_tokens == 1
        self._awaited = 0
        if tells and self._prefills:
            self._awaited = awaited = max(1, request.prompt_tokens - pick.cached_tokens)
            live.speed.sent(awaited, now)
        self.place: Entry = self._take(live.load, request, pick.cached_tokens, now, tells)
        self.ahead_tokens = live.load.prefill_tokens

    def first_token(self) -> None:
        """The prompt is computed: its tokens are context now, not backlog.

        An answer of several tokens that comes whole tells of the first when that is long over: no news of its speed.
        """
        self._computed = True
        if self.place.told:
            now = monotonic()
            self.place.first_token(now)
            if self._awaited:
                self.live.speed.first_token(self._awaited, now)
                self._awaited = 0

    def overtaken(self) -> None:
        """Another endpoint has answered first: so long the first token has taken here at least."""
        if self._awaited:
            self.live.speed.first_token(self._awaited, monotonic())
            self._awaited = 0

    def moved(self) -> None:
        """It leaves for another endpoint: if it is the only one that waits, how long it has waited is evidence."""
        if self.live.speed.waiting == 1:
            self.overtaken()

    def doubt(self) -> None:
        """Another endpoint was asked later and has answered: this one gets few requests until it was judged."""
        self._table.doubt(self.live)

    @property
    def is_out_as_slow(self) -> bool:
        """Whether the endpoint was ejected as slow."""
        return self.live.health.state is State.EJECTED and self.live.health.cause is Event.SLOW

    def served(self, usage: Usage) -> None:
        """The answer was whole. What the engine says it had cached corrects what we believed."""
        self._told = True
        self._usage = usage
        if self.live.health is not HEALTHY:
            self._table.happened(self.live, Event.SUCCEEDED)
        if usage.cached_tokens is not None and usage.prompt_tokens:
            believed = min(1.0, self.place.cached_tokens / max(1, self.request.prompt_tokens))
            self._table.confirm(self.live, believed, min(1.0, usage.cached_tokens / usage.prompt_tokens))

    def failed(self, broke: UpstreamBroke) -> None:
        """The answer was not whole: evidence about the endpoint."""
        if not self._told:
            self._told = True
            self._table.broke(self.live, broke)

    def __enter__(self) -> Booking:
        return self

    def __exit__(self, *_: object) -> None:
        now, usage = monotonic(), self._usage
        if usage is None:
            self.place.dropped(now)
        else:
            tokens = usage.completion_tokens
            self.place.finished(now, tokens)
            if tokens and not self._tells:
                self.live.speed.answered(tokens, now - self._booked_at)
        if self._awaited:
            self.live.speed.dropped(self._awaited)
            self._awaited = 0
        if not self._computed:
            self._unlearn()

    def _unlearn(self) -> None:
        """The prompt was never computed there: believe no more than before the pick."""
        if self._fingerprint is not None:
            self._table.unlearn(self._fingerprint, self.live, self.place.cached_tokens, self.request.prompt_tokens)


class Reservation(Booking):
    """A decode place of a split request: KV for all of its prompt from the start, and nothing to prefill there.

    It is taken before the prefill is sent: nobody waits between the legs (engines.md 0.7).
    """

    __slots__ = ()
    _take = staticmethod(ledger.reserve)
    _prefills = False

    def recompute(self) -> None:
        """Nothing usable was handed over: the prompt is computed here after all."""
        self.place.recompute(monotonic())

    def handed_over(self) -> None:
        """The prompt is computed and its KV on the way. An answer that comes whole tells of nothing until its end."""
        if not self.place.told:
            self.place.handed_over(monotonic())

    def served(self, usage: Usage) -> None:
        """The answer was whole. What it says of cached tokens is the transfer, and no news for the index."""
        super().served(Usage(completion_tokens=usage.completion_tokens))
