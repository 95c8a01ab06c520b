"""Finds out whether an engine stores responses, by a request that computes nothing. No I/O.

The request asks for a background job that continues a response which cannot exist. An engine that
stores responses reports that it does not find that response; an engine that stores none refuses to
run background jobs.
"""

from __future__ import annotations

from typing import Any


def store_request(model: str) -> dict[str, Any]:
    """Return the request body for shows_store(); `model` is the engine's name of a model."""
    body = {"model": model, "input": "x", "store": True, "background": True}
    return body | {"max_output_tokens": 1, "previous_response_id": "resp_0"}


def shows_store(status: int, body: bytes) -> bool | None:
    """Return whether an engine stores responses, judged by its response to store_request().

    Returns None if the response leaves that open. vLLM's refusal names the environment variable
    that turns the store on.
    """
    if status == 404:
        return True
    return False if status == 400 and b"STORE" in body else None
