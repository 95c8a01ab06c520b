"""What is booked at an endpoint: the only code that changes the booked numbers of EndpointLoad.

Lives here: taking a place, and giving back exactly what was taken whatever the order of events. Where somebody reads
beliefs (`believe`), each event also moves the endpoint's timeline, and through it its belief and outlook; elsewhere
only counters move. Not here: health, the prefix index, sockets (gateway/).
"""

from __future__ import annotations

from policies import foresight, outlook
from policies.foreign import FIELDS, NOTHING, Share
from policies.load import EndpointLoad
from policies.model import Request
from policies.queued_prompt import Prompt
from policies.timeline import STALE_S, Timeline


class Entry(Prompt):
    """A place taken at an endpoint: `book` for a whole request, `reserve` for what another endpoint prefills.

    Every method may be called at any time, in any order, also twice; after the end none has an effect.

    `told` False: nobody will know when its first token came (an answer that comes whole), so it is believed to come
    when the timeline says so, and teaches nothing. `handed`: another endpoint computes its prompt.

    cached_tokens      how much of the prompt was believed to be held there
    predicted_ttft_s   seconds from booking to the first token, as expected then; None in a reservation
    predicted_tpot_s   seconds per output token after it, as expected then
    Both are None where nobody reads beliefs.
    """

    __slots__ = (
        *("_booked_at", "_context", "_first_s", "_load", "_open", "_request", "_token_s", "_uncached"),
        "cached_tokens",
    )

    def __init__(
        self,
        load: EndpointLoad,
        request: Request,
        cached_tokens: int,
        now: float,
        told: bool = True,
        handed: bool = False,
    ) -> None:
        prompt, output = request.prompt_tokens, request.output_tokens
        self._load, self._request = load, request
        self.cached_tokens, self.told = cached_tokens, told
        self._open, self.decoding = True, False
        self._booked_at: float | None = None
        load.in_flight += 1
        if output > 1:
            load.answers += 1
        load.expected_tokens += output
        load.kv_booked += prompt + output
        load.entries[self] = None
        if handed:
            self._uncached, self._context = 0, prompt
            load.decode_tokens += prompt
        else:
            self._uncached = uncached = prompt - cached_tokens if prompt > cached_tokens else 0
            self._context = 0
            load.prefill_tokens += uncached
        if load.believed:
            self._begin(now, handed)

    @property
    def predicted_ttft_s(self) -> float | None:
        return None if self._booked_at is None else self._first_s

    @property
    def predicted_tpot_s(self) -> float | None:
        return None if self._booked_at is None else self._token_s

    def join(self, now: float) -> None:
        """The endpoint's timeline begins anew, with it as far as it has come."""
        self._begin(now, self._context > 0 and not self._uncached)

    def _begin(self, now: float, handed: bool) -> None:
        load, request = self._load, self._request
        timeline = load.timeline
        if timeline.stale and now - timeline.fresh_at > STALE_S:
            timeline.refresh(load, now)
        self.prompt_tokens = prompt = request.prompt_tokens
        self.sequences = request.choices
        self.output_tokens = request.output_tokens / request.choices
        # What is handed over is nobody's prefix here before it has come.
        self.had = 0 if handed else min(self.cached_tokens, prompt)
        self.planned = self.locked = self.coming = False
        if self.decoding:
            self.left, self.planned = 0, True
            timeline.start(self, now)
            return
        self._booked_at = now
        if handed:
            self._first_s: float | None = None
            self._token_s = outlook.tpot_s(timeline, load, prompt, request.output_tokens, 0.0)
            timeline.expect(load, self)
        else:
            self._place()
            self._first_s = first_s = foresight.ttft_s(timeline, load, self, now)
            self._token_s = outlook.tpot_s(timeline, load, prompt, request.output_tokens, first_s)
            self._compute(now)

    def _place(self) -> None:
        # The last token is always computed: its logits are what the first output token is drawn from.
        self.left = left = self._uncached or 1
        self.at = self.prompt_tokens - left if self.prompt_tokens > left else 0

    def _compute(self, now: float) -> None:
        """The prompt is on its way to be computed here."""
        load = self._load
        self.enters = now + load.belief.request_s
        load.timeline.arrive(load, self, now)

    def recompute(self, now: float) -> None:
        """Nothing usable was handed over to a reservation: its prompt is computed here after all."""
        load = self._load
        if self._open and self._context and not self.decoding and not self._uncached:
            self._uncached = max(1, self._context - self.cached_tokens)
            load.prefill_tokens += self._uncached
            if load.believed:
                self.planned = False
                load.timeline.come(self)
                self._place()
                self._compute(now)

    def handed_over(self, now: float) -> None:
        """A reservation's KV has come, and nobody will tell of its first token: it decodes from now on."""
        if self._open and self._context and not self.decoding and not self._uncached:
            load = self._load
            self.computed()
            if load.believed:
                load.timeline.handed(load, self, now)

    def first_token(self, now: float) -> None:
        """The prompt is computed: its tokens are context now, not backlog."""
        if self.decoding or not self._open:
            return
        self.computed()
        load = self._load
        if load.believed:
            self.told = True
            load.timeline.answered(load, self, now)

    def computed(self) -> None:
        """Moves the counters alone; for the timeline, which believes it of a prompt that nobody will tell of."""
        load, prompt = self._load, self._request.prompt_tokens
        load.prefill_tokens -= self._uncached
        load.decode_tokens += prompt - self._context
        load.decoding += 1
        self._uncached, self._context, self.decoding = 0, prompt, True

    def finished(self, now: float, output_tokens: int | None = None) -> None:
        """The answer is whole; `output_tokens` is how long it was, if anybody said. Gives back what is still held."""
        if not self._open:
            return
        load = self._load
        if load.believed:
            load.timeline.advance(load, now)
        self._open = False
        request = self._request
        output = request.output_tokens
        load.in_flight -= 1
        if output > 1:
            load.answers -= 1
        load.expected_tokens -= output
        load.kv_booked -= request.prompt_tokens + output
        load.decode_tokens -= self._context
        load.prefill_tokens -= self._uncached
        if self.decoding:
            load.decoding -= 1
        del load.entries[self]
        if load.believed:
            load.timeline.leave(load, self, now, output_tokens)

    def dropped(self, now: float) -> None:
        """Over without a whole answer. Gives back what is still held."""
        self.finished(now)


