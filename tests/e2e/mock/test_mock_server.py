"""Tests of a mock engine on real sockets: vLLM's API, errors, metrics and keep-alive."""

from __future__ import annotations

import asyncio
import json
from math import inf
from typing import Any

import pytest

from mockgpu.mock_tokenizer import expected_text, token_bytes
from mockgpu.tp_group import GroupSpec
from tests.duration_limits import PATIENCE_S, at_most, pace
from tests.e2e.mock_group import CHAT, SPEC, MockGroup, mock_group, slow_group

pytestmark = pytest.mark.filterwarnings(
    "ignore:Overriding the .event_loop_policy. fixture is deprecated"
)


# The OpenAI SDK


async def test_the_sdk_gets_the_expected_text(group: MockGroup) -> None:
    answer = await group.sdk.chat.completions.create(**CHAT, max_tokens=12)
    assert answer.choices[0].message.content == expected_text(CHAT, 12)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


async def test_a_stream_has_the_text_of_the_unstreamed_response(group: MockGroup) -> None:
    whole = await group.sdk.chat.completions.create(**CHAT)
    stream = await group.sdk.chat.completions.create(
        **CHAT, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        == whole.choices[0].message.content
    )
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_completions_accept_text_token_ids_and_lists_of_either(group: MockGroup) -> None:
    for prompt in ("once upon", [1, 2, 3], ["a", "b"], [[1, 2], [3]]):
        body: Any = prompt
        answer = await group.sdk.completions.create(model="demo-8b", prompt=body, max_tokens=4)
        single = prompt if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt[-1]
        assert answer.choices[-1].text == expected_text({"prompt": single}, 4)


async def test_n_choices_differ_and_share_their_prompt(group: MockGroup) -> None:
    answer = await group.sdk.chat.completions.create(**CHAT, n=3, max_tokens=8)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [c.message.content for c in answer.choices] == [
        expected_text(CHAT, 8, i) for i in range(3)
    ]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24


async def test_each_streamed_choice_begins_with_a_role_and_ends_once(group: MockGroup) -> None:
    events = [json.loads(e) for e in (await group.stream(CHAT | {"n": 2, "max_tokens": 5}))[:-1]]
    for index in (0, 1):
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in own] == [None] * 5 + ["length"]


async def test_a_seed_changes_the_text(group: MockGroup) -> None:
    first, second, again = [
        await group.sdk.chat.completions.create(**CHAT, seed=s, max_tokens=8) for s in (1, 2, 1)
    ]
    assert first.choices[0].message.content == again.choices[0].message.content
    assert first.choices[0].message.content != second.choices[0].message.content


async def test_a_forced_tool_is_called_with_json_arguments_streamed_or_not(
    group: MockGroup,
) -> None:
    tools: Any = [{"type": "function", "function": {"name": "measure", "parameters": {}}}]
    choice: Any = {"type": "function", "function": {"name": "measure"}}
    answer = await group.sdk.chat.completions.create(
        **CHAT, tools=tools, tool_choice=choice, max_tokens=6
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, answer.choices[0].finish_reason) == ("measure", "tool_calls")
    stream = await group.sdk.chat.completions.create(
        **CHAT, tools=tools, tool_choice=choice, max_tokens=6, stream=True
    )
    deltas = [d for c in [c async for c in stream] for d in c.choices[0].delta.tool_calls or ()]
    assert (
        "".join(d.function.arguments or "" for d in deltas if d.function) == call.function.arguments
    )
    assert json.loads(call.function.arguments).keys() == {"words"}


async def test_a_user_can_ask_for_a_tool_call_with_arguments(group: MockGroup) -> None:
    arguments = '{"depth": 3, "unit": "m"}'
    asking = {"role": "user", "content": f"Please call the tool measure with {arguments}."}
    tools = [{"type": "function", "function": {"name": "measure"}}]
    body = CHAT | {"messages": [asking], "tools": tools, "stream": True}
    events = [json.loads(e)["choices"][0] for e in (await group.stream(body))[:-1]]
    calls = [call for e in events for call in e["delta"].get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "measure"
    assert "".join(call["function"]["arguments"] for call in calls) == arguments
    assert events[-1]["finish_reason"] == "tool_calls"


async def test_structured_output_parses_whatever_its_length(group: MockGroup) -> None:
    schema = {"type": "object", "properties": {"depth": {"type": "string"}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "depth", "schema": schema}}
    answer = await group.sdk.chat.completions.create(**CHAT, response_format=form, max_tokens=6)
    text = answer.choices[0].message.content or ""
    assert json.loads(text) == {"depth": expected_text(CHAT, 6)}
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 6)  # type: ignore[union-attr]
    stream = await group.sdk.chat.completions.create(
        **CHAT, response_format=form, max_tokens=6, stream=True
    )
    assert "".join([c.choices[0].delta.content or "" async for c in stream]) == text


