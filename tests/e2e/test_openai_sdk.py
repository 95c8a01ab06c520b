"""The official openai SDK against real processes: a gateway in front of two mock TP groups whose words are known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from mockgpu.text import expected_text
from tests.e2e.processes import gateway, mock_fleet
from tests.e2e.stub import TEXT, Stub, recording_stub

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
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"words": {"type": "string"}}}},
}


class Setting(NamedTuple):
    """The SDK at the gateway, the same at one engine, and the gateway's URL."""

    sdk: OpenAI
    engine: OpenAI
    url: str


def client(url: str, key: str = "none", retries: int = 0, **options: Any) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=retries, timeout=20, **options)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    with mock_fleet() as engines, gateway(tmp_path_factory.mktemp("sdk"), CONFIG.format(*engines)) as running:
        with client(running.url) as sdk, client(engines[0]) as engine:
            yield Setting(sdk, engine, running.url)
        assert running.alive
        assert "Traceback" not in running.said, running.said


@pytest.fixture(scope="module")
def stub() -> Iterator[Stub]:
    with recording_stub() as engine:
        yield engine


@pytest.fixture(scope="module")
def tenants_url(tmp_path_factory: pytest.TempPathFactory, stub: Stub) -> Iterator[str]:
    """A gateway with one tenant before the recording engine."""
    config = TENANTS.format(stub.url)
    with gateway(tmp_path_factory.mktemp("tenants"), config, ACME_KEY="sk-acme-secret") as running:
        yield running.url
        assert "sk-acme-secret" not in running.said


def words(n_tokens: int, choice: int = 0, **body: Any) -> str:
    """What a mock must answer to the chat of these tests."""
    return expected_text({"messages": MESSAGES, **body}, n_tokens, choice)


# Chat


def test_a_chat_answer_is_the_text_the_engine_generates_for_this_prompt(setting: Setting) -> None:
    answer = setting.sdk.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=12)
    assert answer.choices[0].message.content == words(12)
    assert answer.choices[0].finish_reason == "length"
    assert answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_streamed_chat_says_the_same_token_by_token_and_then_its_usage(setting: Setting) -> None:
    chunks = list(
        setting.sdk.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=12, stream=True, stream_options={"include_usage": True}
        )
    )
    told = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(told) == words(12)
    assert len(told) == 12
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert not chunks[-1].choices
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert {chunk.model for chunk in chunks} == {MODEL}


def test_a_stream_without_include_usage_tells_none(setting: Setting) -> None:
    stream = setting.sdk.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3, stream=True)
    assert all(chunk.usage is None for chunk in stream)


def test_two_choices_come_apart_streamed_or_not(setting: Setting) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "n": 2, "seed": 7}
    expected = [words(8, choice, seed=7) for choice in (0, 1)]
    whole = setting.sdk.chat.completions.create(**asked)
    assert [choice.message.content for choice in sorted(whole.choices, key=lambda each: each.index)] == expected
    told = ["", ""]
    for chunk in setting.sdk.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            told[choice.index] += choice.delta.content or ""
    assert told == expected
    assert expected[0] != expected[1]


def test_a_seed_changes_the_answer_and_repeats_it(setting: Setting) -> None:
    def said(seed: int) -> str | None:
        answer = setting.sdk.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, seed=seed)
        return answer.choices[0].message.content

    assert said(1) == said(1) == words(8, seed=1)
    assert said(1) != said(2)


def test_a_stop_word_ends_the_answer_before_it(setting: Setting) -> None:
    stop = words(12).split()[5]
    answer = setting.sdk.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12, stop=[stop])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == words(12)[: words(12).index(stop)]


def test_a_forced_tool_is_called_with_json_arguments(setting: Setting) -> None:
    forced: Any = {"type": "function", "function": {"name": "weather"}}
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 6, "tools": [WEATHER]}
    whole = setting.sdk.chat.completions.create(**asked, tool_choice=forced)
    calls = whole.choices[0].message.tool_calls
    assert calls
    function = calls[0].function
    assert function.name == "weather"
    with setting.sdk.chat.completions.stream(**asked, tool_choice=forced) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed
    assert json.loads(streamed[0].function.arguments) == json.loads(function.arguments)
    assert json.loads(function.arguments)["words"]


def test_logprobs_come_with_every_token(setting: Setting) -> None:
    answer = setting.sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=1
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(token.token for token in logprobs.content) == words(5)
    assert all(token.logprob <= 0 and token.top_logprobs for token in logprobs.content)


