"""Tests of the error messages for clients with a wrong base URL."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from gateway.http.api_application import api_application


def _no_models() -> Any:
    raise AssertionError("an unknown path must not ask for the list of models")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/batches", "/v1/messages/x?a=b"])
async def test_errors_below_the_path_of_messages_have_anthropics_form(path: str) -> None:
    async with TestClient(TestServer(api_application(_no_models), host="127.0.0.1")) as client:
        answer = await client.get(path)
        assert (await answer.json())["type"] == "error"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/models", "/v1/models"),
        ("/v1/models/", "/v1/models"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/images/generations", None),
    ],
)
async def test_an_unknown_path_is_refused_with_the_one_that_was_meant(
    path: str, meant: str | None
) -> None:
    async with TestClient(TestServer(api_application(_no_models), host="127.0.0.1")) as client:
        answer = await client.post(path)
        error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (404, "unknown_url")
        hint = "" if meant is None else f" Did you mean {meant}? Check the client's base URL."
        assert error["message"] == f"Unknown request URL: POST {path}.{hint}"
