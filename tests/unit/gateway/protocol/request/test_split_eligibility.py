"""Tests of what can make a request unfit to be split between two endpoints."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.protocol.api_table import COMPLETIONS
from gateway.protocol.request.api_call import Call
from gateway.protocol.request.media import NO_MEDIA, MediaSize
from gateway.protocol.request.split_eligibility import (
    can_be_pulled,
    read_shape,
    unsplittable_error,
)
from policies.pricing.split_decision import SplitReason, SplitShape
from policies.routing_types import Request


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"messages": []}, SplitShape()),
        ({"max_tokens": 5}, SplitShape(max_tokens=5)),
        ({"max_tokens": 5, "max_completion_tokens": 1}, SplitShape(max_tokens=1)),
        ({"max_tokens": 5, "max_completion_tokens": None}, SplitShape(max_tokens=5)),
        ({"n": 2, "best_of": None}, SplitShape(choices=2)),
        ({"n": 1, "best_of": 3}, SplitShape(choices=3)),
        ({"prompt": "a"}, SplitShape()),
        ({"prompt": [1, 2]}, SplitShape()),
        ({"prompt": ["a", "b"]}, SplitShape(prompts=2)),
        ({"prompt": [[1], [2], [3]]}, SplitShape(prompts=3)),
        ({"prompt": "a", "echo": True}, SplitShape(scores_prompt=True)),
        ({"prompt": "a", "echo": False, "prompt_logprobs": None}, SplitShape()),
        ({"prompt_logprobs": 0}, SplitShape(scores_prompt=True)),
    ],
)
def test_the_shape_of_a_request_is_what_can_make_it_unfit_to_be_split(
    given: dict[str, Any], expected: SplitShape
) -> None:
    members = msgspec.json.decode(msgspec.json.encode(given), type=dict[str, msgspec.Raw])
    assert read_shape(members) == expected


def test_the_error_for_an_unsplittable_request_names_the_model_and_the_reason() -> None:
    error = unsplittable_error("large", SplitReason.CHOICES)
    assert error is not None
    assert error.status == 400
    assert "'large' serves only requests that are split" in error.message
    assert "(choices)" in error.message


def test_a_request_that_is_not_split_for_lack_of_endpoints_is_not_unsplittable() -> None:
    assert unsplittable_error("large", SplitReason.NO_PAIR) is None


@pytest.mark.parametrize(
    ("members", "media", "expected"),
    [
        ({"prompt": "a"}, NO_MEDIA, True),
        ({"messages": []}, MediaSize(1, 100), False),
        ({"prompt": "a", "truncate_prompt_tokens": 5}, NO_MEDIA, False),
        ({"prompt": "a", "truncation_side": "left"}, NO_MEDIA, False),
    ],
)
def test_a_beginning_is_pulled_only_of_a_text_that_the_client_does_not_shorten(
    members: dict[str, Any], media: MediaSize, expected: bool
) -> None:
    raw = msgspec.json.decode(msgspec.json.encode(members), type=dict[str, msgspec.Raw])
    request = Request("id", "model", "", 10, 10)
    call = Call(COMPLETIONS, request, "model", b"{}", (), raw, media_size=media)
    assert can_be_pulled(call) == expected
