"""Reservations: capacity that one request holds at an endpoint, from the pick to the last byte.

Making and releasing one changes the endpoint's load (policies/load_ledger.py), and also its health
(endpoint_load_and_health.py) and the prefix index (prefix_cache_view.py).
"""

from __future__ import annotations

from time import monotonic
from typing import Protocol

from gateway.fleet.kv_events.event_verification import CacheExpectation
from gateway.fleet.live_endpoint import INITIAL_HEALTH, LiveEndpoint
from gateway.fleet.prefix_cache_view import PrefixCacheView
from gateway.http.engine_connections import ConnectionPool
from gateway.protocol.response.usage_and_error_search import TokenUsage
from gateway.protocol.upstream_error import UpstreamError
from policies.health.endpoint_health import HealthEvent, HealthState
from policies.load_ledger import LoadReservation
from policies.prefix.fingerprint import Fingerprint
from policies.routing_types import Pick, Request


class DropSink(Protocol):
    """The interface through which a reservation reports a cancelled prompt to the speed monitor.

    A prompt is cancelled if its client leaves before the first token of the answer.
    """

    def on_dropped(self, live: LiveEndpoint, tokens: int, now: float, /) -> None: ...


class EvidenceSink(Protocol):
    """The interface to which a reservation reports how well its endpoint serves the request.

    The endpoint table implements it, and updates the endpoint's health from the reports.
    """

    prefixes: PrefixCacheView

    @property
    def speed_monitor(self) -> DropSink: ...
    def on_event(self, live: LiveEndpoint, event: HealthEvent, /) -> None: ...
    def on_failure(self, live: LiveEndpoint, broke: UpstreamError, /) -> None: ...
    def on_overtaken(self, live: LiveEndpoint, tokens: int, /) -> None: ...


