"""Reads the JSON members that can prevent the split of a request: prompts, choices, token limit.

A split request has its prefill and its decode at different endpoints.
policies/pricing/split_decision.py decides; gateway/proxy/split_request.py asks it.
"""

from __future__ import annotations

import re

import msgspec

from gateway.protocol.request.json_splice import Members
from policies.pricing.split_decision import SplitShape

_any = msgspec.json.Decoder().decode
_LIST_OF_PROMPTS = re.compile(rb'\[[ \t\r\n]*+["\[]')
_OFF = frozenset((b"null", b"false"))
# The members, besides limits, that can make a request unfit to be split.
_SHAPING = frozenset(("n", "best_of", "prompt", "prompt_logprobs", "echo"))


def read_shape(members: Members) -> SplitShape:
    """Return the properties of a request on which it depends whether it can be split.

    Parsing has checked that numbers are integers or null.
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
