"""Tests of how a mock engine tokenizes text, generates answers, and continues them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mockgpu.mock_tokenizer import (
    WORDS,
    block_keys,
    expected_text,
    generate,
    render_chat,
    salt_keys,
    token_bytes,
    token_count,
    token_ids,
    variation,
)


def chat(*contents: str) -> dict[str, object]:
    roles = ("user", "assistant")
    return {
        "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    }


def test_every_word_is_one_token_of_its_own() -> None:
    assert len(set(WORDS)) == 128
    assert {len(word) for word in WORDS} == {4}


@given(st.text(max_size=60))
def test_text_and_its_ids_are_the_same_tokens(text: str) -> None:
    tokens = token_bytes(text)
    assert token_count(tokens) == -(-len(text.encode()) // 4)
    assert token_bytes(token_ids(tokens)) == tokens


@given(st.lists(st.text(max_size=40), min_size=1, max_size=4))
def test_a_rendered_chat_is_whole_tokens_and_grows_by_appending(contents: list[str]) -> None:
    body = chat(*contents)
    rendered = render_chat(body)
    assert len(rendered) % 4 == 0
    longer = render_chat(chat(*contents, "more"))
    opened = render_chat(body | {"add_generation_prompt": False})
    assert longer.startswith(opened)


def test_tools_and_system_prompt_are_part_of_the_prompt() -> None:
    plain = chat("hi")
    tools = plain | {"tools": [{"type": "function", "function": {"name": "f"}}]}
    assert render_chat(tools) != render_chat(plain)
    assert expected_text(tools, 8) != expected_text(plain, 8)


@given(st.binary(min_size=0, max_size=400), st.binary(min_size=4, max_size=4))
def test_equal_beginnings_have_equal_keys_and_a_difference_changes_all_that_follow(
    tokens: bytes, other: bytes
) -> None:
    tokens += b"\0" * (-len(tokens) % 64) + b"\1" * 64
    changed = other + tokens[4:]
    same = [a == b for a, b in zip(block_keys(tokens), block_keys(changed), strict=True)]
    assert all(same) if changed == tokens else not any(same)
    assert block_keys(tokens[:64]) == block_keys(tokens)[:1]


def test_a_salt_separates_caches_but_not_words() -> None:
    keys = block_keys(b"abcd" * 40)
    assert salt_keys(keys, "") == keys
    assert not set(salt_keys(keys, "tenant")) & set(keys)
    assert salt_keys(keys, "tenant") == salt_keys(keys, "tenant")


@given(st.text(min_size=1, max_size=80), st.integers(1, 60), st.integers(0, 40))
def test_a_prompt_with_part_of_its_answer_continues_with_the_rest(
    prompt: str, said: int, more: int
) -> None:
    tokens = token_bytes(prompt)
    whole = generate(tokens, block_keys(tokens), said + more, may_end=False)
    begun = tokens + whole.tokens[: said * 4]
    rest = generate(begun, block_keys(begun), more, may_end=False)
    assert whole.tokens[said * 4 :] == rest.tokens
    assert whole.keys == rest.keys == block_keys(tokens + whole.tokens)


def test_an_answer_may_end_by_itself_where_a_block_ends() -> None:
    speeches = [generate(token_bytes(str(i)), (), 5000, may_end=True) for i in range(300)]
    lengths = [token_count(speech.tokens) for speech in speeches]
    assert all(speech.has_ended for speech in speeches)
    assert 90 < sum(lengths) / len(lengths) < 170
    assert all(
        token_count(generate(token_bytes("1"), (), 5000, True, at_least=n).tokens) >= n
        for n in (1, 100, 1000)
    )


def test_only_the_first_unseeded_choice_is_unvaried() -> None:
    assert variation(None, 0) == 0
    assert len({variation(seed, choice) for seed in (None, 0, 1) for choice in (0, 1)}) == 6
