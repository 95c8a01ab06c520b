"""Patterns that find token counts, finish reasons and errors in the text of a chat or completion.

The functions are pure. The Relay (relay.py) calls them with bytes that it has kept.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from gateway.protocol.byte_scan import IS_C_FORM, finish_reason, has_error_name, usage_counts
from gateway.protocol.python_byte_scan import DONE_MARKER as DONE_MARKER
from gateway.protocol.python_byte_scan import ERROR_NAME
from gateway.protocol.python_byte_scan import USAGE as USAGE

_FINISH_NAME = b'"finish_reason":'
FINISH_REASON = b'"finish_reason":"'
SPACED_FINISH_REASON = b'"finish_reason": "'
"""The form in which some engines write a finish reason, with a blank after each colon."""
EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
"""The byte sequences that end an event. Engines write the first; proxies in front of them may write
the second.
"""
# A JSON string contains no raw line break, so these bytes never occur within one.
_DONE_MARKERS = tuple(DONE_MARKER + end for end in EVENT_ENDS)
MAX_FIRST_EVENT, MAX_LEADING_ERROR = 256, 1024 * 1024
"""Limits on the first bytes of a stream that are held back.

MAX_FIRST_EVENT    bytes until the stream must show whether it begins with an error
MAX_LEADING_ERROR  bytes of such an error; larger because engines repeat a bad request in it
"""
MAX_COMMENTS_S = 20.0
"""For how many seconds after the client's request comments before the first event are held back.

Another engine can serve the request until then. Afterwards comments, such as `: ping`, are passed
on as they come, because proxies close connections on which nothing is sent for a minute. The same
holds for named events that show no work of the engine.
"""
DATA_LINE = b"\ndata:"  # after the size of a chunk or another line
MAX_REFUSAL_BYTES = 64 * 1024
"""Maximum number of bytes of an engine's error response that are kept."""
MAX_HELD_BYTES, MAX_HELD_EVENTS = 64 * 1024, 3
"""How much of a stream is held back while no token has been recognised: bytes, and events."""
HELD_IDS_BYTES, PROMPT_IDS = 1024 * 1024, b'"prompt_token_ids"'
"""How the start of a stream with the token ids of its prompt is recognised and held back.

Engines send these ids where a model has `resume`, because the gateway requests them.

HELD_IDS_BYTES  maximum number of bytes that are held back; enough for about 150,000 ids
PROMPT_IDS      the JSON name of the list of ids
"""

# Blanks are limited, so that no match is longer than LONGEST_MATCH bytes: text that arrives in many
# reads is searched from that many bytes before each read.
_BLANKS = rb"\s{0,64}"
LONGEST_MATCH = 160
# Older releases of vLLM, SGLang and TensorRT-LLM send the members of an error without the object
# `error` around them, after this one.
_FLAT_ERROR = rb'"object":\s{0,4}"error"'
# Begins with a fixed text, which `re` searches for quickly, and then looks back for a line break.
ERROR_EVENT_PATTERN = re.compile(
    rb'data:(?<![^\n]data:)%b\{%b(?:"error"|%b)' % (_BLANKS, _BLANKS, _FLAT_ERROR)
)
# In a chunked body a size line may come first.
_ERROR_BODY = re.compile(
    rb"(?:[0-9a-fA-F]{1,15}[^\r\n]{0,64}\r\n)?%b\{%b"
    rb'(?:"error"%b:%b(?!null)|%b|"type":\s{0,4}"error")'  # the last one in Anthropic's API
    % (_BLANKS, _BLANKS, _BLANKS, _BLANKS, _FLAT_ERROR)
)
_ERROR_BODY_BYTES = 64
TOKEN_PATTERN = re.compile(
    rb'"(?:(?:content|text|reasoning|reasoning_content|refusal|arguments)":%b"[^"]'
    rb'|(?:tool_calls|token_ids)":%b\[%b[^\]\s])' % (_BLANKS, _BLANKS, _BLANKS)
)
QUOTED_FINISH_REASON = re.compile(rb'"finish_reason":%b"' % _BLANKS)
# A member whose value directly follows: a chunk's framing may stand between name and value.
_FIRST_MEMBER = re.compile(rb'"\w+":( ?)[^\s]')
_CODE = re.compile(rb'"code":\s*(4\d\d)(?!\d)')
_FINISH = re.compile(rb'"finish_reason": ?"(\w+)"')
_FINISH_REASONS = {
    reason.encode(): reason
    for reason in ("stop", "length", "tool_calls", "content_filter", "function_call", "abort")
}
"""The usual finish reasons, which are searched for without a regular expression."""
_QUOTE, _REASON_BYTES = ord('"'), 24
_PROMPT, _COMPLETION, _CACHED = (
    re.compile(rb'"%b_tokens":\s*(\d{1,15})(?!\d)' % kind).search
    for kind in (b"prompt", b"completion", b"cached")
)


_UNFINISHED = frozenset((None, "abort", "error"))
"""Finish reasons of a choice that the model has not completed."""


class _FinishedChoice(msgspec.Struct, frozen=True):
    index: int = 0
    finish_reason: str | None = None


class _FinishedChunk(msgspec.Struct, frozen=True):
    choices: tuple[_FinishedChoice, ...] = ()


_read_choices = msgspec.json.Decoder(_FinishedChunk).decode


Count = Annotated[int, msgspec.Meta(ge=0, lt=10**15)]


