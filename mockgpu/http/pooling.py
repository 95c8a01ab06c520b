"""The APIs that generate no text: embeddings, scores, classification, moderation, detokenization.

Each function parses a request body, and returns the request with a function that builds the
response. Results depend only on the words of a text, so texts with common words are similar. The
caller simulates the time that an engine would compute.
"""

from __future__ import annotations

import base64
import math
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from xxhash import xxh3_64_intdigest

from mockgpu.mock_tokenizer import render_chat, token_bytes, token_count
from mockgpu.request_parser import (
    ApiError,
    ParsedRequest,
    RequestBody,
    TokenId,
    check_rank,
    decode_body,
    one_prompt,
)
from mockgpu.requested_tool_or_schema import FREE_TEXT

DIMENSIONS = 64
MAX_INPUTS = 2048
LABELS = ("LABEL_0", "LABEL_1")
CATEGORIES = ("harassment", "hate", "self-harm", "sexual", "violence")

Document = str | dict[str, Any]


class InputBody(msgspec.Struct, frozen=True):
    """The JSON body of a request with a list of input texts, or with the messages of one chat."""

    model: str | None = None
    input: str | list[Any] | None = None
    messages: list[dict[str, Any]] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1, le=DIMENSIONS)] | None = None
    cache_salt: str | None = None


class PairBody(msgspec.Struct, frozen=True):
    """The JSON body of a request that compares pairs of texts.

    Engines accept several names for the same two lists. This object has a field for each name.
    """

    model: str | None = None
    query: Document | None = None
    documents: Document | list[Document] | None = None
    items: Document | list[Document] | None = None
    queries: Document | list[Document] | None = None
    text_1: Document | list[Document] | None = None
    text_2: Document | list[Document] | None = None
    top_n: int = 0
    cache_salt: str | None = None


class CohereBody(msgspec.Struct, frozen=True):
    """The JSON body of POST /v2/embed, Cohere's API. It has one of the three lists."""

    model: str | None = None
    texts: list[str] | None = None
    images: list[str] | None = None
    inputs: list[dict[str, Any]] | None = None
    embedding_types: list[Literal["float", "base64"]] | None = None
    output_dimension: Annotated[int, Meta(ge=1, le=DIMENSIONS)] | None = None


class DetokenizeBody(msgspec.Struct, frozen=True):
    """The JSON body of POST /detokenize, which converts token ids to text."""

    tokens: list[TokenId]
    model: str | None = None


class PoolingRequest(msgspec.Struct, frozen=True):
    """A valid request to an API that generates no text, such as embeddings.

    parsed  the prompts that the engine must prefill
    build   function that builds the response's JSON; its argument is the time in Unix seconds
    """

    parsed: ParsedRequest
    build: Callable[[int], dict[str, Any]]


Reader = Callable[[bytes, Mapping[str, str], str, str], PoolingRequest]
"""A function that parses a request to one API.

Its arguments are the body, the headers, the served model's name and the request's id. It raises
ApiError.
"""


def read_embeddings(
    raw: bytes, headers: Mapping[str, str], served: str, name: str
) -> PoolingRequest:
    """Parse the body of POST /v1/embeddings. Raises ApiError if it is invalid."""
    return _about_inputs(raw, headers, served, f"embd-{name}", "embedding", _embedding)


def read_cohere_embed(
    raw: bytes, headers: Mapping[str, str], served: str, name: str
) -> PoolingRequest:
    """Parse the body of POST /v2/embed, Cohere's API for embeddings.

    As in vLLM, the response names no model. Raises ApiError if the body is invalid.
    """
    body = decode_body(raw, CohereBody)
    _check_model(body.model, served, headers)
    given = [part for part in (body.texts, body.images, body.inputs) if part]
    if len(given) != 1:
        raise ApiError(400, "Exactly one of texts, images and inputs must be given.", "texts")
    prompts = [_cohere_prompt(part) for part in _listed(list(given[0]))]
    parsed = _job(f"embd-{name}", served, prompts, None)

    def build(_: int) -> dict[str, Any]:
        vectors = [vector(prompt, body.output_dimension or DIMENSIONS) for prompt in prompts]
        forms = {
            kind: [_encoded(values, kind) for values in vectors]
            for kind in body.embedding_types or ("float",)
        }
        units = {"input_tokens": _usage(parsed)["prompt_tokens"]}
        meta = {"api_version": {"version": "2"}, "billed_units": units}
        return {"id": parsed.id, "embeddings": forms, "texts": body.texts, "meta": meta}

    return PoolingRequest(parsed, build)


def _cohere_prompt(part: Document) -> bytes:
    # Return a text or an image of a Cohere request as tokens.
    if isinstance(part, str) and not part.startswith("data:"):
        return token_bytes(part)
    content = part["content"] if isinstance(part, dict) and "content" in part else [_image(part)]
    return render_chat({"messages": [{"role": "user", "content": content}]})