class Reservation:
    """Capacity reserved at an endpoint for one request; leaving the context releases it.

    entry              the entry in policies/load_ledger.py: what is reserved, and what was
                       predicted
    expected_cache     number of cached tokens that the answer must report; None without KV events
    queued_tokens      prompt tokens that the endpoint had to compute when the reservation was made,
                       including those of this request
    _sees_first_token  whether the gateway can observe when the first token is generated: the answer
                       is a stream or a single token
    _awaited           prompt tokens to compute before the first token; 0 once it has arrived
    _is_reported       whether the end of the answer was reported to the endpoint's health
    _cached_before     number of the prompt's first tokens that the endpoint was believed to have
                       cached when the prefix index learned the prompt; None: not learned yet
    """

    __slots__ = (
        *("_awaited", "_reserved_at", "_fingerprint", "_is_computed", "_is_reported", "_table"),
        *(
            "_cached_before",
            "_sees_first_token",
            "_usage",
            "expected_cache",
            "queued_tokens",
            "endpoint",
            "live",
            "entry",
            "request",
            "upstream",
        ),
    )
    _prefills = True

    def __init__(
        self,
        table: EvidenceSink,
        live: LiveEndpoint,
        pick: Pick,
        request: Request,
        fingerprint: Fingerprint | None,
    ) -> None:
        self._table = table
        self._fingerprint = fingerprint
        self.live = live
        self.endpoint = live.endpoint
        self.upstream: ConnectionPool = live.upstream
        self.request = request
        self._is_computed = self._is_reported = False
        prefills = self._prefills
        self._cached_before = pick.cached_tokens if prefills else None
        self._usage: TokenUsage | None = None
        self.expected_cache: CacheExpectation | None = None
        self._reserved_at = now = monotonic()
        self._sees_first_token = sees_first_token = request.output_tokens == 1 or (
            request.stream and not live.answers_whole
        )
        self._awaited = 0
        if sees_first_token and prefills:
            self._awaited = awaited = max(1, request.prompt_tokens - pick.cached_tokens)
            live.speed.on_sent(awaited, now, is_decoding=live.load.decoding > 0)
        self.entry: LoadReservation = LoadReservation(
            live.load, request, pick.cached_tokens, now, sees_first_token, not prefills
        )
        self.queued_tokens = live.load.prefill_tokens

    def on_stream_seen(self, *, is_whole: bool) -> None:
        """Record whether the engine answered a request for a stream with one whole answer.

        A whole answer shows when it was complete, and not when its prompt was computed. Therefore
        its duration is compared only with those of other whole answers. Otherwise the endpoint
        would seem slow at computing prompts.
        """
        if not self.request.stream:
            return
        self.live.answers_whole = is_whole
        if is_whole and self.request.output_tokens > 1:
            self._sees_first_token = False
            self.leave_untimed()

    def leave_untimed(self) -> None:
        """Do not let the time of the first token say anything about the endpoint's speed."""
        self.entry.sees_first_token = False
        if self._awaited:
            self.live.speed.on_dropped(self._awaited, monotonic())
            self._awaited = 0

    def on_first_token(self) -> None:
        """Record that the prompt is computed: it leaves the endpoint's backlog and becomes context.

        The time since the request was sent measures the endpoint's speed. An answer of several
        tokens that is not streamed is left out, because it arrives long after its first token.
        """
        self._is_computed = True
        if self.entry.sees_first_token:
            now = monotonic()
            self.entry.on_first_token(now)
            if self._awaited:
                budget_tokens = self.live.load.belief.shape.budget_tokens
                self.live.speed.on_first_token(self._awaited, now, budget_tokens=budget_tokens)
                self._awaited = 0

    def on_overtaken(self) -> None:
        """Record that the request moves to another endpoint, because this one is late.

        The time that it has waited here is evidence of slowness. The endpoint gets few requests
        until its speed has been judged.
        """
        awaited, self._awaited = self._awaited, 0
        self._table.on_overtaken(self.live, awaited)

    @property
    def is_behind(self) -> bool:
        """Return whether this prompt must wait for the engine's current prefill step to end."""
        return self._awaited > 0 and self.live.speed.is_behind(self._reserved_at)

    @property
    def has_visible_first_token(self) -> bool:
        """Return whether the gateway can observe when the first token is generated."""
        return self._sees_first_token

    @property
    def is_ejected_as_slow(self) -> bool:
        """Return whether the reserved endpoint was ejected because it is slow."""
        health = self.live.health
        return health.state is HealthState.EJECTED and health.cause is HealthEvent.SLOW

    def on_served(self, usage: TokenUsage) -> None:
        """Record that the endpoint has answered the request completely.

        The number of cached tokens that the engine reports in `usage` corrects the prefix index.
        """
        self._is_reported = True
        self._usage = usage
        if self.live.health is not INITIAL_HEALTH:
            self._table.on_event(self.live, HealthEvent.SUCCEEDED)
        if usage.cached_tokens is not None and usage.prompt_tokens:
            prompt_tokens = max(1, self.request.prompt_tokens)
            believed = min(1.0, self.entry.cached_tokens / prompt_tokens)
            found = min(1.0, usage.cached_tokens / usage.prompt_tokens)
            prefixes = self._table.prefixes
            prefixes.confirm_cached_share(self.live, believed, found)
            if self.expected_cache is not None:
                prefixes.on_cache_report(self.live, self.expected_cache, usage)

    def on_failed(self, broke: UpstreamError) -> None:
        """Record a failed or incomplete answer in the endpoint's health.

        `broke` is the error. Later calls on the same reservation have no effect.
        """
        if not self._is_reported:
            self._is_reported = True
            self._table.on_failure(self.live, broke)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the reserved capacity, and update the latency model with the time needed."""
        now, usage = monotonic(), self._usage
        if usage is None:
            self.entry.drop(now)
        else:
            tokens = usage.completion_tokens
            self.entry.finish(now, tokens)
            if tokens and not self._sees_first_token:
                self.live.speed.record_answer(tokens, now - self._reserved_at)
        if self._awaited:
            self._table.speed_monitor.on_dropped(self.live, self._awaited, now)
            self._awaited = 0
        if not self._is_computed:
            self._forget_prompt()

    def _forget_prompt(self) -> None:
        # Remove from the prefix index what this request taught: the prompt was never computed.
        cached_tokens, prompt_tokens = self._cached_before, self.request.prompt_tokens
        if cached_tokens is not None and self._fingerprint is not None:
            prefixes = self._table.prefixes
            prefixes.forget_prompt(self._fingerprint, self.live, cached_tokens, prompt_tokens)


class DecodeReservation(Reservation):
    """Capacity reserved at the decode endpoint of a request whose prompt another endpoint computes.

    It is made before the prefill request is sent, so that the request does not queue between
    prefill and decode. It includes memory for the prompt's KV cache.

    The prefix index learns the prompt only when its KV cache has arrived. Until then, the engine
    would compute the same prefix again for other requests.
    """

    __slots__ = ()
    _prefills = False

    def on_first_token(self) -> None:
        """Record that the KV cache has arrived and the first token is generated."""
        super().on_first_token()
        self._learn_prompt()

    def on_recompute(self) -> None:
        """Add the prompt to the decode endpoint's backlog: no usable KV cache was received."""
        self.entry.recompute_prompt(monotonic())
        self._learn_prompt()

    def on_handed_over(self) -> None:
        """Record that the prompt is computed and its KV cache is being transferred.

        This is used only for an answer that is not streamed, as it has no visible first token that
        shows the end of the transfer.
        """
        if not self.entry.sees_first_token:
            self.entry.on_kv_arrived(monotonic())
            self._learn_prompt()

    def on_served(self, usage: TokenUsage) -> None:
        """Record that the decode endpoint has served the request with a complete answer.

        The cached tokens that it reports are the transferred KV cache. Therefore they do not
        correct the prefix index.
        """
        super().on_served(TokenUsage(completion_tokens=usage.completion_tokens))

    def _learn_prompt(self) -> None:
        fingerprint = self._fingerprint
        if self._cached_before is not None or fingerprint is None:
            return
        prefixes, prompt_tokens = self._table.prefixes, self.request.prompt_tokens
        # Since the pick, other requests may have taught more. A computed prompt stays recorded.
        cached = () if self._is_computed else prefixes.cached_tokens(fingerprint, prompt_tokens)
        slot = self.live.load.slot
        self._cached_before = cached[slot] if slot < len(cached) else 0
        prefixes.learn_sent(fingerprint, self.live, prompt_tokens)


class PullReservation(DecodeReservation):
    """Capacity reserved at an endpoint that fetches a prompt's beginning and computes the rest.

    The rest joins the endpoint's backlog when the KV is on its way. The time of the first token
    says little about the endpoint's speed, because it includes the fetch.

    pulled_tokens  number of tokens that are fetched; set it before any other use
    """

    __slots__ = ("pulled_tokens",)
    pulled_tokens: int

    def on_handed_over(self) -> None:
        """Record that the beginning is being transferred, and that the rest is to be computed."""
        self.leave_untimed()
        self.entry.recompute_prompt(monotonic())

    def on_recompute(self) -> None:
        """Add the whole prompt to the endpoint's backlog: the beginning was not fetched."""
        entry = self.entry
        entry.cached_tokens = max(0, entry.cached_tokens - self.pulled_tokens)
        super().on_recompute()
