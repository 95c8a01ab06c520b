"""Grammars of streams with named events: Anthropic's Messages API and OpenAI's Responses API.

An EventGrammar has patterns for the events that begin, continue, end or break an answer, and a
function that reads token counts. The patterns match the `event:` line, because the member `type`
may be anywhere in the event's data. Streams of chat completions have no such lines;
gateway/protocol/response/usage_and_error_search.py reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from gateway.protocol.response.usage_and_error_search import USAGE, TokenUsage

_COUNT = rb'"%b":\s*(\d{1,15})(?!\d)'
_CODE = re.compile(rb'"code":\s*(4\d\d)(?!\d)')
_TYPE = re.compile(rb'"type":\s*"(\w{1,64})"')
_CLIENT_ERRORS = {
    b"invalid_request_error": 400,
    b"BadRequestError": 400,
    b"not_found_error": 404,
    b"NotFoundError": 404,
    b"request_too_large": 413,
}


class EventGrammar(msgspec.Struct, frozen=True, eq=False):
    """The events of one API's streams, as patterns to search in complete events.

    first       an event that shows that the engine has begun to work; group 1 is its name
    token       an event with a part of the answer
    end         the event that ends a complete answer
    error       the event that ends a failed answer
    finish      the reason why an answer ended, in group 1
    find_usage  function that returns the token counts in a text
    """

    first: re.Pattern[bytes]
    token: re.Pattern[bytes]
    end: re.Pattern[bytes]
    error: re.Pattern[bytes]
    finish: re.Pattern[bytes]
    find_usage: Callable[[bytes], TokenUsage]


def _events(names: bytes) -> re.Pattern[bytes]:
    return re.compile(rb"(?:^|\n)event: ?(%b)\r?\n" % names)


def _find_messages_usage(text: bytes) -> TokenUsage:
    # Return the token counts of the last `usage` member of a Messages stream.
    #
    # Counts that are missing there are taken from the first `usage` member, which has those of the
    # prompt. Unlike OpenAI's, Anthropic's `input_tokens` exclude tokens that were read from or
    # written to a cache; they are added here.
    first, last = text.find(USAGE), text.rfind(USAGE)
    if first == last:
        return _messages_counts(text, last)
    return merge_usage(_messages_counts(text, first), _messages_counts(text, last))


def _messages_counts(text: bytes, start: int) -> TokenUsage:
    if start < 0:
        return TokenUsage()
    fresh, output, read, written = (_count(pattern, text, start) for pattern in _MESSAGES_COUNTS)
    prompt = None if fresh is None else fresh + (read or 0) + (written or 0)
    return TokenUsage(prompt, output, read)


def _find_responses_usage(text: bytes) -> TokenUsage:
    # Return the token counts of the last `usage` member of a Responses stream.
    start = text.rfind(USAGE)
    if start < 0:
        return TokenUsage()
    return TokenUsage(*(_count(pattern, text, start) for pattern in _RESPONSES_COUNTS))


def _count(pattern: re.Pattern[bytes], text: bytes, start: int) -> int | None:
    match = pattern.search(text, start)
    return None if match is None else int(match[1])


_MESSAGES_COUNTS = tuple(
    re.compile(_COUNT % name)
    for name in (
        *(b"input_tokens", b"output_tokens"),
        *(b"cache_read_input_tokens", b"cache_creation_input_tokens"),
    )
)
_RESPONSES_COUNTS = tuple(
    re.compile(_COUNT % name) for name in (b"input_tokens", b"output_tokens", b"cached_tokens")
)

MESSAGES = EventGrammar(
    first=_events(rb"(?!message_start\r?\n|ping\r?\n)[^\s][^\r\n]{0,63}"),
    token=_events(rb"content_block_delta"),
    end=_events(rb"message_stop"),
    error=_events(rb"error"),
    finish=re.compile(rb'"stop_reason":\s*"(\w{1,64})"'),
    find_usage=_find_messages_usage,
)
RESPONSES = EventGrammar(
    first=_events(rb"(?!response\.(?:created|in_progress|queued)\r?\n)[^\s][^\r\n]{0,63}"),
    token=_events(rb"response\.[a-z_.]{1,60}\.delta"),
    end=_events(rb"response\.(?:completed|incomplete|failed)"),
    error=_events(rb"error"),
    finish=re.compile(rb'"status":\s*"(completed|incomplete|failed|cancelled)"'),
    find_usage=_find_responses_usage,
)


def named_error_status(event: bytes) -> int | None:
    """Return the 4xx status for an error event that the request caused, else None."""
    code = _CODE.search(event)
    if code is not None:
        return int(code[1])
    statuses = (_CLIENT_ERRORS.get(match[1]) for match in _TYPE.finditer(event))
    return next((status for status in statuses if status is not None), None)


def merge_usage(first: TokenUsage, last: TokenUsage) -> TokenUsage:
    """Return the token counts of an answer whose first and last events each report some of them.

    If both events report a count, the last event's count is used.
    """
    return TokenUsage(
        first.prompt_tokens if last.prompt_tokens is None else last.prompt_tokens,
        first.completion_tokens if last.completion_tokens is None else last.completion_tokens,
        first.cached_tokens if last.cached_tokens is None else last.cached_tokens,
    )
