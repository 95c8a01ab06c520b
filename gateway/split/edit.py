"""A request's JSON with a dialect's edits: raw values are laid side by side, never decoded and encoded again.

Where an edit only adds members that a client's body cannot hold (the door drops them), it is spliced in before the
closing brace.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from kvtransfer.dialects import Edits
from policies.split import Shape

Members = Mapping[str, msgspec.Raw]

_any = msgspec.json.Decoder().decode
_LISTED = re.compile(rb'\[[ \t\r\n]*+["\[]')  # however much blank a client puts there
_NOTHING = frozenset((b"null", b"false"))
_MANY = frozenset(("n", "best_of", "prompt", "prompt_logprobs", "echo"))  # all that can make it unfit to be split


class _Keys(dict[str, bytes]):
    """How a member's name stands in a body behind another member; those of nearly all requests are at hand."""

    def __missing__(self, name: str) -> bytes:
        return b"," + msgspec.json.encode(name) + b":"


_KEYS = _Keys(
    (name, f',"{name}":'.encode())
    for name in (
        *(
            "model",
            "messages",
            "prompt",
            "stream",
            "stream_options",
            "max_tokens",
            "max_completion_tokens",
            "n",
            "stop",
        ),
        *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias"),
        *("tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort", "metadata", "user"),
        *("n", "prompt_cache_key", "chat_template_kwargs", "logprobs", "top_logprobs"),
    )
)


def shape(members: Members) -> Shape:
    """What decides whether this request can be split."""
    bound = _number(members.get("max_completion_tokens")) or _number(members.get("max_tokens"))
    if _MANY.isdisjoint(members):  # as nearly always in a chat
        return Shape(max_tokens=bound)
    prompt = members.get("prompt")
    return Shape(
        max(_number(members.get("n")) or 1, _number(members.get("best_of")) or 1),
        1 if prompt is None else _prompts(prompt),
        any(bytes(members.get(name, b"null")) not in _NOTHING for name in ("prompt_logprobs", "echo")),
        bound,
    )


def shows_usage(members: Members) -> bool:
    """Whether the client will be shown token counts: always, but for streams that do not ask for them."""
    stream, options = members.get("stream"), members.get("stream_options")
    if stream is None or bytes(stream) != b"true":
        return True
    asked = None if options is None else _any(options)
    return isinstance(asked, dict) and bool(asked.get("include_usage"))


def edited(body: bytes, members: Members, edits: Edits, model: str | None) -> bytes:
    """The body, an object of these members, with `edits`; for an engine that knows the model as `model`, unless that is
    None. The body itself may be gone if `edits` drops anything."""
    drop, keep = edits.drop, edits.keep
    if model is None and not drop and keep is None:
        return b"".join((memoryview(body)[: body.rindex(b"}")], edits.put, b"}"))
    if model is not None:
        members = {**members, "model": msgspec.Raw(msgspec.json.encode(model))}
    parts: list[bytes | msgspec.Raw] = []
    for name, value in members.items():
        if name not in drop and (keep is None or name in keep):
            parts += (_KEYS[name], value)
    parts[0] = b"{" + bytes(parts[0])[1:]
    parts += (edits.put, b"}")
    return b"".join(parts)


def _number(raw: msgspec.Raw | None) -> int | None:
    """The door has checked that it is an integer or null."""
    found: int | None = None if raw is None else _any(raw)
    return found


def _prompts(raw: msgspec.Raw) -> int:
    """Prompts in a completions request: a text or one list of ids is one, a list of texts or of lists as many."""
    if _LISTED.match(raw) is None:
        return 1
    return len(msgspec.json.decode(raw, type=list[msgspec.Raw]))
