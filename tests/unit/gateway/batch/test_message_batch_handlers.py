"""Tests of the handlers of message batches: slow bodies, missing results, the form of errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BufferedReader, BytesIO
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientPayloadError, web
from aiohttp.test_utils import TestClient, TestServer
from msgspec.structs import replace

from gateway.batch.file_and_batch_objects import BatchRecord, BatchState, new_id
from gateway.batch.message_batch_handlers import AllBatchPages
from gateway.batch.message_batches import result
from gateway.batch.result_lines import result_line
from gateway.http.api_application import api_application
from tests.virtual_time import VIRTUAL_TIME

PATH = "/v1/messages/batches"
ERROR = b'{"error": {"message": "gone", "type": "upstream_error", "param": null, "code": "x"}}'
LINE = result_line(0, "batch_0", "a", (200, "req_1", b"{}"))
Client = TestClient[web.Request, web.Application]


def record(output: str | None = None, errors: str | None = None) -> BatchRecord:
    made = BatchRecord(new_id("batch_"), "acme", "", "/v1/messages", "file-1", "24h", 0, 1)
    return replace(made, state=BatchState.COMPLETED, output_file_id=output, error_file_id=errors)


class Store:
    """A fake storage that has one batch and some files."""

    def __init__(self, batch: BatchRecord | None = None, **files: Any) -> None:
        self._batch, self._files = batch, files

    def batch(self, tenant: str, name: str) -> BatchRecord | None:
        return self._batch

    def open_content(self, tenant: str, name: str) -> Any:
        if name not in self._files:
            raise FileNotFoundError(name)
        return self._files[name]


class Pages(AllBatchPages):
    """The tested handlers of message batches. A request's API key is its tenant's name."""

    def _tenant(self, request: web.Request) -> str:
        return request.headers.get("x-api-key", "")

    async def _create_from(self, raw: bytearray, tenant: str, request: web.Request) -> BatchRecord:
        return record()


@asynccontextmanager
async def serving(store: Store) -> AsyncIterator[Client]:
    section: Any = SimpleNamespace(file_size=1000)
    limits = SimpleNamespace(body_timeout=0.5)
    snapshot: Any = SimpleNamespace(config=SimpleNamespace(batch=section, limits=limits))
    runner: Any = SimpleNamespace(storage=store, is_open=True)
    server = api_application(lambda: snapshot)
    Pages(runner, lambda: snapshot, section).add_routes(server)
    async with TestClient(TestServer(server, host="127.0.0.1")) as client:
        yield client


@pytest.mark.parametrize("files", [{}, {"out": BufferedReader(BytesIO(LINE))}])  # type: ignore[arg-type]
async def test_results_that_were_deleted_are_not_found(files: dict[str, Any]) -> None:
    batch = record("out", "err")
    name = batch.id.replace("batch_", "msgbatch_")
    async with serving(Store(batch, **files)) as client, asyncio.timeout(5.0):
        answer = await client.get(f"{PATH}/{name}/results")
        body = await answer.json()
    assert (answer.status, body["type"]) == (404, "error")
    assert body["error"]["type"] == "not_found_error"
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_a_batch_has_the_id_of_its_request_where_anthropic_s_sdk_looks() -> None:
    batch = record()
    name = batch.id.replace("batch_", "msgbatch_")
    async with serving(Store(batch)) as client, asyncio.timeout(5.0):
        answers = [
            await client.get(f"{PATH}/{name}"),
            await client.post(PATH, json={"requests": []}),
        ]
    for answer in answers:
        assert answer.status == 200
        assert answer.headers["request-id"] == answer.headers["x-request-id"]


class Broken(BytesIO):
    """A fake file of which only the first line can be read."""

    def readlines(self, hint: int | None = -1, /) -> list[bytes]:
        if self.tell():
            raise OSError("the test's file fails after its first line")
        self.seek(1)
        return [LINE]


async def test_results_that_break_off_close_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    batch = record("out")
    name = batch.id.replace("batch_", "msgbatch_")
    async with serving(Store(batch, out=Broken())) as client:
        answer = await client.get(f"{PATH}/{name}/results")
        assert answer.status == 200
        with pytest.raises(ClientPayloadError):
            await answer.read()
    assert [logged.name for logged in caplog.records] == ["penstock"]


async def drip(pieces: int) -> AsyncIterator[bytes]:
    for _ in range(pieces):
        yield b" "
        await asyncio.sleep(0.1)


@VIRTUAL_TIME
async def test_a_body_that_drips_is_refused_in_time() -> None:
    async with serving(Store()) as client:
        answer = await client.post(PATH, data=drip(20))
        body = await answer.json()
    assert (answer.status, body["type"]) == (408, "error")


@VIRTUAL_TIME
async def test_a_tenant_whose_bodies_drip_takes_no_place_of_another() -> None:
    async with serving(Store()) as client:

        async def create(key: str, pieces: int) -> int:
            headers = {"x-api-key": key} if key else {}
            async with client.post(PATH, data=drip(pieces), headers=headers) as answer:
                return answer.status

        first = asyncio.create_task(create("acme", 3))
        await asyncio.sleep(0.05)
        assert await create("acme", 1) == 429
        assert await create("rival", 1) == 200
        assert await first == 200
        assert await create("acme", 1) == 200
        assert await asyncio.gather(create("", 2), create("", 2)) == [200, 200]


def test_errors_of_the_gateway_in_results_have_anthropics_form() -> None:
    lines = [result_line(0, "batch_0", "a", (502, "req_1", body)) for body in (ERROR, b"", b"no")]
    results = [json.loads(result(line))["result"] for line in lines]
    assert [shown["type"] for shown in results] == ["errored"] * 3
    assert [shown["error"]["type"] for shown in results] == ["error"] * 3
    assert results[0]["error"]["error"] == {"type": "api_error", "message": "gone"}
    own = {"type": "error", "error": {"type": "rate_limit_error", "message": "x"}, "request_id": 1}
    kept = result_line(0, "batch_0", "a", (429, "req_1", json.dumps(own).encode()))
    assert json.loads(result(kept))["result"]["error"] == own
