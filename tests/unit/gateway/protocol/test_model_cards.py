"""Tests of lists of models in the format of Anthropic's API."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from gateway.protocol.error_formats import anthropic_error
from gateway.protocol.errors import Failure, GatewayError
from gateway.protocol.model_cards import anthropic_card, anthropic_list


class Card(NamedTuple):
    name: str = "demo"
    context_tokens: int | None = None


MODELS = {f"m{number:02d}": Card() for number in range(25)}


def page(**query: str) -> Any:
    return anthropic_list(MODELS, 0, query)


def ids(**query: str) -> list[str]:
    return [card["id"] for card in page(**query)["data"]]


def test_a_page_has_twenty_models_and_says_whether_more_follow() -> None:
    first = page()
    assert (len(first["data"]), first["has_more"]) == (20, True)
    assert (first["first_id"], first["last_id"]) == ("m00", "m19")
    rest = page(after_id="m19")
    assert (ids(after_id="m19"), rest["has_more"]) == ([f"m{n}" for n in range(20, 25)], False)


def test_cursors_and_limits_select_a_page() -> None:
    assert ids(limit="2", after_id="m03") == ["m04", "m05"]
    assert ids(limit="2", before_id="m03") == ["m01", "m02"]
    assert page(limit="3", before_id="m03")["has_more"] is False
    assert len(ids(limit="1000")) == 25
    assert page(after_id="m24") == {
        "data": [],
        "has_more": False,
        "first_id": None,
        "last_id": None,
    }


@pytest.mark.parametrize(
    "query",
    [{"limit": "0"}, {"limit": "1001"}, {"limit": "x"}, {"after_id": "y"}, {"before_id": ""}],
)
def test_an_invalid_page_is_refused_by_name(query: dict[str, str]) -> None:
    with pytest.raises(GatewayError) as caught:
        page(**query)
    assert (caught.value.status, caught.value.param) == (400, next(iter(query)))


def test_a_card_has_the_name_that_clients_use_and_the_context() -> None:
    assert anthropic_card("claude-x", Card("llama", 8192), 86_400) == {
        "type": "model",
        "id": "claude-x",
        "display_name": "claude-x",
        "created_at": "1970-01-02T00:00:00Z",
        "max_input_tokens": 8192,
    }


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (Failure.BAD_KEY, "authentication_error"),
        (Failure.MODEL_NOT_FOUND, "not_found_error"),
        (Failure.METHOD_NOT_ALLOWED, "invalid_request_error"),
        (Failure.INTERNAL, "api_error"),
        (Failure.NO_CAPACITY, "overloaded_error"),
    ],
)
def test_errors_have_anthropics_types(failure: Failure, kind: str) -> None:
    assert json.loads(anthropic_error(GatewayError(failure, "why"), "req_1")) == {
        "type": "error",
        "error": {"type": kind, "message": "why"},
        "request_id": "req_1",
    }