book = Entry
"""Take a place for a whole request: a prompt to compute, then tokens to make. An alias: a call less per request."""


def reserve(load: EndpointLoad, request: Request, cached_tokens: int, now: float, told: bool = True) -> Entry:
    """Take a decode place for a split request: KV for all of its prompt from the start, and nothing to prefill."""
    return Entry(load, request, cached_tokens, now, told, True)


def believe(load: EndpointLoad, believed: bool, now: float) -> None:
    """Whether somebody reads beliefs of this endpoint from now on.

    The timeline begins anew with what is booked at this moment; of prompts under way it is not known how far they are.
    What was learnt of the endpoint's speed before is still believed.
    """
    if load.believed == believed:
        return
    load.believed = believed
    load.timeline = Timeline(now)
    load.timeline.refresh(load, now)
    if believed:
        # Answers under way first: what is said of the others reckons with their ends.
        for entry in sorted(load.entries, key=lambda entry: not entry.decoding):
            entry.join(now)
        load.timeline.refresh(load, now)


def scraped(
    load: EndpointLoad,
    running: int | None,
    waiting: int | None,
    kv_usage: float | None,
    kv_tokens: int | None,
    now: float,
) -> None:
    """The engine's own view of itself, None where it did not tell: it knows of requests that others sent.

    A request that another gateway has not told us of yet, or that ended while this view was on its way, is no
    stranger's and would weigh on the endpoint until the next view: whoever is there twice in a row counts.
    """
    beyond = max(0, (running or 0) + (waiting or 0) - load.in_flight)
    load.strangers, load.beyond = min(beyond, load.beyond), beyond
    load.running, load.waiting, load.kv_usage = running, waiting, kv_usage
    load.scraped_at = now
    if kv_tokens is not None:
        load.kv_tokens = kv_tokens
    if load.believed:
        load.timeline.scraped(load, kv_usage, now)


def foreign(load: EndpointLoad, source: bytes, share: Share | None, now: float) -> bool:
    """`source` holds this share at the endpoint now, in place of what it held before; None or NOTHING: none any more.

    False when that is no news.
    """
    others = load.others
    before = others.shares.get(source, NOTHING)
    after = share or NOTHING
    if before == after:
        return False
    if after == NOTHING:
        del others.shares[source]
    else:
        others.shares[source] = after
    for name in FIELDS:
        change = getattr(after, name) - getattr(before, name)
        if change:
            setattr(others, name, getattr(others, name) + change)
            setattr(load, name, getattr(load, name) + change)
    if load.believed:
        load.timeline.advance(load, now)
        load.timeline.refresh(load, now)
    return True


def own(load: EndpointLoad) -> Share:
    """What this gateway itself holds at the endpoint."""
    others = load.others
    return Share(
        load.in_flight - others.in_flight,
        load.decoding - others.decoding,
        load.prefill_tokens - others.prefill_tokens,
        load.decode_tokens - others.decode_tokens,
        load.expected_tokens - others.expected_tokens,
        load.kv_booked - others.kv_booked,
        load.answers - others.answers,
    )
