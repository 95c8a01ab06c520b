"""Tests of two gateways that share batches in one S3 bucket.

Each batch has one owner, also after its gateway was killed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import openai
import pytest
from openai import OpenAI

from tests.chaos.fleet_processes import MockProcess
from tests.duration_limits import pace
from tests.e2e.processes import GatewayProcess, gateway_process
from tests.e2e.test_batch_api import KEYS, client, create, results, until, upload, wait
from tests.e2e.test_batch_restart import (
    TOKENS_LONG,
    burst,
    check_texts,
    completed,
    generated,
    lines,
    page,
)
from tests.metrics_page import total
from tests.ports import free_port
from tests.s3_server import BUCKET, s3_process
from tests.s3_server import KEYS as S3_KEYS

LEASE_S = 3.0
CONFIG = """
models: [{{name: demo-8b, pool: main, resume: {{}}}}]
pools: {{main: {{endpoints: [{{url: '{engine}', max_concurrency: 8}}]}}}}
batch:
  s3:
    bucket: {bucket}
    endpoint_url: {s3}
    region: us-east-1
    access_key_id: '${{AWS_ACCESS_KEY_ID}}'
    secret_access_key: '${{AWS_SECRET_ACCESS_KEY}}'
  share: 1
  lease: {lease}s
{more}
slo: {{classes: {{standard: {{ttft: 60s, tpot: 5s}}, batch: {{ttft: 60s, tpot: 5s, weight: 0.1}}}}}}
"""
TENANTS = """
tenants:
  - {name: acme, key: '${ACME_KEY}'}
  - {name: rival, key: '${RIVAL_KEY}'}
