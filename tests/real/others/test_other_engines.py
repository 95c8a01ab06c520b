"""Tests of a gateway in front of real engines other than vLLM, on the CPU.

They are llama.cpp's server and `transformers serve`. `make real-others` installs them, with tiny
models of random weights.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from tests.e2e.processes import GatewayProcess, gateway_process
from tests.real.engines import ROOT, free_ports

OTHERS = ROOT / "build" / "real" / "others"
PYTHON = OTHERS / "venv" / "bin" / "python"
ENV = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
READY_WITHIN_S = 300.0
MESSAGES: Any = [{"role": "user", "content": "Why does the gate of a river open?"}]


class RealEngine(NamedTuple):
    kind: str
    url: str
    process: subprocess.Popen[bytes]


def _command(kind: str, port: int) -> list[str]:
    if kind == "llamacpp":
        script = ROOT / "deploy" / "real" / "llama_server.py"
        return [str(PYTHON), str(script), str(OTHERS / "tiny.gguf"), str(port)]
    serve = str(OTHERS / "venv" / "bin" / "transformers")
    return [serve, "serve", "tiny", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]


@contextmanager
def running(kind: str) -> Iterator[RealEngine]:
    if not (OTHERS / "installed").exists():
        pytest.fail("the engines are not installed; `make real-others` does it")
    (port,) = free_ports(1)
    process = subprocess.Popen(_command(kind, port), cwd=OTHERS, env=ENV, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + READY_WITHIN_S
        while not _serves(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None, f"{kind} ended with {process.returncode}"
            assert time.monotonic() < deadline
            time.sleep(0.5)
        yield RealEngine(kind, f"http://127.0.0.1:{port}", process)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def _serves(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="module", params=["llamacpp", "transformers"])
def engine(request: pytest.FixtureRequest) -> Iterator[RealEngine]:
    with running(request.param) as engine:
        yield engine


@pytest.fixture(scope="module")
def gateway(engine: RealEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with served(tmp_path_factory.mktemp("gateway"), [engine]) as gateway:
        yield gateway


@contextmanager
def served(folder: Path, engines: list[RealEngine]) -> Iterator[GatewayProcess]:
    endpoints = "".join(
        f"      - {{url: '{engine.url}', engine: {engine.kind}}}\n" for engine in engines
    )
    config = (
        "models: [{name: chat, pool: main, served_model: tiny}]\n"
        f"pools:\n  main:\n    endpoints:\n{endpoints}"
    )
    with gateway_process(folder, config) as gateway:
        yield gateway


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def state(gateway: GatewayProcess, number: int = 0) -> Any:
    with urllib.request.urlopen(f"{gateway.admin_url}/endpoints", timeout=60) as answer:
        return json.loads(answer.read())["endpoints"][number]


def streamed(url: str, model: str, wanted: dict[str, Any]) -> list[tuple[str, str | None]]:
    """Send a streamed chat; return the text and the finish reason of each choice, chunk by chunk."""
    chunks = client(url).chat.completions.create(model=model, stream=True, **wanted)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return [(choice.delta.content or "", choice.finish_reason) for choice in choices]


@pytest.mark.parametrize("max_tokens", range(16, 32, 3))
def test_whole_and_streamed_answers_equal_the_engines_own(
    engine: RealEngine, gateway: GatewayProcess, max_tokens: int
) -> None:
    wanted: dict[str, Any] = {"messages": MESSAGES, "max_tokens": max_tokens, "temperature": 0}
    own = client(engine.url).chat.completions.create(model="tiny", **wanted)
    answer = client(gateway.url).chat.completions.create(model="chat", **wanted)
    assert answer.choices[0].message.content == own.choices[0].message.content
    assert answer.model == "chat"
    assert answer.usage.completion_tokens == own.usage.completion_tokens
    # A stream is compared with a stream: where the last token ends within a UTF-8 character, whole
    # answers of `transformers serve` have replacement characters for it, and streams have nothing.
    own_chunks = streamed(engine.url, "tiny", wanted)
    assert streamed(gateway.url, "chat", wanted) == own_chunks
    text = "".join(text for text, _ in own_chunks)
    cut = "\N{REPLACEMENT CHARACTER}"
    assert own.choices[0].message.content.rstrip(cut) == text.rstrip(cut)
    assert (state(gateway)["state"], state(gateway)["cause"]) == ("up", None)


def test_a_hundred_streams_end_without_an_error_or_an_ejection(gateway: GatewayProcess) -> None:
    chat = client(gateway.url).chat.completions
    for _ in range(100):
        chunks = list(
            chat.create(model="chat", messages=MESSAGES, max_tokens=4, stream=True, temperature=0)
        )
        assert any(c.choices and c.choices[0].finish_reason for c in chunks)
    assert (state(gateway)["state"], state(gateway)["cause"]) == ("up", None)


def test_an_api_that_the_engine_lacks_is_refused_and_ejects_nothing(
    gateway: GatewayProcess,
) -> None:
    request = urllib.request.Request(
        f"{gateway.url}/v1/embeddings", json.dumps({"model": "chat", "input": "why"}).encode()
    )
    for _ in range(10):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=60)
        assert caught.value.code in (404, 501)
    assert state(gateway)["state"] == "up"


def test_messages_are_served_natively_or_in_translation(gateway: GatewayProcess) -> None:
    body = {"model": "chat", "max_tokens": 8, "messages": MESSAGES}
    request = urllib.request.Request(
        f"{gateway.url}/v1/messages",
        json.dumps(body).encode(),
        {"content-type": "application/json", "anthropic-version": "2023-06-01"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.loads(response.read())
    assert (answer["type"], answer["model"]) == ("message", "chat")
    assert answer["usage"]["output_tokens"] == 8


def test_the_other_engine_serves_when_one_is_killed(tmp_path: Path) -> None:
    with ExitStack() as stack:
        pair = [stack.enter_context(running("llamacpp")) for _ in range(2)]
        gateway = stack.enter_context(served(tmp_path, pair))
        chat = client(gateway.url).chat.completions
        for number in range(40):
            if number == 20:
                pair[0].process.send_signal(signal.SIGKILL)
            assert chat.create(model="chat", messages=MESSAGES, max_tokens=4).choices
        assert state(gateway)["state"] == "down" or state(gateway)["cause"]
