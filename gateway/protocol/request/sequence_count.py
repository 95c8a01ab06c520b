"""Counts the sequences that an engine has to generate for one request: prompts times choices.

An engine schedules each prompt of a request like a separate request. Prompts are counted in the raw
JSON by their quotes or brackets, without decoding. Invalid lists are counted too, because engines
reject them. Only inputs that are objects, such as documents with images, are decoded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from gateway.protocol.errors import Failure, GatewayError

PROMPT_MEMBER, EMBEDS_MEMBER = "prompt", "prompt_embeds"  # vLLM accepts both in one request
SEQUENCE_MEMBERS = frozenset((PROMPT_MEMBER, "n", "best_of"))

SLICE = 64 * 1024  # bytes of JSON that are searched at once
_ESCAPED = re.compile(rb"\\*.?", re.DOTALL)
_LIST = ord("[")
_NULL = b"null"
_OBJECTS = re.compile(rb"\[?[ \t\r\n]*\{")
MAX_OBJECTS = 256 * 1024
"""Maximum number of braces in a value whose objects are counted by decoding, which takes about 20
ms for so many.
"""
_CHAT_MEMBER = "messages"


class _Object(msgspec.Struct, gc=False):
    """Any JSON object; its members are skipped."""


class _Content(msgspec.Struct):
    """The JSON object in which vLLM accepts several inputs of a score or rerank request."""

    content: list[_Object]


_read_objects = msgspec.json.Decoder(list[_Object]).decode
_read_content = msgspec.json.Decoder(_Content).decode


class Prompts(NamedTuple):
    """The number of prompts in a request, and the number of token ids if the client sent those.

    token_id_count     number of token ids in all prompts; None for text
    longest_token_ids  number of token ids in the longest prompt
    """

    prompt_count: int = 1
    token_id_count: int | None = None
    longest_token_ids: int = 0


ONE_PROMPT = Prompts()


def without_null_embeddings(members: Mapping[str, msgspec.Raw]) -> Mapping[str, msgspec.Raw]:
    """Treat embeddings of prompts that are null as if they had not been sent.

    Returns the members of the request without them.
    """
    embeds = members.get(EMBEDS_MEMBER)
    if embeds is None or memoryview(embeds)[0] != _NULL[0]:
        return members
    return {name: value for name, value in members.items() if name != EMBEDS_MEMBER}


def read_prompts(members: Mapping[str, msgspec.Raw], name: str, most: int) -> Prompts:
    """Count the prompts in the member `name` of a request.

    Prompts that the request contains as embeddings count as well. Raises GatewayError if there are
    more than `most` prompts.
    """
    prompts, embeds = _read(members[name], name, most), members.get(EMBEDS_MEMBER)
    if name == EMBEDS_MEMBER or embeds is None or memoryview(embeds)[0] != _LIST:
        return prompts
    number = _checked(EMBEDS_MEMBER, _count_strings(bytes(embeds), most), most)
    if bytes(members[name]) == _NULL:
        return Prompts(number)
    return Prompts(prompts.prompt_count + number, prompts.token_id_count, prompts.longest_token_ids)


def read_inputs(members: Mapping[str, msgspec.Raw], name: str, most: int) -> Prompts:
    """Count the inputs in the member `name` of a request that generates no text.

    Unlike prompts, inputs may be objects. A chat is one input. Raises GatewayError if there are
    more than `most` inputs.
    """
    if name == _CHAT_MEMBER:
        return ONE_PROMPT
    objects = _count_objects(members[name])
    if objects is None:
        return read_prompts(members, name, most)
    return Prompts(_checked(name, objects, most))


def count_sequences(
    numbers: Mapping[str, int], most: int, *, generates: bool = True
) -> tuple[int, int]:
    """Return the number of choices in a request's response, and the number of its prompts.

    A request that generates no text counts as one choice for all its prompts.

    numbers  the request's integers, by the names in SEQUENCE_MEMBERS

    Raises GatewayError for more than `most` sequences.
    """
    prompts, choices = numbers.get(PROMPT_MEMBER, 1), numbers.get("n", 1)
    if not generates:
        return 1, prompts
    sequences = prompts * max(choices, numbers.get("best_of", 1))
    if sequences > most:
        names = ("n", "best_of") if prompts == 1 else (PROMPT_MEMBER,)
        raise _too_many(max(names, key=lambda name: numbers.get(name, 0)), sequences, most)
    return prompts * choices, prompts


def _read(prompt: msgspec.Raw, name: str, most: int) -> Prompts:
    if memoryview(prompt)[0] != _LIST:
        return ONE_PROMPT
    text = bytes(prompt)
    strings = _count_strings(text, most)
    if strings:
        return Prompts(_checked(name, strings, most))
    # The list's own closing bracket is one of them.
    prompts = _checked(name, max(1, text.count(b"]") - 1), most)
    if not text.lstrip(b"[ \t\r\n")[:1].isdigit():
        return Prompts(prompts)
    longest = max(part.lstrip(b"[, \t\r\n").count(b",") + 1 for part in text.split(b"]"))
    return Prompts(prompts, text.count(b",") + 1, longest)


def _count_objects(value: msgspec.Raw) -> int | None:
    # Return the number of inputs in a list of objects, or in the `content` of an object.
    #
    # None: the inputs have another form.
    if (
        _OBJECTS.match(memoryview(value)) is None
        or (text := bytes(value)).count(b"{") > MAX_OBJECTS
    ):
        return None
    try:
        if text[0] == _LIST:
            return len(_read_objects(text))
        return max(1, len(_read_content(text).content))
    except (msgspec.DecodeError, RecursionError):
        return None


def _count_strings(text: bytes, most: int) -> int:
    # Return the number of strings in some JSON text; counting stops somewhere above `most`.
    quotes = start = 0
    while start < len(text) and quotes <= 2 * most:
        end = start + SLICE
        # An escaped character stays in the slice of its backslash.
        if text[end - 1 : end] == b"\\" and (escaped := _ESCAPED.match(text, end)):
            end = escaped.end()
        part = text[start:end]
        if b"\\" in part:
            part = part.replace(rb"\\", b"__").replace(rb"\"", b"__")
        quotes += part.count(b'"')
        start = end
    return quotes // 2


def _checked(name: str, prompts: int, most: int) -> int:
    if prompts > most:
        raise _too_many(name, prompts, most)
    return prompts


def _too_many(name: str, sequences: int, most: int) -> GatewayError:
    message = (
        f"The request asks for {sequences} sequences or more (prompts x choices). "
        f"One request may ask for at most {most}."
    )
    return GatewayError(Failure.BAD_REQUEST, message, param=name)