def _image(url: Document) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def read_pooling(raw: bytes, headers: Mapping[str, str], served: str, name: str) -> PoolingRequest:
    """Parse the body of POST /pooling, which returns embeddings in vLLM's own format.

    Raises ApiError if it is invalid.
    """
    return _about_inputs(raw, headers, served, f"pool-{name}", "pooling", _pooled)


def read_classify(raw: bytes, headers: Mapping[str, str], served: str, name: str) -> PoolingRequest:
    """Parse the body of POST /classify. Raises ApiError if it is invalid."""
    return _about_inputs(raw, headers, served, f"classify-{name}", None, _class)


def read_moderations(
    raw: bytes, headers: Mapping[str, str], served: str, name: str
) -> PoolingRequest:
    """Parse the body of POST /v1/moderations. The response never flags a text.

    Raises ApiError if the body is invalid.
    """
    body, prompts = _inputs(raw, headers, served)
    parsed = _job(f"modr-{name}", served, prompts, body.cache_salt)

    def build(_: int) -> dict[str, Any]:
        return {
            "id": parsed.id,
            "model": served,
            "results": [_verdict(prompt) for prompt in prompts],
        }

    return PoolingRequest(parsed, build)


def read_rerank(raw: bytes, headers: Mapping[str, str], served: str, name: str) -> PoolingRequest:
    """Parse the body of POST /rerank, which sorts documents by their similarity to a query.

    Raises ApiError if it is invalid.
    """
    body = decode_body(raw, PairBody)
    _check_model(body.model, served, headers)
    if body.query is None or body.documents is None:
        raise ApiError(400, "1 validation error: query and documents are required", "documents")
    query, documents = _document(body.query), [_document(part) for part in _listed(body.documents)]
    parsed = _job(f"rerank-{name}", served, [query + text for text in documents], body.cache_salt)

    def build(created: int) -> dict[str, Any]:
        results = _ranked(query, documents)[: body.top_n or len(documents)]
        return {"id": parsed.id, "model": served, "usage": _usage(parsed), "results": results}

    return PoolingRequest(parsed, build)


def _ranked(query: bytes, documents: Sequence[bytes]) -> list[dict[str, Any]]:
    scores = [similarity(query, text) for text in documents]
    return [
        {
            "index": index,
            "document": {"text": documents[index].decode("utf-8", "replace").rstrip("\n")},
            "relevance_score": scores[index],
        }
        for index in sorted(range(len(documents)), key=lambda index: -scores[index])
    ]


