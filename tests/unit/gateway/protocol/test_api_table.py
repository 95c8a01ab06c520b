"""Tests of the table of APIs: where each API has its prompt, and which response belongs to it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from gateway.protocol import api_table
from gateway.protocol.api_table import API_PATHS, APIS, Api
from gateway.protocol.errors import Failure, GatewayError
from gateway.protocol.request.api_call import Call
from gateway.protocol.request.request_body import CallContext, parse_call
from gateway.protocol.request.request_head import read_head
from gateway.protocol.request.service_level_headers import NO_PREFERENCES
from gateway.protocol.response.resume_eligibility import continuation_terms
from policies.routing_types import STANDARD, Slo

TEXT = "How deep is the reservoir behind the dam?"
AUDIO = {"file": TEXT}
RERANK = {"query": "dam", "documents": [TEXT]}
SCORE = {"text_1": "dam", "text_2": [TEXT]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}]},
    "/v1/completions": {"prompt": TEXT},
    "/v1/messages": {"messages": [{"role": "user", "content": TEXT}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": TEXT}]},
    "/v1/responses": {"input": TEXT},
    "/v1/responses/input_tokens": {"input": TEXT},
    "/v1/embeddings": {"input": TEXT},
    "/v2/embed": {"texts": [TEXT]},
    "/classify": {"input": TEXT},
    "/pooling": {"input": TEXT},
    "/v1/moderations": {"input": TEXT},
    **dict.fromkeys(("/v1/rerank", "/rerank", "/v2/rerank"), RERANK),
    **dict.fromkeys(("/v1/score", "/score"), SCORE),
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations"), AUDIO),
    "/tokenize": {"prompt": TEXT},
    "/detokenize": {"tokens": [1, 2, 3]},
}


class Model(NamedTuple):
    served_model: str = "demo"
    context_tokens: int | None = None
    slo: Slo = STANDARD
    is_low_first: bool = True
    sequences: int = 8


def encoded(api: Api, body: dict[str, Any]) -> bytes:
    if not api.is_form:
        return json.dumps(body).encode()
    parts = b""
    for name, value in body.items():
        file = '; filename="a.wav"\r\nContent-Type: audio/wav' if name == "file" else ""
        parts += f'--x9\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode()
        parts += (value if isinstance(value, str) else json.dumps(value)).encode() + b"\r\n"
    return parts + b"--x9--\r\n"


def parsed(api: Api, body: dict[str, Any], served: str = "demo") -> Call:
    return parse_call(
        encoded(api, {"model": "demo", **body}),
        api,
        {"demo": Model(served)},
        CallContext("req_1", "acme", NO_PREFERENCES, 0.0),
    )


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
def test_a_body_of_each_api_parses_and_its_prompt_is_measured(api: Api) -> None:
    call = parsed(api, BODIES[api.path])
    assert call.api is api
    assert call.prompt
    assert (call.request.prompt_tokens > 0) is api.is_admitted
    assert call.request.output_tokens == (256 if api.generates else 1)


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
def test_a_body_without_the_prompt_is_refused_with_the_member_s_name(api: Api) -> None:
    with pytest.raises(GatewayError) as refused:
        parsed(api, {})
    assert (refused.value.failure, refused.value.param) == (Failure.BAD_REQUEST, api.conversation)


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
def test_the_engine_s_name_of_the_model_is_sent_and_internals_are_not(api: Api) -> None:
    call = parsed(api, {**BODIES[api.path], "kv_transfer_params": {}, "rid": "x"}, "engine-name")
    expected = {"model": "engine-name", **BODIES[api.path]}
    if api.is_form:
        assert call.body == encoded(api, expected)
    else:
        assert json.loads(call.body) == expected


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
def test_the_fast_connection_recognises_each_path_with_and_without_a_query(api: Api) -> None:
    for query in ("", "?beta=true", "?a=%20b&c"):
        head = f"POST {api.path}{query} HTTP/1.1\r\nHost: gw\r\nContent-Length: 2\r\n\r\n"
        result = read_head(head.encode(), 0)
        assert result is not None
        assert result.api is api


def test_plain_apis_have_neither_forms_nor_events_of_their_own() -> None:
    for api in (*APIS, *api_table.STORED_APIS.values()):
        assert api.is_plain is (api.grammar is None and not api.is_form)


def test_paths_are_unique_and_operations_name_spans() -> None:
    assert len(API_PATHS) == len(APIS)
    assert all(api.operation and " " not in api.operation for api in APIS)


def test_only_text_apis_can_be_resumed_or_split() -> None:
    for api in APIS:
        assert api.generates or not (api.can_split or api.can_resume)
        call = parsed(api, {**BODIES[api.path], "stream": True})
        assert (continuation_terms(call) is not None) is api.can_resume


def test_inputs_of_a_batch_are_counted_and_bounded_apart_from_the_model_s_sequences() -> None:
    call = parsed(api_table.EMBEDDINGS, {"input": [TEXT] * 100})
    assert (call.request.prompts, call.request.choices) == (100, 1)
    assert call.request.output_tokens == 1
    with pytest.raises(GatewayError) as refused:
        parsed(api_table.EMBEDDINGS, {"input": ["x"] * 2049})
    assert refused.value.param == "input"


@pytest.mark.parametrize("count", [1, 1500, 2048])
def test_each_object_of_a_list_is_one_input_whatever_its_members(count: int) -> None:
    documents = [{"title": "a {dam}", "text": TEXT}] * count
    body = {"query": "dam", "documents": documents}
    assert parsed(api_table.RERANK, body).request.prompts == count


def test_more_objects_than_inputs_are_allowed_are_refused() -> None:
    with pytest.raises(GatewayError) as refused:
        parsed(api_table.RERANK, {"query": "dam", "documents": [{"text": "a"}] * 2049})
    assert refused.value.param == "documents"


def test_a_chat_to_embed_is_one_input_however_many_messages_it_has() -> None:
    messages = [{"role": "user", "content": TEXT}] * 1500
    assert parsed(api_table.EMBEDDINGS, {"messages": messages}).request.prompts == 1


@pytest.mark.parametrize("documents", [{"content": 1}, {"text": "a"}, [{"a": 1}, 1], {}])
def test_documents_of_a_wrong_form_are_left_to_the_engine(documents: Any) -> None:
    assert parsed(api_table.RERANK, {"query": "dam", "documents": documents}).body


def test_token_ids_of_an_input_are_counted_exactly() -> None:
    assert parsed(api_table.EMBEDDINGS, {"input": [1, 2, 3]}).request.prompt_tokens == 3
    assert parsed(api_table.EMBEDDINGS, {"input": [[1, 2], [3, 4, 5]]}).request.prompt_tokens == 5


def test_both_texts_of_a_rerank_and_of_a_score_count() -> None:
    for api in (api_table.RERANK, api_table.SCORE):
        short = parsed(api, BODIES[api.path]).request.prompt_tokens
        first = api.prompt[0]
        long = parsed(api, {**BODIES[api.path], first: "x" * 4000}).request.prompt_tokens
        assert long - short >= 900


@pytest.mark.parametrize("name", sorted(api_table.SCORE.alternatives))
def test_a_score_is_accepted_in_each_of_its_forms(name: str) -> None:
    assert parsed(api_table.SCORE, {name: TEXT}).request.prompt_tokens > 5


def test_embeddings_and_tokenize_accept_a_chat() -> None:
    for api in (api_table.EMBEDDINGS, api_table.TOKENIZE):
        assert parsed(api, {"messages": [{"role": "user", "content": TEXT}]}).prompt


def test_an_openapi_page_tells_which_apis_an_engine_has() -> None:
    paths: dict[str, Any] = {"/v1/chat/completions": {"post": {}}, "/v1/messages": {}, "/x": {}}
    page = json.dumps({"openapi": "3.1.0", "paths": paths}).encode()
    assert api_table.api_paths(page) == {"/v1/chat/completions", "/v1/messages"}
    assert api_table.api_paths(b'{"paths": {"/v1/messages": {}}}') == frozenset()
    assert api_table.api_paths(b"<html>") == frozenset()
