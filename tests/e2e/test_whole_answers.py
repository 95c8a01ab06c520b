"""Tests of engines that send one JSON body in place of a stream, or only a part of it."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from bench.clients.threaded_server import threaded_server
from tests.duration_limits import PATIENCE_S, pace
from tests.e2e.processes import PATIENCE, GatewayProcess, gateway_process
from tests.metrics_page import total

MODEL = "demo"
TEXT = "The gate opens."
USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
NAMED_USAGE = {"input_tokens": 7, "output_tokens": 5, "total_tokens": 12}
ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": TEXT},
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
    },
    "/v1/completions": {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "text": TEXT, "finish_reason": "stop"}],
        "usage": USAGE,
    },
    "/v1/responses": {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": MODEL,
        "status": "completed",
        "output": [
            {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": TEXT, "annotations": []}],
            }
        ],
        "usage": NAMED_USAGE,
    },
    "/v1/messages": {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": TEXT}],
        "stop_reason": "end_turn",
        "usage": NAMED_USAGE,
    },
}
LISTS = {
    "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model"}]},
    "/openapi.json": {"paths": {path: {} for path in ANSWERS}},
}
PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
}


def _response(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


@contextmanager
def whole_engine(*, cut: int = 0, wait_s: float = 0.0, is_serial: bool = False) -> Iterator[str]:
    # Run an engine that answers with JSON, without its last `cut` bytes, whatever was asked for.
    #
    # is_serial  whether it computes one request at a time
    slots = asyncio.Semaphore(1 if is_serial else 1000)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ", 2)[1].decode()
                if head.startswith(b"GET"):
                    writer.write(_response(json.dumps(LISTS.get(path, {})).encode()))
                    continue
                lines = head.lower().split(b"\r\n")
                length = next(line for line in lines if line.startswith(b"content-length:"))
                await reader.readexactly(int(length[15:]))
                async with slots:
                    await asyncio.sleep(wait_s)
                body = json.dumps(ANSWERS[path]).encode()
                writer.write(_response(body[: len(body) - cut]))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            writer.close()

    with threaded_server(serve) as port:
        yield f"http://127.0.0.1:{port}"


@contextmanager
def gateway(folder: Path, *urls: str, patience: str = PATIENCE) -> Iterator[GatewayProcess]:
    endpoints = "".join(f"\n      - {{url: '{url}'}}" for url in urls)
    config = f"models:\n  - {{name: {MODEL}, pool: main}}\npools:\n  main:\n    endpoints:"
    with gateway_process(folder, config + endpoints + "\n", patience) as running:
        yield running
        assert "Traceback" not in running.stderr_text, running.stderr_text


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with whole_engine() as url, gateway(tmp_path_factory.mktemp("whole"), url) as running:
        yield running


@pytest.fixture(scope="module")
def sdk(whole: GatewayProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{whole.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def post(url: str, path: str, *, stream: bool = False) -> tuple[int, str, bytes]:
    body = json.dumps({"model": MODEL, "stream": stream, **PROMPTS[path]}).encode()
    request = urllib.request.Request(url + path, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.headers["content-type"], answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["content-type"], error.read()


def test_the_sdk_streams_a_chat_that_the_engine_sent_whole(sdk: OpenAI) -> None:
    chunks = list(
        sdk.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == TEXT
    assert [choice.finish_reason for choice in choices] == [None, "stop"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def test_the_sdk_streams_a_completion_that_the_engine_sent_whole(sdk: OpenAI) -> None:
    chunks = list(sdk.completions.create(model=MODEL, prompt="hi", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_sdk_streams_a_response_that_the_engine_sent_whole(sdk: OpenAI) -> None:
    with sdk.responses.stream(model=MODEL, input="hi") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == TEXT
    assert final.usage is not None
    assert final.usage.output_tokens == 5


def test_a_message_that_the_engine_sent_whole_is_a_stream_too(whole: GatewayProcess) -> None:
    status, kind, body = post(whole.url, "/v1/messages", stream=True)
    assert (status, kind) == (200, "text/event-stream")
    assert body.startswith(b"event: message_start\n")
    assert body.endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')


def test_tokens_of_whole_answers_are_counted_and_no_endpoint_is_ejected(
    tmp_path: Path,
) -> None:
    with (
        ExitStack() as stack,
        gateway(
            tmp_path, *(stack.enter_context(whole_engine(wait_s=0.05)) for _ in range(2))
        ) as running,
    ):
        for _ in range(40):
            assert post(running.url, "/v1/chat/completions", stream=True)[0] == 200
        with urllib.request.urlopen(f"{running.admin_url}/metrics", timeout=20) as page:
            metrics = page.read().decode()
    assert total(metrics, "penstock_completion_tokens_total") == 40 * USAGE["completion_tokens"]
    assert total(metrics, "penstock_prompt_tokens_total") == 40 * USAGE["prompt_tokens"]
    assert total(metrics, "penstock_ejections_total") == 0


@pytest.mark.parametrize("path", sorted(ANSWERS))
def test_a_cut_answer_is_retried_at_another_endpoint(tmp_path: Path, path: str) -> None:
    with (
        whole_engine(cut=1) as broken,
        whole_engine() as well,
        gateway(tmp_path, broken, well) as running,
    ):
        for _ in range(6):
            status, _, body = post(running.url, path)
            answer = json.loads(body)
            assert status == 200
            if path == "/v1/messages":  # a chat of the engine, because of its cache salt
                assert answer["content"] == ANSWERS[path]["content"]
            else:
                assert answer == ANSWERS[path]


@pytest.mark.parametrize("path", sorted(ANSWERS))
@pytest.mark.parametrize("stream", [False, True])
def test_cut_answers_alone_are_a_502_in_the_api_s_own_shape(
    tmp_path: Path, path: str, stream: bool
) -> None:
    with whole_engine(cut=1) as broken, gateway(tmp_path, broken) as running:
        status, _, body = post(running.url, path, stream=stream)
    answer = json.loads(body)
    assert status == 502
    assert "malformed" in answer["error"]["message"]
    assert answer.get("type") == ("error" if path == "/v1/messages" else None)


def test_an_engine_that_computes_one_request_at_a_time_is_not_taken_for_stalled(
    tmp_path: Path,
) -> None:
    # The slow engine's kind is not declared, so it counts as vLLM. The gateway's requests for a
    # test token wait in its queue.
    limit = f"{300 * pace():.0f}ms"
    patience = f"health: {{progress: {limit}, timeout: {limit}}}\n"
    with (
        whole_engine(wait_s=1.5 * pace(), is_serial=True) as slow,
        gateway(tmp_path, slow, patience=patience) as running,
        ThreadPoolExecutor() as threads,
    ):
        url = running.url
        answers = list(threads.map(lambda _: post(url, "/v1/completions"), range(4)))
        assert [status for status, _, _ in answers] == [200] * 4
        assert "stalled" not in running.stderr_text
        assert "ejected" not in running.stderr_text
