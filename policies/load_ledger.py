"""Reserves load at endpoints for requests of this and other gateways, and removes it at their end.

This is the only code that changes the reserved numbers of EndpointLoad. A LoadReservation subtracts
exactly what it added, in whatever order events arrive. If a policy reads the forecast, each event
also advances the endpoint's timeline (the simulated engine), and with it the learned speed. The
gateway itself handles health, the prefix index and sockets.
"""

from __future__ import annotations

from policies.endpoint_load import EndpointLoad
from policies.engine import load_forecast
from policies.engine.engine_model_updates import STALE_S, EngineTimeline
from policies.engine.peer_load import FIELDS, NOTHING, PeerShare
from policies.engine.queued_prompt import QueuedPrompt
from policies.latency import ttft_simulation
from policies.routing_types import Request


class LoadReservation(QueuedPrompt):
    """The load that one request has reserved at an endpoint, made by `reserve` or `reserve_decode`.

    Every method may be called at any time, in any order and repeatedly. After the end, no method
    has an effect.

    sees_first_token  whether the first token can be observed. False if the answer comes in one
                      piece: its first token is then assumed to come as forecast, and nothing is
                      learned
    is_handoff        whether another endpoint computes the prompt, and sends its KV here
    cached_tokens     prompt tokens that the endpoint was believed to have cached
    predicted_ttft_s  expected seconds from reservation to the first token; None if another endpoint
                      computes the prompt
    predicted_tpot_s  expected seconds per output token after the first

    Both predictions are None if no policy reads the forecast, or if the first token cannot be
    observed.
    """

    __slots__ = (
        *(
            "_reserved_at",
            "_context",
            "_first_s",
            "_load",
            "_open",
            "_request",
            "_token_s",
            "_uncached",
        ),
        "cached_tokens",
    )

    def __init__(
        self,
        load: EndpointLoad,
        request: Request,
        cached_tokens: int,
        now: float,
        sees_first_token: bool = True,
        is_handoff: bool = False,
    ) -> None:
        prompt, output = request.prompt_tokens, request.output_tokens
        self._load, self._request = load, request
        self.cached_tokens, self.sees_first_token = cached_tokens, sees_first_token
        self._open, self.is_decoding = True, False
        self._reserved_at: float | None = None
        load.in_flight += 1
        if output > 1:
            load.answers += 1
        load.expected_tokens += output
        load.kv_reserved += prompt + output
        load.reservations[self] = None
        if is_handoff:
            self._uncached, self._context = 0, prompt
            load.decode_tokens += prompt
        else:
            self._uncached = uncached = prompt - cached_tokens if prompt > cached_tokens else 0
            self._context = 0
            load.prefill_tokens += uncached
        if load.is_modelled:
            self._begin(now, is_handoff)
        if load.changes is not None:
            load.changes.record(load.slot)

    @property
    def request(self) -> Request:
        return self._request

    @property
    def predicted_ttft_s(self) -> float | None:
        return None if self._reserved_at is None else self._first_s

    @property
    def predicted_tpot_s(self) -> float | None:
        return None if self._reserved_at is None else self._token_s

    def rejoin_timeline(self, now: float) -> None:
        """Add this request, with its progress so far, to an engine model that was started again."""
        self._begin(now, self._context > 0 and not self._uncached)

    def _begin(self, now: float, handed: bool) -> None:
        load, request = self._load, self._request
        timeline = load.timeline
        if timeline.is_stale and now - timeline.forecast_at > STALE_S:
            timeline.refresh_forecast(load, now)
        self.prompt_tokens = prompt = request.prompt_tokens
        self.sequences = request.choices
        self.output_tokens = request.output_tokens / request.choices
        # KV that is handed over cannot be a shared prefix here before it has arrived.
        self.prefix_tokens = 0 if handed else min(self.cached_tokens, prompt)
        self.is_planned = self.has_kv = self.awaits_kv = False
        self.length_class = -1
        if self.is_decoding:
            self.remaining_tokens, self.is_planned = 0, True
            timeline.start_decoding(self, now)
            return
        load_forecast.add_sequence(load, prompt)
        if handed:
            if self.sees_first_token:
                self._reserved_at = now
                self._first_s: float | None = None
                self._token_s = load_forecast.predict_tpot_s(
                    timeline, load, prompt, request.output_tokens, 0.0
                )
            timeline.expect_kv(load, self)
            return
        self._place()
        timeline.advance(load, now)
        if self.sees_first_token:
            self._reserved_at = now
            self._first_s = first_s = ttft_simulation.simulate_ttft_s(timeline, load, self, now)
            self._token_s = load_forecast.predict_tpot_s(
                timeline, load, prompt, request.output_tokens, first_s
            )
        self._compute(now)

    def _place(self) -> None:
        # Engines always compute the last token, because its logits produce the first output token.
        self.remaining_tokens = left = self._uncached or 1
        self.computed_tokens = self.prompt_tokens - left if self.prompt_tokens > left else 0

    def _compute(self, now: float) -> None:
        load = self._load
        self.enters_at = now + load.belief.request_s
        load.timeline.on_sent(load, self, now)

    def recompute_prompt(self, now: float) -> None:
        """Let this endpoint compute the prompt: no usable KV cache came from another one."""
        load = self._load
        if self._open and self._context and not self.is_decoding and not self._uncached:
            self._uncached = max(1, self._context - self.cached_tokens)
            load.prefill_tokens += self._uncached
            if load.is_modelled:
                self.is_planned = False
                load.timeline.on_kv_arrived(self)
                self._place()
                self._compute(now)
            load.mark_changed()

    def on_kv_arrived(self, now: float) -> None:
        """Start to decode: the prompt's KV cache has arrived from another endpoint.

        No first token will be reported, because it came from that endpoint.
        """
        if self._open and self._context and not self.is_decoding and not self._uncached:
            load = self._load
            self.mark_decoding()
            if load.is_modelled:
                load.timeline.on_handoff(load, self, now)

    def on_first_token(self, now: float) -> None:
        """Record the first token: from now on the request counts as decoding, not as prefill."""
        if self.is_decoding or not self._open:
            return
        self.mark_decoding()
        load = self._load
        if load.is_modelled:
            self.sees_first_token = True
            load.timeline.on_first_token(load, self, now)

    def mark_decoding(self) -> None:
        """Count the request as decoding, not as prefill, in the endpoint's load.

        The engine model gets no event, unlike with `on_first_token`.
        """
        load, prompt = self._load, self._request.prompt_tokens
        load.prefill_tokens -= self._uncached
        load.decode_tokens += prompt - self._context
        load.decoding += 1
        self._uncached, self._context, self.is_decoding = 0, prompt, True
        if load.changes is not None:
            load.changes.record(load.slot)

    def finish(self, now: float, output_tokens: int | None = None) -> None:
        """End the reservation, and subtract its remaining load from the endpoint.

        `output_tokens` is the length of a complete answer; None: it is incomplete or unknown.
        """
        if not self._open:
            return
        load = self._load
        if load.is_modelled:
            load.timeline.advance(load, now)
        self._open = False
        request, output = self._request, self._request.output_tokens
        load.in_flight -= 1
        if output > 1:
            load.answers -= 1
        load.expected_tokens -= output
        load.kv_reserved -= request.prompt_tokens + output
        load.decode_tokens -= self._context
        load.prefill_tokens -= self._uncached
        if self.is_decoding:
            load.decoding -= 1
        del load.reservations[self]
        if load.is_modelled:
            load.timeline.on_ended(load, self, now, output_tokens)
        load.mark_changed()

    def drop(self, now: float) -> None:
        """End the reservation of a request that failed or was cancelled, and subtract its load."""
        self.finish(now)


