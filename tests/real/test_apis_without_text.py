"""Tests that APIs without generated text give the same answer through the gateway as directly.

Three engines run one after another: an encoder for embeddings, a cross-encoder and a classifier.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.real.api_pair import Call, Pair, engine_and_gateway

TEXT = "How deep is the reservoir behind the dam?"
RERANK = {"query": "a deep dam", "documents": ["a zoo", "the deep dam", TEXT]}
PAIRS = {"text_1": TEXT, "text_2": [TEXT, "a zoo"]}
WITHOUT_TEXT: dict[str, dict[str, Call]] = {
    "embedding": {
        "one text": ("/v1/embeddings", {"input": TEXT}),
        "texts": ("/v1/embeddings", {"input": [TEXT, "a zoo"]}),
        "base64": ("/v1/embeddings", {"input": TEXT, "encoding_format": "base64"}),
        "token ids": ("/v1/embeddings", {"input": [[5, 6, 7], [8, 9]]}),
        "pooling": ("/pooling", {"input": [TEXT, "a zoo"], "task": "embed"}),
        "score of embeddings": ("/v1/score", PAIRS),
        "rerank by embeddings": ("/v1/rerank", RERANK),
        "tokenize": ("/tokenize", {"prompt": TEXT}),
        "detokenize": ("/detokenize", {"tokens": [300, 301]}),
    },
    "reranker": {
        "rerank": ("/rerank", RERANK),
        "v1 rerank": ("/v1/rerank", RERANK | {"top_n": 2}),
        "v2 rerank": ("/v2/rerank", RERANK),
        "score": ("/score", PAIRS),
        "v1 score": ("/v1/score", {"queries": TEXT, "documents": [TEXT, "a zoo"]}),
        "classify": ("/classify", {"input": [TEXT, "a zoo"]}),
    },
    "classifier": {
        "classify": ("/classify", {"input": [TEXT, "a zoo"]}),
        "pooling": ("/pooling", {"input": TEXT, "task": "classify"}),
    },
}
WITHOUT_TEXT_REFUSED: dict[str, dict[str, Call]] = {
    "embedding": {
        "context": ("/v1/embeddings", {"input": "gate " * 900}),
        "format": ("/v1/embeddings", {"input": TEXT, "encoding_format": "hex"}),
        "dimensions": ("/v1/embeddings", {"input": TEXT, "dimensions": 7}),
        "task": ("/pooling", {"input": TEXT, "task": "token_embed"}),
    },
    "reranker": {
        "no query": ("/v1/rerank", {"documents": ["a zoo"]}),
        "documents": ("/v1/rerank", {"query": TEXT, "documents": [7]}),
        "texts": ("/v1/score", {"text_1": [TEXT, TEXT], "text_2": [TEXT, TEXT, TEXT]}),
    },
    "classifier": {"input": ("/classify", {"input": "gate " * 900})},
}


@pytest.fixture(scope="module", params=WITHOUT_TEXT)
def encoding(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Pair]]:
    options = ("--runner", "pooling", "--max-model-len", "512")
    folder = tmp_path_factory.mktemp(request.param)
    with engine_and_gateway(folder, f"encoders/{request.param}", *options) as pair:
        yield request.param, pair


async def test_answers_without_text_are_the_engine_s_own(encoding: tuple[str, Pair]) -> None:
    kind, pair = encoding
    for path, body in WITHOUT_TEXT[kind].values():
        await pair.assert_equal(path, body)


async def test_refusals_of_engines_without_text_keep_status_and_message(
    encoding: tuple[str, Pair],
) -> None:
    kind, pair = encoding
    for path, body in WITHOUT_TEXT_REFUSED[kind].values():
        await pair.assert_refused(path, body)
