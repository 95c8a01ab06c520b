"""Builds bodies of batch requests for engines: whole, as a stream, or for the rest of an answer.

A stream can be interrupted and continued token for token; answer_receiver.py receives it. No I/O.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.batch.result_journal import KeptAnswer
from gateway.protocol.api_table import Api
from gateway.protocol.request.json_members import read_members
from gateway.protocol.response.resume_eligibility import ContinuationTerms, member_terms

_STREAM = {
    "stream": msgspec.Raw(b"true"),
    "stream_options": msgspec.Raw(b'{"include_usage":true}'),
}
_encode = msgspec.json.Encoder().encode


def streamed_body(body: bytes, api: Api) -> tuple[bytes, ContinuationTerms] | None:
    """Return a batch request's body with streaming on, and how its stream can be continued later.

    A stream can be interrupted and continued without losing tokens. Returns None if the answer
    could not be continued exactly; such a request is sent unchanged.
    """
    if not api.can_resume:
        return None
    members = read_members(body)
    terms = member_terms(members | _STREAM, api)
    if terms is None or not isinstance(terms.max_tokens, int | None):
        return None
    return _encode({**members, **_STREAM}), terms


def whole_body(body: bytes, api: Api) -> bytes:
    """Return the body for a batch request whose answer is not streamed.

    The body asks the engine not to store the answer, unless the request itself says whether to
    store it. Engines keep stored answers in memory, and a batch's answers are in its output file
    anyway.
    """
    if not api.keeps_answers:
        return body
    members = read_members(body)
    if bytes(members.get("store", b"null")) != b"null":
        return body
    return _encode({**members, "store": False})


def rest_body(terms: ContinuationTerms, kept: KeptAnswer, model: str) -> bytes:
    """Return the body of a request that continues an interrupted answer.

    terms  what the new request has to repeat of the original one, such as sampling parameters
    kept   the part of the answer that was received
    model  the engine's name of the model
    """
    left = None if terms.max_tokens is None else terms.max_tokens - len(kept.tokens)
    body: dict[str, Any] = {
        "model": model,
        "prompt": [*kept.prompt, *kept.tokens],
        "max_tokens": left,
        **terms.sampling,
        **_STREAM,
    }
    if terms.min_tokens > len(kept.tokens):
        body["min_tokens"] = terms.min_tokens - len(kept.tokens)
    return _encode(body)
