"""How many sequences one request makes an engine generate: its prompts times its choices. Counted in the raw JSON.

A completions call may hold a list of prompts, and each of them is scheduled like a request of its own. They are counted
by their quotes or brackets and never decoded: a list that holds anything but prompts counts too, and engines refuse it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from gateway.answer import Failure, GatewayError

PROMPT, EMBEDS = "prompt", "prompt_embeds"  # vLLM takes both, together
MULTIPLE = frozenset((PROMPT, "n", "best_of"))

SLICE = 64 * 1024
_ESCAPED = re.compile(rb"\\*.?", re.DOTALL)
_LIST = ord("[")


class Prompts(NamedTuple):
    """The prompts of a completions call.

    token_ids  in all of them; None for text    longest  token ids of the longest prompt
    """

    number: int = 1
    token_ids: int | None = None
    longest: int = 0


ONE = Prompts()


def read_prompts(members: Mapping[str, msgspec.Raw], most: int) -> Prompts:
    """The prompts of a completions call. Raises GatewayError for more than `most`."""
    found = _read(members[PROMPT], most)
    embeds = members.get(EMBEDS)
    if embeds is not None and memoryview(embeds)[0] == _LIST:
        return found._replace(number=found.number + _checked(EMBEDS, _strings(bytes(embeds), most), most))
    return found


def counted(numbers: Mapping[str, int], most: int) -> tuple[int, int]:
    """Choices in the whole answer, and prompts. `numbers` by MULTIPLE's names. Raises GatewayError for too many."""
    prompts, choices = numbers.get(PROMPT, 1), numbers.get("n", 1)
    sequences = prompts * max(choices, numbers.get("best_of", 1))
    if sequences > most:
        names = ("n", "best_of") if prompts == 1 else (PROMPT,)
        raise _too_many(max(names, key=lambda name: numbers.get(name, 0)), sequences, most)
    return prompts * choices, prompts


def _read(prompt: msgspec.Raw, most: int) -> Prompts:
    if memoryview(prompt)[0] != _LIST:
        return ONE
    text = bytes(prompt)
    strings = _strings(text, most)
    if strings:
        return Prompts(_checked(PROMPT, strings, most))
    prompts = _checked(PROMPT, max(1, text.count(b"]") - 1), most)  # the list's own is one of them
    if not text.lstrip(b"[ \t\r\n")[:1].isdigit():
        return Prompts(prompts)
    longest = max(part.lstrip(b"[, \t\r\n").count(b",") + 1 for part in text.split(b"]"))
    return Prompts(prompts, text.count(b",") + 1, longest)


def _strings(text: bytes, most: int) -> int:
    """How many strings there are in some JSON, or more than `most`: then the rest of the text is not counted."""
    quotes = start = 0
    while start < len(text) and quotes <= 2 * most:
        end = start + SLICE
        if text[end - 1 : end] == b"\\" and (rest := _ESCAPED.match(text, end)):
            end = rest.end()  # what is escaped stays with its backslash
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
    message = f"The request asks for {sequences} sequences or more (prompts x choices). One request may ask for {most}."
    return GatewayError(Failure.BAD_REQUEST, message, param=name)
