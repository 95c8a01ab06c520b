"""Tests that images, audio and files take a fixed number of tokens in a mock engine."""

from __future__ import annotations

import base64
from random import Random
from typing import Any

import pytest

from mockgpu.media import MEDIUM_TOKENS
from mockgpu.mock_tokenizer import render_chat, token_count

TEXT = {"type": "text", "text": "What is this?"}


def data(seed: int = 1, size: int = 9_000) -> str:
    return base64.b64encode(Random(seed).randbytes(size)).decode()


def image(data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def tokens(*parts: dict[str, Any]) -> int:
    return token_count(render_chat({"messages": [{"role": "user", "content": list(parts)}]}))


@pytest.mark.parametrize("size", [9_000, 300_000])
@pytest.mark.parametrize(
    "part",
    [
        image,
        lambda data: {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        lambda data: {"type": "file", "file": {"file_data": f"data:text/csv;base64,{data}"}},
        lambda data: {"type": "tool_result", "content": [{"source": {"data": data}}]},
    ],
)
def test_a_part_in_base64_takes_as_many_tokens_whatever_its_size(part: Any, size: int) -> None:
    assert tokens(TEXT, part(data(size=size))) == tokens(TEXT) + MEDIUM_TOKENS


def test_several_media_count_one_by_one_and_text_like_base64_is_text() -> None:
    assert tokens(image(data(1)), TEXT, image(data(2))) == tokens(TEXT) + 2 * MEDIUM_TOKENS
    text = {"type": "text", "text": data()}
    assert tokens(text) > len(data()) // 4
    assert tokens(image("QUJD")) < 40
    for odd in ("!" + data(), data() + " end", data() + "é"):
        assert tokens(image(odd)) > MEDIUM_TOKENS


def test_the_same_image_has_the_same_tokens_and_another_one_has_others() -> None:
    def prompt(seed: int) -> bytes:
        content = [TEXT, image(data(seed))]
        return render_chat({"messages": [{"role": "user", "content": content}]})

    assert prompt(1) == prompt(1)
    assert prompt(1) != prompt(2)
