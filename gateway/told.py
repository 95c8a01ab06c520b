"""What engines tell in their answers, read out of the bytes: token counts, why generation ended, and errors told late.

Pure functions over the pieces that a relay keeps (relay.py) and nothing else.
"""

from __future__ import annotations

import re

import msgspec

from gateway.framing import LAST_CHUNK

USAGE = b'"usage":'
REASON = b'"finish_reason":"'
SPACED_REASON = b'"finish_reason": "'
"""The same as some engines write it, with a blank behind each colon."""
LAST_WORD = b"[DONE]"
ENDS = (b"\n\n", b"\r\n\r\n")
"""Of an event: engines write the first, what stands before them may write the other."""
_LAST = tuple(LAST_WORD + end for end in ENDS)  # no JSON has a line's end behind a word
FIRST_EVENT, ERROR_HELD = 256, 1024 * 1024
"""Bytes of a stream that are waited for, to see whether it begins with an error, and for all of that error: engines
repeat a bad request in what they say of it."""
ERROR_KEPT = 64 * 1024
"""Bytes that are kept of what an engine says of a refusal."""
HELD_BYTES, HELD_EVENTS = 64 * 1024, 3
"""An engine that says more before its first token says what we do not know."""

ERROR_EVENT = re.compile(rb'(?:^|\n)data:\s*\{\s*"error"')
CONTENT = re.compile(
    rb'"(?:content|text|reasoning|reasoning_content|refusal|arguments)":\s*"[^"]|"(?:tool_calls|token_ids)":\s*\[\s*[^\]\s]'
)
_TELLS = re.compile(CONTENT.pattern + rb'|"finish_reason":\s*"|\[DONE\]|' + ERROR_EVENT.pattern)
_FIRST_MEMBER = re.compile(rb'"\w+":( ?)')
_CODE = re.compile(rb'"code":\s*(4\d\d)(?!\d)')
_FINISH = re.compile(rb'"finish_reason": ?"(\w+)"')
_PROMPT, _COMPLETION, _CACHED = (
    re.compile(rb'"%b_tokens":\s*(\d{1,15})(?!\d)' % each).search for each in (b"prompt", b"completion", b"cached")
)


_UNFINISHED = frozenset((None, "abort", "error"))
"""A choice with one of these was not finished by the model."""


class _FinishedChoice(msgspec.Struct, frozen=True):
    index: int = 0
    finish_reason: str | None = None


class _FinishedChunk(msgspec.Struct, frozen=True):
    choices: tuple[_FinishedChoice, ...] = ()


_read_choices = msgspec.json.Decoder(_FinishedChunk).decode


class Usage(msgspec.Struct, frozen=True):
    """Token counts as the engine reported them; None where it did not."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


def usage_in(text: bytes) -> Usage:
    """The counts behind the last `usage` member."""
    at = text.rfind(USAGE)
    if at < 0:
        return Usage()
    prompt, completion, cached = _PROMPT(text, at), _COMPLETION(text, at), _CACHED(text, at)
    return Usage(
        None if prompt is None else int(prompt[1]),
        None if completion is None else int(completion[1]),
        None if cached is None else int(cached[1]),
    )


def reason_in(text: bytes) -> str | None:
    """The last reason why generation ended, in the engine's word."""
    at = max(text.rfind(REASON), text.rfind(SPACED_REASON))
    found = _FINISH.match(text, at) if at >= 0 else None
    return found[1].decode() if found else None


def reason_marker(stream: bytes) -> bytes:
    """How this stream writes a finish reason, judged by the blank behind the name of its first member."""
    first = _FIRST_MEMBER.search(stream)
    return SPACED_REASON if first is not None and first[1] else REASON


def finished_choices(events: bytes) -> frozenset[int]:
    """Return the indices of the choices that the whole events among these finish, the engine's aborts left out."""
    found: set[int] = set()
    for event in events.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]:
        if _FINISH.search(event) is not None:
            try:
                choices = _read_choices(event.lstrip(b"\n").removeprefix(b"data:")).choices
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
                continue
            found.update(each.index for each in choices if each.finish_reason not in _UNFINISHED)
    return frozenset(found)


def undecided(stream: bytes, patient: bool) -> bool:
    """Whether its first bytes do not tell yet what the answer is: it is judged by its whole first event or, where there
    is patience, by its first token."""
    error = error_in(stream, patient)
    if error is not None:
        return len(stream) < ERROR_HELD and not any(stream.find(end, error.end()) >= 0 for end in ENDS)
    if patient:
        few = len(stream) < HELD_BYTES and stream.count(b"\ndata:") <= HELD_EVENTS
        return few and _TELLS.search(stream) is None and not stream.endswith(LAST_CHUNK)
    return len(stream) < FIRST_EVENT and not any(end in stream for end in ENDS)


def error_in(stream: bytes, patient: bool) -> re.Match[bytes] | None:
    """The error that a stream begins with, as it came: its first event or, where there is patience, what comes before
    the first token."""
    end = len(stream) if patient else FIRST_EVENT
    if stream.find(b'"error"', 0, end) < 0:  # far faster than the pattern, and all that nearly every stream needs
        return None
    return ERROR_EVENT.search(stream, 0, end)


def clients_fault(events: bytes, error: re.Match[bytes]) -> int | None:
    """The status of an error event that is about the request. SGLang and vLLM find some faults, such as a prompt that
    is too long, when they have said 200 already (engines.md A.6). None for trouble of the engine's own, as any is that
    comes behind a token: there the request was understood."""
    code = None if CONTENT.search(events, 0, error.start()) else _CODE.search(events, error.start())
    return None if code is None else int(code[1])


def told_all(events: bytes) -> bool:
    """Whether the last event is among them, whatever may follow it."""
    return any(events.find(last) >= 0 for last in _LAST)


def error_said(said: bytes) -> bytes:
    """What an error event among them says, or a beginning of it; of what is no event, all."""
    found = ERROR_EVENT.search(said)
    return said if found is None else said[said.index(b"{", found.start()) :].partition(b"\n")[0].rstrip()


def last_end(events: bytes) -> int:
    """Where the last whole event ends: at its last line's end, which the next one's beginning is known by."""
    blank = events.rfind(b"\n\r\n")
    return max(events.rfind(b"\n\n") + 1, blank + 2 if blank >= 0 else 0)
