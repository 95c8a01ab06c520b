"""Tests of the official openai SDK with a gateway in front of two mock engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from mockgpu.mock_tokenizer import expected_text
from tests.e2e.processes import gateway_process, mock_fleet
from tests.e2e.recording_engine import TEXT, RecordingEngine, recording_engine

MODEL, ALIAS, SHORT = "demo-8b", "gpt-demo", "demo-8b-short"
MESSAGES: Any = [{"role": "user", "content": "How deep is the reservoir behind the dam?"}]
CONFIG = """
models:
  - {{name: demo-8b, aliases: [gpt-demo], pool: main}}
  - {{name: demo-8b-short, served_model: demo-8b, pool: main, context_tokens: 64}}
pools:
  main:
    endpoints:
      - {{url: '{0}'}}
      - {{url: '{1}'}}
"""
TENANTS = """
models: [{{name: demo, pool: main}}]
pools: {{main: {{endpoints: [{{url: '{0}'}}]}}}}
tenants: [{{name: acme, key: '${{ACME_KEY}}'}}]
"""
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"words": {"type": "string"}}},
    },
}


class Setup(NamedTuple):
    sdk: OpenAI
    engine: OpenAI
    url: str


def client(url: str, key: str = "none", retries: int = 0, **options: Any) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=retries, timeout=20, **options)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    with (
        mock_fleet() as engines,
        gateway_process(tmp_path_factory.mktemp("sdk"), CONFIG.format(*engines)) as running,
    ):
        with client(running.url) as sdk, client(engines[0]) as engine:
            yield Setup(sdk, engine, running.url)
        assert running.is_alive
        assert "Traceback" not in running.stderr_text, running.stderr_text


@pytest.fixture(scope="module")
def engine() -> Iterator[RecordingEngine]:
    with recording_engine() as running:
        yield running


@pytest.fixture(scope="module")
def tenants_url(tmp_path_factory: pytest.TempPathFactory, engine: RecordingEngine) -> Iterator[str]:
    # Run a gateway with one tenant in front of the recording engine; yield its URL.
    config = TENANTS.format(engine.url)
    with gateway_process(
        tmp_path_factory.mktemp("tenants"), config, ACME_KEY="sk-acme-secret"
    ) as running:
        yield running.url
        assert "sk-acme-secret" not in running.stderr_text


def words(n_tokens: int, choice: int = 0, **body: Any) -> str:
    # Return the text that a mock engine must generate for the chat of these tests.
    return expected_text({"messages": MESSAGES, **body}, n_tokens, choice)


# Chat


def test_a_chat_answer_is_the_text_the_engine_generates_for_this_prompt(setup: Setup) -> None:
    answer = setup.sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=12
    )
    assert answer.choices[0].message.content == words(12)
    assert answer.choices[0].finish_reason == "length"
    assert answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_streamed_chat_has_the_same_text_token_by_token_and_then_its_usage(setup: Setup) -> None:
    chunks = list(
        setup.sdk.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    contents = [
        chunk.choices[0].delta.content
        for chunk in chunks
        if chunk.choices and chunk.choices[0].delta.content
    ]
    assert "".join(contents) == words(12)
    assert len(contents) == 12
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert not chunks[-1].choices
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert {chunk.model for chunk in chunks} == {MODEL}


def test_a_stream_without_include_usage_has_no_usage(setup: Setup) -> None:
    stream = setup.sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=3, stream=True
    )
    assert all(chunk.usage is None for chunk in stream)


def test_two_choices_differ_streamed_or_not(setup: Setup) -> None:
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 8,
        "n": 2,
        "seed": 7,
    }
    expected = [words(8, choice, seed=7) for choice in (0, 1)]
    whole = setup.sdk.chat.completions.create(**request)
    assert [
        choice.message.content for choice in sorted(whole.choices, key=lambda entry: entry.index)
    ] == expected
    texts = ["", ""]
    for chunk in setup.sdk.chat.completions.create(**request, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == expected
    assert expected[0] != expected[1]


def test_a_seed_changes_the_answer_and_repeats_it(setup: Setup) -> None:
    def said(seed: int) -> str | None:
        answer = setup.sdk.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=8, seed=seed
        )
        return answer.choices[0].message.content

    assert said(1) == said(1) == words(8, seed=1)
    assert said(1) != said(2)


def test_a_stop_string_ends_the_response_before_it(setup: Setup) -> None:
    stop = words(12).split()[5]
    answer = setup.sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=12, stop=[stop]
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == words(12)[: words(12).index(stop)]


def test_a_forced_tool_is_called_with_json_arguments(setup: Setup) -> None:
    forced: Any = {"type": "function", "function": {"name": "weather"}}
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 6,
        "tools": [WEATHER],
    }
    whole = setup.sdk.chat.completions.create(**request, tool_choice=forced)
    calls = whole.choices[0].message.tool_calls
    assert calls
    function = calls[0].function
    assert function.name == "weather"
    with setup.sdk.chat.completions.stream(**request, tool_choice=forced) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed
    assert json.loads(streamed[0].function.arguments) == json.loads(function.arguments)
    assert json.loads(function.arguments)["words"]


def test_logprobs_come_with_every_token(setup: Setup) -> None:
    answer = setup.sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=1
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(token.token for token in logprobs.content) == words(5)
    assert all(token.logprob <= 0 and token.top_logprobs for token in logprobs.content)


# Completions


@pytest.mark.parametrize(
    "prompt", ["The water falls", [101, 102, 103, 104]], ids=["text", "token ids"]
)
def test_a_completion_has_the_same_text_streamed_or_not(setup: Setup, prompt: Any) -> None:
    expected = expected_text({"prompt": prompt}, 9)
    whole = setup.sdk.completions.create(model=MODEL, prompt=prompt, max_tokens=9, logprobs=1)
    assert whole.choices[0].text == expected
    assert whole.choices[0].logprobs is not None
    stream = setup.sdk.completions.create(model=MODEL, prompt=prompt, max_tokens=9, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == expected


def test_two_prompts_and_two_choices_make_four_completions(setup: Setup) -> None:
    prompts = ["The water falls", "The turbine turns"]
    answer = setup.sdk.completions.create(model=MODEL, prompt=prompts, max_tokens=4, n=2, seed=3)
    expected = [
        expected_text({"prompt": prompt, "seed": 3}, 4, choice)
        for prompt in prompts
        for choice in (0, 1)
    ]
    assert [choice.text for choice in answer.choices] == expected


# Responses pass unchanged


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_through_the_gateway_is_the_one_of_the_engine(
    setup: Setup, stream: bool
) -> None:
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 10,
        "n": 2,
        "seed": 5,
        "stream": stream,
    }

    def answer(sdk: OpenAI) -> Any:
        result = sdk.chat.completions.create(**request)
        parts = [part.to_dict() for part in result] if stream else [result.to_dict()]
        for part in parts:
            part.pop("id")
            part.pop("created")
            (part.get("usage") or {}).pop("prompt_tokens_details", None)  # the cached tokens differ
        return sorted(json.dumps(part, sort_keys=True) for part in parts)

    assert answer(setup.sdk) == answer(setup.engine)


@pytest.mark.parametrize("name", [MODEL, ALIAS, SHORT])
def test_the_model_in_a_response_is_the_requested_name(setup: Setup, name: str) -> None:
    whole = setup.sdk.chat.completions.create(model=name, messages=MESSAGES, max_tokens=4)
    assert (whole.model, whole.choices[0].message.content) == (name, words(4))
    chunks = list(
        setup.sdk.chat.completions.create(model=name, messages=MESSAGES, max_tokens=4, stream=True)
    )
    assert {chunk.model for chunk in chunks} == {name}
    assert "".join(
        chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
    ) == words(4)


def test_models_are_listed_and_found_by_every_name(setup: Setup) -> None:
    assert [model.id for model in setup.sdk.models.list()] == sorted([MODEL, ALIAS, SHORT])
    assert setup.sdk.models.retrieve(ALIAS).id == ALIAS
    with pytest.raises(openai.NotFoundError) as refused:
        setup.sdk.models.retrieve("gpt-17")
    assert refused.value.code == "model_not_found"


def test_every_response_has_its_request_id(setup: Setup) -> None:
    ids = set()
    for stream in (False, True):
        raw = setup.sdk.chat.completions.with_raw_response.create(
            model=MODEL, messages=MESSAGES, max_tokens=2, stream=stream
        )
        ids.add(raw.headers["x-request-id"])
        raw.http_response.read()
    ids.add(setup.sdk.models.with_raw_response.list().headers["x-request-id"])
    assert len(ids) == 3
    assert all(len(request_id) == len("req_") + 32 for request_id in ids)


async def test_many_streams_at_once_are_never_mixed_up(setup: Setup) -> None:
    async def one(sdk: AsyncOpenAI, number: int) -> tuple[str, str]:
        messages: Any = [
            {"role": "user", "content": f"Tell me about turbine number {number}, at some length."}
        ]
        text = ""
        stream = await sdk.chat.completions.create(
            model=ALIAS, messages=messages, max_tokens=20, stream=True
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        return text, expected_text({"messages": messages}, 20)

    async with AsyncOpenAI(base_url=f"{setup.url}/v1", api_key="none", timeout=20) as sdk:
        answers = await asyncio.gather(*(one(sdk, number) for number in range(40)))
    assert all(text == expected for text, expected in answers)


# Refusals


def test_an_unknown_model_is_not_found_and_a_near_one_is_named(setup: Setup) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        setup.sdk.chat.completions.create(model="demo-8c", messages=MESSAGES)
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    assert MODEL in refused.value.message
    assert refused.value.request_id


def test_a_prompt_too_long_is_a_bad_request_whether_the_gateway_or_the_engine_refuses_it(
    setup: Setup,
) -> None:
    with pytest.raises(openai.BadRequestError) as at_the_door:
        setup.sdk.chat.completions.create(model=SHORT, messages=MESSAGES, max_tokens=65)
    with pytest.raises(openai.BadRequestError) as by_ids:
        setup.sdk.completions.create(model=SHORT, prompt=list(range(60)), max_tokens=5)
    long: Any = [{"role": "user", "content": "word " * 300_000}]
    with pytest.raises(openai.BadRequestError) as at_the_engine:
        setup.sdk.chat.completions.create(model=MODEL, messages=long)
    for refused in (at_the_door, by_ids, at_the_engine):
        assert refused.value.code == "context_length_exceeded"
        assert refused.value.type == "invalid_request_error"


def test_an_engine_error_keeps_its_message_in_the_shape_of_openai(setup: Setup) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        setup.sdk.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
    assert refused.value.type == "invalid_request_error"
    assert "temperature" in refused.value.message


@pytest.mark.parametrize(
    "asked",
    [{"model": "nope"}, {"n": 1000}, {"temperature": 9}],
    ids=["404", "400", "400 by the engine"],
)
def test_the_sdk_does_not_retry_permanent_errors(setup: Setup, asked: dict[str, Any]) -> None:
    sent: list[object] = []
    http = openai.DefaultHttpxClient(event_hooks={"request": [sent.append]})
    with (
        client(setup.url, retries=5, http_client=http) as sdk,
        pytest.raises(openai.APIStatusError) as refused,
    ):
        sdk.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **asked})
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert len(sent) == 1


def test_the_sdk_does_not_retry_a_409_of_an_engine(
    engine: RecordingEngine, tenants_url: str
) -> None:
    before = len(engine.requests)
    with (
        client(tenants_url, "sk-acme-secret", retries=5) as sdk,
        pytest.raises(openai.ConflictError),
    ):
        sdk.chat.completions.create(model="demo", messages=MESSAGES, user="status:409")
    assert len(engine.requests) == before + 1


def test_a_stream_that_breaks_raises_in_the_sdk_after_its_last_token(tenants_url: str) -> None:
    contents: list[str | None] = []
    with client(tenants_url, "sk-acme-secret") as sdk:
        stream = sdk.chat.completions.create(
            model="demo", messages=MESSAGES, stream=True, user="break"
        )
        with pytest.raises(openai.APIError) as broken:
            contents.extend(chunk.choices[0].delta.content for chunk in stream)
    assert contents == TEXT.split()
    assert broken.value.code == "stream_interrupted"


def test_an_engine_that_closes_without_an_answer_is_a_502_that_may_be_retried(
    tenants_url: str,
) -> None:
    with client(tenants_url, "sk-acme-secret") as sdk:
        with pytest.raises(openai.InternalServerError) as refused:
            sdk.chat.completions.create(model="demo", messages=MESSAGES, user="break")
        assert (refused.value.status_code, refused.value.code) == (502, "upstream_failed")
        assert "x-should-retry" not in refused.value.response.headers
    with client(
        tenants_url, "sk-acme-secret", retries=5
    ) as sdk:  # 503 until a probe of the engine succeeds
        assert (
            sdk.chat.completions.create(model="demo", messages=MESSAGES).choices[0].message.content
            == TEXT
        )


# Keys


@pytest.mark.parametrize("key", ["wrong", "sk-acme-secre", "sk-acme-secret2", "SK-ACME-SECRET"])
def test_a_wrong_key_is_an_authentication_error_and_reaches_no_engine(
    engine: RecordingEngine, tenants_url: str, key: str
) -> None:
    before = len(engine.requests)
    with client(tenants_url, key) as sdk:
        with pytest.raises(openai.AuthenticationError) as refused:
            sdk.chat.completions.create(model="demo", messages=MESSAGES)
        with pytest.raises(openai.AuthenticationError):
            sdk.models.list()
    assert refused.value.code == "invalid_api_key"
    assert key not in refused.value.message
    assert len(engine.requests) == before


@pytest.mark.parametrize("stream", [False, True])
def test_a_clients_key_is_accepted_by_the_gateway_and_never_sent_to_the_engine(
    engine: RecordingEngine, tenants_url: str, stream: bool
) -> None:
    with client(tenants_url, "sk-acme-secret") as sdk:
        answer: Any = sdk.chat.completions.create(
            model="demo", messages=MESSAGES, stream=stream, user="me"
        )
        for _ in answer if stream else ():
            pass
    request = engine.requests[-1]
    assert b"sk-acme" not in request.head + request.body
    assert b"authorization" not in request.head.lower()
    assert b"openai" not in request.head.lower()
