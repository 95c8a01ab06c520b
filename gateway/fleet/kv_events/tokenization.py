"""Builds requests that make an engine tokenize a prompt, and parses the responses. No I/O.

vLLM and SGLang serve POST /tokenize. vLLM also accepts chat messages, and applies the model's chat
template to them.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gateway.protocol.request.json_members import join_members
from policies.prefix.fingerprint import Fingerprint

TOKENIZE_PATH = "/tokenize"
CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"

_CHAT_MEMBERS = (
    *("messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
    *("continue_final_message", "add_special_tokens", "mm_processor_kwargs"),
)
_UNSUPPORTED = frozenset(("documents", "reasoning_effort", "tool_choice", "reasoning"))
"""Members of a request that change how a chat is rendered, but that /tokenize does not accept."""

_COMPLETION_MEMBERS = ("prompt", "add_special_tokens")


class UnreadPrompt(msgspec.Struct, frozen=True):
    """A prompt whose token ids an engine has to compute.

    model    the gateway's name of the model
    path     path of the API that the request used
    members  members of the request's JSON body by name, as raw JSON
    salt     the cache salt for engines that accept one; b"" for none
    """

    model: str
    path: str
    members: Mapping[str, msgspec.Raw]
    salt: bytes
    fingerprint: Fingerprint


class _TokenizeResponse(msgspec.Struct):
    tokens: list[int]


_decode_tokens = msgspec.json.Decoder(list[int]).decode
_decode_response = msgspec.json.Decoder(_TokenizeResponse).decode


def can_tokenize(path: str, members: Mapping[str, msgspec.Raw]) -> bool:
    """Return whether an engine's /tokenize can report the tokens of such a request's prompt."""
    if path == CHAT_PATH:
        return _UNSUPPORTED.isdisjoint(members)
    return path == COMPLETIONS_PATH


def given_tokens(prompt: UnreadPrompt) -> list[int] | None:
    """Return the token ids of a prompt that the client sent as token ids; None if it sent text."""
    if prompt.path != COMPLETIONS_PATH:
        return None
    try:
        return _decode_tokens(prompt.members["prompt"])
    except msgspec.DecodeError:
        return None


def tokenize_body(prompt: UnreadPrompt, engine_model: str) -> bytes:
    """Return the JSON body of a request to an engine's /tokenize for this prompt."""
    names = _CHAT_MEMBERS if prompt.path == CHAT_PATH else _COMPLETION_MEMBERS
    members = {name: prompt.members[name] for name in names if name in prompt.members}
    members["model"] = msgspec.Raw(msgspec.json.encode(engine_model))
    return join_members(members)


def parse_tokens(status: int, body: bytes) -> list[int] | None:
    """Return the token ids in an engine's response to /tokenize; None if there are none."""
    if status != 200:
        return None
    try:
        return _decode_response(body).tokens
    except (msgspec.DecodeError, RecursionError):
        return None
