"""A request's JSON with a dialect's edits: raw values are laid side by side, never decoded and encoded again.

Where an edit only adds members that a client's body cannot hold (the door drops them), it is spliced in before the
closing brace.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from gateway.openai import ENGINE_INTERNAL, Call
from kvtransfer.dialects import Edits
from policies.split import Shape

Members = Mapping[str, msgspec.Raw]

_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_any = msgspec.json.Decoder().decode
_LISTED = re.compile(rb'\[[ \t\r\n]*+["\[]')  # however much blank a client puts there
_NOTHING = frozenset((b"null", b"false"))


class Body:
    """A call's body that may be edited several times: its members are found once, and only when somebody needs them."""

    __slots__ = ("_call", "_found")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._found: Members | None = None

    @property
    def members(self) -> Members:
        """Raw values by name. They hold the whole body: see forget()."""
        if self._found is None:
            self._found = _members(self._call.body)
        return self._found

    def forget(self) -> None:
        """Hold nothing of the body any more than the call does."""
        self._found = None

    @property
    def shape(self) -> Shape:
        """What decides whether this request can be split."""
        members = self.members
        prompt, n, best_of = members.get("prompt"), members.get("n"), members.get("best_of")
        bound = members.get("max_completion_tokens") or members.get("max_tokens")
        scores, echo = members.get("prompt_logprobs"), members.get("echo")
        if bound is not None and bytes(bound) == b"null":
            bound = members.get("max_tokens")
        return Shape(
            1 if n is None and best_of is None else max(_number(n) or 1, _number(best_of) or 1),
            1 if prompt is None else _prompts(prompt),
            (scores is not None and bytes(scores) not in _NOTHING)
            or (echo is not None and bytes(echo) not in _NOTHING),
            None if bound is None else _number(bound),
        )

    @property
    def shows_usage(self) -> bool:
        """Whether the client will be shown token counts: always, but for streams without stream_options."""
        stream, options = self.members.get("stream"), self.members.get("stream_options")
        return (
            stream is None or bytes(stream) != b"true" or (options is not None and b"include_usage" in bytes(options))
        )

    def edited(self, edits: Edits, model: str | None) -> bytes:
        """The body with `edits`, for an engine that knows the model as `model`; None: as the body says."""
        if model is None and not edits.drop and edits.keep is None and edits.put.keys() <= ENGINE_INTERNAL:
            return self._spliced(edits.put)
        put, drop, keep = edits.put, edits.drop, edits.keep
        if model is not None:
            put = {**put, "model": msgspec.json.encode(model)}
        parts: list[bytes | msgspec.Raw] = []
        for name, value in self.members.items():
            if name not in drop and name not in put and (keep is None or name in keep):
                parts += (_key(name), value)
        for name, new in put.items():
            parts += (_key(name), new)
        parts[0] = b"{" + bytes(parts[0])[1:]
        parts.append(b"}")
        return b"".join(parts)

    def _spliced(self, put: Mapping[str, bytes]) -> bytes:
        raw = self._call.body
        parts: list[bytes | memoryview] = [memoryview(raw)[: raw.rindex(b"}")]]
        for name, new in put.items():
            parts += (_key(name), new)
        parts.append(b"}")
        return b"".join(parts)


def _key(name: str) -> bytes:
    if name.isidentifier() and name.isascii():  # as all are but strange ones, and then nothing is to be escaped
        return f',"{name}":'.encode()
    return b"," + msgspec.json.encode(name) + b":"


def _number(raw: msgspec.Raw | None) -> int | None:
    """The door has checked that it is an integer or null."""
    found = None if raw is None else _any(raw)
    return found if isinstance(found, int) else None


def _prompts(raw: msgspec.Raw) -> int:
    """Prompts in a completions request: a text or one list of ids is one, a list of texts or of lists as many."""
    if _LISTED.match(raw) is None:
        return 1
    return len(msgspec.json.decode(raw, type=list[msgspec.Raw]))
