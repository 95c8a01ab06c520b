"""Tests of how the gateway finds a request's session: in headers, in the body, or by hints."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.config import Config
from gateway.protocol.api_table import CHAT, MESSAGES, RESPONSES, Api
from gateway.protocol.request.request_body import CallContext, parse_call
from gateway.protocol.request.service_level_headers import ServiceClasses
from gateway.protocol.request.sessions import (
    MAX_HINT_BYTES,
    MAX_SESSION_CHARS,
    SESSION_HEADER_NAMES,
    SESSION_HEADERS,
    SESSION_MEMBERS,
    HeaderSession,
    read_header_session,
    with_body_session,
)
from gateway.protocol.stored_response_ids import ResponseIds
from policies.routing_types import Request, SessionHints
from tests.unit.gateway.protocol.request.test_request_body import Model

UUID = "8f14e45f-ceea-467f-ab1c-0d5d2b0c3a11"
CONFIG = Config.model_validate(
    {"version": 1, "pools": {"main": {"endpoints": [{"url": "http://127.0.0.1:1"}]}}}
)
PLAIN = Request("req_1", "demo", "acme", 10, 10)


def body(members: dict[str, Any], request: Request = PLAIN) -> Request:
    raw = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in members.items()}
    return with_body_session(request, raw)


@pytest.mark.parametrize("header", SESSION_HEADERS)
def test_each_agents_header_names_the_session(header: str) -> None:
    assert read_header_session({header: UUID}) == HeaderSession(UUID, header)


def test_the_first_header_of_the_table_counts() -> None:
    headers = dict.fromkeys(SESSION_HEADERS, "other") | {"x-claude-code-session-id": "mine"}
    assert read_header_session(headers).name == "mine"


@pytest.mark.parametrize(
    "header", ["x-client-request-id", "x-request-id", "x-opencode-request", "traceparent"]
)
def test_the_id_of_a_single_request_names_no_session(header: str) -> None:
    assert header not in SESSION_HEADER_NAMES
    assert read_header_session({header: UUID}) == HeaderSession()


def test_a_subagent_has_a_session_of_its_own() -> None:
    main = {"x-claude-code-session-id": UUID}
    assert read_header_session(main | {"x-claude-code-agent-id": "a1"}).name == f"{UUID}/a1"
    codex = {"session-id": UUID, "thread-id": UUID}
    assert read_header_session(codex).name == UUID
    assert read_header_session(codex | {"thread-id": "t2"}).name == f"{UUID}/t2"


@pytest.mark.parametrize("value", ["", "s" * (MAX_SESSION_CHARS + 1)])
def test_an_empty_or_long_header_is_skipped(value: str) -> None:
    headers = {"session-id": value, "x-litellm-session-id": "next"}
    assert read_header_session(headers).name == "next"


@pytest.mark.parametrize("header", ["x-session-final", "x-dynamo-session-final"])
def test_a_header_marks_the_last_request_of_a_session(header: str) -> None:
    assert read_header_session({header: "true", "x-session-id": "s"}).is_last
    assert not read_header_session({header: "false", "x-session-id": "s"}).is_last


@pytest.mark.parametrize(
    ("members", "source"),
    [
        ({"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": UUID})}}, "metadata"),
        ({"metadata": {"user_id": f"user_0a1b_account_{UUID}_session_{UUID}"}}, "metadata"),
        ({"metadata": {"user_id": f"user_0a1b_account__session_{UUID}"}}, "metadata"),
        ({"conversation": UUID}, "conversation"),
        ({"conversation": {"id": UUID}}, "conversation"),
        ({"prompt_cache_key": UUID}, "prompt_cache_key"),
        ({"previous_response_id": UUID}, "previous_response_id"),
        ({"vllm_xargs": {"agentic_context": {"program_id": UUID}}}, "vllm_xargs"),
        ({"vllm_xargs": {"agentic_context": {"session_id": UUID}}}, "vllm_xargs"),
        ({"nvext": {"agent_context": {"session_id": UUID}}}, "nvext"),
        ({"nvext": {"session_control": {"action": "open", "session_id": UUID}}}, "nvext"),
        ({"agent_hint": {"session_id": UUID}}, "agent_hint"),
    ],
)
def test_a_member_of_the_body_names_the_session(members: dict[str, Any], source: str) -> None:
    request = body(members)
    assert (request.session, request.session_source) == (f"acme\0{UUID}", source)


def test_all_turns_that_continue_a_stored_response_are_one_session() -> None:
    ids = ResponseIds({}, b"k" * 32)
    first = ids.new("acme", "a", "m")
    second = ids.new("acme", "a", "m", first)
    names = [body({"previous_response_id": each}).session for each in (first, second)]
    assert names[0] == names[1] != ""
    assert body({"previous_response_id": ids.new("acme", "a", "m")}).session != names[0]


@pytest.mark.parametrize(
    "members",
    [
        {"metadata": {"user_id": "alice"}},
        {"metadata": {"user_id": "user_0a1b_account_x"}},
        {"metadata": {"user_id": "{"}},
        {"metadata": {"user_id": "[]"}},
        {"metadata": {"user_id": '{"session_id": 3}'}},
        {"metadata": {"user_id": "\ud800{"}},
        {"metadata": {"other": UUID}},
        {"metadata": UUID},
        {"metadata": {"user_id": "user_a_session_" + "0" * 40, "pad": "x" * MAX_HINT_BYTES}},
        {"conversation": None},
        {"conversation": ["x"]},
        {"prompt_cache_key": ""},
        {"prompt_cache_key": "s" * (MAX_SESSION_CHARS + 1)},
        {"previous_response_id": 7},
        {"vllm_xargs": {"agentic_context": UUID}},
        {"vllm_xargs": []},
        {"nvext": {"agent_context": {"session_id": [1]}}},
        {"agent_hint": "x"},
    ],
)
def test_other_values_name_no_session(members: dict[str, Any]) -> None:
    assert body(members) == PLAIN


def test_a_member_that_names_nothing_leaves_the_choice_to_the_next() -> None:
    members = {"metadata": {"user_id": "alice"}, "prompt_cache_key": "key"}
    assert body(members).session_source == "prompt_cache_key"


def test_the_session_of_a_header_precedes_the_bodys() -> None:
    named = msgspec.structs.replace(PLAIN, session="acme\0h", session_source="session-id")
    assert body({"prompt_cache_key": "key"}, named) == named


@pytest.mark.parametrize(
    ("members", "hints"),
    [
        ({"vllm_xargs": {"agentic_context": {"expected_resume": False}}}, SessionHints(True)),
        ({"vllm_xargs": {"agentic_context": {"expected_resume": True}}}, None),
        ({"nvext": {"agent_context": {"session_final": True}}}, SessionHints(True)),
        ({"nvext": {"session_control": {"action": "close"}}}, SessionHints(True)),
        (
            {"nvext": {"cache_control": {"type": "ephemeral", "ttl": "5m"}}},
            SessionHints(False, 300),
        ),
        ({"agent_hint": {"cache_control": {"ttl": 90}}}, SessionHints(False, 90)),
        ({"agent_hint": {"cache_control": {"ttl": -1}}}, None),
        ({"agent_hint": {"cache_control": {"ttl": True}}}, None),
        ({"agent_hint": {"cache_control": {"ttl": "soon"}}}, None),
        ({"agent_hint": {"cache_control": {"ttl": 1e300}}}, SessionHints(False, 86_400)),
    ],
)
def test_hints_about_the_sessions_future_are_read(
    members: dict[str, Any], hints: SessionHints | None
) -> None:
    assert body(members).session_hints == hints


def test_hints_of_headers_and_body_add_up() -> None:
    last = msgspec.structs.replace(PLAIN, session_hints=SessionHints(True))
    assert body({"agent_hint": {"cache_control": {"ttl": 9}}}, last).session_hints == SessionHints(
        True, 9
    )


def test_every_member_that_gives_hints_is_looked_for() -> None:
    assert {"vllm_xargs", "nvext", "agent_hint"} <= SESSION_MEMBERS


CLAUDE_CODE = {
    "model": "demo",
    "max_tokens": 32000,
    "system": [{"type": "text", "text": "You are an agent."}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "fix it"}]}],
    "tools": [{"name": "Bash", "input_schema": {"type": "object"}}],
    "metadata": {"user_id": json.dumps({"device_id": "d", "account_uuid": "", "session_id": UUID})},
    "stream": True,
}
CODEX = {
    "model": "demo",
    "instructions": "You are an agent.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}
    ],
    "tools": [],
    "prompt_cache_key": UUID,
    "store": False,
    "stream": True,
}
OPENCODE = {"model": "demo", "messages": [{"role": "user", "content": "fix it"}], "stream": True}


@pytest.mark.parametrize(
    ("api", "members", "headers", "source"),
    [
        (MESSAGES, CLAUDE_CODE, {"x-claude-code-session-id": UUID}, "x-claude-code-session-id"),
        (MESSAGES, CLAUDE_CODE, {"x-client-request-id": "r1"}, "metadata"),
        (RESPONSES, CODEX, {"session-id": UUID, "thread-id": UUID}, "session-id"),
        (RESPONSES, CODEX, {"session_id": UUID}, "session_id"),
        (RESPONSES, CODEX, {}, "prompt_cache_key"),
        (CHAT, OPENCODE, {"x-opencode-session": UUID}, "x-opencode-session"),
        (CHAT, OPENCODE, {"x-session-affinity": UUID}, "x-session-affinity"),
        (CHAT, OPENCODE, {"x-litellm-session-id": UUID}, "x-litellm-session-id"),
    ],
)
def test_each_agent_is_recognised_by_what_it_sends(
    api: Api, members: dict[str, Any], headers: dict[str, str], source: str
) -> None:
    wish = ServiceClasses(CONFIG).read_preferences(headers, "acme")
    context = CallContext("req_1", "acme", wish, 0.0)
    request = parse_call(json.dumps(members).encode(), api, {"demo": Model()}, context).request
    assert (request.session, request.session_source) == (f"acme\0{UUID}", source)
