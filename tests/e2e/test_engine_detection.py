"""Tests that the option `--engine` detects which kind of engine answers at a URL."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

from gateway.cli.engine_detection import config_with_kinds
from gateway.config import LoadedConfig, config_from_engines
from tests.e2e.processes import ENV, mock_fleet
from tests.ports import free_port
from tests.recorded_engine import recorded_engine


def detect(urls: list[str], key: str | None = None) -> tuple[LoadedConfig, list[str]]:
    build = partial(config_from_engines, urls, "prefix_aware", "127.0.0.1", 0, 0, key)
    return config_with_kinds(urls, build)


def kinds(loaded: LoadedConfig) -> list[str]:
    return [spec.engine for pool in loaded.config.pools.values() for spec in pool.endpoints]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llamacpp", "llamacpp"),
        ("ollama", "ollama"),
        ("tgi", "tgi"),
        ("transformers", "openai"),  # no page of `transformers serve` identifies it
    ],
)
def test_an_engine_is_known_by_its_answers(name: str, kind: str) -> None:
    with recorded_engine(name) as engine:
        loaded, notes = detect([engine.url])
    assert kinds(loaded) == [kind]
    assert notes == [f"{engine.url} is an engine of the kind {kind}"]


def test_several_engines_may_be_of_several_kinds() -> None:
    with recorded_engine("ollama") as engine, mock_fleet() as urls:
        loaded, notes = detect([*urls, engine.url])
    assert kinds(loaded) == ["vllm", "vllm", "ollama"]
    assert len(notes) == 1


@pytest.mark.parametrize("path_prefix", ["", "/proxied"])
def test_a_key_and_a_path_prefix_are_used(path_prefix: str) -> None:
    with recorded_engine("llamacpp", prefix=path_prefix, key="sk-engine-key") as engine:
        loaded, _ = detect([engine.url], "sk-engine-key")
    assert kinds(loaded) == ["llamacpp"]


def test_an_engine_that_does_not_answer_is_taken_for_vllm_and_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    loaded, (note,) = detect([url])
    assert kinds(loaded) == ["vllm"]
    assert note.startswith(f"{url} does not answer (")
    assert note.endswith("it is taken for vllm")


def test_doctor_checks_an_engine_as_what_it_is() -> None:
    with recorded_engine("tgi") as engine:
        command = [sys.executable, "-m", "gateway", "doctor", "--engine", engine.url, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENV)
    findings: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    metrics = [finding for finding in findings if finding["check"] == "metrics"]
    assert [finding["verdict"] for finding in metrics] != ["fail"]
    assert not any("not vllm" in finding["seen"] for finding in findings)
