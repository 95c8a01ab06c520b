"""vLLM's JSON of chats and completions: chunks, whole answers, usage, logprobs, /tokenize.

For speed, most stream events are not encoded as JSON one by one. The text of the token is inserted
between two byte strings that are built once per choice.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mockgpu.http.choice_and_stop_reason import Choice
from mockgpu.mock_tokenizer import TOKEN_BYTES, token_count, token_ids
from mockgpu.request_parser import ParsedRequest

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


def event(payload: object) -> bytes:
    return b"data: %s\n\n" % _encode(payload)


def http_chunk(data: bytes) -> bytes:
    """Return `data` as one chunk of HTTP/1.1 chunked transfer encoding.

    Returns no bytes if `data` is empty, because an empty chunk would end the body.
    """
    return b"%x\r\n%s\r\n" % (len(data), data) if data else b""


def usage(parsed: ParsedRequest, output_tokens: int, cached: int | None) -> dict[str, Any]:
    """Return the `usage` object of a response: its numbers of prompt and output tokens.

    `cached` is the number of prompt tokens found in the prefix cache. None: the engine does not
    report it.
    """
    details = None if cached is None else {"cached_tokens": cached}
    return {
        "prompt_tokens": parsed.prompt_tokens,
        "total_tokens": parsed.prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
        "prompt_tokens_details": details,
    }


def cached_tokens(choices: list[Choice], n: int) -> int:
    """Return the number of prompt tokens of a request that were found in the prefix cache.

    Each prompt has `n` consecutive choices. Only the first choice of a prompt is counted.
    """
    return sum(max(0, choice.job.cached) for choice in choices[::n])


def _token_logprob(token: bytes) -> dict[str, Any]:
    return {
        "token": token.decode("latin-1"),
        "logprob": -(sum(token) % 64) / 64,
        "bytes": list(token),
    }


def _chat_logprobs(parsed: ParsedRequest, tokens: bytes) -> dict[str, Any] | None:
    return {"content": token_logprobs(parsed, tokens)} if parsed.wants_logprobs else None


def token_logprobs(parsed: ParsedRequest, tokens: bytes) -> list[dict[str, Any]]:
    """Return the log probabilities of tokens; empty if the client did not request them."""
    content: list[dict[str, Any]] = []
    if not parsed.wants_logprobs:
        return content
    for i in range(0, len(tokens), TOKEN_BYTES):
        entry = _token_logprob(tokens[i : i + TOKEN_BYTES])
        content.append(entry | {"top_logprobs": [entry] * min(1, parsed.body.top_logprobs or 0)})
    return content


def _completion_logprobs(
    parsed: ParsedRequest, tokens: bytes, offset: int
) -> dict[str, Any] | None:
    if not parsed.wants_logprobs:
        return None
    entries = [
        _token_logprob(tokens[i : i + TOKEN_BYTES]) for i in range(0, len(tokens), TOKEN_BYTES)
    ]
    return {
        "text_offset": list(range(offset, offset + len(tokens), TOKEN_BYTES)),
        "token_logprobs": [entry["logprob"] for entry in entries],
        "tokens": [entry["token"] for entry in entries],
        "top_logprobs": [{entry["token"]: entry["logprob"]} for entry in entries],
    }


class ResponseExtras(msgspec.Struct, frozen=True):
    """Fields that a prefill engine adds to its response, so that a decode engine can fetch the KV.

    top_level  fields of the response object
    in_choice  fields of the choice object
    """

    top_level: dict[str, Any] = {}
    in_choice: dict[str, Any] = {}


NO_EXTRAS = ResponseExtras()


def full_response(
    parsed: ParsedRequest,
    choices: list[Choice],
    created: int,
    cached: int | None,
    extras: ResponseExtras = NO_EXTRAS,
) -> bytes:
    output_tokens = sum(choice.output_tokens for choice in choices)
    build = _whole_chat_choice if parsed.chat else _whole_completion_choice
    return _encode(
        {
            "id": parsed.id,
            "object": "chat.completion" if parsed.chat else "text_completion",
            "created": created,
            "model": parsed.model,
            "choices": [build(parsed, choice) | extras.in_choice for choice in choices],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": usage(parsed, output_tokens, cached),
            "kv_transfer_params": None,
        }
        | _prompt_ids(parsed)
        | extras.top_level
    )


def _prompt_ids(parsed: ParsedRequest) -> dict[str, Any]:
    # Return the member with the prompt's token ids, if the chat requested it (vLLM >= 0.10).
    return (
        {"prompt_token_ids": token_ids(parsed.prompts[0])}
        if parsed.chat and parsed.body.return_token_ids
        else {}
    )


def _whole_chat_choice(parsed: ParsedRequest, choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": choice.whole_text,
        "refusal": None,
        "tool_calls": [],
    }
    if parsed.tool is not None:
        function = {"name": parsed.tool, "arguments": choice.whole_text}
        message["content"] = ""
        message["tool_calls"] = [
            {"id": _call_id(parsed, choice), "type": "function", "function": function}
        ]
    return {
        "index": choice.index,
        "message": message,
        "logprobs": _chat_logprobs(parsed, choice.tokens),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": token_ids(choice.tokens) if parsed.body.return_token_ids else None,
    }


def _whole_completion_choice(parsed: ParsedRequest, choice: Choice) -> dict[str, Any]:
    echoed = choice.prompt.decode("utf-8", "replace") if parsed.body.echo else ""
    scored, offset = (choice.prompt, 0) if parsed.echoes_only else (choice.tokens, len(echoed))
    return {
        "index": choice.index,
        "text": echoed + choice.text,
        "logprobs": _completion_logprobs(parsed, scored, offset),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": token_ids(choice.tokens) if parsed.body.return_token_ids else None,
        "prompt_token_ids": token_ids(choice.prompt) if parsed.body.return_token_ids else None,
        "prompt_logprobs": None,
    }


def _call_id(parsed: ParsedRequest, choice: Choice) -> str:
    return f"chatcmpl-tool-{parsed.id.rpartition('-')[2][:24]}-{choice.index}"


class StreamChunks:
    """Builds the HTTP chunks with the stream events of one choice of an answer."""

    __slots__ = (
        "_choice",
        "_created",
        "_has_sent_prompt_ids",
        "_head",
        "_parsed",
        "_plain",
        "_tail",
        "generated_count",
    )

    def __init__(self, parsed: ParsedRequest, choice: Choice, created: int) -> None:
        self._parsed = parsed
        self._choice = choice
        self._created = created
        self.generated_count = 0
        self._has_sent_prompt_ids = False
        options = parsed.body.stream_options
        continuous = options is not None and options.continuous_usage_stats
        self._plain = parsed.form.frame is None and not (
            parsed.wants_logprobs or continuous or parsed.body.return_token_ids
        )
        self._head, self._tail = self._template() if self._plain else (b"", b"")

    def _template(self) -> tuple[bytes, bytes]:
        # Return the bytes before and after a plain token in its rendered event.
        mark = b"\x00" * TOKEN_BYTES
        rendered = http_chunk(self._event(self._delta("0" * TOKEN_BYTES), None, b"", None))
        head, tail = rendered.replace(b'"0000"', b'"' + mark + b'"').split(mark)
        return head, tail

    def next(self, cached: int | None) -> bytes:
        """Return the events for the next token; an event with the role may precede the first
        token.
        """
        choice, start = self._choice, self.generated_count * TOKEN_BYTES
        self.generated_count += 1
        end = start + TOKEN_BYTES
        last = self.generated_count == choice.output_tokens
        if self._plain and self.generated_count > 1 and not last and end <= len(choice.text):
            return self._head + choice.tokens[start:end] + self._tail
        first = self._opening(cached) if self.generated_count == 1 else b""
        reason = choice.finish_reason if last else None
        piece, token = choice.piece(self.generated_count - 1), choice.tokens[start:end]
        return first + http_chunk(self._event(self._delta(piece), reason, token, cached))

    def _opening(self, cached: int | None) -> bytes:
        # Return the events before the first token: the role (chat), the echoed prompt, or none.
        if self._parsed.chat:
            return http_chunk(self._event({"role": "assistant", "content": ""}, None, b"", cached))
        if self._parsed.body.echo:
            return http_chunk(
                self._event(self._choice.prompt.decode("utf-8", "replace"), None, b"", cached)
            )
        return b""

    def _delta(self, piece: str) -> dict[str, Any] | str:
        if not self._parsed.chat:
            return piece
        if self._parsed.tool is None:
            return {"content": piece}
        first = self.generated_count <= 1
        call: dict[str, Any] = {"index": 0, "function": {"arguments": piece}}
        if first:
            call |= {"id": _call_id(self._parsed, self._choice), "type": "function"}
            call["function"]["name"] = self._parsed.tool
        return {"tool_calls": [call]}

    def _event(
        self, delta: dict[str, Any] | str, reason: str | None, token: bytes, cached: int | None
    ) -> bytes:
        parsed, offset = self._parsed, max(0, self.generated_count - 1) * TOKEN_BYTES
        part: dict[str, Any] = {"index": self._choice.index}
        beside: dict[str, Any] = {}
        if parsed.body.return_token_ids:
            part["token_ids"] = token_ids(token) or None
            if not self._has_sent_prompt_ids:
                self._has_sent_prompt_ids = True
                (beside if parsed.chat else part)["prompt_token_ids"] = token_ids(
                    self._choice.prompt
                )
        if parsed.chat:
            part |= {"delta": delta, "logprobs": _chat_logprobs(parsed, token) if token else None}
        else:
            logprobs = _completion_logprobs(parsed, token, offset) if token else None
            part |= {"text": delta, "logprobs": logprobs}
        part["finish_reason"] = reason
        if reason is not None:
            part["stop_reason"] = self._choice.stop_reason
        return event(
            chunk(parsed, self._created, [part])
            | beside
            | self._running_usage(self.generated_count if token else 0, cached)
        )

    def _running_usage(self, output_tokens: int, cached: int | None) -> dict[str, Any]:
        options = self._parsed.body.stream_options
        if options is None or not options.include_usage:
            return {}
        return {
            "usage": usage(self._parsed, output_tokens, cached)
            if options.continuous_usage_stats
            else None
        }


def chunk(parsed: ParsedRequest, created: int, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON object of one stream event that contains these choices."""
    kind = "chat.completion.chunk" if parsed.chat else "text_completion"
    return {
        "id": parsed.id,
        "object": kind,
        "created": created,
        "model": parsed.model,
        "choices": choices,
    }


def stream_end(
    parsed: ParsedRequest, choices: list[Choice], created: int, cached: int | None
) -> bytes:
    """Return the end of a successful stream: usage if the client requested it, then `[DONE]`.

    The result is one or more HTTP chunks.
    """
    options = parsed.body.stream_options
    if options is None or not options.include_usage:
        return http_chunk(DONE)
    output_tokens = sum(choice.output_tokens for choice in choices)
    return http_chunk(
        event(chunk(parsed, created, []) | {"usage": usage(parsed, output_tokens, cached)})
    ) + http_chunk(DONE)


def stream_error(body: bytes) -> bytes:
    """Return the end of a failed stream: the error event, then `[DONE]`, as HTTP chunks."""
    return http_chunk(b"data: %s\n\n" % body) + http_chunk(DONE)


def tokenize_response(prompt: bytes, context: int) -> bytes:
    """Return the JSON body of a /tokenize response: token ids, their count, and the context
    length.
    """
    return _encode(
        {
            "count": token_count(prompt),
            "max_model_len": context,
            "tokens": token_ids(prompt),
            "token_strs": None,
        }
    )
