"""Reads whether a request can be split, from its API and JSON members; the error if it cannot.

A split request has its prefill and its decode at different endpoints. Whether a request is split is
decided in policies/pricing/split_decision.py.
"""

from __future__ import annotations

import re

import msgspec

from gateway.protocol.errors import Failure, GatewayError
from gateway.protocol.request.api_call import Call
from gateway.protocol.request.handoff_members import Members
from policies.pricing.split_decision import SplitReason, SplitShape

_any = msgspec.json.Decoder().decode
_LIST_OF_PROMPTS = re.compile(rb'\[[ \t\r\n]*+["\[]')
_OFF = frozenset((b"null", b"false"))
# The members, besides limits, that can make a request unfit to be split.
_SHAPING = frozenset(("n", "best_of", "prompt", "prompt_embeds", "prompt_logprobs", "echo"))
# Members that need the whole prompt at one endpoint: no handoff of them is known.
_UNSPLIT = ("prompt_logprobs", "echo", "prompt_embeds")
_SHORTENING = frozenset(("truncate_prompt_tokens", "truncation_side", "truncation"))
_NOT_BY_THIS_API = SplitShape(can_hand_over=False)
_UNSPLITTABLE = (
    SplitReason.API,
    SplitReason.CHOICES,
    SplitReason.PROMPTS,
    SplitReason.PROMPT_SCORES,
)


def split_shape(call: Call) -> SplitShape:
    """Return the properties on which it depends whether a request can be split.

    Examples are the number of its prompts and the maximum length of its answer.
    """
    return read_shape(call.members) if call.api.can_split else _NOT_BY_THIS_API


def can_be_pulled(call: Call) -> bool:
    """Return whether the KV of the beginning of a request's prompt can be fetched.

    The request for it is the same with a shortened prompt, which engines do with text only. A
    request that shortens its prompt by itself would be shortened twice.
    """
    return not call.media_size.parts and _SHORTENING.isdisjoint(call.members)


def unsplittable_error(model: str, reason: SplitReason) -> GatewayError | None:
    """Return the client's error for a request that was not split, though its model requires that.

    model   name of a model that serves only split requests
    reason  why the request was not split; the result is None if the request is not the cause
    """
    if reason not in _UNSPLITTABLE:
        return None
    return GatewayError(
        Failure.BAD_REQUEST,
        f"The model '{model}' serves only requests that are split between two endpoints, but this "
        f"request cannot be split ({reason}).",
    )


def read_shape(members: Members) -> SplitShape:
    """Read the properties that decide whether a request can be split from its JSON members.

    Parsing has checked that numbers are integers or null.
    """
    limit = _number(members.get("max_completion_tokens")) or _number(members.get("max_tokens"))
    if _SHAPING.isdisjoint(members):  # nearly every chat
        return SplitShape(max_tokens=limit)
    prompt = members.get("prompt")
    return SplitShape(
        max(_number(members.get("n")) or 1, _number(members.get("best_of")) or 1),
        1 if prompt is None else _count_prompts(prompt),
        any(bytes(members.get(name, b"null")) not in _OFF for name in _UNSPLIT),
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