async def test_logprobs_are_returned_per_token(group: MockGroup) -> None:
    chat = await group.sdk.chat.completions.create(
        **CHAT, logprobs=True, top_logprobs=1, max_tokens=5
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert "".join(t.token for t in logprobs.content or ()) == chat.choices[0].message.content
    plain = await group.sdk.completions.create(
        model="demo-8b", prompt="x", logprobs=0, max_tokens=5
    )
    assert plain.choices[0].logprobs is not None
    assert len(plain.choices[0].logprobs.tokens or ()) == 5


async def test_a_stop_string_ends_the_response_before_it(group: MockGroup) -> None:
    words = expected_text(CHAT, 20)
    stop = words[38:43]
    for stream in (False, True):
        body = CHAT | {"max_tokens": 20, "stop": [stop]}
        if stream:
            events = [json.loads(e)["choices"][0] for e in (await group.stream(body))[:-1]]
            text, last = "".join(e["delta"]["content"] for e in events), events[-1]
        else:
            _, answer = await group.answer("/v1/chat/completions", body)
            text, last = answer["choices"][0]["message"]["content"], answer["choices"][0]
        assert text == words[: words.index(stop)]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)


# Server-sent events


async def test_the_stream_is_framed_as_vllm_frames_it(group: MockGroup) -> None:
    events = await group.stream(CHAT | {"max_tokens": 3, "stream_options": {"include_usage": True}})
    chunks = [json.loads(event) for event in events[:-1]]
    assert events[-1] == "[DONE]"
    assert [c["choices"][0]["delta"] for c in chunks[:1]] == [{"role": "assistant", "content": ""}]
    assert [c["usage"] for c in chunks[:-1]] == [None] * 4
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert {c["id"] for c in chunks} == {chunks[0]["id"]}
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"


async def test_continuous_usage_counts_completion_tokens(group: MockGroup) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await group.stream(CHAT | {"max_tokens": 3, "stream_options": options})
    assert [json.loads(e)["usage"]["completion_tokens"] for e in events[:-1]] == [0, 1, 2, 3, 3]


@pytest.mark.parametrize("chat", [True, False])
async def test_a_stream_reports_its_token_ids_and_once_those_of_the_prompt(
    group: MockGroup, chat: bool
) -> None:
    body = {"max_tokens": 5, "return_token_ids": True} | (
        CHAT if chat else {"prompt": "Once upon a time"}
    )
    events = await group.stream(body, "/v1/chat/completions" if chat else "/v1/completions")
    chunks = [json.loads(event) for event in events[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks]
    prompt_ids = [
        entry["prompt_token_ids"]
        for entry in (chunks if chat else choices)
        if "prompt_token_ids" in entry
    ]
    token_ids = [i for choice in choices for i in choice["token_ids"] or ()]
    assert len(prompt_ids) == 1
    text = "".join(choice["delta"]["content"] if chat else choice["text"] for choice in choices)
    assert (len(token_ids), token_bytes(token_ids).decode()) == (5, text)
    rest = await group.stream(
        {"prompt": prompt_ids[0] + token_ids[:2], "max_tokens": 3}, "/v1/completions"
    )
    assert text.endswith("".join(json.loads(event)["choices"][0]["text"] for event in rest[:-1]))


async def test_max_tokens_null_removes_the_default_limit_of_a_completion(group: MockGroup) -> None:
    _, bound = await group.answer("/v1/completions", {"prompt": "Once", "model": "demo-8b"})
    _, free = await group.answer(
        "/v1/completions", {"prompt": "Once", "model": "demo-8b", "max_tokens": None}
    )
    assert (bound["usage"]["completion_tokens"], bound["choices"][0]["finish_reason"]) == (
        16,
        "length",
    )
    assert free["choices"][0]["finish_reason"] == "stop"
    shorter, longer = sorted((answer["choices"][0]["text"] for answer in (bound, free)), key=len)
    assert longer.startswith(shorter)


async def test_headers_come_before_the_first_token() -> None:
    async with mock_group() as group:
        await group.fault("lost-rank:hang")
        async with (
            asyncio.timeout(PATIENCE_S),
            group.post("/v1/chat/completions", CHAT | {"stream": True}) as response,
        ):
            assert response.status == 200
            assert response.headers["Content-Type"].startswith("text/event-stream")


async def test_the_response_id_contains_the_request_id_header(group: MockGroup) -> None:
    _, chat = await group.answer(
        "/v1/chat/completions", CHAT | {"max_tokens": 1}, headers={"X-Request-Id": "abc"}
    )
    _, plain = await group.answer(
        "/v1/completions", {"prompt": "x"}, headers={"X-Request-Id": "abc"}
    )
    assert (chat["id"], plain["id"]) == ("chatcmpl-abc", "cmpl-abc")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_id_beyond_ascii_is_read_as_latin_1(group: MockGroup, stream: bool) -> None:
    body = json.dumps(CHAT | {"max_tokens": 2, "stream": stream}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", group.member.listener.port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nX-Request-Id: \xff\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert '"id":"chatcmpl-ÿ"'.encode() in answer


# Errors


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"model": "other"}, 404, "does not exist"),
        ({"messages": []}, 400, "messages"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 10_000_000}, 400, "maximum context length"),
        ({"min_tokens": 9, "max_tokens": 3}, 400, "min_tokens"),
        ({"temperature": 3}, 400, "temperature"),
        ({"stream_options": {"include_usage": True}}, 400, "Stream options"),
        ({"tools": []}, 400, "tools"),
        ({"n": 0}, 400, "n"),
        ({"priority": 1}, 400, "priority"),
        ({"stop": [""]}, 400, "stop"),
        ({"cache_salt": "a/b"}, 400, "cache_salt"),
        ({"tool_choice": "required"}, 400, "tools"),
        ({"messages": "hello"}, 400, "messages"),
    ],
)
async def test_a_bad_request_is_refused_in_vllms_shape(
    group: MockGroup, change: dict[str, Any], status: int, message: str
) -> None:
    actual_status, answer = await group.answer("/v1/chat/completions", CHAT | change)
    assert (actual_status, answer["error"]["code"]) == (status, status)
    assert message in answer["error"]["message"]
    assert answer["error"].keys() == {"message", "type", "param", "code"}


