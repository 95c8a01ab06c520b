"""What is booked at an endpoint: the only code that changes the booked numbers of EndpointLoad.

Lives here: taking a place, and giving back exactly what was taken whatever the order of events. Each event also moves
the endpoint's timeline, and through it its belief and outlook. Not here: health, the prefix index, sockets (gateway/).
"""

from __future__ import annotations

from policies.latency import ttft_s
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

    def __init__(
        self, load: EndpointLoad, request: Request, cached_tokens: int, now: float, told: bool, handed: bool
    ) -> None:
        self.prompt_tokens = prompt = request.prompt_tokens
        self.sequences = request.choices
        self.cached_tokens, self.told = cached_tokens, told
        self._load, self._booked_at, self._open = load, now, True
        self._output = output = request.output_tokens
        self.planned = self.decoding = self.locked = False
        load.in_flight += 1
        load.expected_tokens += output
        load.kv_booked += prompt + output
        load.step_s = self.predicted_tpot_s = load.step_s + load.sequence_s + load.context_s * prompt
        if handed:
            self.predicted_ttft_s: float | None = None
            self._uncached, self._context = 0, prompt
            load.decode_tokens += prompt
            load.timeline.expect(self)
        else:
            self._uncached = uncached = prompt - cached_tokens if prompt > cached_tokens else 0
            self._context = 0
            load.prefill_tokens += uncached
            self.predicted_ttft_s = first_s = ttft_s(load, uncached, cached_tokens, now)
            if output > 0:  # those who come while it waits are computed while it decodes
                self.predicted_tpot_s += load.timeline.crowd * first_s / output
            self._compute(now)

    def _compute(self, now: float) -> None:
        """The prompt is on its way to be computed here."""
        # The last token is always computed: its logits are what the first output token is drawn from.
        self.left = self._uncached or 1
        self.at = max(0, self.prompt_tokens - self.left)
        load = self._load
        self.enters = now + load.belief.request_s
        load.timeline.arrive(load, self, now)

    def recompute(self, now: float) -> None:
        """Nothing usable was handed over to a reservation: its prompt is computed here after all."""
        if self._open and self._context and not self.decoding and not self._uncached:
            self._uncached = max(0, self.prompt_tokens - self.cached_tokens)
            self._load.prefill_tokens += self._uncached
            self.planned = False
            self._compute(now)

    def first_token(self, now: float) -> None:
        """The prompt is computed: its tokens are context now, not backlog."""
        if self.decoding or not self._open:
            return
        self.told = True
        self.computed()
        load = self._load
        if self.predicted_ttft_s is not None:
            load.belief.missed(self.predicted_ttft_s, now - self._booked_at)
        load.timeline.answered(load, self, now)

    def computed(self) -> None:
        load = self._load
        load.prefill_tokens -= self._uncached
        self._uncached = 0
        load.decode_tokens += self.prompt_tokens - self._context
        self._context = self.prompt_tokens
        load.decoding += 1

    def finished(self, now: float, output_tokens: int | None = None) -> None:
        """The answer is whole; `output_tokens` is how long it was, if anybody said. Gives back what is still held."""
        if not self._open:
            return
        load, prompt = self._load, self.prompt_tokens
        load.timeline.advance(load, now)
        self._open = False
        load.in_flight -= 1
        load.expected_tokens -= self._output
        load.kv_booked -= prompt + self._output
        load.decode_tokens -= self._context
        load.prefill_tokens -= self._uncached
        if self.decoding:
            load.decoding -= 1
        load.timeline.leave(load, self, now, output_tokens)

    def dropped(self, now: float) -> None:
        """Over without a whole answer. Gives back what is still held."""
        self.finished(now)


def book(load: EndpointLoad, request: Request, cached_tokens: int, now: float, told: bool = True) -> Entry:
    """Take a place for a whole request: a prompt to compute, then tokens to make.

    `told` False: nobody will know when its first token came (an answer that comes whole), so it is believed to come
    when the timeline says so, and teaches nothing.
    """
    return Entry(load, request, cached_tokens, now, told, handed=False)


def reserve(load: EndpointLoad, request: Request, cached_tokens: int, now: float, told: bool = True) -> Entry:
    """Take a decode place for a split request: KV for all of its prompt from the start, and nothing to prefill."""
    return Entry(load, request, cached_tokens, now, told, handed=True)


def scraped(
    load: EndpointLoad,
    running: int | None,
    waiting: int | None,
    kv_usage: float | None,
    kv_tokens: int | None,
    now: float,
) -> None:
    """The engine's own view of itself, None where it did not tell: it knows of requests that others sent."""
    load.strangers = max(0, (running or 0) + (waiting or 0) - load.in_flight)
    load.running, load.waiting, load.kv_usage = running, waiting, kv_usage
    load.scraped_at = now
    if kv_tokens is not None:
        load.kv_tokens = kv_tokens
    load.timeline.advance(load, now)
    load.timeline.refresh(load, now)
