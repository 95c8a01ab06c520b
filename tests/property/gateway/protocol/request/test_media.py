"""Property tests that large images in requests, however many bytes, cause no refusal or delay."""

from __future__ import annotations

import base64
import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.protocol import api_table
from gateway.protocol.api_table import Api
from gateway.protocol.request.api_call import Call
from gateway.protocol.request.media import MEDIA_TOKENS, MIN_MEDIUM_BYTES
from gateway.protocol.request.request_body import CallContext, parse_call
from gateway.protocol.request.service_level_headers import NO_PREFERENCES
from gateway.proxy.context_length import least_tokens
from tests.unit.gateway.protocol.request.test_request_body import Model

SOURCE = {"type": "base64", "media_type": "image/png"}
IMAGES = {"content": [{"type": "text", "text": "a dam"}]}


def image(data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url("image/png", data)}}


INPUTS: dict[str, tuple[Api, Any]] = {
    "a chat to embed": (
        api_table.EMBEDDINGS,
        lambda d: {"messages": [{"role": "user", "content": [image(d)]}]},
    ),
    "a chat to pool": (
        api_table.POOLING,
        lambda d: {"messages": [{"role": "user", "content": [image(d)]}]},
    ),
    "an input": (api_table.EMBEDDINGS, lambda d: {"input": [{"content": [image(d)]}]}),
    "Cohere's image": (api_table.COHERE_EMBED, lambda d: {"images": [url("image/png", d)]}),
    "Cohere's input": (
        api_table.COHERE_EMBED,
        lambda d: {"inputs": [{"content": [image(d)]}]},
    ),
    "a data URL": (api_table.EMBEDDINGS, lambda d: {"input": url("image/png", d)}),
    "a moderated part": (api_table.MODERATIONS, lambda d: {"input": [image(d)]}),
    "documents": (
        api_table.RERANK,
        lambda d: {"query": "dam", "documents": {"content": [image(d)]}},
    ),
    "a document of a list": (
        api_table.RERANK,
        lambda d: {"query": "dam", "documents": [{"content": [image(d)]}]},
    ),
    "a query": (
        api_table.RERANK,
        lambda d: {"query": {"content": [image(d)]}, "documents": ["a dam"]},
    ),
    "a first text": (
        api_table.SCORE,
        lambda d: {"data_1": {"content": [image(d)]}, "data_2": IMAGES},
    ),
    "a second text": (
        api_table.SCORE,
        lambda d: {"data_1": "dam", "data_2": {"content": [image(d)]}},
    ),
}
"""Bodies of requests that generate no text, with an image in each place."""
PARTS: dict[str, tuple[Api, Any]] = {
    "image": (
        api_table.CHAT,
        lambda d: {"type": "image_url", "image_url": {"url": url("image/png", d)}},
    ),
    "audio": (api_table.CHAT, lambda d: {"type": "input_audio", "input_audio": {"data": d}}),
    "video": (
        api_table.CHAT,
        lambda d: {"type": "video_url", "video_url": {"url": url("video/mp4", d)}},
    ),
    "file": (api_table.CHAT, lambda d: {"type": "file", "file": {"file_data": url("text/csv", d)}}),
    "embeddings": (api_table.CHAT, lambda d: {"type": "image_embeds", "image_embeds": d}),
    "message's image": (
        api_table.MESSAGES,
        lambda d: {"type": "image", "source": SOURCE | {"data": d}},
    ),
    "message's document": (
        api_table.MESSAGES,
        lambda d: {"type": "document", "source": SOURCE | {"data": d}},
    ),
    "tool result": (
        api_table.MESSAGES,
        lambda d: {
            "type": "tool_result",
            "tool_use_id": "t",
            "content": [{"type": "image", "source": SOURCE | {"data": d}}],
        },
    ),
    "response's image": (
        api_table.RESPONSES,
        lambda d: {"type": "input_image", "image_url": url("image/png", d)},
    ),
    "response's file": (
        api_table.RESPONSES,
        lambda d: {"type": "input_file", "file_data": url("a/b", d)},
    ),
}
sizes = st.integers(MIN_MEDIUM_BYTES, 400_000)
# All kinds are counted by the same code, which sees two bodies in each example.
FEW = settings(max_examples=25)


def url(kind: str, data: str) -> str:
    return f"data:{kind};base64,{data}"


def random_data(size: int, seed: int) -> str:
    return base64.b64encode(b"\0" + Random(seed).randbytes(size)).decode()


def parsed(kind: str, size: int, seed: int) -> Call:
    # Return the call with one part of `size` random bytes, whose dimensions are unknown.
    api, part = PARTS[kind]
    data = random_data(size, seed)
    messages = [{"role": "user", "content": [part(data)]}]
    name = "input" if api is api_table.RESPONSES else "messages"
    return call_of(api, {"max_tokens": 16, name: messages})


def call_of(api: Api, body: dict[str, Any]) -> Call:
    caller = CallContext("r", "", NO_PREFERENCES, 0.0)
    text = json.dumps({"model": "demo", **body}).encode()
    return parse_call(text, api, {"demo": Model()}, caller)


@pytest.mark.parametrize("kind", PARTS)
@FEW
@given(sizes, sizes, st.integers(0, 100))
def test_a_part_counts_the_same_whatever_its_size_in_bytes(
    kind: str, small: int, large: int, seed: int
) -> None:
    # Admission and quotas use only a prompt's number of tokens. Only the minimum number that a
    # request needs is compared with an engine's context length.
    calls = [parsed(kind, size, seed) for size in (small, large)]
    counts = [call.request.prompt_tokens for call in calls]
    assert max(counts) - min(counts) <= 1
    assert MEDIA_TOKENS < min(counts) < MEDIA_TOKENS + 100
    assert all(least_tokens(call) < 16 + 100 for call in calls)


@pytest.mark.parametrize("kind", INPUTS)
@FEW
@given(sizes, sizes, st.integers(0, 100))
def test_an_image_to_embed_or_score_counts_the_same_whatever_its_size_in_bytes(
    kind: str, small: int, large: int, seed: int
) -> None:
    api, body = INPUTS[kind]
    calls = [call_of(api, body(random_data(size, seed))) for size in (small, large)]
    counts = [call.request.prompt_tokens for call in calls]
    assert max(counts) - min(counts) <= 1
    assert MEDIA_TOKENS < min(counts) < MEDIA_TOKENS + 100
    assert all(least_tokens(call) < 100 and call.request.prompts == 1 for call in calls)


@given(st.lists(st.integers(MIN_MEDIUM_BYTES, 20_000), min_size=2, max_size=5), st.integers(0, 9))
def test_each_document_with_an_image_is_one_input(document_sizes: list[int], seed: int) -> None:
    parts = [image(random_data(size, seed)) for size in document_sizes]
    for documents in ({"content": parts}, [{"content": [part]} for part in parts]):
        call = call_of(api_table.RERANK, {"query": "dam", "documents": documents})
        assert call.request.prompts == call.media_size.parts == len(parts)
        assert call.request.prompt_tokens > len(parts) * MEDIA_TOKENS
