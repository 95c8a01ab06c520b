"""Decides whether another engine can continue a broken answer exactly, and builds its request.

No member of the request may depend on the tokens generated so far. Penalties and grammars do, for
example, and their state cannot be passed to another engine. Engines also accept members that the
gateway does not know. Therefore members are checked against a list of permitted ones; all others
must be absent or turned off. Obstacles in the answer itself, such as too many tokens, are found in
token_ledger.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType

import msgspec

from gateway.protocol.api_table import CHAT, Api
from gateway.protocol.request.api_call import Call
from gateway.protocol.request.handoff_members import Members, edited
from kvtransfer.dialects import RequestEdits, encode_members

# Members that control how each token is drawn, independently of the tokens before it.
_SAMPLING = frozenset(
    (
        *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "allowed_token_ids"),
        *("repetition_penalty", "stop_token_ids", "ignore_eos", "skip_special_tokens"),
        "spaces_between_special_tokens",
    )
)
# Members that only determine the prompt, whose token ids the engine reports, or that concern the
# gateway alone.
_BEFORE = frozenset(
    (
        *("model", "messages", "prompt", "stream", "documents", "chat_template"),
        *("chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
        *("add_special_tokens", "reasoning_effort", "user", "metadata", "store", "service_tier"),
        *("safety_identifier", "prompt_cache_key"),
    )
)
_BOUNDS = frozenset(("max_tokens", "max_completion_tokens", "min_tokens", "stream_options"))
# Values that turn a member off. Of any other member, false or 0 may mean something: to turn
# something off that is on by default, or to ask for the log probabilities of the drawn tokens, as
# `logprobs: 0` of a completion does. A null has no meaning for any member: engines treat it as the
# member's absence, or refuse it.
_OFF: Mapping[str, tuple[bytes, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("n", "best_of"), (b"1",)),
        **dict.fromkeys(("presence_penalty", "frequency_penalty"), (b"0", b"0.0")),
        **dict.fromkeys(("stop", "bad_words", "tools", "functions"), (b"[]",)),
        **dict.fromkeys(("tool_choice", "function_call"), (b'"none"',)),
        **dict.fromkeys(
            ("echo", "parallel_tool_calls", "use_beam_search", "return_token_ids"), (b"false",)
        ),
        **dict.fromkeys(("include_stop_str_in_output", "return_tokens_as_token_ids"), (b"false",)),
        **dict.fromkeys(("top_logprobs", "priority"), (b"0",)),
        "response_format": (b'{"type":"text"}',),
    }
)
_BLANK = re.compile(rb"[ \t\r\n]+")
# A part of a message that is not text: an image takes more than token ids in a prompt.
_MEDIA = re.compile(rb'"type"\s*:\s*"(?!text")')
_SEVERAL_PROMPTS = re.compile(rb'\s*\[\s*["\[]')
_USAGE = b'{"include_usage":true,"continuous_usage_stats":true}'
_PUT = {"return_token_ids": b"true", "stream_options": _USAGE}
_REPORT = RequestEdits(encode_members(_PUT), frozenset(_PUT))
# Bytes of a member that is decoded here; a longer one has no value that can be continued.
_LONGEST = 1024
_NO_MEMBERS: Mapping[str, str] = MappingProxyType({})
_DEFAULT_COMPLETION_TOKENS = 16  # maximum tokens of a completion without max_tokens

_any = msgspec.json.Decoder().decode


class ContinuationTerms(msgspec.Struct, frozen=True):
    """The properties of the client's request that the request for the rest of its answer repeats.

    chat         whether the client's request is a chat
    sampling     members of the request that apply to the rest too, as raw JSON
    max_tokens   maximum number of tokens of the whole answer; None: as many as fit into the context
    min_tokens   minimum number of tokens of the whole answer
    shows_usage  whether the client receives token counts
    """

    chat: bool
    sampling: Mapping[str, msgspec.Raw]
    max_tokens: int | None
    min_tokens: int
    shows_usage: bool

    def rest_body(
        self,
        model: str,
        prompt: Sequence[int],
        shown: Sequence[int],
        extra_members: Mapping[str, str] = _NO_MEMBERS,
    ) -> bytes:
        """Return the body of a request that continues a broken answer after the token ids `shown`.

        `prompt` has the prompt's token ids; `extra_members` has raw JSON of further members by
        name.
        """
        left = None if self.max_tokens is None else self.max_tokens - len(shown)
        body = {
            "model": model,
            "prompt": list(chain(prompt, shown)),
            "stream": True,
            "stream_options": msgspec.Raw(_USAGE),
            "return_token_ids": True,
            "max_tokens": left,  # null: as many as fit the context; an absent member means 16
            **self.sampling,
            **extra_members,
        }
        if self.min_tokens > len(shown):
            body["min_tokens"] = self.min_tokens - len(shown)
        return msgspec.json.encode(body)


def continuation_terms(call: Call) -> ContinuationTerms | None:
    """Return what the request to an engine that continues this request's answer must repeat.

    Returns None if another engine could not continue the answer exactly.
    """
    if not call.api.can_resume or not call.request.stream or call.request.choices != 1:
        return None
    return member_terms(call.members, call.api)


def member_terms(members: Members, api: Api) -> ContinuationTerms | None:
    """Return what the request to an engine that continues an answer must repeat.

    Returns None if another engine could not continue the answer exactly.

    members  the members of the client's body, which requests a stream
    api      the client's API: chat completions or completions
    """
    chat = api is CHAT
    if not all(_is_continuable(name, raw, chat=chat) for name, raw in members.items()):
        return None
    if api.conversation not in members:
        return None
    if _MEDIA.search(members["messages"]) if chat else _SEVERAL_PROMPTS.match(members["prompt"]):
        return None
    if any(len(members.get(name, b"")) > _LONGEST for name in ("stream_options", "min_tokens")):
        return None
    options = _any(members.get("stream_options", b"null")) or {}
    if not isinstance(options, dict):
        return None
    if any(value for name, value in options.items() if name != "include_usage"):
        return None
    # Copies: a raw value would keep the whole body in memory.
    sampling = {name: value.copy() for name, value in members.items() if name in _SAMPLING}
    least = _any(members.get("min_tokens", b"null")) or 0
    if not isinstance(least, int):
        return None
    return ContinuationTerms(
        chat, sampling, _most_tokens(members, chat), least, bool(options.get("include_usage"))
    )


def call_with_token_ids(call: Call, model: str, salt_member: str) -> Call:
    """Return a copy of the request that makes the engine report token ids and counts.

    model        the engine's name of the model
    salt_member  the member for the cache salt; "" if the engine accepts none
    """
    edits = with_token_ids(RequestEdits())
    if call.salt:
        put = edits.put + call.salt_member(salt_member)
        edits = msgspec.structs.replace(edits, put=put)
    body = edited(call.body, call.members, edits, model)
    return msgspec.structs.replace(call, body=body, members={})


def with_token_ids(edits: RequestEdits) -> RequestEdits:
    """Return `edits` with the members that make an engine report its token ids and counts."""
    put, drop = edits.put + _REPORT.put, edits.drop | _REPORT.drop
    return msgspec.structs.replace(edits, put=put, drop=drop)


def _is_continuable(name: str, raw: msgspec.Raw, *, chat: bool) -> bool:
    if name in _SAMPLING or name in _BEFORE or name in _BOUNDS:
        return True
    value = _BLANK.sub(b"", bytes(raw)) if len(raw) < 64 else b""
    if name == "logprobs" and chat:
        return value in (b"null", b"false")  # in a completion it is a number
    return value == b"null" or value in _OFF.get(name, ())


def _most_tokens(members: Members, chat: bool) -> int | None:
    # Return the limit on the answer's tokens, or None without one.
    #
    # Parsing has checked that limits are integers or null.
    most: int | None = None
    if chat:
        most = _any(members.get("max_completion_tokens", b"null"))
    if most is None and "max_tokens" in members:
        most = _any(members["max_tokens"])
    elif most is None and not chat:
        most = _DEFAULT_COMPLETION_TOKENS
    return most