def _text_pairs(body: PairBody) -> list[tuple[bytes, bytes]]:
    # Return the pairs of texts to compare: one with one, one with each of several, or N with N.
    first = body.queries if body.text_1 is None else body.text_1
    second = body.text_2 or body.documents or body.items
    if first is None or second is None:
        raise ApiError(400, "1 validation error: two texts are required", "text_2")
    firsts, seconds = _listed(first), _listed(second)
    if len(firsts) not in (1, len(seconds)):
        raise ApiError(400, "Input lengths must be either 1:1, 1:N or N:N", "text_2")
    firsts = firsts * (len(seconds) // len(firsts))
    return [(_document(a), _document(b)) for a, b in zip(firsts, seconds, strict=True)]


def read_score(raw: bytes, headers: Mapping[str, str], served: str, name: str) -> PoolingRequest:
    """Parse the body of POST /score, which returns the similarity of pairs of texts.

    Raises ApiError if it is invalid.
    """
    body = decode_body(raw, PairBody)
    _check_model(body.model, served, headers)
    pairs = _text_pairs(body)
    parsed = _job(f"score-{name}", served, [a + b for a, b in pairs], body.cache_salt)

    def build(created: int) -> dict[str, Any]:
        data = [
            {"index": index, "object": "score", "score": similarity(a, b)}
            for index, (a, b) in enumerate(pairs)
        ]
        return _listing(parsed, created, served, data)

    return PoolingRequest(parsed, build)


def detokenize(raw: bytes) -> dict[str, Any]:
    """Return the response of POST /detokenize: the text of the given token ids."""
    tokens = array("I", decode_body(raw, DetokenizeBody).tokens).tobytes()
    return {"prompt": tokens.decode("utf-8", "replace")}


def vector(text: bytes, dimensions: int = DIMENSIONS) -> list[float]:
    """Return the embedding of a text: a vector of length 1, the sum of one direction per word."""
    values = [0.0] * dimensions
    for word in text.split() or [b""]:
        digest = xxh3_64_intdigest(word)
        for index in range(dimensions):
            values[index] += 1.0 if digest >> (index % 64) & 1 else -1.0
    length = math.sqrt(sum(value * value for value in values)) or 1.0
    return [value / length for value in values]


def similarity(first: bytes, second: bytes) -> float:
    """Return the cosine similarity of two texts, between 0 and 1."""
    product = sum(a * b for a, b in zip(vector(first), vector(second), strict=True))
    return min(1.0, max(0.0, product))


def _about_inputs(
    raw: bytes,
    headers: Mapping[str, str],
    served: str,
    name: str,
    kind: str | None,
    build_one: Callable[[bytes, InputBody], dict[str, Any]],
) -> PoolingRequest:
    body, prompts = _inputs(raw, headers, served)
    parsed = _job(name, served, prompts, body.cache_salt)

    def build(created: int) -> dict[str, Any]:
        objects = {} if kind is None else {"object": kind}
        data = [
            {"index": index} | objects | build_one(prompt, body)
            for index, prompt in enumerate(prompts)
        ]
        return _listing(parsed, created, served, data)

    return PoolingRequest(parsed, build)


def _embedding(prompt: bytes, body: InputBody) -> dict[str, Any]:
    return {
        "embedding": _encoded(vector(prompt, body.dimensions or DIMENSIONS), body.encoding_format)
    }


def _pooled(prompt: bytes, body: InputBody) -> dict[str, Any]:
    return {"data": _encoded(vector(prompt, body.dimensions or DIMENSIONS), body.encoding_format)}


def _class(prompt: bytes, _: InputBody) -> dict[str, Any]:
    share = xxh3_64_intdigest(prompt) % 1000 / 1000
    probs = [share, 1.0 - share]
    return {
        "label": LABELS[probs.index(max(probs))],
        "probs": probs,
        "num_classes": len(LABELS),
    }


def _verdict(prompt: bytes) -> dict[str, Any]:
    scores = {
        name: xxh3_64_intdigest(prompt, seed) % 100 / 1000 for seed, name in enumerate(CATEGORIES)
    }
    return {
        "flagged": False,
        "categories": dict.fromkeys(CATEGORIES, False),
        "category_scores": scores,
    }


def _encoded(values: Sequence[float], encoding: str) -> list[float] | str:
    if encoding == "float":
        return list(values)
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def _inputs(raw: bytes, headers: Mapping[str, str], served: str) -> tuple[InputBody, list[bytes]]:
    # Parse an InputBody; return it and its prompts as tokens. Raises ApiError if invalid.
    body = decode_body(raw, InputBody)
    _check_model(body.model, served, headers)
    if body.messages:
        return body, [render_chat({"messages": body.messages, "add_generation_prompt": False})]
    if not body.input:
        raise ApiError(400, "1 validation error: input: field required and not empty", "input")
    parts = [body.input] if isinstance(body.input, str) or _is_ids(body.input) else body.input
    if len(parts) > MAX_INPUTS:
        raise ApiError(400, f"At most {MAX_INPUTS} inputs are allowed, got {len(parts)}", "input")
    return body, [_input(part) for part in parts]


def _input(part: object) -> bytes:
    # Return one input as tokens: a text, token ids, or a part of a chat, as in moderations.
    if isinstance(part, dict):
        return render_chat({"messages": [{"role": "user", "content": [part]}]})
    return one_prompt(part)


def _is_ids(value: Sequence[object]) -> bool:
    return isinstance(value[0], int)


def _check_model(model: str | None, served: str, headers: Mapping[str, str]) -> None:
    check_rank(headers)
    if model is not None and model != served:
        raise ApiError(404, f"The model `{model}` does not exist.", "model")


def _listed(value: Document | list[Document]) -> list[Document]:
    parts = value if isinstance(value, list) else [value]
    if not parts or len(parts) > MAX_INPUTS:
        raise ApiError(400, f"1 to {MAX_INPUTS} texts are required, got {len(parts)}", "documents")
    return parts


def _document(part: Document) -> bytes:
    text = part if isinstance(part, str) else part.get("text")
    return token_bytes(text) if isinstance(text, str) else token_bytes(str(part))


def _job(name: str, served: str, prompts: list[bytes], salt: str | None) -> ParsedRequest:
    body = RequestBody(cache_salt=salt)
    return ParsedRequest(name, False, served, prompts, 1, 1, False, body, (), FREE_TEXT)


def _usage(parsed: ParsedRequest) -> dict[str, int]:
    tokens = sum(token_count(prompt) for prompt in parsed.prompts)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _listing(
    parsed: ParsedRequest, created: int, served: str, data: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "id": parsed.id,
        "object": "list",
        "created": created,
        "model": served,
        "data": data,
        "usage": _usage(parsed),
    }


READERS: Mapping[str, Reader] = {
    "/v1/embeddings": read_embeddings,
    "/v2/embed": read_cohere_embed,
    "/pooling": read_pooling,
    "/classify": read_classify,
    "/v1/moderations": read_moderations,
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), read_rerank),
    **dict.fromkeys(("/score", "/v1/score"), read_score),
}
