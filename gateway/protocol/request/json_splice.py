"""Inserts an engine's KV handoff members into a request's JSON; tells if a request can be split.

By this protocol, a prefill engine passes a request's KV cache to a decode engine. Raw values are
joined without being decoded. Edits that only add members are inserted before the closing brace.
This is possible because parsing has removed such members from the client's body.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from kvtransfer.dialects import RequestEdits
from policies.pricing.split_decision import SplitShape

Members = Mapping[str, msgspec.Raw]

_any = msgspec.json.Decoder().decode
_LIST_OF_PROMPTS = re.compile(rb'\[[ \t\r\n]*+["\[]')
_OFF = frozenset((b"null", b"false"))
# The members that can make a request unfit to be split.
_SHAPING = frozenset(("n", "best_of", "prompt", "prompt_logprobs", "echo"))


class _Keys(dict[str, bytes]):
    """A cache of the text before a member's value in a JSON object: comma, name and colon.

    It maps a member's name to that text. Common names are prepared in advance.
    """

    def __missing__(self, name: str) -> bytes:
        return b"," + msgspec.json.encode(name) + b":"


_KEYS = _Keys(
    (name, f',"{name}":'.encode())
    for name in (
        *("model", "messages", "prompt", "stream", "stream_options", "max_tokens"),
        *("max_completion_tokens", "n", "stop", "temperature", "top_p", "top_k", "min_p", "seed"),
        *("presence_penalty", "frequency_penalty", "logit_bias", "tools", "tool_choice"),
        *("parallel_tool_calls", "response_format", "reasoning_effort", "metadata", "user"),
        *("prompt_cache_key", "chat_template_kwargs", "logprobs", "top_logprobs"),
    )
)


def shape(members: Members) -> SplitShape:
    """Return the properties of a request on which it depends whether it can be split.

    A split request has its prefill and its decode at different endpoints.
    """
    limit = _number(members.get("max_completion_tokens")) or _number(members.get("max_tokens"))
    if _SHAPING.isdisjoint(members):  # nearly every chat
        return SplitShape(max_tokens=limit)
    prompt = members.get("prompt")
    return SplitShape(
        max(_number(members.get("n")) or 1, _number(members.get("best_of")) or 1),
        1 if prompt is None else _count_prompts(prompt),
        any(bytes(members.get(name, b"null")) not in _OFF for name in ("prompt_logprobs", "echo")),
        limit,
    )


def shows_usage(members: Members) -> bool:
    """Return whether the client receives token counts (usage) with its answer.

    An answer that is not a stream always contains them. A stream does only if the request asks for
    them.
    """
    stream, raw = members.get("stream"), members.get("stream_options")
    if stream is None or bytes(stream) != b"true":
        return True
    options = None if raw is None else _any(raw)
    return isinstance(options, dict) and bool(options.get("include_usage"))


def edited(body: bytes, members: Members, edits: RequestEdits, model: str | None) -> bytes:
    """Return a request body with the edits applied.

    body     the body to edit; it may be empty if an edit drops a member, because then the new body
             is built from the members
    members  the parsed members of the body
    model    the model name to write; None keeps the client's
    """
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
    # Decode an optional member that parsing has found to be an integer or null.
    #
    # Return None if it is missing or null.
    number: int | None = None if raw is None else _any(raw)
    return number


def _count_prompts(raw: msgspec.Raw) -> int:
    # Return the number of prompts in the `prompt` member of a completions request.
    #
    # A text or a list of token ids is one prompt; a list of texts or of such lists is several.
    if _LIST_OF_PROMPTS.match(raw) is None:
        return 1
    return len(msgspec.json.decode(raw, type=list[msgspec.Raw]))
