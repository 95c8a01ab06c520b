"""Whether the answer to a request could be continued exactly, and how the rest of it is asked for.

A whitelist: engines take members that nobody here knows, and one of them may depend on what was said before. What
depends on it and could not be told to another engine (a stop string half said, a penalty, a grammar, a parser's state)
must be absent or say nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType

import msgspec

from gateway.openai import Api, Call
from gateway.split.edit import Members, edited
from kvtransfer.dialects import Edits, members

# Every token is drawn with these alike, whichever engine draws it.
_SAMPLING = frozenset(
    (
        *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "allowed_token_ids", "repetition_penalty"),
        *("stop_token_ids", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens"),
    )
)
# These make the prompt, whose ids the engine tells, or are nobody's business but the door's.
_BEFORE = frozenset(
    (
        *("model", "messages", "prompt", "stream", "documents", "chat_template", "chat_template_kwargs"),
        *("add_generation_prompt", "continue_final_message", "add_special_tokens", "reasoning_effort"),
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    )
)
_BOUNDS = frozenset(("max_tokens", "max_completion_tokens", "min_tokens", "stream_options"))
# With these values they say nothing. No other member's false or 0 can be trusted to: it may turn something off, or ask
# for the log probabilities of the drawn tokens alone, as a completion's `logprobs: 0` does. A null says nothing of any:
# engines take it for the member's absence, or refuse it.
_SAYS_NOTHING: Mapping[str, tuple[bytes, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("n", "best_of"), (b"1",)),
        **dict.fromkeys(("presence_penalty", "frequency_penalty"), (b"0", b"0.0")),
        **dict.fromkeys(("stop", "bad_words", "tools", "functions"), (b"[]",)),
        **dict.fromkeys(("tool_choice", "function_call"), (b'"none"',)),
        **dict.fromkeys(("echo", "parallel_tool_calls", "use_beam_search", "return_token_ids"), (b"false",)),
        **dict.fromkeys(("include_stop_str_in_output", "return_tokens_as_token_ids"), (b"false",)),
        **dict.fromkeys(("top_logprobs", "priority"), (b"0",)),
        "response_format": (b'{"type":"text"}',),
    }
)
_BLANK = re.compile(rb"[ \t\r\n]+")
_NO_TEXT = re.compile(rb'"type"\s*:\s*"(?!text")')  # an image's place in the prompt is more than its ids
_MANY = re.compile(rb'\s*\[\s*["\[]')
_USAGE = b'{"include_usage":true,"continuous_usage_stats":true}'
_PUT = {"return_token_ids": b"true", "stream_options": _USAGE}
_REPORT = Edits(members(_PUT), frozenset(_PUT))
_LONGEST = 1024  # bytes of a member that is read here: what is longer is none of those that can be continued
_NO_MORE: Mapping[str, str] = MappingProxyType({})
_COMPLETIONS_BOUND = 16  # tokens of a completion that names no bound

_any = msgspec.json.Decoder().decode


class Terms(msgspec.Struct, frozen=True):
    """How the rest of an answer is asked for.

    sampling      members of the request that hold for the rest too, raw
    most, least   tokens of the whole answer; most None: as many as the context has room for
    shows_usage   whether the client wants token counts
    """

    chat: bool
    sampling: Mapping[str, msgspec.Raw]
    most: int | None
    least: int
    shows_usage: bool

    def rest(self, model: str, prompt: Sequence[int], said: Sequence[int], more: Mapping[str, str] = _NO_MORE) -> bytes:
        """The body that asks for what follows `said`, with `more` members."""
        left = None if self.most is None else self.most - len(said)
        body = {
            "model": model,
            "prompt": list(chain(prompt, said)),
            "stream": True,
            "stream_options": msgspec.Raw(_USAGE),
            "return_token_ids": True,
            "max_tokens": left,  # null is as many as the context has room for; without it, 16
            **self.sampling,
            **more,
        }
        if self.least > len(said):
            body["min_tokens"] = self.least - len(said)
        return msgspec.json.encode(body)


def terms_of(call: Call) -> Terms | None:
    """None: an answer to it could not be continued exactly."""
    members = call.members
    chat = call.api is Api.CHAT
    if not call.request.stream or call.request.choices != 1:
        return None
    if not all(_continuable(name, raw, chat=chat) for name, raw in members.items()):
        return None
    if _NO_TEXT.search(members["messages"]) if chat else _MANY.match(members["prompt"]):
        return None
    if any(len(members.get(name, b"")) > _LONGEST for name in ("stream_options", "min_tokens")):
        return None
    options = _any(members.get("stream_options", b"null")) or {}
    if not isinstance(options, dict) or any(value for name, value in options.items() if name != "include_usage"):
        return None
    sampling = {name: value.copy() for name, value in members.items() if name in _SAMPLING}  # not the whole body
    least = _any(members.get("min_tokens", b"null")) or 0
    if not isinstance(least, int):
        return None
    return Terms(chat, sampling, _most(members, chat), least, bool(options.get("include_usage")))


def telling(call: Call, model: str, salt_member: str) -> Call:
    """The call for an engine that knows the model as `model`, which tells the ids of what it says and counts them.
    The engine takes the cache salt as `salt_member`, if it has a name."""
    edits = with_token_ids(Edits())
    if call.salt:
        edits = msgspec.structs.replace(edits, put=edits.put + call.salt_member(salt_member))
    return msgspec.structs.replace(call, body=edited(call.body, call.members, edits, model), members={})


def with_token_ids(edits: Edits) -> Edits:
    """Return the edits of a request, so that its engine reports the ids and the running count of its tokens."""
    put, drop = edits.put + _REPORT.put, edits.drop | _REPORT.drop
    return msgspec.structs.replace(edits, put=put, drop=drop)


def _continuable(name: str, raw: msgspec.Raw, *, chat: bool) -> bool:
    if name in _SAMPLING or name in _BEFORE or name in _BOUNDS:
        return True
    value = _BLANK.sub(b"", bytes(raw)) if len(raw) < 64 else b""
    if name == "logprobs" and chat:
        return value in (b"null", b"false")  # a completion's is a number
    return value == b"null" or value in _SAYS_NOTHING.get(name, ())


def _most(members: Members, chat: bool) -> int | None:
    """The door has checked that bounds are integers or null."""
    found: int | None = _any(members.get("max_completion_tokens", b"null")) if chat else None
    if found is None:
        found = _any(members["max_tokens"]) if "max_tokens" in members else None if chat else _COMPLETIONS_BOUND
    return found
