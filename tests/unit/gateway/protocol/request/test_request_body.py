"""Tests of the request parser: limits, errors, token counts and streaming."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from gateway.protocol import api_table
from gateway.protocol.errors import Failure, GatewayError
from gateway.protocol.request import json_members
from gateway.protocol.request.allowed_tools import MAX_TOOLS
from gateway.protocol.request.api_call import Call
from gateway.protocol.request.json_members import (
    MAX_DIGITS,
    MAX_MEMBERS,
    MAX_NAME_CHARS,
    SMALL_BODY_BYTES,
)
from gateway.protocol.request.parameter_limits import MAX_MEMBER_BYTES, MAX_NUMBERS
from gateway.protocol.request.request_body import (
    DEFAULT_OUTPUT_TOKENS,
    MAX_EXPECTED_TOKENS,
    CallContext,
    parse_call,
)
from gateway.protocol.request.service_level_headers import NO_PREFERENCES
from policies.engine.output_length import OutputLengths
from policies.routing_types import STANDARD, Slo
from tests.cpu_growth import FACTOR, MOST_GROWTH, growth

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "demo", "prompt": "hi"}


class Model(NamedTuple):
    served_model: str = "demo"
    context_tokens: int | None = None
    slo: Slo = STANDARD
    is_low_first: bool = True
    sequences: int = 256


def parsed(
    body: dict[str, Any] | bytes,
    api: api_table.Api = api_table.CHAT,
    context_tokens: int | None = None,
) -> Call:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_call(
        raw,
        api,
        {"demo": Model("demo", context_tokens)},
        CallContext("req_1", "acme", NO_PREFERENCES, 0.0),
    )


def refusal(
    body: dict[str, Any] | bytes,
    api: api_table.Api = api_table.CHAT,
    context_tokens: int | None = None,
) -> GatewayError:
    with pytest.raises(GatewayError) as refused:
        parsed(body, api, context_tokens)
    return refused.value


@pytest.mark.parametrize("name", sorted(MAX_NUMBERS))
def test_a_limited_number_is_accepted_up_to_its_limit(name: str) -> None:
    for good in (1, MAX_NUMBERS[name], None):
        parsed({**CHAT, name: good})
    wrong: tuple[Any, ...] = (
        0,
        -1,
        MAX_NUMBERS[name] + 1,
        2**31,
        2**63,
        2**64,
        10**300,
        1.5,
        "1.5",
        True,
        [1],
        {},
    )
    for bad in wrong:
        error = refusal({**CHAT, name: bad})
        assert (error.failure, error.param) == (Failure.BAD_REQUEST, name)


@pytest.mark.parametrize("name", sorted(MAX_MEMBER_BYTES))
def test_a_limited_member_is_accepted_up_to_its_size(name: str) -> None:
    fits = "x" * (MAX_MEMBER_BYTES[name] - 2)
    parsed({**CHAT, name: fits})
    error = refusal({**CHAT, name: fits + "x"})
    assert (error.failure, error.param) == (Failure.BAD_REQUEST, name)
    assert str(MAX_MEMBER_BYTES[name]) in error.message


@pytest.mark.parametrize("large", [False, True], ids=["small body", "large body"])
def test_the_number_of_members_and_the_length_of_names_are_limited(large: bool) -> None:
    messages = [{"role": "user", "content": "x" * (SMALL_BODY_BYTES if large else 1)}]
    room = MAX_MEMBERS - 2
    parsed({**CHAT, "messages": messages} | {f"k{i}": 0 for i in range(room)})
    assert (
        "members"
        in refusal({**CHAT, "messages": messages} | {f"k{i}": 0 for i in range(room + 1)}).message
    )
    parsed({**CHAT, "messages": messages, "k" * MAX_NAME_CHARS: 0})
    assert "name" in refusal({**CHAT, "messages": messages, "k" * (MAX_NAME_CHARS + 1): 0}).message


def test_a_huge_name_in_a_compact_body_passes() -> None:
    body = json.dumps({**CHAT, "k" * 2**20: 0}, separators=(",", ":")).encode()
    assert parsed(body).body is body


def test_the_number_of_digits_is_limited() -> None:
    def body(digits: int) -> bytes:
        return json.dumps(CHAT)[:-1].encode() + b',"seed":' + b"1" * digits + b"}"

    assert parsed(body(MAX_DIGITS))
    error = refusal(body(MAX_DIGITS + 1))
    assert (error.param, error.status) == ("seed", 400)
    assert parsed({**CHAT, "user": "1" * (MAX_DIGITS + 1)})


def test_a_huge_bound_is_forwarded_but_not_expected() -> None:
    call = parsed({**CHAT, "max_tokens": 1_000_000})
    assert call.request.output_tokens == MAX_EXPECTED_TOKENS
    assert b"1000000" in call.body


@pytest.mark.parametrize(
    ("body", "output_tokens"),
    [
        ({}, DEFAULT_OUTPUT_TOKENS),
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 9}, 9),
        ({"max_tokens": 7, "n": 3}, 21),
        ({"max_tokens": None, "n": None}, DEFAULT_OUTPUT_TOKENS),
    ],
)
def test_the_expected_output_is_limited_by_the_client(
    body: dict[str, Any], output_tokens: int
) -> None:
    assert parsed({**CHAT, **body}).request.output_tokens == output_tokens


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("", 1),
        ("x" * 398, 101),
        ([1, 2, 3], 3),
        ([[1, 2], [3]], 3),
        (["text", "more"], len('["text", "more"]') // 4 + 1),
    ],
)
def test_prompt_tokens_are_counted_for_ids_and_estimated_for_text(prompt: Any, tokens: int) -> None:
    assert (
        parsed({**COMPLETION, "prompt": prompt}, api_table.COMPLETIONS).request.prompt_tokens
        == tokens
    )


def test_the_prompt_includes_what_is_rendered_before_the_conversation() -> None:
    call = parsed(
        {"messages": [1], "tools": [2], "model": "demo", "chat_template": "t", "documents": [3]}
    )
    assert [bytes(part) for part in call.prompt] == [b'"t"', b"[2]", b"[3]", b"[1]"]


@pytest.mark.parametrize(
    ("value", "stream"), [("true", True), (" true ", True), ("false", False), ("null", False)]
)
def test_a_request_streams_only_if_stream_is_true(value: str, stream: bool) -> None:
    assert (
        parsed(json.dumps(CHAT)[:-1].encode() + f',"stream":{value}}}'.encode()).request.stream
        is stream
    )


def test_a_request_that_exceeds_the_context_is_rejected_with_both_numbers() -> None:
    parsed(
        {**COMPLETION, "prompt": [1] * 60, "max_tokens": 4},
        api_table.COMPLETIONS,
        context_tokens=64,
    )
    error = refusal(
        {**COMPLETION, "prompt": [1] * 60, "max_tokens": 5},
        api_table.COMPLETIONS,
        context_tokens=64,
    )
    assert error.failure is Failure.CONTEXT_TOO_LONG
    assert "64 tokens" in error.message
    assert "65 (60 in the prompt, 5 to be generated)" in error.message


def test_each_of_several_prompts_must_fit_the_context() -> None:
    fit, too_long = [[1] * 60, [2] * 59], [[1] * 3, [2] * 61, [3] * 60]
    parsed({**COMPLETION, "prompt": fit, "max_tokens": 4}, api_table.COMPLETIONS, context_tokens=64)
    error = refusal(
        {**COMPLETION, "prompt": too_long, "max_tokens": 4},
        api_table.COMPLETIONS,
        context_tokens=64,
    )
    assert "65 (61 in the prompt" in error.message


def test_text_is_never_rejected_for_its_length() -> None:
    assert parsed({**COMPLETION, "prompt": "x" * 10_000}, api_table.COMPLETIONS, context_tokens=64)


def test_an_unknown_model_is_refused_with_a_similar_name() -> None:
    error = refusal({**CHAT, "model": "demp"})
    assert (error.failure, error.param) == (Failure.MODEL_NOT_FOUND, "model")
    assert "Did you mean 'demo'?" in error.message


@pytest.mark.parametrize("size", [0, SMALL_BODY_BYTES])
@pytest.mark.parametrize("bad", [b'"us\x80er":1', b'"us\\u0065\x80":1', b'"user":"\x80"'])
def test_invalid_utf_8_in_names_and_values_is_refused_with_its_place(bad: bytes, size: int) -> None:
    body = b"{" + bad + b"," + json.dumps({**CHAT, "x": " " * size}).encode()[1:]
    refused = refusal(body)
    assert refused.message == (
        f"The body of the request is not valid UTF-8 (byte {body.index(0x80)})."
    )


@pytest.mark.parametrize("model", [1, ["demo"], {"demo": 1}, True, 1e300])
def test_the_model_must_be_a_string(model: Any) -> None:
    assert refusal({**CHAT, "model": model}).param == "model"


@pytest.mark.parametrize(
    ("api", "missing"), [(api_table.CHAT, "messages"), (api_table.COMPLETIONS, "prompt")]
)
def test_a_missing_prompt_is_named(api: api_table.Api, missing: str) -> None:
    assert refusal({"model": "demo"}, api).param == missing


@pytest.mark.parametrize(
    "value", ["[" + "[]," * 1000 + "[]]", "{" + ",".join(f'"{n}":1' for n in range(1000)) + "}"]
)
def test_a_list_in_place_of_a_scalar_is_not_decoded(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Decoding a million objects would block the event loop.
    read: list[int] = []
    decode = json_members._decode_any

    def counted(raw: bytes) -> object:
        read.append(len(raw))
        return decode(raw)

    monkeypatch.setattr(json_members, "_decode_any", counted)
    chat = '{"messages":[{"role":"user","content":"hi"}],%s}'
    assert (
        refusal((chat % f'"model":"demo","n":{value}').encode()).message
        == "'n' must be an integer."
    )
    assert refusal((chat % f'"model":{value}').encode()).message == "'model' must be a string."
    assert parsed((chat % f'"model":"demo","priority":{value}').encode()).request.priority == 0
    assert (
        parsed((chat % f'"model":"demo","prompt_cache_key":{value}').encode()).request.session == ""
    )
    assert max(read) < 100


def test_extra_arguments_are_limited_before_they_are_decoded() -> None:
    many = b",".join(b'"%d":%d' % (number, 10**9) for number in range(40_000))
    assert (
        "'vllm_xargs' has too many members; at most 256"
        in refusal(
            b'{"model":"demo","messages":[{"role":"user","content":"hi"}],"vllm_xargs":{%b}}' % many
        ).message
    )


def test_a_released_call_holds_no_bytes() -> None:
    call = parsed(CHAT)
    call.release()
    assert (call.body, call.prompt) == (b"", ())


def test_a_response_without_a_bound_is_expected_to_be_as_long_as_earlier_ones() -> None:
    lengths = OutputLengths()
    caller = CallContext("req_1", "acme", NO_PREFERENCES, 0.0, lengths)

    def expected(**more: Any) -> int:
        return parse_call(
            json.dumps(CHAT | more).encode(), api_table.CHAT, {"demo": Model()}, caller
        ).request.output_tokens

    assert expected() == DEFAULT_OUTPUT_TOKENS
    for _ in range(20):
        lengths.record("demo", "acme", STANDARD.name, 700)
    assert (expected(), expected(n=3), expected(max_tokens=40)) == (700, 2100, 40)
    for _ in range(2000):
        lengths.record("demo", "acme", STANDARD.name, 10**6)
    assert expected() == MAX_EXPECTED_TOKENS


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("run", "stop", "walk")
]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_become_the_tools_and_their_mode_the_choice(mode: str) -> None:
    call = parsed({**CHAT, "tools": TOOLS, "tool_choice": allowed(mode, "walk", "run", "other")})
    sent = json.loads(call.body)
    assert (sent["tools"], sent["tool_choice"]) == ([TOOLS[0], TOOLS[2]], mode)
    assert sent["messages"] == CHAT["messages"]
    assert json.loads(bytes(call.prompt[0])) == sent["tools"]


def test_allowed_tools_of_the_responses_api_are_flat() -> None:
    tools = [
        {"type": "function", "name": "run"},
        {"type": "custom", "name": "run"},
        {"type": "mcp", "server_label": "a"},
        {"type": "mcp", "server_label": "b"},
    ]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [tools[1], tools[3]]}
    body = {"model": "demo", "input": "x", "tools": tools, "tool_choice": choice}
    sent = json.loads(parsed(body, api_table.RESPONSES).body)
    assert (sent["tools"], sent["tool_choice"]) == ([tools[1], tools[3]], "auto")


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"tool_choice": allowed("auto", "run")}, "tools"),
        ({"tools": 1, "tool_choice": allowed("auto", "run")}, "tools"),
        ({"tools": TOOLS, "tool_choice": allowed("auto", "other")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("none", "run")}, "tool_choice"),
        ({"tools": [*TOOLS, 1], "tool_choice": allowed("auto", "run")}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": 1}},
            "tool_choice",
        ),
    ],
)
def test_allowed_tools_that_cannot_be_read_are_refused_by_name(
    members: dict[str, Any], param: str
) -> None:
    error = refusal(CHAT | members)
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    "choice",
    [
        "auto",
        None,
        {"type": "function", "function": {"name": "run"}},
        {"type": "function", "function": {"name": "allowed_tools"}},
    ],
)
def test_another_choice_of_tools_goes_to_the_engine_as_it_came(choice: object) -> None:
    raw = json.dumps({**CHAT, "tools": TOOLS, "tool_choice": choice}, indent=1).encode()
    assert parsed(raw).body == raw


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" * 5000])
def test_a_choice_of_tools_with_unreadable_numbers_goes_to_the_engine(number: str) -> None:
    choice = b'{"type": "allowed_tools", "x": %b}' % number.encode()
    raw = json.dumps({**CHAT, "tool_choice": 0}).encode().replace(b": 0}", b": " + choice + b"}")
    assert choice in parsed(raw).body


def test_permitting_many_of_many_tools_takes_linear_time() -> None:
    def request(size: int) -> bytes:
        names = [f"f{number}" for number in range(size)]
        tools = [{"type": "function", "function": {"name": f"g{name}"}} for name in names * 4]
        choice = allowed("auto", "run", *names)
        return json.dumps({**CHAT, "tools": [*tools, TOOLS[0]], "tool_choice": choice}).encode()

    small = MAX_TOOLS // 4 // FACTOR - 1
    requests = {size: request(size) for size in (small, FACTOR * small)}
    for raw in requests.values():
        assert json.loads(parsed(raw).body)["tools"] == TOOLS[:1]
    assert growth(lambda size: parsed(requests[size]).body, small) < MOST_GROWTH


@pytest.mark.parametrize("count", [MAX_TOOLS, MAX_TOOLS + 1, 300_000])
def test_more_tools_than_are_decoded_are_refused(count: int) -> None:
    body = {**CHAT, "tools": [*([{}] * (count - 1)), TOOLS[0]]}
    body["tool_choice"] = allowed("auto", "run")
    if count == MAX_TOOLS:
        assert json.loads(parsed(body).body)["tools"] == TOOLS[:1]
    else:
        error = refusal(body)
        assert (error.status, error.param) == (400, "tools")


def embeds(tokens: int) -> str:
    return "A" * (tokens * 10_924)


@pytest.mark.parametrize("more", [{}, {"prompt": None}])
@pytest.mark.parametrize(("value", "prompts"), [(embeds(100), 1), ([embeds(50), embeds(50)], 2)])
def test_embeddings_may_stand_instead_of_a_prompt(
    more: dict[str, Any], value: object, prompts: int
) -> None:
    body = {"model": "demo", "prompt_embeds": value, "max_tokens": 5, **more}
    call = parsed(body, api_table.COMPLETIONS)
    assert json.loads(call.body) == body
    assert (call.request.prompts, call.request.output_tokens) == (prompts, 5 * prompts)
    assert 80 <= call.request.prompt_tokens <= 120
    assert call.media_size.parts == 1


def test_embeddings_that_are_null_count_as_absent() -> None:
    without = parsed(COMPLETION, api_table.COMPLETIONS)
    body = {**COMPLETION, "prompt_embeds": None}
    call = parsed(body, api_table.COMPLETIONS)
    assert (call.media_size, call.prompt) == (without.media_size, without.prompt)
    assert call.request.prompt_tokens == without.request.prompt_tokens
    assert json.loads(call.body) == body
    nothing = {"model": "demo", "prompt_embeds": None}
    assert refusal(nothing, api_table.COMPLETIONS).param == "prompt"


def test_equal_embeddings_have_equal_fingerprints() -> None:
    def prompt(value: str) -> tuple[bytes, ...]:
        call = parsed({"model": "demo", "prompt_embeds": value}, api_table.COMPLETIONS)
        return tuple(map(bytes, call.prompt))

    assert prompt(embeds(9)) == prompt(embeds(9)) != prompt("B" + embeds(9)[1:])
