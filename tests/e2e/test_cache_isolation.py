"""Tests that tenants share no cached prompts on an engine, whichever API their requests use."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e.processes import gateway_process, mock_fleet
from tests.metrics_page import total

CONFIG = """
models: [{{name: demo-8b, pool: main}}]
pools: {{main: {{endpoints: [{{url: '{0}'}}]}}}}
tenants:
  - {{name: acme, key: '${{ACME}}'}}
  - {{name: zeta, key: '${{ZETA}}'}}
"""
KEYS = {"ACME": "sk-acme", "ZETA": "sk-zeta"}
TURN = [{"role": "user", "content": "PROMPT"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURN, "max_tokens": 2},
    "/v1/completions": {"prompt": "PROMPT", "max_tokens": 2},
    "/v1/messages": {"messages": TURN, "max_tokens": 2},
    "/v1/responses": {"input": "PROMPT", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "PROMPT"},
    "/pooling": {"input": "PROMPT"},
    "/classify": {"input": "PROMPT"},
    "/v1/moderations": {"input": "PROMPT"},
    "/v1/rerank": {"query": "PROMPT", "documents": ["one"]},
    "/v1/score": {"text_1": "PROMPT", "text_2": "one"},
}


class Setup(NamedTuple):
    url: str
    engine: str


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder: Path = tmp_path_factory.mktemp("isolation")
    with (
        mock_fleet() as engines,
        gateway_process(folder, CONFIG.format(engines[0]), **KEYS) as running,
    ):
        yield Setup(running.url, engines[0])


def cached_tokens(setup: Setup, path: str, key: str, prompt: str) -> float:
    # Send a request; return the prompt tokens that the engine found in its cache.
    def hits() -> float:
        with urllib.request.urlopen(f"{setup.engine}/metrics", timeout=20) as page:
            return total(page.read().decode(), "vllm:prefix_cache_hits_total")

    before = hits()
    text = json.dumps({"model": "demo-8b"} | BODIES[path]).replace("PROMPT", prompt)
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(setup.url + path, text.encode(), headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.status == 200
    return hits() - before


@pytest.mark.parametrize("path", sorted(BODIES))
def test_a_tenant_finds_its_own_cached_prompt_and_no_other_s(setup: Setup, path: str) -> None:
    prompt = f"{path} " + "word " * 200
    assert cached_tokens(setup, path, "sk-acme", prompt) == 0
    own = cached_tokens(setup, path, "sk-acme", prompt)
    assert own > 100
    assert cached_tokens(setup, path, "sk-zeta", prompt) == 0
    assert cached_tokens(setup, path, "sk-zeta", prompt) == own


def test_an_isolated_tenant_is_refused_where_engines_take_no_salt(setup: Setup) -> None:
    body = {"model": "demo-8b", "texts": ["one"]}
    headers = {"content-type": "application/json", "authorization": "Bearer sk-acme"}
    url = f"{setup.url}/v2/embed"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=20
        )
    assert refused.value.code == 400
    assert json.load(refused.value)["error"]["param"] == "cache_salt"
