"""Inserts an engine's KV handoff members into a request's JSON, and drops members from it.

By the handoff protocol, a prefill engine passes a request's KV cache to a decode engine. Raw values
are joined without being decoded. Edits that only add members are inserted before the closing brace.
This is possible because parsing has removed such members from the client's body.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvtransfer.dialects import RequestEdits

Members = Mapping[str, msgspec.Raw]

_any = msgspec.json.Decoder().decode


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
