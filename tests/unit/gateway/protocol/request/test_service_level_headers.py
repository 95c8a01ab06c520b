"""Tests of service classes and priorities from headers, tenants and models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gateway.config import Config
from gateway.protocol import api_table
from gateway.protocol.errors import Failure, GatewayError
from gateway.protocol.request.api_call import Call
from gateway.protocol.request.request_body import CallContext, parse_call
from gateway.protocol.request.service_level_headers import (
    MAX_SESSION_CHARS,
    NO_PREFERENCES,
    HeaderFields,
    RequestPreferences,
    ServiceClasses,
)
from policies.routing_types import Slo

POOLS = {"main": {"endpoints": [{"url": "http://127.0.0.1:9000"}]}}
TENANTS = [
    {"name": "acme", "key": "a", "slo": "batch", "priority": 3},
    {"name": "plain", "key": "b"},
]


class Model:
    def __init__(self, slo: Slo, is_low_first: bool = True) -> None:
        self.served_model, self.context_tokens, self.slo, self.is_low_first = (
            "demo",
            None,
            slo,
            is_low_first,
        )
        self.sequences = 256


def levels(**sections: Any) -> ServiceClasses:
    return ServiceClasses(Config.model_validate({"version": 1, "pools": POOLS} | sections))


def call(
    wish: RequestPreferences,
    body: bytes = b"",
    is_low_first: bool = True,
    arrived_s: float = 100.0,
    tenant: str = "",
) -> Call:
    raw = b'{"model":"demo","prompt":"hi"' + body + b"}"
    usual = levels().get_class("standard")
    return parse_call(
        raw,
        api_table.COMPLETIONS,
        {"demo": Model(usual, is_low_first)},
        CallContext("r", tenant, wish, arrived_s),
    )


def rejection(headers: Mapping[str, str]) -> GatewayError:
    with pytest.raises(GatewayError) as wrong:
        levels().read_preferences(headers, "")
    assert wrong.value.failure is Failure.BAD_REQUEST
    return wrong.value


def test_there_are_three_classes_by_default() -> None:
    classes = levels()
    assert (classes.get_class("interactive").ttft_s, classes.get_class("interactive").weight) == (
        1.0,
        4.0,
    )
    assert classes.get_class("batch").tpot_s == 0.5
    assert classes.get_class(None) == Slo(is_promised=False)


def test_only_configured_or_requested_budgets_are_promises() -> None:
    built_in, configured = levels(), levels(slo={"default": "batch"})
    assert not built_in.get_class(None).is_promised
    assert built_in.get_class("standard").is_promised
    assert configured.get_class(None).is_promised
    default = built_in.get_class(None)
    for headers in ({"x-slo-class": "standard"}, {"x-slo-ttft-ms": "900"}):
        assert built_in.read_preferences(headers, "").resolve_slo(default).is_promised
    assert not built_in.read_preferences({}, "").resolve_slo(default).is_promised


def test_configured_classes_replace_the_default_ones() -> None:
    classes = levels(
        slo={"default": "gold", "classes": {"gold": {"ttft": "2s", "tpot": "20ms", "weight": 9}}}
    )
    assert classes.get_class(None) == Slo("gold", 2.0, 0.02, 9.0)
    with pytest.raises(GatewayError, match="must be one of gold, not 'standard'"):
        classes.read_preferences({"x-slo-class": "standard"}, "")


def test_unrelated_headers_give_no_preferences() -> None:
    assert levels().read_preferences({"host": "x", "user-agent": "y"}, "") is NO_PREFERENCES


def test_the_class_of_the_header_precedes_the_tenants_and_the_models() -> None:
    classes, usual = levels(tenants=TENANTS), levels().get_class("standard")
    assert classes.read_preferences({}, "plain").resolve_slo(usual).name == "standard"
    assert classes.read_preferences({}, "acme").resolve_slo(usual).name == "batch"
    assert (
        classes.read_preferences({"x-slo-class": "interactive"}, "acme").resolve_slo(usual).name
        == "interactive"
    )


@pytest.mark.parametrize("prefix", ["x-slo-", "x-llm-d-slo-"])
def test_a_budget_in_a_header_replaces_only_that_of_the_class(prefix: str) -> None:
    wish = levels().read_preferences({f"{prefix}ttft-ms": "250", "x-slo-class": "interactive"}, "")
    assert wish.resolve_slo(Slo()) == Slo("interactive", 0.25, 0.05, 4.0)
    wish = levels().read_preferences({f"{prefix}tpot-ms": "12.5"}, "")
    assert wish.resolve_slo(Slo("x", 3.0, 1.0, 2.0)) == Slo("x", 3.0, 0.0125, 2.0)


@pytest.mark.parametrize("header", ["x-llm-d-inference-objective", "x-gateway-inference-objective"])
def test_an_objective_selects_a_class_of_the_same_name(header: str) -> None:
    assert levels().read_preferences({header: "batch"}, "").resolve_slo(Slo()).name == "batch"
    assert (
        levels().read_preferences({header: "somebody-elses"}, "").resolve_slo(Slo()).name
        == "standard"
    )


@pytest.mark.parametrize(
    "value",
    ["0", "-1", "abc", "1e3", "nan", "inf", "", " 5", "5ms", "86400001", "9" * 40, "1_0", "٣"],
)
@pytest.mark.parametrize("header", ["x-slo-ttft-ms", "x-slo-tpot-ms", "x-llm-d-slo-ttft-ms"])
def test_an_invalid_budget_is_rejected_by_header_name(header: str, value: str) -> None:
    error = rejection({header: value})
    assert error.param == header
    assert header in error.message


@pytest.mark.parametrize(
    ("header", "least", "less"),
    [("x-slo-ttft-ms", "1", "0.999"), ("x-slo-tpot-ms", "0.1", "0.099")],
)
def test_a_budget_below_the_minimum_is_rejected_with_the_minimum(
    header: str, least: str, less: str
) -> None:
    wish = levels().read_preferences({header: least}, "")
    assert (wish.ttft_s or wish.tpot_s) == float(least) / 1000
    assert f"from {least} to 86400000, not '{less}'" in rejection({header: less}).message


@pytest.mark.parametrize("value", ["9", "-9", "high", "1.5", "", "999999999999"])
def test_a_priority_out_of_range_is_rejected_by_header_name(value: str) -> None:
    assert rejection({"x-priority": value}).param == "x-priority"


def test_an_error_repeats_only_a_short_printable_part_of_a_header() -> None:
    message = rejection({"x-slo-class": "\x1b[31m" + "a" * 9000}).message
    assert len(message) < 300
    assert message.isprintable()


def test_the_length_of_a_session_id_is_limited() -> None:
    assert (
        levels().read_preferences({"x-session-id": "s" * MAX_SESSION_CHARS}, "").session
        == "s" * MAX_SESSION_CHARS
    )
    assert rejection({"x-session-id": "s" * (MAX_SESSION_CHARS + 1)}).param == "x-session-id"


def test_sessions_of_different_tenants_differ() -> None:
    classes = levels(tenants=TENANTS)
    one, other = (
        classes.read_preferences({"x-session-id": "s"}, tenant).session
        for tenant in ("acme", "plain")
    )
    assert one != other
    assert call(NO_PREFERENCES, b',"prompt_cache_key":"s"', tenant="acme").request.session == one


@pytest.mark.parametrize("value", ["", "soon", "-3", "0", "nan", "9" * 40])
def test_an_invalid_sdk_timeout_is_ignored(value: str) -> None:
    assert (
        call(levels().read_preferences({"x-stainless-read-timeout": value}, "")).request.deadline_s
        is None
    )


@pytest.mark.parametrize("header", ["x-stainless-read-timeout", "x-stainless-timeout"])
def test_a_deadline_is_measured_from_the_end_of_the_request(header: str) -> None:
    request = call(levels().read_preferences({header: "12.5"}, ""), arrived_s=100.0).request
    assert (request.arrived_s, request.deadline_s) == (100.0, 112.5)


def test_only_a_short_timeout_is_a_short_deadline() -> None:
    assert levels().read_preferences({"x-stainless-read-timeout": "2"}, "").has_short_deadline
    assert not levels().read_preferences({"x-stainless-read-timeout": "600"}, "").has_short_deadline


def test_a_tenants_priority_is_limited_from_above() -> None:
    classes = levels(tenants=TENANTS)
    claims = [("acme", "8"), ("acme", "-8"), ("plain", "1"), ("plain", "-1")]
    ranks = [
        classes.read_preferences({"x-priority": priority}, tenant).effective_priority(0)
        for tenant, priority in claims
    ]
    assert ranks == [3, -8, 0, -1]


@pytest.mark.parametrize(
    ("body", "is_low_first", "expected"),
    [
        (b',"priority":2', True, -2),
        (b',"priority":2', False, 2),
        (b',"priority":-100', True, 8),
        (b',"priority":1e5', False, 0),
        (b',"priority":true', False, 0),
        (b',"priority":"x"', False, 0),
        (b',"priority":null', False, 0),
    ],
)
def test_the_bodys_priority_is_interpreted_like_the_engine_does(
    body: bytes, is_low_first: bool, expected: int
) -> None:
    parsed = call(NO_PREFERENCES, body, is_low_first)
    assert parsed.request.priority == expected
    assert b"priority" not in parsed.body


def test_the_headers_priority_precedes_the_bodys() -> None:
    assert (
        call(levels().read_preferences({"x-priority": "5"}, ""), b',"priority":2').request.priority
        == 5
    )


def test_the_headers_session_precedes_the_bodys() -> None:
    body = b',"prompt_cache_key":"conversation"'
    assert call(NO_PREFERENCES, body).request.session == "conversation"
    assert (
        call(levels().read_preferences({"x-session-id": "mine"}, ""), body).request.session
        == "mine"
    )
    assert call(NO_PREFERENCES, b',"prompt_cache_key":["x"]').request.session == ""
    assert call(NO_PREFERENCES, b',"user":"somebody"').request.session == ""


def test_headers_are_read_once_per_configuration() -> None:
    fields, before, after = (
        HeaderFields([("x-slo-class", "batch")]),
        levels(),
        levels(slo={"default": "batch"}),
    )
    wish = before.read_preferences(fields, "")
    assert before.read_preferences(fields, "") is wish
    assert after.read_preferences(fields, "") is not wish