# Completions


@pytest.mark.parametrize("prompt", ["The water falls", [101, 102, 103, 104]], ids=["text", "token ids"])
def test_a_completion_says_the_same_streamed_or_not(setting: Setting, prompt: Any) -> None:
    expected = expected_text({"prompt": prompt}, 9)
    whole = setting.sdk.completions.create(model=MODEL, prompt=prompt, max_tokens=9, logprobs=1)
    assert whole.choices[0].text == expected
    assert whole.choices[0].logprobs is not None
    stream = setting.sdk.completions.create(model=MODEL, prompt=prompt, max_tokens=9, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == expected


def test_two_prompts_and_two_choices_make_four_completions(setting: Setting) -> None:
    prompts = ["The water falls", "The turbine turns"]
    answer = setting.sdk.completions.create(model=MODEL, prompt=prompts, max_tokens=4, n=2, seed=3)
    expected = [expected_text({"prompt": prompt, "seed": 3}, 4, choice) for prompt in prompts for choice in (0, 1)]
    assert [choice.text for choice in answer.choices] == expected


# The gateway adds nothing and takes nothing away


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_through_the_gateway_is_the_engines_own(setting: Setting, stream: bool) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 10,
        "n": 2,
        "seed": 5,
        "stream": stream,
    }

    def answer(sdk: OpenAI) -> Any:
        found = sdk.chat.completions.create(**asked)
        parts = [part.to_dict() for part in found] if stream else [found.to_dict()]
        for part in parts:
            part.pop("id")
            part.pop("created")
            (part.get("usage") or {}).pop("prompt_tokens_details", None)  # who had the prompt cached differs
        return sorted(json.dumps(part, sort_keys=True) for part in parts)

    assert answer(setting.sdk) == answer(setting.engine)


@pytest.mark.parametrize("name", [MODEL, ALIAS, SHORT])
def test_the_model_in_an_answer_is_the_name_that_was_asked_for(setting: Setting, name: str) -> None:
    whole = setting.sdk.chat.completions.create(model=name, messages=MESSAGES, max_tokens=4)
    assert (whole.model, whole.choices[0].message.content) == (name, words(4))
    chunks = list(setting.sdk.chat.completions.create(model=name, messages=MESSAGES, max_tokens=4, stream=True))
    assert {chunk.model for chunk in chunks} == {name}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == words(4)


def test_models_are_listed_and_found_by_every_name(setting: Setting) -> None:
    assert [model.id for model in setting.sdk.models.list()] == sorted([MODEL, ALIAS, SHORT])
    assert setting.sdk.models.retrieve(ALIAS).id == ALIAS
    with pytest.raises(openai.NotFoundError) as refused:
        setting.sdk.models.retrieve("gpt-17")
    assert refused.value.code == "model_not_found"


def test_every_answer_names_its_request(setting: Setting) -> None:
    ids = set()
    for stream in (False, True):
        raw = setting.sdk.chat.completions.with_raw_response.create(
            model=MODEL, messages=MESSAGES, max_tokens=2, stream=stream
        )
        ids.add(raw.headers["x-request-id"])
        raw.http_response.read()
    ids.add(setting.sdk.models.with_raw_response.list().headers["x-request-id"])
    assert len(ids) == 3
    assert all(len(each) == len("req_") + 32 for each in ids)


async def test_many_streams_at_once_are_never_mixed_up(setting: Setting) -> None:
    async def one(sdk: AsyncOpenAI, number: int) -> tuple[str, str]:
        messages: Any = [{"role": "user", "content": f"Tell me about turbine number {number}, at some length."}]
        told = ""
        stream = await sdk.chat.completions.create(model=ALIAS, messages=messages, max_tokens=20, stream=True)
        async for chunk in stream:
            told += chunk.choices[0].delta.content or "" if chunk.choices else ""
        return told, expected_text({"messages": messages}, 20)

    async with AsyncOpenAI(base_url=f"{setting.url}/v1", api_key="none", timeout=20) as sdk:
        answers = await asyncio.gather(*(one(sdk, number) for number in range(40)))
    assert all(told == expected for told, expected in answers)


# Refusals


def test_an_unknown_model_is_not_found_and_a_near_one_is_named(setting: Setting) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        setting.sdk.chat.completions.create(model="demo-8c", messages=MESSAGES)
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    assert MODEL in refused.value.message
    assert refused.value.request_id


