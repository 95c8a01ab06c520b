"""Tests that the gateway recognises a conversation by its growing prompts."""

from __future__ import annotations

import json
from typing import Any

from gateway.fleet.prefix_cache_view import PrefixCacheView
from gateway.protocol import api_table
from gateway.protocol.request.api_call import Call
from gateway.protocol.request.request_body import CallContext, parse_call
from gateway.protocol.request.service_level_headers import NO_PREFERENCES
from policies.routing_types import INFERRED_SESSION
from tests.unit.gateway.protocol.request.test_request_body import Model

MESSAGES = [
    {"role": "system", "content": "You repair water wheels. " * 60},
    {"role": "user", "content": "It squeaks."},
]
ANSWERED = [*MESSAGES, {"role": "assistant", "content": "Oil."}, {"role": "user", "content": "Ah"}]


def sent(view: PrefixCacheView, messages: list[Any], tenant: str = "", **members: Any) -> Call:
    body = json.dumps({"model": "demo", "messages": messages, **members}).encode()
    context = CallContext("req_1", tenant, NO_PREFERENCES, 0.0)
    call = parse_call(body, api_table.CHAT, {"demo": Model()}, context)
    view.recognise_session(call, view.fingerprint(call, "demo"))
    return call


def view() -> PrefixCacheView:
    return PrefixCacheView(bytes(range(16)), 1 << 20, 512)


def test_the_second_turn_of_an_unnamed_conversation_is_in_a_session() -> None:
    prefixes = view()
    assert sent(prefixes, MESSAGES).request.session == ""
    request = sent(prefixes, ANSWERED).request
    assert request.session.startswith("prefix:")
    assert request.session_source == INFERRED_SESSION
    assert request.is_session_inferred


def test_a_named_session_keeps_its_name() -> None:
    prefixes = view()
    sent(prefixes, MESSAGES)
    request = sent(prefixes, ANSWERED, prompt_cache_key="mine").request
    assert (request.session, request.session_source) == ("mine", "prompt_cache_key")


def test_tenants_with_equal_prompts_share_no_session() -> None:
    prefixes = view()
    for tenant in ("one", "other"):
        sent(prefixes, MESSAGES, tenant)
    one, other = (sent(prefixes, ANSWERED, tenant).request.session for tenant in ("one", "other"))
    assert one.startswith("one\0prefix:")
    assert other.startswith("other\0prefix:")


def test_tools_are_part_of_the_prompt() -> None:
    prefixes = view()
    tools = [{"type": "function", "function": {"name": "oil"}}]
    sent(prefixes, MESSAGES, tools=tools)
    assert sent(prefixes, ANSWERED).request.session == ""
    assert sent(prefixes, ANSWERED, tools=tools).request.session
