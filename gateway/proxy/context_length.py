"""Decides whether a prompt and its answer certainly exceed the context length of all endpoints.

A prompt that is too long only by estimate is still sent, because engines count tokens exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.protocol.errors import Failure, GatewayError
from gateway.protocol.request.api_call import Call
from gateway.protocol.request.media import BYTES_PER_TOKEN, MOST_BYTES_PER_TOKEN
from policies.routing_types import Candidate, Request

_OUTPUT_LIMITS = frozenset(("max_tokens", "max_completion_tokens"))


def is_too_long(call: Call, candidates: Sequence[Candidate]) -> bool:
    """Return whether a prompt and its answer certainly exceed every candidate's context length."""
    needed_tokens = least_tokens(call)
    limits = [candidate.endpoint.context_tokens for candidate in candidates]
    return all(limit is not None and limit < needed_tokens for limit in limits)


def least_tokens(call: Call) -> int:
    """Return a lower bound of the tokens that one prompt of a request has with its answer.

    Images and files count as almost no tokens, because some engines count hardly any for them.
    """
    request, prompt_tokens = call.request, call.request.prompt_tokens
    if call.estimated_tokens:
        text_tokens = max(0, call.estimated_tokens - call.media_size.tokens)
        text_bytes = text_tokens * BYTES_PER_TOKEN
        prompt_tokens = min(prompt_tokens, text_bytes // MOST_BYTES_PER_TOKEN)
    output_tokens = request.output_tokens // request.choices if limits_output(call) else 1
    return prompt_tokens // request.prompts + output_tokens


def limits_output(call: Call) -> bool:
    """Return whether the client limited the length of the answer.

    If it did not, `output_tokens` of the request is only an estimate.
    """
    return not _OUTPUT_LIMITS.isdisjoint(call.members)


def too_long_error(request: Request) -> GatewayError:
    """Return the client's error for a request that exceeds the context of every endpoint."""
    tokens = request.prompt_tokens + request.output_tokens
    return GatewayError(
        Failure.CONTEXT_TOO_LONG,
        f"No endpoint accepts a context of about {tokens} tokens "
        f"({request.prompt_tokens} in the prompt, {request.output_tokens} to be generated).",
    )