def test_too_long_is_a_bad_request_at_the_door_and_at_the_engine(setting: Setting) -> None:
    with pytest.raises(openai.BadRequestError) as at_the_door:
        setting.sdk.chat.completions.create(model=SHORT, messages=MESSAGES, max_tokens=65)
    with pytest.raises(openai.BadRequestError) as by_ids:
        setting.sdk.completions.create(model=SHORT, prompt=list(range(60)), max_tokens=5)
    long: Any = [{"role": "user", "content": "word " * 300_000}]
    with pytest.raises(openai.BadRequestError) as at_the_engine:
        setting.sdk.chat.completions.create(model=MODEL, messages=long)
    for refused in (at_the_door, by_ids, at_the_engine):
        assert refused.value.code == "context_length_exceeded"
        assert refused.value.type == "invalid_request_error"


def test_what_the_engine_refuses_comes_back_as_its_own_words_in_openais_shape(setting: Setting) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        setting.sdk.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
    assert refused.value.type == "invalid_request_error"
    assert "temperature" in refused.value.message


@pytest.mark.parametrize(
    "asked", [{"model": "nope"}, {"n": 1000}, {"temperature": 9}], ids=["404", "400", "400 by the engine"]
)
def test_the_sdk_does_not_retry_what_would_fail_again(setting: Setting, asked: dict[str, Any]) -> None:
    sent: list[object] = []
    http = openai.DefaultHttpxClient(event_hooks={"request": [sent.append]})
    with client(setting.url, retries=5, http_client=http) as sdk, pytest.raises(openai.APIStatusError) as refused:
        sdk.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **asked})
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert len(sent) == 1


def test_the_sdk_does_not_retry_a_409_that_an_engine_means(stub: Stub, tenants_url: str) -> None:
    before = len(stub.requests)
    with client(tenants_url, "sk-acme-secret", retries=5) as sdk, pytest.raises(openai.ConflictError):
        sdk.chat.completions.create(model="demo", messages=MESSAGES, user="status:409")
    assert len(stub.requests) == before + 1


def test_a_stream_that_breaks_raises_in_the_sdk_after_its_last_token(tenants_url: str) -> None:
    told: list[str | None] = []
    with client(tenants_url, "sk-acme-secret") as sdk:
        stream = sdk.chat.completions.create(model="demo", messages=MESSAGES, stream=True, user="break")
        with pytest.raises(openai.APIError) as broken:
            told.extend(chunk.choices[0].delta.content for chunk in stream)
    assert told == TEXT.split()
    assert broken.value.code == "stream_interrupted"


def test_an_engine_that_closes_without_an_answer_is_a_502_that_may_be_retried(tenants_url: str) -> None:
    with client(tenants_url, "sk-acme-secret") as sdk:
        with pytest.raises(openai.InternalServerError) as refused:
            sdk.chat.completions.create(model="demo", messages=MESSAGES, user="break")
        assert (refused.value.status_code, refused.value.code) == (502, "upstream_failed")
        assert "x-should-retry" not in refused.value.response.headers
    with client(tenants_url, "sk-acme-secret", retries=5) as sdk:  # 503 until a probe has found the engine well
        assert sdk.chat.completions.create(model="demo", messages=MESSAGES).choices[0].message.content == TEXT


# Keys


@pytest.mark.parametrize("key", ["wrong", "sk-acme-secre", "sk-acme-secret2", "SK-ACME-SECRET"])
def test_a_wrong_key_is_an_authentication_error_and_reaches_no_engine(stub: Stub, tenants_url: str, key: str) -> None:
    before = len(stub.requests)
    with client(tenants_url, key) as sdk:
        with pytest.raises(openai.AuthenticationError) as refused:
            sdk.chat.completions.create(model="demo", messages=MESSAGES)
        with pytest.raises(openai.AuthenticationError):
            sdk.models.list()
    assert refused.value.code == "invalid_api_key"
    assert key not in refused.value.message
    assert len(stub.requests) == before


@pytest.mark.parametrize("stream", [False, True])
def test_a_clients_key_opens_the_gateway_and_never_reaches_the_engine(
    stub: Stub, tenants_url: str, stream: bool
) -> None:
    with client(tenants_url, "sk-acme-secret") as sdk:
        answer: Any = sdk.chat.completions.create(model="demo", messages=MESSAGES, stream=stream, user="me")
        for _ in answer if stream else ():
            pass
    seen = stub.requests[-1]
    assert b"sk-acme" not in seen.head + seen.body
    assert b"authorization" not in seen.head.lower()
    assert b"openai" not in seen.head.lower()
