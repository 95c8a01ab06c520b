"""Tests of the command `penstock golden run`, which compares the answers of two engines."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gateway.cli.main import run as penstock
from tests.command_runner import CommandRunner, Result

PROMPTS = "\n".join(
    json.dumps({"messages": [{"role": "user", "content": f"question {number}"}]})
    for number in range(60)
)


def engine_app(wrong_every: int, has_logprobs: bool) -> web.Application:
    # Return an engine that answers every n-th question otherwise; 0: none.
    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["temperature"] == 0
        if body.get("logprobs") and not has_logprobs:
            return web.json_response({"message": "no logprobs"}, status=400)
        number = int(body["messages"][0]["content"].split()[1])
        text = "b" if wrong_every and number % wrong_every == 0 else "a"
        choice: dict[str, Any] = {"message": {"content": text}}
        if has_logprobs:
            choice["logprobs"] = {"content": [{"token": text, "logprob": -0.1}]}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": 1}})

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    made = web.Application()
    made.add_routes([web.post("/v1/chat/completions", chat), web.get("/v1/models", models)])
    return made


@contextmanager
def engine(wrong_every: int = 0, has_logprobs: bool = True) -> Iterator[str]:
    # Serve an engine on a free port in a thread with a loop of its own.
    loop, runner = asyncio.new_event_loop(), web.AppRunner(engine_app(wrong_every, has_logprobs))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    try:
        port = asyncio.run_coroutine_threadsafe(start(), loop).result()
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def run(folder: Path, base: str, candidate: str, *options: str) -> Result:
    file = folder / "prompts.jsonl"
    file.write_text(PROMPTS)
    words = ["golden", "run", str(file), "--base", base, "--candidate", candidate, *options]
    return CommandRunner().invoke(penstock, words)


def test_an_equal_candidate_ends_with_0_and_shows_the_noise_floor(tmp_path: Path) -> None:
    with engine() as base, engine() as candidate:
        result = run(tmp_path, base, candidate)
    assert result.exit_code == 0, result.output
    assert "the base was asked twice" in result.output
    assert "no worse" in result.output


@pytest.mark.parametrize("has_logprobs", [True, False])
def test_a_worse_candidate_ends_with_3(tmp_path: Path, has_logprobs: bool) -> None:
    with engine(has_logprobs=has_logprobs) as base, engine(3, has_logprobs) as candidate:
        result = run(tmp_path, base, candidate, "--json")
        accepted = run(tmp_path, base, candidate, "--fail-if-worse", "90", "--json")
    assert result.exit_code == 3, result.output
    report = json.loads(result.output)
    equal = report["measures"][0]
    assert (equal["name"], equal["floor"], equal["is_worse"]) == ("equal answers", 1.0, True)
    assert equal["candidate"] == pytest.approx(2 / 3)
    assert ("divergence (KL)" in {each["name"] for each in report["measures"]}) is has_logprobs
    assert json.loads(accepted.output)["measures"][0]["is_worse"] is False


def test_an_engine_that_is_not_there_and_a_wrong_file_are_named(tmp_path: Path) -> None:
    with engine() as base:
        gone = run(tmp_path, base, "http://127.0.0.1:9")
    assert gone.exit_code == 1
    assert "http://127.0.0.1:9 lists no model" in " ".join(gone.output.split())
    file = tmp_path / "wrong.jsonl"
    file.write_text("{}\n")
    words = ["golden", "run", str(file), "--base", "http://a", "--candidate", "http://b"]
    wrong = CommandRunner().invoke(penstock, words)
    assert wrong.exit_code == 2
    assert "line 1 is not a request; valid:" in " ".join(wrong.output.split())
