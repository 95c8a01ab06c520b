"""Tests that each image, audio or video in a prompt counts as one item, however large it is."""

from __future__ import annotations

import base64
import json
from random import Random
from typing import Any

import pytest

from gateway.fleet.prefix_cache_view import PrefixCacheView
from gateway.protocol import api_table
from gateway.protocol.request.api_call import Call
from gateway.protocol.request.media import MEDIA_TOKENS, MediaSize, may_contain_media, replace_media
from gateway.protocol.request.request_body import CallContext, parse_call
from gateway.protocol.request.service_level_headers import NO_PREFERENCES
from policies.admission.prompt_length_correction import PromptLengths
from tests.unit.gateway.protocol.request.test_image_size import png
from tests.unit.gateway.protocol.request.test_request_body import Model

IMAGE = base64.b64encode(Random(1).randbytes(200_000)).decode()
OTHER = base64.b64encode(Random(2).randbytes(200_000)).decode()
TEXT = {"type": "text", "text": "What is this?"}
PARTS: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}", "detail": "high"}},
    {"type": "image_url", "image_url": f"data:image/png;base64,{IMAGE}"},
    {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{IMAGE}"}},
    {"type": "input_audio", "input_audio": {"data": IMAGE, "format": "wav"}},
    {
        "type": "file",
        "file": {"file_data": f"data:application/pdf;base64,{IMAGE}", "filename": "a.pdf"},
    },
    {"type": "image_embeds", "image_embeds": IMAGE},
    {"type": "audio_url", "audio_url": {"url": f"data:audio/webm; codecs=opus;base64,{IMAGE}"}},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}},
    {"type": "image_url", "images": [IMAGE]},
]


def parsed(
    content: object, separators: tuple[str, str] = (",", ":"), prompts: PromptLengths | None = None
) -> Call:
    body = {"model": "demo", "messages": [{"role": "user", "content": content}]}
    raw = json.dumps(body, separators=separators).encode()
    return parse_call(
        raw,
        api_table.CHAT,
        {"demo": Model()},
        CallContext("r", "", NO_PREFERENCES, 0.0, prompt_lengths=prompts),
    )


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("part", PARTS, ids=lambda part: str(part["type"]))
def test_a_base64_part_counts_as_one_medium_and_is_sent_unchanged(
    part: dict[str, Any], separators: tuple[str, str]
) -> None:
    call = parsed([TEXT, part], separators)
    assert MEDIA_TOKENS < call.request.prompt_tokens < MEDIA_TOKENS + 100
    assert call.media_size.parts == 1
    assert IMAGE.encode() in call.body
    assert parsed([TEXT, part, part], separators).media_size.parts == 2


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_each_medium_of_a_list_counts_and_text_in_lists_is_text(
    separators: tuple[str, str],
) -> None:
    call = parsed(
        [{"type": "x", "images": [IMAGE, f"data:image/png;base64,{OTHER}", IMAGE]}], separators
    )
    assert call.media_size.parts == 3
    assert 3 * MEDIA_TOKENS < call.request.prompt_tokens < 3 * MEDIA_TOKENS + 100
    assert parsed([IMAGE, IMAGE]).media_size.parts == 0


def test_media_in_the_result_of_a_tool_count_as_media() -> None:
    messages = [
        {"role": "user", "content": "draw"},
        {"role": "tool", "tool_call_id": "c1", "content": [TEXT, PARTS[0], PARTS[4]]},
    ]
    body = json.dumps({"model": "demo", "messages": messages}).encode()
    call = parse_call(
        body, api_table.CHAT, {"demo": Model()}, CallContext("r", "", NO_PREFERENCES, 0.0)
    )
    assert (call.media_size.parts, call.request.prompt_tokens < 2 * MEDIA_TOKENS + 200) == (2, True)