class TokenUsage(msgspec.Struct, frozen=True):
    """Token counts as the engine reported them. A count is None if it was not reported."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    cached_tokens: Count | None = None


_read_usage = msgspec.json.Decoder(TokenUsage).decode


def find_usage(text: bytes) -> TokenUsage:
    """Return the token counts in the last `usage` member in `text`."""
    if IS_C_FORM and (counts := usage_counts(text)) is not None:
        prompt_tokens, completion_tokens, cached_tokens = counts
        return TokenUsage(prompt_tokens, completion_tokens, cached_tokens)
    # partition() takes half as long as find(), whose offsets are parsed like a format string.
    _, found, rest = text.rpartition(USAGE)
    if not found:
        return TokenUsage()
    members, end, _ = rest.partition(b"}")
    if members.find(b"{", 1) < 0:  # without details, decoding takes half as long
        try:  # suppress() would take as long as the decoding
            return _read_usage(members + end)
        except msgspec.DecodeError:
            pass
    prompt, completion, cached = _PROMPT(rest), _COMPLETION(rest), _CACHED(rest)
    return TokenUsage(
        None if prompt is None else int(prompt[1]),
        None if completion is None else int(completion[1]),
        None if cached is None else int(cached[1]),
    )


def find_finish_reason(text: bytes) -> str | None:
    """Return the last finish reason in `text` as the engine wrote it; None if there is none."""
    if IS_C_FORM and (usual := finish_reason(text)) is not None:
        return usual
    _, found, value = text.rpartition(_FINISH_NAME)
    if found and value and value[0] == _QUOTE:
        name, is_whole, _ = value[1:_REASON_BYTES].partition(b'"')
        if is_whole and (reason := _FINISH_REASONS.get(name)) is not None:
            return reason
    start = text.rfind(_FINISH_NAME)
    while start >= 0:
        match = _FINISH.match(text, start)
        if match is not None:
            return match[1].decode()
        # This finish reason is null, so look for an earlier one.
        start = text.rfind(_FINISH_NAME, 0, start)
    return None


def finish_reason_marker(stream: bytes) -> bytes:
    """Return the bytes that precede a finish reason in this stream, with or without a blank.

    The first member of the stream shows whether the engine writes a blank after each colon.
    """
    first = _FIRST_MEMBER.search(stream)
    return SPACED_FINISH_REASON if first is not None and first[1] else FINISH_REASON


def find_finished_choices(events: bytes) -> frozenset[int]:
    """Return the indices of the choices that end in these events.

    Incomplete events are ignored. A choice that ends by an abort or an error is not included.
    """
    indices: set[int] = set()
    for event in events.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]:
        if _FINISH.search(event) is not None:
            try:
                choices = _read_choices(event.lstrip(b"\n").removeprefix(b"data:")).choices
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
                continue
            indices.update(
                choice.index for choice in choices if choice.finish_reason not in _UNFINISHED
            )
    return frozenset(indices)


def leading_error_end(stream: bytes | bytearray) -> int:
    """Return the end offset of the part of a stream that is searched for a leading error event.

    Comments before the first event do not count towards the length of that part.
    """
    return MAX_FIRST_EVENT + max(0, stream.find(DATA_LINE))


def find_leading_error(stream: bytes, hold_until_token: bool) -> re.Match[bytes] | None:
    """Return the match of an error event at the start of a stream; None if there is none.

    With `hold_until_token`, `stream` ends before the first token, and the error event may be
    anywhere in it.
    """
    # This search is much faster than the pattern, and suffices for nearly every stream.
    if stream.find(ERROR_NAME) < 0:
        return None
    end = len(stream) if hold_until_token else leading_error_end(stream)
    return ERROR_EVENT_PATTERN.search(stream, 0, end)


def find_error_body(body: bytes, start: int = 0) -> re.Match[bytes] | None:
    """Return the match of an error at the start of a JSON body; None if there is none.

    Some providers send errors with status 200. `start` is the offset of the body.
    """
    if not has_error_name(body, start, _ERROR_BODY_BYTES):
        return None
    return _ERROR_BODY.match(body, start)


def client_error_status(events: bytes, error: re.Match[bytes]) -> int | None:
    """Return the 4xx status of an error event if the request caused the error, else None.

    SGLang and vLLM detect some bad requests, such as a prompt that is too long, only after they
    have sent status 200. An error after the first token is never caused by the request.
    """
    code = (
        None
        if TOKEN_PATTERN.search(events, 0, error.start())
        else _CODE.search(events, error.start())
    )
    return None if code is None else int(code[1])


def is_flat_error(event: re.Match[bytes]) -> bool:
    """Return whether an error event lacks the member `error`, so that SDKs do not recognise it."""
    return event[0].find(b'"object"') >= 0


def has_done_marker(events: bytes) -> bool:
    """Return whether these events include [DONE], the marker for the end of a stream."""
    return any(events.find(marker) >= 0 for marker in _DONE_MARKERS)


def error_text(text: bytes) -> bytes:
    """Return the JSON of the error event in `text`, which may be cut off.

    If there is no error event, all of `text` is returned.
    """
    match = ERROR_EVENT_PATTERN.search(text)
    if match is None:
        return text
    return text[text.index(b"{", match.start()) :].partition(b"\n")[0].rstrip()


def last_event_end(events: bytes) -> int:
    """Return the offset at which the last complete event of a stream ends.

    The event's final newline is not included: it serves to recognise the start of the next event.
    """
    crlf = events.rfind(b"\n\r\n")
    return max(events.rfind(b"\n\n") + 1, crlf + 2 if crlf >= 0 else 0)
