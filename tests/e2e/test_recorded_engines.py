"""Tests of a real gateway with engines other than vLLM, whose answers are recorded or
documented.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.processes import GatewayProcess, gateway_process
from tests.recorded_engine import RecordedEngine, recorded_engine

SERVED = {
    "llamacpp": "tiny",
    "ollama": "llama3.2:latest",
    "openai": "gpt-4o-mini",
    "sglang": "acme/small-7b",
    "tgi": "acme/small-7b",
    "tgi1": "acme/small-7b",
    "transformers": "tiny",
    "trtllm": "small-7b",
}
MESSAGES: Any = [{"role": "user", "content": "why water"}]
KEY = "provider-key"


@contextmanager
def served(folder: Path, engine: RecordedEngine, kind: str, more: str = "") -> Iterator[Any]:
    model = SERVED[engine.folder.name]
    config = (
        f"models: [{{name: chat, pool: main, served_model: '{model}'}}]\n"
        f"pools: {{main: {{endpoints: [{{url: '{engine.url}', engine: {kind}{more}}}]}}}}\n"
    )
    with gateway_process(folder, config, PROVIDER_KEY=KEY) as gateway:
        yield gateway


def client(gateway: GatewayProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)


def post(gateway: GatewayProcess, path: str, body: object) -> tuple[int, Any]:
    request = urllib.request.Request(gateway.url + path, json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def endpoint(gateway: GatewayProcess) -> Any:
    with urllib.request.urlopen(f"{gateway.admin_url}/endpoints", timeout=60) as answer:
        return json.loads(answer.read())["endpoints"][0]


@pytest.mark.parametrize("name", sorted(SERVED))
def test_an_engine_of_each_kind_serves_chats_whole_and_streamed(tmp_path: Path, name: str) -> None:
    kind = name.removesuffix("1")  # tgi1 has answers of TGI 1.4
    with recorded_engine(name) as engine, served(tmp_path, engine, kind) as gateway:
        whole = client(gateway).chat.completions.create(model="chat", messages=MESSAGES)
        assert whole.choices[0].message.content
        assert (whole.model, whole.usage is not None) == ("chat", True)

        stream = client(gateway).chat.completions.create(
            model="chat", messages=MESSAGES, stream=True
        )
        chunks = list(stream)
        assert {chunk.model for chunk in chunks} == {"chat"}
        assert chunks[-1].choices == [] or chunks[-1].choices[0].finish_reason
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

        state = endpoint(gateway)
        assert (state["state"], state["cause"]) == ("up", None)
        sent = [json.loads(body) for path, body in engine.requests if len(body) > len("{}")]
        assert {body["model"] for body in sent} == {SERVED[name]}


@pytest.mark.parametrize("kind", ["ollama", "tgi"])
def test_what_an_engine_of_an_undeclared_kind_lacks_is_found_out_and_translated(
    tmp_path: Path, kind: str
) -> None:
    with recorded_engine(kind) as engine, served(tmp_path, engine, "vllm") as gateway:
        answer = client(gateway).responses.create(model="chat", input="why water")
        assert answer.output_text
        status, message = post(
            gateway, "/v1/messages", {"model": "chat", "max_tokens": 8, "messages": MESSAGES}
        )
        assert (status, message["type"]) == (200, "message")
        texts = [block["text"] for block in message["content"] if block["type"] == "text"]
        assert texts == [answer.output_text]


@pytest.mark.parametrize(("name", "kind"), [("transformers", "transformers"), ("tgi1", "tgi")])
def test_a_hundred_streams_without_an_end_mark_are_whole_and_eject_nothing(
    tmp_path: Path, name: str, kind: str
) -> None:
    with recorded_engine(name) as engine, served(tmp_path, engine, kind) as gateway:
        chat = client(gateway).chat.completions
        for _ in range(100):
            chunks = list(chat.create(model="chat", messages=MESSAGES, stream=True))
            assert chunks[-1].usage or chunks[-1].choices[0].finish_reason == "length"
        state = endpoint(gateway)
    assert (state["state"], state["cause"]) == ("up", None)


@pytest.mark.parametrize(
    ("kind", "load"),
    [("llamacpp", (0, 0)), ("tgi", (3, 2)), ("sglang", (3, 2)), ("trtllm", (3, 2))],
)
def test_an_engines_own_metrics_show_its_load(
    tmp_path: Path, kind: str, load: tuple[int, int]
) -> None:
    with recorded_engine(kind) as engine, served(tmp_path, engine, kind) as gateway:
        state = endpoint(gateway)
    assert (state["running"], state["waiting"]) == load


def test_an_engine_without_a_health_page_is_up_by_its_list_of_models(tmp_path: Path) -> None:
    with recorded_engine("ollama") as engine, served(tmp_path, engine, "vllm") as gateway:
        assert endpoint(gateway)["state"] == "up"
        assert "has no health page; its list of models is probed instead" in gateway.stderr_text


def test_an_api_that_an_engine_has_not_implemented_is_no_failure_of_the_engine(
    tmp_path: Path,
) -> None:
    with recorded_engine("llamacpp") as engine, served(tmp_path, engine, "llamacpp") as gateway:
        for _ in range(12):
            status, answer = post(gateway, "/v1/embeddings", {"model": "chat", "input": "why"})
            assert status == 501
            assert "does not support embeddings" in answer["error"]["message"]
        assert endpoint(gateway)["state"] == "up"
        assert client(gateway).chat.completions.create(model="chat", messages=MESSAGES).choices


def test_tokens_are_refused_where_the_engine_reads_the_request_differently(tmp_path: Path) -> None:
    with recorded_engine("llamacpp") as engine, served(tmp_path, engine, "llamacpp") as gateway:
        status, answer = post(gateway, "/tokenize", {"model": "chat", "prompt": "why"})
    assert (status, answer["error"]["code"]) == (404, "unknown_url")
    assert "/tokenize" in answer["error"]["message"]


def test_llama_cpp_serves_messages_and_responses_itself(tmp_path: Path) -> None:
    with recorded_engine("llamacpp") as engine, served(tmp_path, engine, "llamacpp") as gateway:
        answer = client(gateway).responses.create(model="chat", input="why")
        assert answer.model == "chat"
        assert answer.output_text
        assert "/v1/responses" in [path for path, _ in engine.requests]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("tgi", "tgi"), ("tgi", "openai"), ("transformers", "transformers")],
)
def test_messages_are_translated_for_engines_that_lack_them(
    tmp_path: Path, name: str, kind: str
) -> None:
    with recorded_engine(name) as engine, served(tmp_path, engine, kind) as gateway:
        status, answer = post(
            gateway, "/v1/messages", {"model": "chat", "max_tokens": 8, "messages": MESSAGES}
        )
    assert (status, answer["type"], answer["role"]) == (200, "message", "assistant")
    assert answer["content"][0]["text"]
    assert "/v1/messages" not in [path for path, _ in engine.requests]


def test_a_provider_is_reached_under_its_path_with_its_key_and_model_name(tmp_path: Path) -> None:
    with (
        recorded_engine("ollama", prefix="/api", key=KEY) as engine,
        served(tmp_path, engine, "openai", ", api_key: '${PROVIDER_KEY}'") as gateway,
    ):
        answer = client(gateway).chat.completions.create(model="chat", messages=MESSAGES)
        assert answer.model == "chat"
        paths = {path for path, _ in engine.requests}
    assert paths <= {"/api/v1/models", "/api/v1/chat/completions", "/api/openapi.json"}


@pytest.mark.parametrize("alias", ["chat", "gpt-4o-mini"])
def test_an_answer_has_the_requested_name_where_a_provider_adds_a_version(
    tmp_path: Path, alias: str
) -> None:
    with recorded_engine("openai") as engine:
        config = (
            f"models: [{{name: '{alias}', pool: main, served_model: gpt-4o-mini}}]\n"
            f"pools: {{main: {{endpoints: [{{url: '{engine.url}', engine: openai}}]}}}}\n"
        )
        with gateway_process(tmp_path, config) as gateway:
            sdk = client(gateway)
            whole = sdk.chat.completions.create(model=alias, messages=MESSAGES)
            chunks = sdk.chat.completions.create(model=alias, messages=MESSAGES, stream=True)
            names = {whole.model, *(chunk.model for chunk in chunks)}
            names.add(sdk.responses.create(model=alias, input="why water").model)
    assert names == {alias}


def test_what_a_provider_charges_is_counted_by_model_and_class(tmp_path: Path) -> None:
    price = ", token_price: {prompt: 0.5, cached: 0.1, answer: 2}"
    with (
        recorded_engine("llamacpp") as engine,
        served(tmp_path, engine, "openai", price) as gateway,
    ):
        answers = [
            client(gateway).chat.completions.create(model="chat", messages=MESSAGES)
            for _ in range(3)
        ]
        page = urllib.request.urlopen(f"{gateway.admin_url}/metrics", timeout=60).read().decode()
    usage = answers[0].usage
    cached = usage.prompt_tokens_details.cached_tokens
    one = (usage.prompt_tokens - cached) * 0.5 + cached * 0.1 + usage.completion_tokens * 2
    (line,) = [x for x in page.splitlines() if x.startswith("penstock_cost_usd_total{")]
    assert 'model="chat"' in line
    assert float(line.split()[-1]) == pytest.approx(3 * one / 1e6)