"""


class Fleet(NamedTuple):
    gateways: list[GatewayProcess]
    engine: MockProcess
    s3: str


@pytest.fixture
def engine() -> Iterator[MockProcess]:
    mock = MockProcess(0.5)
    try:
        mock.wait_until_ready()
        yield mock
    finally:
        mock.end()


@pytest.fixture
def fleet(engine: MockProcess, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    # Run two gateways with one engine and one bucket. The parameter is YAML for the configuration.
    more = getattr(request, "param", "")
    with ExitStack() as stack:
        s3 = stack.enter_context(s3_process())
        values = {"engine": engine.url, "bucket": BUCKET, "s3": s3, "lease": LEASE_S}
        config = CONFIG.format(**values, more=more)
        gateways = []
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            running = gateway_process(tmp_path / name, config, **KEYS, **S3_KEYS)
            gateways.append(stack.enter_context(running))
        yield Fleet(gateways, engine, s3)


def finished(gateway: GatewayProcess) -> float:
    text = page(gateway.admin_url)
    return total(text, "penstock_batch_requests_total", outcome="completed")


def owner_and_other(fleet: Fleet) -> tuple[GatewayProcess, GatewayProcess]:
    # Return the gateway that runs requests of the only batch, and the one that does not.
    running: list[float] = []

    def is_running() -> bool:
        running[:] = [
            total(page(gateway.admin_url), "penstock_batch_running") for gateway in fleet.gateways
        ]
        return any(running)

    until(is_running)
    assert min(running) == 0
    first, second = fleet.gateways
    return (first, second) if running[0] else (second, first)


def test_a_batch_goes_to_another_gateway_when_its_owner_is_killed(fleet: Fleet) -> None:
    asked = lines(64, int(60 * pace()))
    with client(fleet.gateways[0].url, "sk-acme") as sdk:
        batch_id = create(sdk, upload(sdk, asked)).id
        owner, other = owner_and_other(fleet)
        with client(other.url, "sk-acme") as observer:
            until(lambda: completed(observer, batch_id) >= 4)
            os.kill(owner.pid, signal.SIGKILL)
            owner.wait()
            stored = completed(observer, batch_id)
            ended = wait(observer, batch_id)
            assert ended.status == "completed"
            assert 4 <= stored < len(asked)
            check_texts(observer, ended.output_file_id, asked)
            assert ended.error_file_id is None
            # The other gateway ran what the journal did not have, and nothing else.
            assert 0 < finished(other) <= len(asked) - stored
    for secret in S3_KEYS.values():
        assert not any(secret in gateway.stderr_text for gateway in fleet.gateways)


def test_kept_tokens_are_continued_by_the_gateway_that_takes_a_batch_over(fleet: Fleet) -> None:
    asked = lines(8, TOKENS_LONG)
    before = generated(fleet.engine)
    with client(fleet.gateways[0].url, "sk-acme") as sdk:
        batch_id = create(sdk, upload(sdk, asked)).id
        owner, other = owner_and_other(fleet)
        until(lambda: total(page(owner.admin_url), "penstock_batch_running") == 8)
        until(lambda: generated(fleet.engine) > before + 8 * 40)
        # A gateway that stops stores the parts of all answers, and gives up its batches.
        os.kill(owner.pid, signal.SIGTERM)
        owner.wait()
        at_stop = generated(fleet.engine) - before
        with client(other.url, "sk-acme") as observer:
            ended = wait(observer, batch_id)
            check_texts(observer, ended.output_file_id, asked)
        extra = generated(fleet.engine) - before - 8 * TOKENS_LONG
        assert at_stop >= 8 * 40
        assert 0 <= extra <= 8 * 8 * pace()


def test_tokens_kept_in_the_journal_outlive_a_killed_owner(fleet: Fleet) -> None:
    asked = lines(8, TOKENS_LONG)
    before = generated(fleet.engine)
    with client(fleet.gateways[0].url, "sk-acme") as sdk:
        batch_id = create(sdk, upload(sdk, asked)).id
        owner, other = owner_and_other(fleet)
        until(lambda: total(page(owner.admin_url), "penstock_batch_running") == 8)
        until(lambda: generated(fleet.engine) > before + 8 * 60)
        # These requests pre-empt requests of the batch, whose parts are stored.
        live = burst(owner, 0)
        kept = "penstock_batch_preemptions_total"
        until(lambda: total(page(owner.admin_url), kept, result="kept") >= 4)
        tokens = total(page(owner.admin_url), "penstock_batch_kept_tokens_total")
        until(lambda: generated(fleet.engine) > before + live + tokens + 8 * 20)
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        at_kill = generated(fleet.engine) - before - live
        with client(other.url, "sk-acme") as observer:
            ended = wait(observer, batch_id)
            check_texts(observer, ended.output_file_id, asked)
        repeated = generated(fleet.engine) - before - live - 8 * TOKENS_LONG
        # Tokens in the journal are not generated again; tokens after its last entry are.
        assert repeated <= at_kill - tokens + 8 * 8 * pace()


def test_an_owner_that_hangs_does_no_harm_when_it_goes_on(fleet: Fleet) -> None:
    asked = lines(24, 240)  # so long that the batch ends neither before the signal nor unseen
    with client(fleet.gateways[0].url, "sk-acme") as sdk:
        batch_id = create(sdk, upload(sdk, asked)).id
    hung, other = owner_and_other(fleet)
    with client(other.url, "sk-acme") as sdk, client(hung.url, "sk-acme") as hung_sdk:
        until(lambda: completed(sdk, batch_id) >= 2)
        os.kill(hung.pid, signal.SIGSTOP)
        try:
            until(lambda: total(page(other.admin_url), "penstock_batch_running") > 0)
        finally:
            os.kill(hung.pid, signal.SIGCONT)
        # The process continues while the other one runs the batch, and notices the lost lease.
        until(lambda: "another process has taken over batch" in hung.stderr_text)
        ended = wait(sdk, batch_id)
        assert ended.status == "completed"
        check_texts(sdk, ended.output_file_id, asked)
        assert hung_sdk.batches.retrieve(batch_id) == ended


def is_reachable(sdk: OpenAI) -> bool:
    try:
        sdk.files.list()
    except openai.InternalServerError:
        return False
    return True


def test_a_gateway_serves_live_requests_while_its_storage_cannot_be_reached(
    engine: MockProcess, tmp_path: Path
) -> None:
    port = free_port()
    values = {"engine": engine.url, "bucket": BUCKET, "s3": f"http://127.0.0.1:{port}"}
    config = CONFIG.format(**values, lease=LEASE_S, more="")
    with (
        gateway_process(tmp_path, config, **S3_KEYS) as running,
        client(running.url, "none") as sdk,
    ):
        assert burst(running, 0) == 8 * 10
        with pytest.raises(openai.APIStatusError) as refused:
            upload(sdk, lines(4, 10))
        assert (refused.value.status_code, refused.value.code) == (503, "storage_unreachable")
        with s3_process(port):
            until(lambda: is_reachable(sdk))
            ended = wait(sdk, create(sdk, upload(sdk, lines(4, 10))).id)
            assert ended.status == "completed"


@pytest.mark.parametrize("fleet", [TENANTS], indirect=True)
def test_files_and_batches_are_the_same_at_every_gateway_and_apart_by_tenant(
    fleet: Fleet,
) -> None:
    urls = [gateway.url for gateway in fleet.gateways]
    with (
        client(urls[0], "sk-acme") as first,
        client(urls[1], "sk-acme") as second,
        client(urls[1], "sk-rival") as rival,
    ):
        file_id = upload(first, lines(4, 10))
        assert second.files.content(file_id).content == first.files.content(file_id).content
        batch_id = create(second, file_id).id
        ended = wait(first, batch_id)
        assert ended.output_file_id is not None
        assert set(results(second, ended.output_file_id)) == {f"line-{at}" for at in range(4)}
        check_isolated(rival, file_id, batch_id)
        assert second.files.delete(file_id).deleted
        with pytest.raises(openai.NotFoundError):
            first.files.retrieve(file_id)


def check_isolated(rival: OpenAI, file_id: str, batch_id: str) -> None:
    for call in (rival.files.retrieve, rival.files.content, rival.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file_id)
    for call in (rival.batches.retrieve, rival.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call(batch_id)
    assert list(rival.files.list()) == []
    assert list(rival.batches.list()) == []


def test_a_batch_is_cancelled_through_the_gateway_that_does_not_own_it(fleet: Fleet) -> None:
    asked = lines(60, int(60 * pace()))
    with client(fleet.gateways[0].url, "sk-acme") as sdk:
        batch_id = create(sdk, upload(sdk, asked)).id
    _, other = owner_and_other(fleet)
    with client(other.url, "sk-acme") as sdk:
        until(lambda: completed(sdk, batch_id) >= 1)
        assert sdk.batches.cancel(batch_id).status == "cancelling"
        ended = wait(sdk, batch_id)
        assert ended.status == "cancelled"
        good, bad = results(sdk, ended.output_file_id), results(sdk, ended.error_file_id)
        assert good.keys() | bad.keys() == {line["custom_id"] for line in asked}
        assert len(good) + len(bad) == len(asked)
