"""The ledger of a stream: which tokens its client has been shown, and the stream as the client is shown it.

Sans-IO. An engine that is asked to says the ids of its tokens beside their text; the client did not ask and does not
see them. When the engine breaks, what was shown is known by its ids, and another engine's words for the rest are put
into the clothes of the first one's.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from gateway.relay import Relay, UpstreamBroke
from gateway.rename import Renamer, whole_events
from gateway.resume.terms import Terms
from gateway.told import Usage

MOST_EVENT = 8 * 1024 * 1024
"""Bytes of one event. The longest has the ids of the prompt, about seven bytes each."""
_SEAM = 2  # bytes of an event's end that do not show that it is one
_DONE = b"[DONE]"
_LOST = frozenset(("abort", "error"))  # an engine's word for an end that it did not choose
_SHOWN = frozenset(("role", "content"))

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class Ledger:
    """What one client has been shown of its answer.

    prompt     token ids of the prompt, as the engine rendered it; empty until it was told
    said       ids of the tokens whose text the client has
    made       tokens of the answer so far, those included whose text is still to come; prompt_tokens  of the prompt
    finish     why generation ended; None while it goes on; done  the client has the last event
    obstacle   why this answer cannot be continued exactly; "" while it can
    resumed    how often it was continued

    An id may come before its text does: part of a character, a special token. Such ids wait, and are not part of what
    is continued: their text was not shown, so they may be drawn again. Where a piece of text came with several ids at
    once nobody knows which of them it already shows, until one comes alone.
    """

    __slots__ = (
        *("_alone", "_before", "_counted", "_details", "_envelope", "_most", "_saved", "_waiting", "done", "finish"),
        *("made", "obstacle", "prompt", "prompt_tokens", "resumed", "said", "terms"),
    )

    def __init__(self, terms: Terms, most_tokens: int) -> None:
        """`most_tokens` of prompt and answer are kept; a longer one cannot be continued."""
        self.terms = terms
        self.prompt, self.said = array("I"), array("I")
        self.finish: str | None = None
        self.obstacle = ""
        self.resumed = self.made = self.prompt_tokens = 0
        self._most = most_tokens
        self._waiting: list[int] = []
        self._alone = True
        self._counted = self.done = False
        self._before = 0
        self._details: dict[str, Any] | None = None  # of the prompt, from the engine that began
        self._envelope: dict[str, Any] = {}
        self.mark()

    # What came

    def mark(self) -> None:
        """What follows may have to be taken back."""
        known = (self.made, self._alone, self._counted, self.done, self.finish)
        self._saved = len(self.said), tuple(self._waiting), known

    def take_back(self) -> None:
        """What came since mark() was not shown."""
        length, waiting, known = self._saved
        self.made, self._alone, self._counted, self.done, self.finish = known
        del self.said[length:]
        self._waiting = list(waiting)

    def note(self, chunk: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
        """Take a chunk's ids out of it and keep them. Its text, and its choice if it has one. Raises UpstreamBroke."""
        if "error" in chunk:
            raise UpstreamBroke("engine_error", "the engine broke off with an error event")
        prompt, usage = chunk.pop("prompt_token_ids", None), chunk.pop("usage", None)
        choices = chunk.get("choices") or ()
        if not choices:
            return "", None
        choice = choices[0]
        ids, shown = choice.pop("token_ids", None) or (), choice.get("delta", choice)
        prompt = choice.pop("prompt_token_ids", None) or prompt
        if prompt and not self.prompt_tokens:
            self.prompt, self.prompt_tokens = array("I", prompt), len(prompt)
        if choice.get("finish_reason") in _LOST:
            raise UpstreamBroke("aborted", "the engine gave the request up")
        text = shown.get("content" if shown is not choice else "text") or ""
        self.finish = choice.get("finish_reason") or self.finish
        self._take(ids, text, usage)
        if shown is not choice and any(value for name, value in shown.items() if name not in _SHOWN):
            self.spoil("parsed")
        return text, choice

    def _take(self, ids: Sequence[int], text: str, usage: dict[str, Any] | None) -> None:
        self.made += len(ids)
        if self.obstacle:
            return
        self._waiting += ids
        if text:
            self.said.extend(self._waiting)
            self._waiting.clear()
            self._alone = len(ids) == 1
        counted = None if usage is None else usage.get("completion_tokens")
        if counted != self.made - self._before:
            self.spoil("uncounted")
        elif self.prompt_tokens + self.made > self._most:
            self.spoil("too_long")

    def spoil(self, obstacle: str) -> None:
        """It cannot be continued any more, and the ids are let go of."""
        self.obstacle = self.obstacle or obstacle
        self.prompt, self.said = array("I"), array("I")
        self._waiting.clear()

    # What follows

    @property
    def standing(self) -> str:
        """Why it cannot be continued as it stands; "" when it can."""
        if self.obstacle or not self.prompt:
            return self.obstacle or "untold"
        if self.terms.chat and not self.said and self.finish is None:
            return "untold"  # whether thoughts come first, only the chat's own parser knows; a completion has none
        return "" if self._alone or self.finish else "seam"

    @property
    def whole(self) -> bool:
        """Nothing is left to be generated."""
        return self.finish is not None or self.terms.most == len(self.said)

    def resume(self) -> None:
        """Another engine is asked to go on after what was said."""
        self._waiting.clear()
        self.made = self._before = len(self.said)

    @property
    def usage(self) -> Usage:
        """Tokens of the whole answer."""
        cached = None if self._details is None else self._details.get("cached_tokens")
        return Usage(self.prompt_tokens, self.made, cached if type(cached) is int else None)

    # As the client is shown it

    def first(self, chunk: dict[str, Any]) -> bytes:
        """A chunk of the engine that began."""
        usage = chunk.get("usage")
        _, choice = self.note(chunk)
        if usage and self._details is None:
            self._details = usage.get("prompt_tokens_details")
        if not self._envelope:
            self._envelope = {name: value for name, value in chunk.items() if name != "choices"}
        if choice is None:
            return self._told(chunk | {"usage": usage})
        return _event(self._dressed(chunk))

    def rest(self, chunk: dict[str, Any]) -> bytes:
        """A chunk of a completion that goes on, in the clothes of the answer's first chunk."""
        usage = chunk.get("usage")
        text, choice = self.note(chunk)
        if choice is None:
            return self._told(self._envelope | {"choices": [], "usage": self._sums(usage)})
        reason = choice.get("finish_reason")
        if not text and reason is None:
            return b""
        if self.terms.chat:
            stop = {"stop_reason": choice["stop_reason"]} if "stop_reason" in choice else {}
            delta = {"content": text} if text else {}
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason} | stop
        return _event(self._dressed(self._envelope | {"choices": [choice]}))

    def closing(self) -> bytes:
        """The end of an answer of which nothing but its end is missing."""
        if self.done:
            return b""
        last = b""
        if self.finish is None:
            self.finish = "length"
            choice = {"index": 0, "delta": {}} if self.terms.chat else {"index": 0, "text": ""}
            last = _event(self._dressed(self._envelope | {"choices": [choice | {"finish_reason": self.finish}]}))
        usage = b"" if self._counted else self._told(self._envelope | {"choices": [], "usage": self._sums(None)})
        return last + usage + b"data: " + _DONE + b"\n\n"

    def _dressed(self, chunk: dict[str, Any]) -> dict[str, Any]:
        return chunk | {"usage": None} if self.terms.shows_usage else chunk

    def _told(self, chunk: dict[str, Any]) -> bytes:
        """The event of the counts, for who wants it."""
        self._counted = True
        return _event(chunk) if self.terms.shows_usage else b""

    def _sums(self, ended: dict[str, Any] | None) -> dict[str, Any]:
        """Counts of the whole. Of the prompt's details, those of the engine that began hold.

        If it did not report them before it broke, the last engine's hold, with no more cached tokens than the prompt
        has: that engine was also given the part of the answer which the client already had.
        """
        prompt, made = self.prompt_tokens, self.made
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        if self._details is None and ended is not None and ended.get("prompt_tokens_details") is not None:
            last: dict[str, Any] = ended["prompt_tokens_details"]
            cached = last.get("cached_tokens")
            self._details = last | ({"cached_tokens": min(cached, prompt)} if cached else {})
        if self._details is not None or (ended is not None and "prompt_tokens_details" in ended):
            usage["prompt_tokens_details"] = self._details
        return usage


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