def test_text_that_looks_like_base64_counts_as_text() -> None:
    for content in (IMAGE, [{"type": "text", "text": IMAGE}], json.dumps({"data": IMAGE})):
        call = parsed(content)
        assert call.request.prompt_tokens > len(IMAGE) // 4
        assert call.media_size.parts == 0


def test_small_media_and_plain_text_count_as_text() -> None:
    small = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + IMAGE[:3000]}}
    assert parsed([TEXT, small]).media_size.parts == 0
    words = "It was the best of times, it was the worst of times. " * 10_000
    assert not may_contain_media(json.dumps({"content": words}).encode())


def test_prompts_with_different_images_share_only_the_blocks_before_the_image() -> None:
    def keys(image: str) -> list[int]:
        before = {"type": "text", "text": "Look. " * 300}
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
        call = parsed([before, part, {"type": "text", "text": "And now? " * 300}])
        return list(PrefixCacheView(b"s" * 32, 1 << 22, 512).fingerprint(call, "demo").keys)

    one, again, other = keys(IMAGE), keys(IMAGE), keys(OTHER)
    assert one == again
    shared = sum(a == b for a, b in zip(one, other, strict=True))
    assert 1800 // 512 <= shared <= 2000 // 512
    assert one[:shared] == other[:shared]


@pytest.mark.parametrize("data", [png(700, 1400), b"GIF89a" + b"\xbc\x02\x78\x05" + bytes(4000)])
@pytest.mark.parametrize("form", ["data:image/png;base64,%s", "%s"])
def test_an_image_counts_by_its_dimensions_and_not_by_its_bytes(data: bytes, form: str) -> None:
    for size in (4_000, 3_000_000):
        image = base64.b64encode(data + Random(3).randbytes(size)).decode()
        call = parsed([TEXT, {"type": "image", "source": {"data": form % image}}])
        assert call.media_size == MediaSize(1, 25 * 50 // 16 * 16)
        assert 1248 < call.request.prompt_tokens < 1350


def test_a_small_and_a_large_image_count_within_limits() -> None:
    for side, tokens in ((28, 64), (20_000, 4096)):
        image = base64.b64encode(png(side, side) + Random(4).randbytes(4_000)).decode()
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
        assert parsed([TEXT, part]).media_size == MediaSize(1, tokens)


def test_the_same_image_after_another_answer_keeps_its_blocks() -> None:
    image = base64.b64encode(png(1400, 1400) + Random(5).randbytes(100_000)).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
    view = PrefixCacheView(b"s" * 32, 1 << 22, 512)
    first, second = (
        view.fingerprint(parsed([part, {"type": "text", "text": text}]), "demo").keys
        for text in ("What is it?", "And where? " * 100)
    )
    assert len(first) >= 2500 * 4 // 512
    assert list(first[:-1]) == list(second[: len(first) - 1])


def test_lists_without_an_end_are_scanned_in_linear_time() -> None:
    blob = b'"x":["' + b"A" * 5000 + b'","'
    listed = b"[{" + blob * 200
    assert replace_media(listed, 0, len(listed))[1].parts == 200


def test_a_prompt_of_only_keys_and_blobs_is_scanned_in_linear_time() -> None:
    messages = b'[{"x":"' + b"A" * 5000 + b'"},' + b'{"data":"' * 100_000 + b"]"
    assert replace_media(messages, 0, len(messages))[1].parts == 1


def test_estimates_follow_the_counts_of_engines_for_similar_prompts() -> None:
    prompts, part = PromptLengths(), PARTS[0]
    plain = parsed("word " * 400).estimated_tokens
    for _ in range(8):
        prompts.record("demo", True, parsed([TEXT, part]).estimated_tokens, 300)
        prompts.record("demo", False, plain, plain // 2)
    assert parsed([TEXT, part], prompts=prompts).request.prompt_tokens == 300
    assert parsed("word " * 400, prompts=prompts).request.prompt_tokens == pytest.approx(
        plain / 2, abs=1
    )
    assert parsed("word " * 400, prompts=prompts).estimated_tokens == plain
