"""Receives the answer to one request of a batch, and keeps the start of an interrupted answer.

LineClient takes the place of a client's connection. If an answer can be continued token for token,
it is requested as a stream (engine_request_body.py). StreamedAnswer joins the events of the stream
to the body of a whole answer. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.batch.result_journal import KeptAnswer
from gateway.protocol.api_table import CHAT, Api
from gateway.protocol.error_formats import OPENAI, ErrorFormat
from gateway.protocol.errors import GatewayError
from gateway.protocol.response.date_header import ResponseClock, ResponseLines
from gateway.protocol.translate.chat_types import TranslationError
from gateway.protocol.translate.sse import EventReader

if TYPE_CHECKING:
    from gateway.http.engine_connections import UpstreamConnection
    from gateway.http.large_body_parsing import JoinInTurn

MAX_ANSWER_BYTES = 32 * 1024 * 1024
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


class StreamedAnswer:
    """Collects the text of a streamed answer, and builds the body of the whole answer at its end.

    first  the first chunk of the answer as raw JSON; b"" until it has arrived
    """

    def __init__(self, api: Api, kept: KeptAnswer | None = None) -> None:
        # Initialize; `kept` is the part of the answer that earlier attempts received, if any.
        self._is_chat = api is CHAT
        self._kept = kept
        self._texts = [] if kept is None else [kept.text]
        self.first = b"" if kept is None else bytes(kept.first)
        self._extra: dict[str, list[str]] = {}
        self._last: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}
        self._events = EventReader()

    @property
    def text(self) -> str:
        """Return the answer's text so far, including what earlier attempts have received."""
        return "".join(self._texts)

    def feed(self, data: bytes) -> None:
        """Process the next bytes of the streamed answer.

        Raises TranslationError if an event is too long.
        """
        for event in self._events.feed(data):
            payload = bytes(event.strip())
            if payload[:1] == b"{":
                self._read(payload)

    def _read(self, payload: bytes) -> None:
        chunk = _decode(payload)
        self.first = self.first or payload
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            self._last = {name: v for name, v in choice.items() if v is not None} | self._last
            self._last["finish_reason"] = choice.get("finish_reason")
            delta = choice.get("delta")
            if delta is None:
                self._texts.append(choice.get("text") or "")
                continue
            self._texts.append(delta.get("content") or "")
            for name, value in delta.items():
                if name not in ("content", "role") and isinstance(value, str):
                    self._extra.setdefault(name, []).append(value)

    @property
    def is_complete(self) -> bool:
        """Return whether the answer has its finish reason, so that its body can be built."""
        return self._last.get("finish_reason") is not None

    def end_at_limit(self) -> None:
        """Complete an answer whose earlier attempts have generated the maximum number of tokens.

        No further request to an engine is needed.
        """
        self._last["finish_reason"] = "length"
        self._usage = {"completion_tokens": 0}

    def body(self) -> bytes:
        """Return the complete answer in the JSON form of an answer that is not streamed."""
        envelope = {
            name: value
            for name, value in _decode(self.first).items()
            if name not in ("choices", "usage", "prompt_token_ids")
        }
        envelope["object"] = "chat.completion" if self._is_chat else "text_completion"
        choice: dict[str, Any] = {"index": 0}
        if self._is_chat:
            choice["message"] = {"role": "assistant", "content": self.text, "refusal": None}
            choice["message"] |= {name: "".join(parts) for name, parts in self._extra.items()}
        else:
            choice["text"] = self.text
        choice |= {"logprobs": None, "finish_reason": self._last["finish_reason"]}
        if "stop_reason" in self._last:
            choice["stop_reason"] = self._last["stop_reason"]
        return _encode({**envelope, "choices": [choice], "usage": self._total_usage()})

    def _total_usage(self) -> dict[str, Any]:
        usage, kept = self._usage, self._kept
        if kept is None or not usage:
            return usage
        made = usage.get("completion_tokens", 0) + len(kept.tokens)
        total = {"prompt_tokens": kept.prompt_tokens, "completion_tokens": made}
        return {**total, "total_tokens": kept.prompt_tokens + made}

    def keep(
        self, prompt: Sequence[int], shown: Sequence[int], prompt_tokens: int
    ) -> KeptAnswer | None:
        """Return what has been received of the answer, over all attempts; None if that is nothing.

        prompt  token ids of the newest attempt's prompt
        shown   token ids of the newest attempt's answer
        """
        kept = self._kept
        if not shown:
            return kept
        first = msgspec.Raw(self.first)
        if kept is None:
            return KeptAnswer(list(prompt), list(shown), self.text, first, prompt_tokens)
        tokens = [*kept.tokens, *shown]
        return KeptAnswer(kept.prompt, tokens, self.text, first, kept.prompt_tokens)


class LineClient:
    """Takes the place of a client connection, and collects the response to one batch request.

    It implements gateway.http.client_interface.Client. The response arrives in the form for
    HTTP/1.0: a head, then the body up to its end.

    status    the response's HTTP status; 0 before its head has arrived
    body      the body of a response that is not streamed
    answer    collects a streamed answer; None for a request without streaming
    overflow  whether the response was longer than MAX_ANSWER_BYTES, or one of its events too long
    """

    address = "batch"
    target = ""
    is_http_1_0 = True
    will_close = False
    is_writing_paused = False

    def __init__(
        self,
        body: bytes,
        headers: Mapping[str, str],
        clock: ResponseClock,
        answer: StreamedAnswer | None,
    ) -> None:
        self._request_body = body
        self.headers = headers
        self.clock: ResponseClock = clock
        self.response_lines: ResponseLines = clock
        self.answer = answer
        self.status = self._received = 0
        self.retry_after_s: float | None = None
        self.is_cut = False
        self._head = bytearray()
        self._body = bytearray()  # not a list, whose items take more memory than a few bytes

    @property
    def body(self) -> bytes:
        return bytes(self._body)

    @property
    def overflow(self) -> bool:
        return self._received > MAX_ANSWER_BYTES

    def take_buffered_body(self) -> bytes:
        return self._request_body

    async def read_body(
        self, reserve: Callable[[int], None], join_in_turn: JoinInTurn | None = None
    ) -> bytes:
        reserve(len(self._request_body))
        return self._request_body

    def set_source(self, source: UpstreamConnection | None) -> None:
        """Do nothing: this client reads everything and never pauses the engine's connection."""

    def write(self, data: bytes) -> None:
        self._received += len(data)
        if self.overflow:
            return
        if not self.status:
            self._head += data
            head, separator, data = bytes(self._head).partition(b"\r\n\r\n")
            if not separator:
                return
            self.status = int(head.split(b" ", 2)[1])
        if self.answer is not None and self.status == 200:
            try:
                self.answer.feed(data)
            except TranslationError:
                self._received = MAX_ANSWER_BYTES + 1
        else:
            self._body += data

    def send_error(self, error: GatewayError, request_id: str, shape: ErrorFormat = OPENAI) -> None:
        self.status, self.retry_after_s = error.status, error.retry_after_s
        self._body = bytearray(shape.body(error, request_id))

    def send_response(self, status: int, body: bytes, headers: list[tuple[str, str]]) -> None:
        self.status, self._body = status, bytearray(body)

    def close_after_write(self) -> None:
        """Mark the response as cut: the gateway closes it before the answer is complete."""
        self.is_cut = True