class Recorder(Renamer):
    """Where a relay shows what it passes on: every event goes through the ledger."""

    def __init__(self, ledger: Ledger, show: Callable[[dict[str, Any]], bytes], served: str, asked: str) -> None:
        """`show` is the ledger's first or rest."""
        super().__init__(served, asked)
        self.ledger = ledger
        self._asked = asked
        self._show = show
        self._unfinished: list[bytes] = []  # pieces of an event
        self._unfinished_bytes = 0
        self._seam = b""  # the last bytes of it: the end of an event may be cut

    def feed(self, payload: bytes, *, sse: bool, ended: bool) -> bytes:
        """Whole events in, the client's events out. When one of them breaks the answer, none of them was shown."""
        if not sse:
            return super().feed(payload, sse=sse, ended=ended)
        self.ledger.mark()
        ready = self._whole_events(payload, ended=ended).replace(b"\r\n", b"\n")
        try:
            return b"".join([self._event(event) for event in ready.split(b"\n\n") if event.strip()])
        except UpstreamBroke:
            self.ledger.take_back()
            raise

    def _whole_events(self, payload: bytes, *, ended: bool) -> bytes:
        """The events that end in this payload, with what came of the first before. Looks at each byte once."""
        seam = self._seam
        whole = len(payload) if ended else whole_events(seam + payload) - len(seam)
        if whole > 0 or ended:
            ready = b"".join([*self._unfinished, payload[:whole]])
            payload, seam = payload[whole:], b""
            self._unfinished.clear()
            self._unfinished_bytes = 0
        else:
            ready = b""
        self._seam = (seam + payload)[-_SEAM:]
        if payload:
            self._unfinished.append(payload)
            self._unfinished_bytes += len(payload)
        if self._unfinished_bytes > MOST_EVENT:
            self._unfinished.clear()
            raise UpstreamBroke("framing", f"the engine sent an event of more than {MOST_EVENT} bytes")
        return ready

    def _event(self, event: bytes) -> bytes:
        data = event.strip().removeprefix(b"data:").strip()
        if event.lstrip()[:1] == b":":
            return event + b"\n\n"
        if data == _DONE:
            self.ledger.done = True
            return event + b"\n\n"
        try:
            chunk = _decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise UpstreamBroke("framing", f"the engine sent an event that is no JSON: {error}") from error
        if "model" in chunk:
            chunk["model"] = self._asked
        try:
            return self._show(chunk)
        except (TypeError, ValueError, AttributeError, LookupError, OverflowError) as error:
            raise UpstreamBroke("framing", f"the engine sent an event of another shape: {error}") from error


