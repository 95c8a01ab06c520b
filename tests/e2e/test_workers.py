"""Tests of two worker processes behind one port: shared state, admin server, reloads, failures."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics

from tests.duration_limits import PATIENCE_S, pace
from tests.e2e.processes import GatewayProcess, gateway_process, mock_fleet
from tests.e2e.restart_traffic import is_alive
from tests.e2e.shared_fleet import (
    CACHE_FIRST,
    all_messages_delivered,
    endpoints,
    metric,
    metrics_page,
    wait_until,
)
from tests.metrics_page import series

VERSION = "penstock_config_version_info"
BODY = {"model": "demo-8b", "max_tokens": 2}


@pytest.fixture(scope="module")
def engines() -> Iterator[list[str]]:
    with mock_fleet() as urls:
        yield urls


def config(engines: list[str], workers: int, policy: str = "prefix_aware") -> str:
    listed = ", ".join(f"{{url: '{url}', max_concurrency: 64}}" for url in engines)
    return f"workers: {workers}\npools: {{main: {{policy: {policy}, endpoints: [{listed}]}}}}\n"


@pytest.fixture(scope="module")
def two(
    tmp_path_factory: pytest.TempPathFactory, engines: list[str]
) -> Iterator[tuple[GatewayProcess, Path]]:
    folder = tmp_path_factory.mktemp("workers")
    with gateway_process(folder, config(engines, 2, CACHE_FIRST)) as running:
        yield running, folder / "gateway.yaml"
        assert "Traceback" not in running.stderr_text, running.stderr_text


def worker_pids(running: GatewayProcess) -> list[int]:
    pids = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    return [int(pid) for pid in pids]


def call_admin(
    running: GatewayProcess,
    path: str,
    method: str = "GET",
    body: bytes | None = None,
    **headers: str,
) -> tuple[int, Any]:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(running.admin_url + path, body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


async def ask(url: str, prompt: str) -> dict[str, Any]:
    # Send a request that must succeed, and return its usage.
    #
    # It uses a new connection, so that the kernel chooses the worker.
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/completions", json=BODY | {"prompt": prompt}) as answer,
    ):
        assert answer.status == 200, await answer.text()
        usage: dict[str, Any] = (await answer.json())["usage"]
        return usage


async def test_cached_prompts_are_found_by_every_worker(
    two: tuple[GatewayProcess, Path], engines: list[str], tmp_path: Path
) -> None:
    async def share(running: GatewayProcess, seed: int) -> float:
        cached_tokens, total, url = 0, 0, running.url
        prompts = [
            "".join(Random(f"{seed} {number}").choices("abcdef ghij", k=8000))
            for number in range(24)
        ]
        for turn in range(3):
            for prompt in prompts:
                usage = await ask(url, prompt + "more words " * 40 * turn)
                cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
                total += usage["prompt_tokens"]
            if running is not alone:
                wait_until(all_messages_delivered([running], "picks"))
        return cached_tokens / total

    with gateway_process(tmp_path, config(engines, 1, CACHE_FIRST)) as alone:
        one = await share(alone, 1)
    both = await share(two[0], 2)
    assert one > 0.5
    assert abs(both - one) <= 0.02
    assert metric(two[0], "penstock_requests_total") == 72
    assert metric(two[0], "penstock_workers") == 2
    assert metric(two[0], "penstock_shared_up") == 1
    assert len(endpoints(two[0])) == 2


async def test_an_openmetrics_scrape_has_exemplars_of_all_workers(
    two: tuple[GatewayProcess, Path],
) -> None:
    running, _ = two
    await ask(running.url, "a prompt")
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    request = urllib.request.Request(f"{running.admin_url}/metrics", headers=accept)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        families = {family.name: family for family in openmetrics(answer.read().decode())}
    marked = [
        sample.exemplar for sample in families["penstock_ttft_seconds"].samples if sample.exemplar
    ]
    assert marked
    assert all(
        call_admin(running, f"/explain/{exemplar.labels['request_id']}")[0] == 200
        for exemplar in marked
    )
    assert families["penstock_workers"].samples[0].value == 2


def test_the_live_view_covers_all_workers(two: tuple[GatewayProcess, Path]) -> None:
    running, _ = two
    _, live_view = call_admin(running, "/live")
    assert live_view["totals"]["since_start"]["requests"] == metric(
        running, "penstock_requests_total"
    )
    assert (
        sum(endpoint["served"] for endpoint in live_view["endpoints"])
        == live_view["totals"]["ttft"]["count"]
    )
    assert len(live_view["endpoints"]) == 2
    assert live_view["config"]["version"] == 1
    with urllib.request.urlopen(f"{running.admin_url}/live/stream", timeout=PATIENCE_S) as stream:
        frame = json.loads(stream.readline().removeprefix(b"data: "))
    assert frame["totals"]["since_start"] == live_view["totals"]["since_start"]
    _, listed = call_admin(running, "/requests?limit=200")
    assert len(listed["requests"]) == min(200, live_view["totals"]["since_start"]["requests"])
    assert listed["size"] == 1024
    assert call_admin(running, f"/explain/{listed['requests'][-1]['id']}")[1]["status"] == 200
    assert (call_admin(running, "/shadow"), call_admin(running, "/canary")) == (
        (200, {"shadows": []}),
        (200, {"canaries": []}),
    )
    with urllib.request.urlopen(running.admin_url, timeout=PATIENCE_S) as front:
        assert front.headers["X-Frame-Options"] == "DENY"


async def test_a_manually_drained_endpoint_gets_no_request_from_any_worker(
    two: tuple[GatewayProcess, Path],
) -> None:
    running, _ = two
    name = endpoints(running)[0]["name"]
    assert call_admin(running, f"/endpoints/{name}/drain", "POST")[1]["drained"] is True
    assert name not in await served_by(running, 12)
    assert call_admin(running, f"/endpoints/{name}/undrain", "POST")[1]["drained"] is False


async def served_by(running: GatewayProcess, requests: int) -> set[str]:
    # Send requests on new connections, so that the kernel chooses the worker for each.
    #
    # Returns the endpoints that served them.
    names = set()
    for number in range(requests):
        async with (
            aiohttp.ClientSession() as http,
            http.post(
                f"{running.url}/v1/completions", json=BODY | {"prompt": f"elsewhere {number}"}
            ) as answer,
        ):
            names.add(answer.headers["x-penstock-endpoint"])
    return names


def test_a_change_is_applied_by_all_workers_or_by_none(two: tuple[GatewayProcess, Path]) -> None:
    running, file = two
    text = file.read_bytes()
    code, answer = call_admin(
        running, "/config", "PUT", text.replace(b"cache_aware", b"cache_awre")
    )
    assert (code, answer["result"]) == (400, "rejected")
    assert answer["problems"][0]["line"] == 5
    assert call_admin(running, "/config", "PUT", text, If_Match='"9-abc"')[0] == 412
    code, answer = call_admin(
        running, "/config", "PUT", text.replace(CACHE_FIRST.encode(), b"least_loaded")
    )
    assert (code, answer["result"], answer["version"]) == (200, "applied", 2)
    versions = [line for line in series(metrics_page(running), VERSION) if line.endswith("1.0")]
    assert versions
    assert all('version="2"' in line for line in versions)
    code, answer = call_admin(running, "/config/rollback", "POST")
    assert (code, answer["result"], answer["version"]) == (200, "applied", 3)
    assert (
        call_admin(running, "/config")[1]["config"]["pools"]["main"]["policy"]["name"]
        == CACHE_FIRST
    )


def test_an_edit_of_the_file_is_applied_by_all_workers_and_logged_once(
    two: tuple[GatewayProcess, Path],
) -> None:
    running, file = two
    fresh = file.with_suffix(".new")
    fresh.write_text(file.read_text().replace(CACHE_FIRST, "round_robin"))
    fresh.replace(file)
    wait_until(lambda: "reloaded gateway.yaml v4" in running.stderr_text)
    assert running.stderr_text.count("reloaded gateway.yaml v4") == 1
    assert (
        call_admin(running, "/config")[1]["config"]["pools"]["main"]["policy"]["name"]
        == "round_robin"
    )


async def test_a_dead_worker_is_replaced_by_one_with_the_current_configuration(
    two: tuple[GatewayProcess, Path],
) -> None:
    running, file = two
    text = file.read_bytes().replace(b"round_robin", b"least_loaded")
    assert call_admin(running, "/config", "PUT", text)[1]["result"] == "applied"
    before = worker_pids(running)
    os.kill(before[0], signal.SIGKILL)
    wait_until(lambda: metric(running, "penstock_worker_deaths_total") == 1)
    await asyncio.gather(*(ask(running.url, f"meanwhile {number}") for number in range(20)))
    wait_until(lambda: metric(running, "penstock_workers") == 2)
    assert set(worker_pids(running)) != set(before)
    in_force = [line for line in series(metrics_page(running), VERSION) if line.endswith("1.0")]
    assert {line.partition('version="')[2][0] for line in in_force} == {"5"}
    assert call_admin(running, "/config", "PUT", text)[1]["result"] == "unchanged"


async def test_replacing_all_workers_under_load_fails_no_request_and_keeps_drains(
    two: tuple[GatewayProcess, Path],
) -> None:
    running, _ = two
    before, done = set(worker_pids(running)), 0
    name = endpoints(running)[0]["name"]
    call_admin(running, f"/endpoints/{name}/drain", "POST")

    async def user(number: int) -> None:
        nonlocal done
        while "worker processes have been replaced" not in running.stderr_text:
            await ask(running.url, f"user {number} says {done}")
            done += 1

    users = asyncio.gather(*(user(number) for number in range(4)))
    os.kill(running.pid, signal.SIGUSR2)
    await users
    assert done > 20
    wait_until(lambda: len(worker_pids(running)) == 2)
    assert not before & set(worker_pids(running))
    assert call_admin(running, "/config")[1]["version"] == 5
    assert name not in await served_by(running, 12)
    assert call_admin(running, f"/endpoints/{name}/undrain", "POST")[1]["drained"] is False


def test_new_workers_keep_the_version_number_when_the_state_folder_has_only_an_older_one(
    tmp_path: Path, engines: list[str]
) -> None:
    state = tmp_path / "state"
    with gateway_process(
        tmp_path, config(engines, 2) + f"reload: {{state_dir: {state}}}\n"
    ) as running:
        text = (tmp_path / "gateway.yaml").read_bytes()
        for policy in (b"round_robin", b"least_loaded"):
            assert (
                call_admin(running, "/config", "PUT", text.replace(b"prefix_aware", policy))[0]
                == 200
            )
        wait_until(lambda: len(list(state.glob("v*.json"))) == 3)
        for number in (2, 3):  # records are missing, as happens on a full disk
            (state / f"v{number:08d}.json").unlink()
        os.kill(running.pid, signal.SIGUSR2)
        wait_until(lambda: "worker processes have been replaced" in running.stderr_text)
        in_force = [line for line in series(metrics_page(running), VERSION) if line.endswith("1.0")]
        assert {line.partition('version="')[2][0] for line in in_force} == {"3"}
        assert call_admin(running, "/config")[1]["version"] == 3
        assert call_admin(running, "/config", "PUT", text)[1]["version"] == 4
        assert call_admin(running, "/config")[1]["version"] == 4


def readiness(running: GatewayProcess) -> str:
    # Return the body of /readyz, which load balancers read.
    try:
        with urllib.request.urlopen(f"{running.admin_url}/readyz", timeout=PATIENCE_S) as answer:
            return str(answer.read().decode().strip())
    except urllib.error.HTTPError as error:
        return error.read().decode().strip()


def test_shutdown_waits_for_balancers_and_open_responses_and_ends_all_workers(
    tmp_path: Path,
) -> None:
    grace = f"timeouts: {{grace: {2 * pace():.1f}s}}\n"
    with (
        mock_fleet("--speed", "1") as slow,
        gateway_process(tmp_path, config(slow, 2) + grace) as running,
    ):
        pids = worker_pids(running)
        body = json.dumps(
            {
                "model": "demo-8b",
                "prompt": "tell",
                "max_tokens": 30,
                "stream": True,
                "ignore_eos": True,
            }
        )
        request = urllib.request.Request(
            f"{running.url}/v1/completions", body.encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            first = answer.readline()
            os.kill(running.pid, signal.SIGTERM)
            wait_until(lambda: readiness(running) == "draining")
            for number in range(4):  # reaches both workers
                asyncio.run(ask(running.url, f"late {number}"))
            assert first.startswith(b"data: ")
            assert b"[DONE]" in answer.read()
        wait_until(lambda: not running.is_alive)
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_workers_exit_when_their_supervisor_is_killed(tmp_path: Path, engines: list[str]) -> None:
    with gateway_process(tmp_path, config(engines, 2)) as running:
        pids = worker_pids(running)
        assert len(pids) == 2
        os.kill(running.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, pids)))


SIZED_FOR = "\n".join(
    [
        "sized_for:",
        "  main:",
        *(
            f"    {name}: {[1.0] + [0.0] * (bins - 1)}"
            for name, bins in (("prompt", 21), ("output", 17), ("uncached", 10), ("turns", 9))
        ),
        "",
    ]
)


async def test_turns_and_new_blocks_are_counted_over_all_workers(
    tmp_path: Path, engines: list[str]
) -> None:
    async def turn(url: str, session: int, number: int) -> None:
        body = BODY | {"prompt": f"{session} " + "many words " * 800 * number}
        async with (
            aiohttp.ClientSession(headers={"x-session-id": f"s{session}"}) as http,
            http.post(f"{url}/v1/completions", json=body) as answer,
        ):
            assert answer.status == 200, await answer.text()

    def open_window(running: GatewayProcess) -> dict[str, Any]:
        _, page = call_admin(running, "/drift")
        window: dict[str, Any] = page["pools"][0]["open_window"]
        return window

    with gateway_process(tmp_path, config(engines, 2) + SIZED_FOR) as running:
        for number in range(1, 5):
            for session in range(8):
                await turn(running.url, session, number)
            # Wait until the supervisor has counted this turn before the next one is sent.
            wait_until(lambda number=number: open_window(running)["requests"] == 8 * number)  # type: ignore[misc]
        counts = open_window(running)["counts"]
        assert counts["turns"][:3] == [8, 16, 8]
        # 4 blocks of 2 KiB are new in each turn of 4, 8, 12 and 16: shares of 1, 1/2, 1/3, 1/4.
        assert counts["uncached"][9] == 8
        assert sum(counts["uncached"][2:7]) == 24
        assert call_admin_status(running, "/drift/records") == 404


def call_admin_status(running: GatewayProcess, path: str) -> int:
    try:
        with urllib.request.urlopen(running.admin_url + path, timeout=PATIENCE_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


TENANT = "tenants: [{name: a, key: '${TENANT_KEY}', limits: {concurrent_requests: 2}}]\n"


async def test_a_limit_on_a_tenants_concurrent_requests_holds_over_all_workers(
    tmp_path: Path,
) -> None:
    key = "sk-of-a-tenant-with-two-workers"
    headers = {"Authorization": f"Bearer {key}"}

    async def status(url: str) -> int:
        # Send a short request over a new connection, so that the kernel chooses the worker.
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(f"{url}/v1/completions", json=BODY | {"prompt": "short"}) as answer,
        ):
            await answer.read()
            return answer.status

    with (
        mock_fleet("--speed", "0.1") as slow,
        gateway_process(tmp_path, config(slow, 2) + TENANT, TENANT_KEY=key) as running,
    ):
        long = BODY | {"prompt": "long", "max_tokens": 4000, "stream": True, "ignore_eos": True}
        async with aiohttp.ClientSession(headers=headers) as http:
            streams = [await http.post(f"{running.url}/v1/completions", json=long) for _ in "ab"]
            for stream in streams:
                await stream.content.readany()
            refused = 0
            while refused < 12:  # until both workers know of both streams
                refused = refused + 1 if await status(running.url) == 429 else 0
            assert metric(running, "penstock_tenant_inflight", tenant="a") == 2.0
            for stream in streams:
                stream.close()
        while await status(running.url) == 429:
            await asyncio.sleep(0.05)
