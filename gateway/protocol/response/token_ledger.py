"""Records the tokens and events that a client has received, so that its stream can be continued.

On request, engines report the ids of their tokens beside the text. The ids are removed from the
client's stream. When the engine fails, another engine continues after the recorded ids, and its
chunks are rewritten in the form of the first engine's.

It may be unknown which tokens the client's newest text shows. Then the other engine generates that
text again. It is left out if it is identical; otherwise the stream ends. No I/O.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from gateway.protocol.response.long_event import LONG_EVENT, LongEvent, first_event_length
from gateway.protocol.response.model_and_usage_rewrite import ModelNameRewriter, whole_events_length
from gateway.protocol.response.resume_eligibility import ContinuationTerms
from gateway.protocol.response.usage_and_error_search import TokenUsage
from gateway.protocol.upstream_error import UpstreamError

_SEAM = 2  # bytes at the end of a read that may be the first part of an event's end
_DONE = b"[DONE]"
_LOST = frozenset(
    ("abort", "error")
)  # finish reasons of a generation that the engine did not complete
DIVERGED = "diverged"
"""Kind of the error for an answer whose text, generated again, differs from the text that the
client has.
"""

MOST_REPEATED_TOKENS = 512
"""Maximum number of tokens that a second engine generates again.

It begins after the last token whose text the client has received for certain. If there are more
tokens after that one, the answer cannot be continued.
"""

_PLAIN_DELTA = frozenset(("role", "content"))
_NO_LISTS: Mapping[str, Sequence[int]] = MappingProxyType({})

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class Ledger:
    """The record of what one client has received of its answer, for an engine that continues it.

    prompt_ids        token ids of the prompt, as the engine rendered it; empty until the engine
                      reports them
    shown_ids         ids of the tokens whose text the client has
    generated_tokens  tokens generated so far, including those whose text has not arrived
    prompt_tokens     number of tokens of the prompt
    cached_tokens     number of cached prompt tokens to report to the client; None: the number that
                      the engine reports
    finish_reason     why generation ended; None while it continues
    max_tokens        maximum number of token ids of prompt and answer that are kept
    is_done           whether the client has the last event
    obstacle          why this answer cannot be continued exactly; "" while it can
    resumes           number of times that the answer was continued

    An id may arrive before its text, for a part of a character or a special token. Such ids are
    kept separately, because their text was not shown. The next engine may sample them again, so
    they are not part of the prompt that it continues.

    If one piece of text arrives with several ids, it is unknown which of them the text shows. After
    a piece with one id, ids and text agree again. A continuation begins at the last such point.

    _agreed    number of `shown_ids` at that point
    _unsure    text of the pieces since that point
    _repeated  text that the client has already but that the next engine generates again, because it
               follows the text of `shown_ids`
    _before    number of tokens that earlier engines generated; this engine's count excludes them
    _details   `prompt_tokens_details` of the engine that began the answer
    _envelope  members of the first chunk, which all chunks of the rest repeat
    """

    __slots__ = (
        *("_agreed", "_before", "_details", "_envelope", "_has_counts", "_repeated", "_saved"),
        *(
            "_unsure",
            "_waiting",
            "cached_tokens",
            "is_done",
            "finish_reason",
            "generated_tokens",
            "max_tokens",
            "obstacle",
            "prompt_ids",
        ),
        *("prompt_tokens", "resumes", "shown_ids", "terms"),
    )

    def __init__(self, terms: ContinuationTerms, max_tokens: int) -> None:
        """Create an empty record. At most `max_tokens` token ids of prompt and answer are kept.

        A longer answer cannot be continued.
        """
        self.terms = terms
        self.prompt_ids, self.shown_ids = array("I"), array("I")
        self.finish_reason: str | None = None
        self.obstacle = ""
        self.cached_tokens: int | None = None
        self.resumes = self.generated_tokens = self.prompt_tokens = 0
        self.max_tokens = max_tokens
        self._waiting: list[int] = []
        self._agreed, self._unsure, self._repeated = 0, "", ""
        self._has_counts = self.is_done = False
        self._before = 0
        self._details: dict[str, Any] | None = None
        self._envelope: dict[str, Any] = {}
        self.mark()

    # Recording the engine's events

    def mark(self) -> None:
        """Save the state of the record, to which rewind() returns if chunks are not sent."""
        state = (
            self.generated_tokens,
            *(self._agreed, self._unsure, self._repeated),
            self._has_counts,
            self.is_done,
            self.finish_reason,
        )
        self._saved = len(self.shown_ids), len(self._waiting), state

    def rewind(self) -> None:
        """Undo what was recorded since the last call of mark().

        Call this if the chunks since mark() were not sent to the client.
        """
        length, waiting, state = self._saved
        (
            self.generated_tokens,
            self._agreed,
            self._unsure,
            self._repeated,
            self._has_counts,
            self.is_done,
            self.finish_reason,
        ) = state
        # Ids that waited then are still the first ones after those that were shown.
        self._waiting = [*self.shown_ids[length:], *self._waiting][:waiting]
        del self.shown_ids[length:]

    def record_chunk(self, chunk: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
        """Record the token ids and counts of a chunk; return the chunk's text and its choice.

        The choice is None for a chunk without one. Raises UpstreamError if the engine reports an
        error.
        """
        if "error" in chunk:
            raise UpstreamError("engine_error", "the engine ended its stream with an error event")
        prompt, usage = chunk.pop("prompt_token_ids", None), chunk.pop("usage", None)
        choices = chunk.get("choices") or ()
        if not choices:
            return "", None
        choice = choices[0]
        ids, shown = choice.pop("token_ids", None) or (), choice.get("delta", choice)
        prompt = choice.pop("prompt_token_ids", None) or prompt
        if prompt and not self.prompt_tokens:
            self.prompt_tokens = len(prompt)
            if len(prompt) <= self.max_tokens:
                self.prompt_ids = array("I", prompt)
        if choice.get("finish_reason") in _LOST:
            raise UpstreamError("aborted", "the engine aborted the request")
        text = shown.get("content" if shown is not choice else "text") or ""
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self._take(ids, text, usage)
        is_chat = shown is not choice
        if is_chat and any(value for name, value in shown.items() if name not in _PLAIN_DELTA):
            self.disable("parsed")
        return text, choice

    def _take(self, ids: Sequence[int], text: str, usage: dict[str, Any] | None) -> None:
        # Add the token ids of a chunk, and compare their number with the engine's own count.
        self.generated_tokens += len(ids)
        if self.obstacle:
            return
        if self.prompt_tokens + self.generated_tokens > self.max_tokens:
            self.disable("too_long")
            return
        self._waiting += ids
        if text:
            self.shown_ids.extend(self._waiting)
            self._waiting.clear()
            if len(ids) == 1:
                self._agreed, self._unsure = len(self.shown_ids), ""
            elif self._can_go_back or not self._unsure:
                self._unsure += text
        counted = None if usage is None else usage.get("completion_tokens")
        if counted != self.generated_tokens - self._before:
            self.disable("uncounted")

    def disable(self, obstacle: str) -> None:
        """Record why no other engine can continue this answer any more, and free the token ids."""
        self.obstacle = self.obstacle or obstacle
        self.prompt_ids, self.shown_ids = array("I"), array("I")
        self._agreed, self._unsure = 0, ""
        self._waiting.clear()

    # Continuing the answer after its engine has failed

    @property
    def current_obstacle(self) -> str:
        """Return why another engine cannot continue exactly after `shown_ids`; "" if it can.

        An example is that the token ids of the client's newest text are unknown.
        """
        if self.obstacle or not self.prompt_ids:
            return self.obstacle or "no_token_ids"
        if self.terms.chat and not self.shown_ids and self.finish_reason is None:
            # Only the chat's own parser knows whether a chat begins with reasoning; a completion
            # never does.
            return "no_token_ids"
        is_exact = not self._unsure and not self._repeated
        return "" if is_exact or self.finish_reason else "ambiguous_ids"

    @property
    def rest_obstacle(self) -> str:
        """Return why another engine cannot finish the answer; "" if it can.

        Unlike for current_obstacle, the other engine may begin at an earlier token, and generate
        some text again that the client already has.
        """
        obstacle = self.current_obstacle
        return "" if obstacle == "ambiguous_ids" and self._can_go_back else obstacle

    @property
    def _can_go_back(self) -> bool:
        return len(self.shown_ids) - self._agreed <= MOST_REPEATED_TOKENS

    @property
    def is_complete(self) -> bool:
        """Return whether the answer is complete, so that no other engine needs to continue it."""
        return self.finish_reason is not None or self.terms.max_tokens == len(self.shown_ids)

    def prepare_rest(self) -> None:
        """Prepare the record for another engine, which continues the answer.

        The answer continues after the last token whose text the client has certainly received.
        """
        self._waiting.clear()
        if self._unsure:
            self._repeated, self._unsure = self._unsure + self._repeated, ""
            del self.shown_ids[self._agreed :]
        self.generated_tokens = self._before = len(self.shown_ids)

    @property
    def usage(self) -> TokenUsage:
        """Return the token counts of the whole answer, of all engines that generated it."""
        cached = None if self._details is None else self._details.get("cached_tokens")
        return TokenUsage(
            self.prompt_tokens, self.generated_tokens, cached if type(cached) is int else None
        )

    # The stream as the client sees it

    def render_first(self, chunk: dict[str, Any]) -> bytes:
        """Record a chunk of the engine that began the answer; return its event for the client."""
        usage = chunk.get("usage")
        _, choice = self.record_chunk(chunk)
        if usage and self._details is None:
            self._details = usage.get("prompt_tokens_details")
        if not self._envelope:
            self._envelope = {name: value for name, value in chunk.items() if name != "choices"}
        if choice is None:
            return self._counts_event(chunk | {"usage": self._with_cached_tokens(usage)})
        return _event(self._with_usage_member(chunk))

    def render_rest(self, chunk: dict[str, Any]) -> bytes:
        """Record a chunk of an engine that continues the answer; return its event for the client.

        Text that the client already has is left out. Returns b"" if nothing is left. Raises
        UpstreamError if the engine generates that text differently.
        """
        usage = chunk.get("usage")
        text, choice = self.record_chunk(chunk)
        if choice is None:
            return self._counts_event(self._envelope | {"choices": [], "usage": self._sums(usage)})
        reason = choice.get("finish_reason")
        if self._repeated:
            text = self._leave_out(text, is_last=reason is not None)
            if not self.terms.chat:
                choice = choice | {"text": text}
        if not text and reason is None:
            return b""
        if self.terms.chat:
            stop = {"stop_reason": choice["stop_reason"]} if "stop_reason" in choice else {}
            delta = {"content": text} if text else {}
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason} | stop
        return _event(self._with_usage_member(self._envelope | {"choices": [choice]}))

    def _leave_out(self, text: str, *, is_last: bool) -> str:
        # Return what is new of a piece of text that begins with text that the client has.
        #
        # Raises UpstreamError if it differs from that text.
        repeated = self._repeated
        is_same = text.startswith(repeated) or (repeated.startswith(text) and not is_last)
        if not is_same:
            raise UpstreamError(
                DIVERGED,
                "the engine that continues the answer generated other text than the client has",
            )
        self._repeated = repeated[len(text) :]
        return text[len(repeated) :]

    def render_end(self) -> bytes:
        """Return the events that end an answer with complete text; b"" if the client has them."""
        if self.is_done:
            return b""
        last = counts = b""
        if self.finish_reason is None:
            self.finish_reason = "length"
            choice = {"index": 0, "delta": {}} if self.terms.chat else {"index": 0, "text": ""}
            chunk = self._envelope | {"choices": [choice | {"finish_reason": self.finish_reason}]}
            last = _event(self._with_usage_member(chunk))
        if not self._has_counts:
            counts = self._counts_event(self._envelope | {"choices": [], "usage": self._sums(None)})
        return last + counts + b"data: " + _DONE + b"\n\n"

    def _with_usage_member(self, chunk: dict[str, Any]) -> dict[str, Any]:
        # Return the chunk with a null `usage`, if the client wants token counts at the end.
        return chunk | {"usage": None} if self.terms.shows_usage else chunk

    def _counts_event(self, chunk: dict[str, Any]) -> bytes:
        # Return the event with the token counts, or b"" for a client that does not want them.
        self._has_counts = True
        return _event(chunk) if self.terms.shows_usage else b""

    def _sums(self, last_usage: dict[str, Any] | None) -> Any:
        # Return the token counts of the whole answer, given those of the last engine.
        #
        # The prompt's details are those of the engine that began. If it failed before it reported
        # them, they are the last engine's. Its `cached_tokens` are then limited to the prompt,
        # since that engine also cached a part of the answer.
        prompt, made = self.prompt_tokens, self.generated_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
        }
        has_details = last_usage is not None and "prompt_tokens_details" in last_usage
        details = None if last_usage is None else last_usage.get("prompt_tokens_details")
        if self._details is None and details is not None:
            cached = details.get("cached_tokens")
            limited = {"cached_tokens": min(cached, prompt)} if cached else {}
            self._details = details | limited
        if self._details is not None or has_details:
            usage["prompt_tokens_details"] = self._details
        return self._with_cached_tokens(usage)

    def _with_cached_tokens(self, usage: dict[str, Any] | None) -> Any:
        # Return `usage` with the ledger's number of cached tokens in place of the engine's.
        if self.cached_tokens is None or not usage:
            return usage
        details = usage.get("prompt_tokens_details")
        if not isinstance(details, dict) or type(details.get("cached_tokens")) is not int:
            return usage
        return usage | {"prompt_tokens_details": details | {"cached_tokens": self.cached_tokens}}


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


class LedgerRecorder(ModelNameRewriter):
    """Passes the events of a relayed answer through a Ledger, the record of the client's tokens.

    The ledger also removes token ids from the events, which only the gateway has requested.
    """

    def __init__(
        self,
        ledger: Ledger,
        show: Callable[[dict[str, Any]], bytes],
        served: str,
        requested_model: str,
    ) -> None:
        """Create a recorder of an answer's tokens.

        show             the ledger's method for a chunk: render_first() or render_rest()
        served           the engine's name of the model
        requested_model  the client's name of the model
        """
        super().__init__(served, requested_model)
        self.ledger = ledger
        self._requested_model = requested_model
        self._show = show
        self._unfinished: list[bytes] = []  # pieces of an event whose end has not arrived
        self._unfinished_bytes = 0
        self._long: LongEvent | None = None  # the unfinished event, once it has LONG_EVENT bytes
        self._seam = b""  # the unfinished event's last bytes, where its end marker may begin

    def feed(self, payload: bytes, *, is_sse: bool, is_complete: bool) -> bytes:
        """Record the complete events in the engine's bytes; return the events for the client.

        If an event shows that the answer is broken, UpstreamError is raised, and none of these
        events is recorded as sent.
        """
        if not is_sse:
            return super().feed(payload, is_sse=is_sse, is_complete=is_complete)
        self.ledger.mark()
        try:
            shown = b""
            if self._long is not None:
                shown, payload = self._read_long(self._long, payload, ended=is_complete)
            ready = self._whole_events(payload, ended=is_complete).replace(b"\r\n", b"\n")
            events = [self._event(event) for event in ready.split(b"\n\n") if event.strip()]
            return b"".join((shown, *events))
        except UpstreamError:
            self.ledger.rewind()
            raise

    def _whole_events(self, payload: bytes, *, ended: bool) -> bytes:
        # Return the events that end in this payload, including the first one's kept beginning.
        #
        # Each byte is searched once. The rest is kept, as a LongEvent if it is long.
        if self._long is not None:
            return b""
        seam = self._seam
        whole = len(payload) if ended else whole_events_length(seam + payload) - len(seam)
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
        if self._unfinished_bytes >= LONG_EVENT:
            self._long = LongEvent(self.ledger.max_tokens)
            for piece in self._unfinished:
                self._long.add(piece)
            self._unfinished.clear()
            self._unfinished_bytes = 0
        return ready

    def _read_long(self, long: LongEvent, payload: bytes, *, ended: bool) -> tuple[bytes, bytes]:
        # Continue a long event with `payload`.
        #
        # Return the client's event if it is complete, and the bytes of `payload` after it.
        seam = self._seam
        end = first_event_length(seam + payload) - len(seam)
        if end <= 0 and not ended:
            long.add(payload)
            self._seam = (seam + payload)[-_SEAM:]
            return b"", b""
        end = end if end > 0 else len(payload)
        long.add(payload[:end])
        self._long, self._seam = None, b""
        event, lists = long.finish()
        return self._event(event.replace(b"\r\n", b"\n").rstrip(b"\n"), lists), payload[end:]

    def _event(self, event: bytes, lists: Mapping[str, Sequence[int]] = _NO_LISTS) -> bytes:
        # Record an event of the engine and return the client's event for it.
        #
        # `lists` has the token ids that were taken out of the event. Raises UpstreamError for an
        # event that is not in the expected format.
        data = event.strip().removeprefix(b"data:").strip()
        if event.lstrip()[:1] == b":":
            return event + b"\n\n"
        if data == _DONE:
            self.ledger.is_done = True
            return event + b"\n\n"
        try:
            chunk = _decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            message = f"the engine sent an event that is not JSON: {error}"
            raise UpstreamError("framing", message) from error
        if "model" in chunk:
            chunk["model"] = self._requested_model
        try:
            for name, ids in lists.items():
                (chunk if name == "prompt_token_ids" else chunk["choices"][0])[name] = ids
            return self._show(chunk)
        except (TypeError, ValueError, AttributeError, LookupError, OverflowError) as error:
            message = f"the engine sent an event of an unknown form: {error}"
            raise UpstreamError("framing", message) from error