reserve = LoadReservation
"""Reserve load for a whole request: a prompt to compute, then tokens to generate.

An alias of the class rather than a function, which saves a call per request.
"""


def reserve_decode(
    load: EndpointLoad,
    request: Request,
    cached_tokens: int,
    now: float,
    sees_first_token: bool = True,
) -> LoadReservation:
    """Reserve load for a split request at the endpoint that decodes it.

    Another endpoint computes the prompt, and sends its KV cache here. So its KV memory counts from
    the start, but no prefill does.

    cached_tokens     prompt tokens that this endpoint is believed to have cached
    sees_first_token  whether the first token can be observed
    """
    return LoadReservation(load, request, cached_tokens, now, sees_first_token, True)


def set_modelled(load: EndpointLoad, modelled: bool, now: float) -> None:
    """Start or stop the simulation of an endpoint's engine, from which its load is forecast.

    It is needed only while some policy reads the forecast. A started simulation contains the
    current reservations, but not the progress of prompts in prefill. The learned speed and answer
    lengths stay.

    load      the endpoint's load
    modelled  whether the engine is simulated from now on
    """
    if load.is_modelled == modelled:
        return
    load.is_modelled = modelled
    load.timeline = EngineTimeline(now, load.timeline.lengths)
    load.timeline.refresh_forecast(load, now)
    if modelled:
        # Decoding requests first: predictions for the others depend on when these end.
        for entry in sorted(load.reservations, key=lambda entry: not entry.is_decoding):
            entry.rejoin_timeline(now)
        load.timeline.refresh_forecast(load, now)
    load.mark_changed()


def set_peer_load(load: EndpointLoad, source: bytes, share: PeerShare | None, now: float) -> bool:
    """Replace the load that another gateway, `source`, has reserved at the endpoint.

    `share` is that load; None or NOTHING: the gateway has no load there any more. Returns whether
    the load has changed.
    """
    others = load.peer_load
    before = others.shares.get(source, NOTHING)
    after = share or NOTHING
    if before == after:
        return False
    if after == NOTHING:
        del others.shares[source]
    else:
        others.shares[source] = after
    for name in FIELDS:
        if difference := getattr(after, name) - getattr(before, name):
            setattr(others, name, getattr(others, name) + difference)
            setattr(load, name, getattr(load, name) + difference)
    if load.is_modelled:
        load.timeline.advance(load, now)
        load.timeline.refresh_forecast(load, now)
    load.mark_changed()
    return True


def own_load(load: EndpointLoad) -> PeerShare:
    """Return the load that this gateway itself has reserved at the endpoint.

    It is the endpoint's whole reserved load minus that of the other gateways.
    """
    others = load.peer_load
    return PeerShare(
        load.in_flight - others.in_flight,
        load.decoding - others.decoding,
        load.prefill_tokens - others.prefill_tokens,
        load.decode_tokens - others.decode_tokens,
        load.expected_tokens - others.expected_tokens,
        load.kv_reserved - others.kv_reserved,
        load.answers - others.answers,
    )