class Recorded(Relay):
    """A relay whose stream may be continued elsewhere: what it cannot end itself it leaves to whoever goes on.

    Its client is shown whole events alone, so it stands between two at any time.
    """

    __slots__ = ()

    @property
    def at_seam(self) -> bool:
        """Whether an event could follow."""
        return self._sse and self.committed

    @property
    def _told_all(self) -> bool:
        """As the ledger has it: what came last may have been taken back."""
        return self._recorder.ledger.done

    @property
    def _recorder(self) -> Recorder:
        assert isinstance(self.renamer, Recorder)
        return self.renamer

    def _end(self, out: bytes) -> bytes:
        unfinished = self._carry or self._recorder.ledger.finish is None
        if self._sse and not self._done and unfinished and not self._last.rstrip().endswith(_DONE):
            self._recorder.ledger.take_back()
            raise UpstreamBroke("truncated", "the engine ended its stream early")
        return super()._end(out)

    def _closing(self) -> bytes | None:
        """As the ledger has it, of the whole answer."""
        ledger = self._recorder.ledger
        return None if ledger.finish is None else ledger.closing()

    def continued(self, rest: Relay, usage: Usage) -> None:
        """Another relay went on where this one broke off: what both saw is the answer."""
        self.bytes_out += rest.bytes_out
        self.events += rest.events
        self.last_at = rest.last_at or self.last_at
        self._reason = rest._reason
        self._counts = usage


class Continuation(Recorded):
    """What follows: the client has its head already."""

    __slots__ = ()

    def _opening(self) -> bytes:
        return b""
