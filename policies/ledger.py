"""What is booked at an endpoint: the only code that changes the booked numbers of EndpointLoad.

Lives here: taking a place, and giving back exactly what was taken whatever the order of events. Each event also moves
the endpoint's timeline, and through it its belief and outlook. Not here: health, the prefix index, sockets (gateway/).
"""

from __future__ import annotations

from policies.latency import tpot_s, ttft_s
from policies.model import EndpointLoad, Request
from policies.timeline import Prompt


class Entry(Prompt):
    """A place taken at an endpoint: `book` for a whole request, `reserve` for what another endpoint prefills.

    Every method may be called at any time, in any order, also twice; after the end none has an effect.

    cached_tokens      how much of the prompt was believed to be held there
    predicted_ttft_s   seconds from booking to the first token, as expected then; None in a reservation
    predicted_tpot_s   seconds per output token after it, as expected then
    """

    __slots__ = (
        *("_booked_at", "_context", "_load", "_open", "_output", "_uncached", "cached_tokens"),
        *("predicted_tpot_s", "predicted_ttft_s"),
    )

    def __init__(self, load: EndpointLoad, request: Request, cached_tokens: int, now: float, handed: bool) -> None:
        prompt = request.prompt_tokens
        super().__init__(prompt, cached_tokens, now + load.belief.shape.request_s)
        self._load, self._booked_at, self._open = load, now, True
        self.cached_tokens = cached_tokens
        self._output = request.output_tokens
        self.predicted_ttft_s: float | None = None
        load.in_flight += 1
        load.expected_tokens += self._output
        load.kv_booked += prompt + self._output
        if handed:
            self._uncached, self._context = 0, prompt
            load.decode_tokens += prompt
            load.timeline.expect(load, self, now)
        else:
            self._uncached, self._context = max(0, prompt - cached_tokens), 0
            self.predicted_ttft_s = ttft_s(load, self._uncached, cached_tokens, now)
            load.prefill_tokens += self._uncached
            load.timeline.arrive(load, self, now)
        self.predicted_tpot_s = tpot_s(load, prompt)

    def recompute(self, now: float) -> None:
        """Nothing usable was handed over to a reservation: its prompt is computed here after all."""
        if self._open and self._context and not self.decoding and not self._uncached:
            self._uncached = max(0, self.prompt_tokens - self.cached_tokens)
            self._load.prefill_tokens += self._uncached
            self._load.timeline.arrive(self._load, self, now)

    def first_token(self, now: float) -> None:
        """The prompt is computed: its tokens are context now, not backlog."""
        if self.decoding or not self._open:
            return
        load = self._load
        load.prefill_tokens -= self._uncached
        self._uncached = 0
        load.decode_tokens += self.prompt_tokens - self._context
        self._context = self.prompt_tokens
        load.decoding += 1
        if self.predicted_ttft_s is not None:
            load.belief.missed(self.predicted_ttft_s, now - self._booked_at)
        load.timeline.answered(load, self, now)

    def finished(self, now: float, output_tokens: int | None = None) -> None:
        """The answer is whole; `output_tokens` is how long it was, if anybody said."""
        if self._open and self.decoding and output_tokens is not None:
            self._load.timeline.decoded(self._load, self, output_tokens, now)
        self.dropped(now)

    def dropped(self, now: float) -> None:
        """Over, whatever became of it: give back what is still held."""
        if not self._open:
            return
        self._open = False
        load = self._load
        load.in_flight -= 1
        load.expected_tokens -= self._output
        load.kv_booked -= self.prompt_tokens + self._output
        load.decode_tokens -= self._context
        load.prefill_tokens -= self._uncached
        if self.decoding:
            load.decoding -= 1
        load.timeline.leave(load, self, now)


def book(load: EndpointLoad, request: Request, cached_tokens: int, now: float) -> Entry:
    """Take a place for a whole request: a prompt to compute, then tokens to make."""
    return Entry(load, request, cached_tokens, now, handed=False)


def reserve(load: EndpointLoad, request: Request, cached_tokens: int, now: float) -> Entry:
    """Take a decode place for a split request: KV for all of its prompt from the start, and nothing to prefill."""
    return Entry(load, request, cached_tokens, now, handed=True)
