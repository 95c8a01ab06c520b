"""Tests of batch requests that restarts, live requests, cancellation or expiry interrupt."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import openai
import pytest
from openai import OpenAI

from mockgpu.mock_tokenizer import expected_text
from tests.chaos.fleet_processes import MockProcess
from tests.duration_limits import pace
from tests.e2e.processes import GatewayProcess, gateway_process
from tests.e2e.test_batch_api import TOOL, chat, client, create, results, until, upload, wait
from tests.metrics_page import total

LINES, TOKENS = 24, 60
TOKENS_LONG = int(200 * pace())
"""Tokens of an answer that has not ended when it is interrupted, even if tests get little CPU."""
CONFIG = """
models: [{{name: demo-8b, pool: main, resume: {{}}}}]
pools: {{main: {{endpoints: [{{url: '{0}', max_concurrency: 8}}]}}}}
batch: {{dir: '{1}', share: 1, lease: 2s}}
slo: {{classes: {{standard: {{ttft: 60s, tpot: 5s}}, batch: {{ttft: 60s, tpot: 5s, weight: 0.1}}}}}}
"""
"""A configuration with loose latency targets, so that only the capacity of the pool limits the
number of batch requests.
"""


@pytest.fixture
def engine() -> Iterator[MockProcess]:
    mock = MockProcess(0.5)
    try:
        mock.wait_until_ready()
        yield mock
    finally:
        mock.end()


def lines(number: int = LINES, tokens: int = TOKENS) -> list[dict[str, Any]]:
    return [chat(f"line-{at}", f"Question {at}?", max_tokens=tokens) for at in range(number)]


def page(url: str) -> str:
    with urlopen(f"{url}/metrics") as answer:
        return str(answer.read().decode())


def generated(engine: MockProcess) -> float:
    # Return the tokens that the engine has generated since its start.
    return total(page(engine.url), "vllm:generation_tokens_total")


def completed(sdk: OpenAI, batch_id: str) -> int:
    counts = sdk.batches.retrieve(batch_id).request_counts
    return 0 if counts is None else counts.completed


def check_texts(sdk: OpenAI, output_file_id: str | None, asked: list[dict[str, Any]]) -> None:
    found = results(sdk, output_file_id)
    assert set(found) == {line["custom_id"] for line in asked}
    for line in asked:
        body = found[line["custom_id"]]["response"]["body"]
        text = body["choices"][0]["message"]["content"]
        assert text == expected_text(line["body"], line["body"]["max_tokens"])
        assert body["usage"]["completion_tokens"] == line["body"]["max_tokens"]


def test_a_killed_gateway_resumes_its_batch_and_repeats_no_finished_request(
    engine: MockProcess, tmp_path: Path
) -> None:
    config, asked = CONFIG.format(engine.url, tmp_path / "store"), lines()
    for line in asked[:4]:
        line["body"]["max_tokens"] = 4
    set_fault(engine, "slow:x=20:decode")  # so that most requests have not ended at the kill
    with gateway_process(tmp_path, config) as running, client(running.url, "none") as sdk:
        batch_id = create(sdk, upload(sdk, asked)).id
        until(lambda: completed(sdk, batch_id) >= 4)
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
    set_fault(engine, "")
    at_kill = journal_results(tmp_path)
    assert 4 <= at_kill < LINES
    with gateway_process(tmp_path, config) as running, client(running.url, "none") as sdk:
        ended = wait(sdk, batch_id)
        assert ended.status == "completed"
        check_texts(sdk, ended.output_file_id, asked)
        count = total(page(running.admin_url), "penstock_batch_requests_total", outcome="completed")
        assert count == LINES - at_kill
        assert not list((tmp_path / "store" / "open").iterdir())


def set_fault(engine: MockProcess, spec: str) -> None:
    body = json.dumps({"spec": spec}).encode()
    urlopen(Request(f"{engine.url}/mock/fault", body, {"content-type": "application/json"})).close()


def journal_results(folder: Path) -> int:
    (journal,) = (folder / "store").glob("batches/*/*/journal")
    return sum(b'"result"' in line for line in journal.read_bytes().splitlines())


def test_an_answer_that_gives_way_to_live_requests_continues_from_its_tokens(
    engine: MockProcess, tmp_path: Path
) -> None:
    config, asked = CONFIG.format(engine.url, tmp_path / "store"), lines(8, TOKENS_LONG)
    before = generated(engine)
    with gateway_process(tmp_path, config) as running, client(running.url, "none") as sdk:
        batch_id = create(sdk, upload(sdk, asked)).id
        until(lambda: total(page(running.admin_url), "penstock_batch_running") == 8)
        until(lambda: generated(engine) > before + 8 * 30)
        live = 0
        for number in range(4):
            live += burst(running, number)
        ended = wait(sdk, batch_id)
        check_texts(sdk, ended.output_file_id, asked)
        metrics = page(running.admin_url)
        kept = total(metrics, "penstock_batch_preemptions_total", result="kept")
        assert kept >= 4
        assert total(metrics, "penstock_batch_preemptions_total", result="restarted") == 0
        assert total(metrics, "penstock_batch_kept_tokens_total") >= 20
        stopped = total(metrics, "penstock_batch_preemptions_total")
        by_reason = {"code": "0", "reason": "preempted"}
        assert total(metrics, "penstock_requests_total", **by_reason) == stopped
        assert total(metrics, "penstock_client_disconnects_total") == 0
        # At most a few tokens were on their way when a connection was closed.
        extra = generated(engine) - before - 8 * TOKENS_LONG - live
        assert 0 <= extra <= 8 * kept


def burst(running: GatewayProcess, number: int) -> int:
    async def ask() -> int:
        url = f"{running.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as sdk:
            question = f"Live {number}?"
            answers = await asyncio.gather(
                *(
                    sdk.chat.completions.create(
                        model="demo-8b",
                        messages=[{"role": "user", "content": f"{question} {at}"}],
                        max_tokens=10,
                    )
                    for at in range(8)
                )
            )
        return sum(answer.usage.completion_tokens for answer in answers if answer.usage)

    return asyncio.run(ask())


@pytest.mark.parametrize("members", [{"n": 2}, {"logprobs": True}, {"tools": [TOOL]}])
def test_requests_that_cannot_be_continued_start_again_and_are_counted(
    engine: MockProcess, tmp_path: Path, members: dict[str, Any]
) -> None:
    config = CONFIG.format(engine.url, tmp_path / "store")
    number = range(8)
    asked = [
        chat(f"line-{at}", f"Question {at}?", max_tokens=TOKENS_LONG, **members) for at in number
    ]
    with gateway_process(tmp_path, config) as running, client(running.url, "none") as sdk:
        batch_id = create(sdk, upload(sdk, asked)).id
        until(lambda: total(page(running.admin_url), "penstock_batch_running") == 8)
        burst(running, 0)
        ended = wait(sdk, batch_id)
        metrics = page(running.admin_url)
        assert total(metrics, "penstock_batch_preemptions_total", result="restarted") >= 1
        assert total(metrics, "penstock_batch_preemptions_total", result="kept") == 0
        found = results(sdk, ended.output_file_id)
    for line in asked:
        choices = found[line["custom_id"]]["response"]["body"]["choices"]
        texts = [choice["message"]["content"] for choice in choices]
        count = members.get("n", 1)
        expected = [expected_text(line["body"], TOKENS_LONG, choice) for choice in range(count)]
        assert texts == expected


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_cancelled_or_expired_batch_has_one_result_per_request(
    engine: MockProcess, tmp_path: Path, is_cancelled: bool
) -> None:
    config, asked = CONFIG.format(engine.url, tmp_path / "store"), lines(60, int(60 * pace()))
    for line in asked[:8]:
        line["body"]["max_tokens"] = 4  # so that some requests end soon after the start
    with gateway_process(tmp_path, config) as running, client(running.url, "none") as sdk:
        file_id = upload(sdk, asked)
        window = "24h" if is_cancelled else f"{3 * pace():.0f}s"
        options: Any = {"input_file_id": file_id, "completion_window": window}
        batch_id = sdk.batches.create(endpoint="/v1/chat/completions", **options).id
        sdk.files.delete(file_id)  # the batch has its own link to the content
        until(lambda: completed(sdk, batch_id) >= 1)
        if is_cancelled:
            assert sdk.batches.cancel(batch_id).status == "cancelling"
        ended = wait(sdk, batch_id)
        state, code = ("cancelled", "batch_cancelled")
        if not is_cancelled:
            state, code = ("expired", "batch_expired")
        assert ended.status == state
        good, bad = results(sdk, ended.output_file_id), results(sdk, ended.error_file_id)
        assert good.keys() | bad.keys() == {line["custom_id"] for line in asked}
        assert len(good) + len(bad) == len(asked)
        assert {line["error"]["code"] for line in bad.values()} == {code}
        assert ended.request_counts is not None
        assert ended.request_counts.completed == len(good)
        with pytest.raises(openai.ConflictError):
            sdk.batches.cancel(batch_id)


def test_a_batch_near_the_end_of_its_window_gets_places_in_a_pool_that_is_always_full(
    engine: MockProcess, tmp_path: Path
) -> None:
    config = CONFIG.format(engine.url, tmp_path / "store").replace("share: 1", "reserve: 0.5")
    asked = lines(40, 20)
    with (
        gateway_process(tmp_path, config) as running,
        client(running.url, "none") as sdk,
        endless_live_requests(running.url, 24),
    ):
        until(lambda: total(page(running.admin_url), "penstock_waiting") > 0)
        options: Any = {
            "input_file_id": upload(sdk, asked),
            "completion_window": f"{12 * pace():.0f}s",
        }
        batch_id = sdk.batches.create(endpoint="/v1/chat/completions", **options).id
        until(lambda: schedule(sdk, batch_id) in ("hurried", "behind"))
        until(lambda: total(page(running.admin_url), "penstock_batch_reserved_places") >= 1)
        ended = wait(sdk, batch_id)
        assert schedule(sdk, batch_id) is None
        assert len(results(sdk, ended.output_file_id)) >= 4
        assert total(page(running.admin_url), "penstock_batch_reserved_places") == 0


def schedule(sdk: OpenAI, batch_id: str) -> Any:
    return (sdk.batches.retrieve(batch_id).model_extra or {})["schedule"]


@contextmanager
def endless_live_requests(url: str, clients: int) -> Iterator[None]:
    over = threading.Event()

    def ask() -> None:
        with client(url, "none") as sdk:
            while not over.is_set():
                sdk.chat.completions.create(
                    model="demo-8b",
                    messages=[{"role": "user", "content": "Live?"}],
                    max_tokens=20,
                )

    with ThreadPoolExecutor(clients) as threads:
        asking = [threads.submit(ask) for _ in range(clients)]
        try:
            yield
        finally:
            over.set()
        assert not any(future.exception() for future in asking)


def test_workers_share_a_batch_folder_and_one_of_them_owns_each_batch(
    engine: MockProcess, tmp_path: Path
) -> None:
    config = CONFIG.format(engine.url, tmp_path / "store") + "workers: 2\n"
    with gateway_process(tmp_path, config) as running:
        asked = lines(20, 20)
        for _ in range(2):  # a new connection each, so that both workers serve some
            with client(running.url, "none") as sdk:
                batch_id = create(sdk, upload(sdk, asked)).id
            with client(running.url, "none") as sdk:
                ended = wait(sdk, batch_id)
                check_texts(sdk, ended.output_file_id, asked)
        metrics = page(running.admin_url)
        assert total(metrics, "penstock_batch_requests_total", outcome="completed") == 40


def stop_between_writes(process: int, store: Path) -> None:
    # Stop a process (SIGSTOP) while it holds no lock on a file of the store. A process that is
    # stopped within a write keeps its lock, and with it the batch, until it continues or dies.
    while True:
        os.kill(process, signal.SIGSTOP)
        if not any(is_locked(path) for path in (*store.rglob("owner"), store / "commits")):
            return
        os.kill(process, signal.SIGCONT)
        time.sleep(0.01)


def is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_process_that_hangs_loses_its_batch_and_does_no_harm_when_it_goes_on(
    engine: MockProcess, tmp_path: Path
) -> None:
    config, asked = CONFIG.format(engine.url, tmp_path / "store"), lines()
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with (
        gateway_process(tmp_path / "first", config) as hung,
        client(hung.url, "none") as hung_sdk,
    ):
        batch_id = create(hung_sdk, upload(hung_sdk, asked)).id
        until(lambda: completed(hung_sdk, batch_id) >= 2)
        stop_between_writes(hung.pid, tmp_path / "store")
        try:
            with (
                gateway_process(tmp_path / "second", config) as running,
                client(running.url, "none") as sdk,
            ):
                ended = wait(sdk, batch_id)
        finally:
            os.kill(hung.pid, signal.SIGCONT)
        # Until it has to renew its lease, the process believes that it still owns the batch.
        until(lambda: hung_sdk.batches.retrieve(batch_id) == ended)
        until(lambda: total(page(hung.admin_url), "penstock_batch_running") == 0)
        assert ended.status == "completed"
        check_texts(hung_sdk, ended.output_file_id, asked)
