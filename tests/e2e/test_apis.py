"""Tests of every HTTP API over raw sockets and the openai SDK, through a gateway with mock
engines.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from openai import OpenAI

from mockgpu.mock_tokenizer import token_bytes, token_count
from tests.e2e.processes import gateway_process, mock_fleet

MODEL, ALIAS = "demo-8b", "text-demo"
TEXT = "How deep is the reservoir behind the dam?"
CONFIG = """
models:
  - {{name: demo-8b, aliases: [text-demo], pool: main}}
  - {{name: renamed, served_model: demo-8b, pool: main}}
pools:
  main:
    endpoints:
      - {{url: '{0}'}}
      - {{url: '{1}'}}
"""
RERANK = {"query": "a deep dam", "documents": ["a zoo", "the deep dam", TEXT], "top_n": 2}
SCORE = {"text_1": TEXT, "text_2": [TEXT, "a zoo"]}
INPUTS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": [TEXT, "ace act"]},
    "/v2/embed": {"texts": [TEXT, "ace act"], "embedding_types": ["float"]},
    "/pooling": {"input": TEXT},
    "/classify": {"input": [TEXT]},
    "/v1/moderations": {"input": TEXT},
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), RERANK),
    **dict.fromkeys(("/score", "/v1/score"), SCORE),
    "/tokenize": {"prompt": TEXT},
    "/detokenize": {"tokens": [1, 2, 3]},
}


class Setup(NamedTuple):
    url: str
    engine: str
    sdk: OpenAI


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    with (
        mock_fleet() as engines,
        gateway_process(tmp_path_factory.mktemp("apis"), CONFIG.format(*engines)) as running,
        OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=20) as sdk,
    ):
        yield Setup(running.url, engines[0], sdk)
        assert running.is_alive
        assert "Traceback" not in running.stderr_text, running.stderr_text


def post(
    url: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any], dict[str, str]]:
    request = urllib.request.Request(
        url,
        json.dumps(body).encode(),
        {"content-type": "application/json", **(headers or {})},
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, json.load(response), dict(response.headers)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), dict(error.headers)


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


@pytest.mark.parametrize("path", sorted(INPUTS))
def test_the_answer_is_the_engine_s_own_but_for_its_id(setup: Setup, path: str) -> None:
    body = {"model": MODEL, **INPUTS[path]}
    status, answer, headers = post(setup.url + path, body)
    assert (status, without_ids(answer)) == (200, without_ids(post(setup.engine + path, body)[1]))
    assert headers["x-request-id"].startswith("req_")
    assert "x-penstock-endpoint" in headers


@pytest.mark.parametrize("path", sorted(INPUTS))
def test_a_query_makes_no_difference(setup: Setup, path: str) -> None:
    body = {"model": MODEL, **INPUTS[path]}
    for query in ("?beta=true", "?api-version=2024-10-21&x=%2F"):
        assert post(f"{setup.url}{path}{query}", body)[0] == 200


@pytest.mark.parametrize("path", sorted(set(INPUTS) - {"/tokenize", "/detokenize", "/v2/embed"}))
def test_the_answer_names_the_model_as_it_was_asked_for(setup: Setup, path: str) -> None:
    for name in (ALIAS, "renamed"):
        assert post(setup.url + path, {"model": name, **INPUTS[path]})[1]["model"] == name


@pytest.mark.parametrize("path", sorted(INPUTS))
def test_an_engine_s_refusal_keeps_its_status_and_message(setup: Setup, path: str) -> None:
    member = next(iter(INPUTS[path]))
    body = {"model": MODEL, **INPUTS[path], member: {"no": "text"}}
    if path in ("/v1/rerank", "/rerank", "/v2/rerank", "/score", "/v1/score"):
        body["documents" if "rerank" in path else "text_2"] = [1]
    status, answer, _ = post(setup.url + path, body)
    engine_status, engine_answer, _ = post(setup.engine + path, body)
    assert status == engine_status == 400
    assert answer["error"]["message"] == engine_answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", sorted(INPUTS))
def test_an_unknown_model_and_another_method_are_refused(setup: Setup, path: str) -> None:
    status, answer, _ = post(setup.url + path, {"model": "nothing", **INPUTS[path]})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(setup.url + path, timeout=20)
    assert refused.value.code == 405


def test_the_sdk_gets_embeddings_as_floats_of_the_length_it_asks_for(setup: Setup) -> None:
    answer = setup.sdk.embeddings.create(model=ALIAS, input=[TEXT, TEXT, "ace"], dimensions=8)
    first, second, third = (item.embedding for item in answer.data)
    assert first == second != third
    assert len(first) == 8
    assert answer.model == ALIAS
    assert answer.usage.prompt_tokens == 2 * token_count(token_bytes(TEXT)) + 1


def test_the_sdk_gets_a_moderation(setup: Setup) -> None:
    answer = setup.sdk.moderations.create(model=MODEL, input=TEXT)
    assert [result.flagged for result in answer.results] == [False]
    parts: Any = [{"type": "text", "text": TEXT}]
    assert len(setup.sdk.moderations.create(model=MODEL, input=parts).results) == 1


@pytest.mark.parametrize(
    "given",
    [
        {"texts": [TEXT]},
        {"images": ["data:image/png;base64,iVBORw0KGgo="]},
        {"inputs": [{"content": [{"type": "text", "text": TEXT}]}]},
    ],
    ids=lambda given: next(iter(given)),
)
def test_cohere_s_embeddings_are_of_texts_images_or_inputs(
    setup: Setup, given: dict[str, Any]
) -> None:
    body = {"model": ALIAS, "input_type": "search_query", "output_dimension": 4, **given}
    forms = {"embedding_types": ["float", "base64"]}
    status, answer, _ = post(setup.url + "/v2/embed", body | forms)
    assert status == 200
    assert [len(vector) for vector in answer["embeddings"]["float"]] == [4]
    assert len(answer["embeddings"]["base64"]) == 1
    assert answer["meta"]["billed_units"]["input_tokens"] > 0


def test_a_rerank_returns_the_most_similar_documents_first(setup: Setup) -> None:
    _, answer, _ = post(setup.url + "/v1/rerank", {"model": MODEL, **INPUTS["/v1/rerank"]})
    assert [result["index"] for result in answer["results"]] == [1, 0]


def test_tokens_of_a_text_lead_back_to_it(setup: Setup) -> None:
    _, answer, _ = post(setup.url + "/tokenize", {"model": MODEL, "prompt": TEXT})
    back = post(setup.url + "/detokenize", {"model": MODEL, "tokens": answer["tokens"]})[1]
    assert back["prompt"].rstrip("\n") == TEXT


@pytest.mark.parametrize("name", [MODEL, "renamed"])
def test_the_sdk_gets_what_a_recording_says_whole_and_streamed(setup: Setup, name: str) -> None:
    recording = ("speech.wav", bytes(range(256)) * 40, "audio/wav")
    whole = setup.sdk.audio.transcriptions.create(model=name, file=recording)
    assert len(whole.text.split()) == 11
    translated = setup.sdk.audio.translations.create(model=name, file=recording)
    assert translated.text == whole.text
    stream: Any = setup.sdk.audio.transcriptions.create(model=name, file=recording, stream=True)
    pieces = [chunk.choices[0]["delta"]["content"] for chunk in stream]
    assert "".join(pieces).strip() == whole.text
