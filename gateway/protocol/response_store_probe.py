"""Finds out whether an engine stores responses, with a request that computes nothing. No I/O.

The request starts a background job that continues a response that does not exist. An engine that
stores responses answers that it cannot find that response. An engine that stores none refuses
background jobs.
"""

from __future__ import annotations

from typing import Any


def store_request(model: str) -> dict[str, Any]:
    """Return the body of the request whose answer shows_store() interprets.

    `model` is the engine's name of a model.
    """
    body = {"model": model, "input": "x", "store": True, "background": True}
    return body | {"max_output_tokens": 1, "previous_response_id": "resp_0"}


def shows_store(status: int, body: bytes) -> bool | None:
    """Return whether an engine stores responses, according to its answer to store_request().

    Returns None if the answer does not show it. vLLM's refusal names the environment variable that
    turns the store on.
    """
    if status == 404:
        return True
    return False if status == 400 and b"STORE" in body else None