async def test_bad_json_a_wrong_type_and_unknown_routes_are_refused(group: MockGroup) -> None:
    url, headers = group.member.url + "/v1/chat/completions", {"Content-Type": "application/json"}
    for body, sent, status in (
        (b"{", headers, 400),
        (b"[" * 200_000, headers, 400),
        (b"{}", {}, 400),
    ):
        async with group.http.post(url, data=body, headers=sent) as response:
            assert response.status == status
            assert (await response.json())["error"]["code"] == status
    assert await group.status("/v1/nothing") == 404
    assert await group.status("/v1/chat/completions") == 405


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/mock/renew", b"{"),
        ("/mock/renew", b'{"name": 5, "ticket": "t"}'),
        ("/mock/fault", b'{"spec": "\xff"}'),
        ("/tokenize", b'{"prompt": "\xff"}'),
        ("/v1/completions", b'{"prompt": "x", "n": 128, "max_tokens": 100000}'),
        ("/v1/completions", b'{"prompt": [-1]}'),
    ],
)
async def test_an_invalid_body_is_answered_400(group: MockGroup, path: str, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    async with group.http.post(group.member.url + path, data=body, headers=headers) as response:
        assert response.status == 400
        assert (await response.json())["error"]["code"] == 400


async def test_a_body_over_32_mib_is_refused(group: MockGroup) -> None:
    url, headers = group.member.url + "/v1/completions", {"Content-Type": "application/json"}
    async with group.http.post(url, data=b" " * (33 << 20), headers=headers) as response:
        assert response.status == 413


@pytest.mark.parametrize("field", ["kv_transfer_params", "bootstrap_room", "disaggregated_params"])
async def test_handoff_fields_sent_to_an_unsplit_group_are_answered_500_and_counted(
    group: MockGroup, field: str
) -> None:
    status, answer = await group.answer(
        "/v1/chat/completions", CHAT | {field: {"do_remote_prefill": True}}
    )
    message = f"unexpected handoff in request: {field} must not be set: this request is not split"
    assert (status, answer["error"]["message"]) == (500, message)
    assert await group.metric("mock:malformed_handoff_total") == 1


async def test_a_full_queue_is_answered_503() -> None:
    spec = GroupSpec("demo-8b", SPEC.model, SPEC.gpu, speed=5, max_num_seqs=1, max_queued=1)
    async with mock_group(spec) as group:
        body = CHAT | {"max_tokens": 5000}
        first = asyncio.ensure_future(group.answer("/v1/chat/completions", body))
        await group.until("vllm:num_requests_running", 1)
        second = asyncio.ensure_future(group.answer("/v1/chat/completions", body))
        await group.until("vllm:num_requests_waiting{", 1)
        for stream in (True, False):
            status, answer = await group.answer("/v1/chat/completions", CHAT | {"stream": stream})
            assert (status, answer["error"]["code"]) == (503, 503)
        assert await group.metric("vllm:admission_rejections_total") == 2
        first.cancel()
        second.cancel()


# Other routes and metrics that a router reads


async def test_models_version_load_tokenize_and_health_answer(group: MockGroup) -> None:
    models = await group.sdk.models.list()
    assert [model.id for model in models.data] == ["demo-8b"]
    assert [await group.status(path) for path in ("/health", "/ping", "/load", "/version")] == [
        200
    ] * 4
    _, tokens = await group.answer("/tokenize", {"prompt": "twelve bytes"})
    assert (tokens["count"], len(tokens["tokens"])) == (3, 3)
    _, answer = await group.answer("/v1/completions", {"prompt": tokens["tokens"], "max_tokens": 5})
    assert answer["choices"][0]["text"] == expected_text({"prompt": "twelve bytes"}, 5)


async def test_cached_tokens_are_reported_and_counted(group: MockGroup) -> None:
    body = {"prompt": "water " * 400, "max_tokens": 1}
    _, first = await group.answer("/v1/completions", body)
    _, second = await group.answer("/v1/completions", body)
    prompt, cached = (
        first["usage"]["prompt_tokens"],
        second["usage"]["prompt_tokens_details"]["cached_tokens"],
    )
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert cached == (prompt - 1) // 16 * 16
    assert await group.metric("vllm:prefix_cache_queries_total") == 2 * prompt
    assert await group.metric("vllm:prefix_cache_hits_total") == cached


async def test_reporting_cached_tokens_can_be_turned_off() -> None:
    async with mock_group(
        GroupSpec("demo-8b", SPEC.model, SPEC.gpu, speed=inf, cached_details=False)
    ) as group:
        _, answer = await group.answer("/v1/completions", {"prompt": "x"})
        assert answer["usage"]["prompt_tokens_details"] is None


async def test_the_next_turn_finds_the_previous_response_in_the_cache(group: MockGroup) -> None:
    first = await group.sdk.chat.completions.create(**CHAT, max_tokens=200)
    turn = [*CHAT["messages"], {"role": "assistant", "content": first.choices[0].message.content}]
    _, second = await group.answer(
        "/v1/chat/completions", CHAT | {"messages": [*turn, {"role": "user", "content": "?"}]}
    )
    assert first.usage is not None
    assert (
        second["usage"]["prompt_tokens_details"]["cached_tokens"] > first.usage.prompt_tokens + 170
    )


async def test_metrics_have_the_names_labels_and_buckets_of_vllm(group: MockGroup) -> None:
    await group.sdk.chat.completions.create(**CHAT, max_tokens=7)
    labels = '{model_name="demo-8b",engine="0"'
    assert await group.metric(f"vllm:generation_tokens_total{labels}}}") == 7
    assert await group.metric(f'vllm:request_success_total{labels},finished_reason="length"}}') == 1
    assert await group.metric(f'vllm:time_to_first_token_seconds_bucket{labels},le="2560.0"}}') == 1
    assert await group.metric(f'vllm:inter_token_latency_seconds_bucket{labels},le="+Inf"}}') == 6
    assert (
        await group.metric(f'vllm:cache_config_info{labels},block_size="16",num_gpu_blocks="') == 1
    )
    for idle in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert await group.metric(f"vllm:{idle}{labels}}}") == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_disconnects_frees_its_kv_and_is_counted(stream: bool) -> None:
    async with mock_group(slow_group()) as group:
        request = asyncio.ensure_future(
            group.answer("/v1/chat/completions", CHAT | {"max_tokens": 5000, "stream": stream})
        )
        await group.until("vllm:num_requests_running", 1)
        assert await group.metric("vllm:kv_cache_usage_perc") > 0
        request.cancel()
        await group.until(
            'vllm:request_success_total{model_name="demo-8b",engine="0",finished_reason="abort"}', 1
        )
        assert await group.metric("vllm:kv_cache_usage_perc") == 0
        assert await group.metric("vllm:num_requests_running") == 0


async def test_an_idle_connection_is_closed_after_the_keep_alive() -> None:
    async with mock_group(keep_alive_s=0.05) as group:
        reader, writer = await asyncio.open_connection("127.0.0.1", group.member.listener.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_steps_take_the_time_that_the_roofline_model_predicts() -> None:
    spec = GroupSpec("demo-8b", SPEC.model, SPEC.gpu, speed=2)
    loop = asyncio.get_running_loop()
    async with mock_group(spec) as group:
        started = loop.time()
        # 8B on one H100 at double speed: 6.2 ms per step at batch 1, plus connection and first
        # token.
        async with at_most(0.6 * pace()):
            await group.sdk.chat.completions.create(**CHAT, max_tokens=101)
        assert loop.time() - started > 0.3
