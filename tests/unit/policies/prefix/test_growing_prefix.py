"""Tests of recognising conversations by their growing prompts."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from policies.prefix.fingerprint import Fingerprinter
from policies.prefix.growing_prefix import GrowingPrefixes

HASHER = Fingerprinter(bytes(range(16)), 64)
SYSTEM = {"role": "system", "content": "You repair water wheels. " * 20}


def message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def dialogue(name: str, turns: int) -> list[dict[str, str]]:
    messages = [SYSTEM, message("user", f"question {name}")]
    for turn in range(1, turns):
        messages += [
            message("assistant", f"answer {turn} " * turn),
            message("user", f"more {turn}"),
        ]
    return messages


def session(
    known: GrowingPrefixes,
    messages: list[dict[str, str]],
    scope: str = "",
    tools: bytes = b"",
    indent: int | None = None,
    separators: tuple[str, str] | None = (",", ":"),
) -> str:
    text = json.dumps(messages, indent=indent, separators=separators).encode()
    parts = [part for part in (tools, text) if part]
    return known.recognise(scope, HASHER.fingerprint(b"", *parts), len(tools), memoryview(text))


@pytest.mark.parametrize(("indent", "separators"), [(None, (",", ":")), (None, None), (2, None)])
@pytest.mark.parametrize("tools", [b"", b'[{"type":"function"}]', b"[" + b" " * 300 + b"]"])
def test_a_conversation_is_one_session_from_its_second_turn_on(
    indent: int | None, separators: tuple[str, str] | None, tools: bytes
) -> None:
    known = GrowingPrefixes()
    names = [
        session(known, dialogue("a", turns), "", tools, indent, separators)
        for turns in range(1, 12)
    ]
    assert names[0] == ""
    assert len(set(names[1:])) == 1
    assert names[1]


def test_conversations_with_the_same_beginning_are_different_sessions() -> None:
    known = GrowingPrefixes()
    first = {name: session(known, dialogue(name, 1)) for name in "abcdefgh"}
    assert set(first.values()) == {""}
    later = {name: [session(known, dialogue(name, turns)) for turns in (2, 3)] for name in first}
    assert len({name for names in later.values() for name in names}) == len(first)


def test_the_place_of_a_message_in_its_block_does_not_matter() -> None:
    for filler in range(70):
        known = GrowingPrefixes()
        name = "x" * filler
        names = [session(known, dialogue(name, turns)) for turns in range(1, 5)]
        assert names[0] == ""
        assert all(one == other for one, other in pairwise(names[1:])), filler
        assert names[1], filler


def test_a_repeated_prompt_begins_no_session_and_leaves_none() -> None:
    known = GrowingPrefixes()
    assert [session(known, dialogue("a", 1)) for _ in range(3)] == ["", "", ""]
    name = session(known, dialogue("a", 2))
    assert name
    assert session(known, dialogue("a", 2)) == name


def test_an_extension_without_an_answer_is_no_conversation() -> None:
    known = GrowingPrefixes()
    session(known, [SYSTEM])
    assert session(known, [SYSTEM, message("user", 'one \\"assistant\\"')]) == ""


def test_branches_of_a_conversation_belong_to_it() -> None:
    known = GrowingPrefixes()
    session(known, dialogue("a", 1))
    trunk = session(known, dialogue("a", 2))
    branch = [*dialogue("a", 1), message("assistant", "another"), message("user", "so")]
    assert session(known, branch) == trunk


def test_equal_prompts_of_different_scopes_have_nothing_in_common() -> None:
    known = GrowingPrefixes()
    session(known, dialogue("a", 1), "one")
    assert session(known, dialogue("a", 2), "other") == ""
    assert session(known, dialogue("a", 2), "one")


@pytest.mark.parametrize(
    "text", [b"", b"[]", b'"text"', b"[1,2,3]", b"{}", b"}]", b"[" * 5000, b"}]" + b" " * 500]
)
def test_prompts_of_other_forms_are_not_recognised(text: bytes) -> None:
    known = GrowingPrefixes()
    fingerprint = HASHER.fingerprint(b"", text)
    assert known.recognise("", fingerprint, 0, memoryview(text)) == ""
    assert len(known) == 0


def test_the_number_of_stored_prompts_is_limited() -> None:
    known = GrowingPrefixes(8)
    for number in range(100):
        session(known, dialogue(f"number {number}", 1))
    assert len(known) == 8
    assert len(known._blocks) <= 8
    assert session(known, dialogue("number 99", 2))
    assert session(known, dialogue("number 0", 2)) == ""


def test_counts_by_block_are_those_of_the_stored_prompts() -> None:
    known = GrowingPrefixes(300)
    for number in range(1000):
        session(known, dialogue(f"number {number % 700}", 1 + number % 3))
    assert 298 <= len(known) <= 300
    assert sum(known._counts) == 2 * sum(known._blocks.values()) == 2 * len(known)
    assert sum(count > 0 for count in known._counts) <= 2 * len(known._blocks)
