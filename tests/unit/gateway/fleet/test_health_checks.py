"""Tests that the health checker reads complete responses, and survives invalid ones."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec.structs import replace

from gateway.config import Model
from gateway.fleet.endpoint_load_and_health import EndpointTable
from gateway.fleet.endpoint_registry import RegistryPlan
from gateway.fleet.engine_metrics import ScrapedLoad
from gateway.fleet.health_checks import HealthChecker
from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.fleet.served_models import serving_endpoints
from gateway.http.engine_connections import ConnectionPool
from gateway.http.engine_lookup_and_connect import Address, EngineAddresses
from gateway.http.engine_poll_client import ConnectError
from policies.health.endpoint_health import HealthEvent, HealthState
from policies.routing_types import EngineKind
from tests.replacement import replace_method
from tests.unit.gateway.fleet.tables import table_of
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _in_pieces(*pieces: bytes) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0.01)
        return response

    return handler


@asynccontextmanager
async def _polled(
    engine: web.Application,
) -> AsyncIterator[tuple[HealthChecker, EndpointTable, RegistryPlan]]:
    # Run an engine; yield its health checker, which has polled it once.
    async with TestServer(engine, host="127.0.0.1") as server:
        table, adoption, config = table_of([str(server.make_url("")).rstrip("/")])
        watcher = HealthChecker(config, table, lambda: None)
        await watcher.start()
        yield watcher, table, adoption
        await watcher.stop()


@asynccontextmanager
async def _looked_at(*metrics: bytes) -> AsyncIterator[tuple[EndpointTable, RegistryPlan]]:
    # Run an engine whose metrics page consists of these pieces; yield the table after one poll.
    engine = web.Application()
    engine.router.add_get("/metrics", _in_pieces(*metrics))
    engine.router.add_get("/v1/models", _in_pieces(b'{"data":', b'[{"id":"m"}]}'))
    engine.router.add_get("/health", _in_pieces(b"ok"))
    async with _polled(engine) as (watcher, table, adoption):
        await watcher.stop()
        yield table, adoption


async def test_nonsensical_engine_metrics_do_not_keep_a_gateway_from_starting() -> None:
    async with _looked_at(b"vllm:num_requests_running 1e308\n" * 2) as (table, _):
        (live,) = table.all()
        assert (live.load.running, live.load.is_available) == (None, True)


async def test_long_and_chunked_responses_are_read_to_their_end() -> None:
    padding = b"# HELP x y\n" * 20_000
    async with _looked_at(padding, padding, b"vllm:num_requests_running 7\n") as (table, adoption):
        (live,) = table.all()
        assert (live.load.running, live.models) == (7, ("m",))
        (candidate,) = adoption.pools["engines"]
        for name, serving in (("m", (candidate,)), ("another", ())):
            model = Model(name=name, pool="engines")
            assert serving_endpoints(adoption, model, (candidate,)) == serving


async def test_a_leaving_endpoint_is_no_longer_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _looked_at(b"") as (table, adoption):
        (live,) = table.all()
        watcher = HealthChecker(adoption.config, table, lambda: None)
        await watcher.start()
        monkeypatch.setattr(watcher, "_probe", lambda live: asyncio.Event().wait())
        watcher.probe_until_recovered(live)
        (probe,) = watcher._recoveries.values()
        live.is_leaving = True
        watcher.reconfigure(adoption.config)
        await asyncio.wait([probe], timeout=5)
        assert probe.cancelled()
        await watcher.stop()


async def test_nothing_is_remembered_of_a_leaving_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _looked_at(b"") as (table, adoption):
        (live,) = table.all()
        health = adoption.config.health.model_copy(update={"progress": 0.01})
        config = adoption.config.model_copy(update={"health": health})
        watcher = HealthChecker(config, table, lambda: None)
        await watcher.start()
        live.is_leaving = True
        watcher.reconfigure(config)

        looks, all_endpoints = asyncio.Semaphore(0), EndpointTable.all

        def look(table: EndpointTable) -> tuple[LiveEndpoint, ...]:
            looks.release()
            return all_endpoints(table)

        replace_method(monkeypatch, EndpointTable, "all", look)
        for _ in range(3):
            await asyncio.wait_for(looks.acquire(), 30)
        assert live not in watcher._silences._by_endpoint
        await watcher.stop()


@pytest.mark.parametrize("lacks_health", [False, True])
async def test_an_engine_that_only_limits_the_rate_of_polls_stays_healthy(
    lacks_health: bool,
) -> None:
    async def limited(request: web.Request) -> web.Response:
        raise web.HTTPTooManyRequests

    engine = web.Application()
    engine.router.add_get("/v1/models", limited)
    if not lacks_health:
        engine.router.add_get("/health", limited)
    async with _polled(engine) as (watcher, table, _):
        (live,) = table.all()
        assert await watcher._health_status(live, 5.0) == 200
        assert live.load.is_available


@pytest.mark.parametrize("page", [None, '{"paths": {"/v1/chat/completions": {}}}'])
async def test_apis_are_tried_once_on_an_engine_that_does_not_list_them(page: str | None) -> None:
    tried = list[tuple[str, bytes]]()

    async def refuses(request: web.Request) -> web.Response:
        tried.append((request.path, await request.read()))
        return web.json_response({"error": "no model"}, status=400)

    async def lists(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def describes(request: web.Request) -> web.Response:
        return web.Response(text=page)

    engine = web.Application()
    engine.router.add_get("/v1/models", lists)
    engine.router.add_post("/v1/responses", refuses)
    if page is not None:
        engine.router.add_get("/openapi.json", describes)
    async with _polled(engine) as (watcher, table, adoption):
        (live,) = table.all()
        await watcher._poll(live)
        lacks = partial(adoption.lacks, candidates=adoption.pools["engines"])
        if page is None:
            assert tried == [("/v1/responses", b"{}")]
            assert not lacks("/v1/responses")
        else:  # an engine that lists its routes serves no others
            assert not tried
            assert lacks("/v1/responses")
        assert lacks("/v1/messages")
        assert not lacks("/v1/chat/completions")


async def test_an_engine_without_models_may_list_null_as_ollama_does() -> None:
    lists = ['{"data": [{"id": "m"}]}', '{"object": "list", "data": null}']

    async def list_next(request: web.Request) -> web.Response:
        return web.Response(text=lists.pop(0), content_type="application/json")

    engine = web.Application()
    engine.router.add_get("/v1/models", list_next)
    engine.router.add_get("/health", _in_pieces(b"ok"))
    async with _polled(engine) as (watcher, table, _):
        (live,) = table.all()
        assert (live.models, live.has_list) == (("m",), True)
        await watcher._capabilities.read(live, limit_s=5.0)
        assert (live.models, live.has_list) == ((), True)


@pytest.mark.parametrize("kind", EngineKind)
async def test_an_engine_that_lets_a_test_token_wait_is_not_found_stalled_by_its_silence(
    kind: EngineKind,
) -> None:
    table, _, config = table_of(["http://127.0.0.1:1"])
    (live,) = table.all()
    live.endpoint = replace(live.endpoint, engine=kind)
    live.progress = (1, 0.5)
    checker = HealthChecker(config, table, lambda: None)
    asks = checker._is_silent(live, 100.0)
    assert asks is (kind in ("vllm", "sglang", "trtllm", "tgi"))


async def test_an_engine_that_takes_more_kv_for_a_long_prompt_makes_progress() -> None:
    table, _, _ = table_of(["http://127.0.0.1:1"])
    (live,) = table.all()
    for usage, has_moved in ((0.1, True), (0.1, False), (0.2, True), (None, False)):
        live.upstream.last_body_at = 0.0
        table.on_scrape(live, ScrapedLoad(1, 0, usage, None))
        assert (live.upstream.last_body_at > 0.0) is has_moved


async def test_the_loss_and_the_recovery_of_an_endpoint_are_logged_with_their_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table, _, _ = table_of(["http://127.0.0.1:1"])
    (live,) = table.all()
    table.on_event(live, HealthEvent.CONNECT_FAILED)
    table.on_event(live, HealthEvent.PROBE_OK_NEEDED)
    for _ in range(3):
        table.on_event(live, HealthEvent.SUCCEEDED)
    assert [line.partition(": ")[2] for line in caplog.messages] == [
        "health changes from up to ejected (connect_failed)",
        "health changes from ejected to returning (connect_failed)",
        "health changes from returning to up (connect_failed)",
    ]
    assert all(line.startswith(f"endpoint {live.endpoint.name}: ") for line in caplog.messages)


async def test_a_host_name_that_cannot_be_resolved_is_logged_once_and_is_the_cause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table, _, config = table_of(["http://no-such-host.invalid:8000"])
    (live,) = table.all()
    checker = HealthChecker(config, table, lambda: None)
    answers: list[BaseException | None] = [_unresolved(), _unresolved(), None, _unresolved()]

    async def health_status(live: LiveEndpoint, timeout_s: float) -> int:
        error = answers.pop(0)
        if error is not None:
            raise error
        return 200

    monkeypatch.setattr(checker, "_health_status", health_status)
    causes = []
    while answers:
        await checker._probe(live)
        causes.append(live.cause)
    assert [cause == "unresolved" for cause in causes] == [True, True, False, True]
    lines = [line for line in caplog.messages if "cannot be resolved" in line]
    assert len(lines) == 2
    assert "http://no-such-host.invalid:8000): [Errno -2] Name or service not known" in lines[0]


async def test_a_probe_that_this_process_cannot_send_says_nothing_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = web.Application()
    engine.router.add_get("/health", _in_pieces(b"ok"))
    async with _polled(engine) as (watcher, table, _):
        (live,) = table.all()

        async def health_status(*_: object) -> int:
            raise ConnectError(OSError(errno.EMFILE, "Too many open files"))

        monkeypatch.setattr(watcher, "_health_status", health_status)
        for _ in range(9):
            await watcher._probe(live)
        assert live.cause is None
        assert live.health.state is HealthState.UP
    assert len([line for line in caplog.messages if "cannot open connections" in line]) == 1


@asynccontextmanager
async def _stalled(
    monkeypatch: pytest.MonkeyPatch, engine: web.Application
) -> AsyncIterator[tuple[HealthChecker, LiveEndpoint]]:
    # Run an engine to which clients' requests get longer silences, and its health checker.
    silence = count(1.0)
    replace_method(monkeypatch, ConnectionPool, "silence_duration_s", lambda *_: next(silence))
    engine.router.add_get("/health", _in_pieces(b"ok"))
    async with _polled(engine) as (watcher, table, _):
        (live,) = table.all()
        live.models = ("m",)
        yield watcher, live


@pytest.mark.parametrize(
    ("status", "answer", "is_stalled"),
    [
        (200, {}, False),
        (200, {"object": "error", "message": "too long", "code": 400}, False),
        (200, {"object": "error", "message": "dead", "code": 500}, True),
        (200, {"error": "dead"}, True),
        (400, {}, False),
        (500, {}, True),
    ],
)
async def test_a_test_token_is_requested_at_the_addresses_that_requests_use(
    monkeypatch: pytest.MonkeyPatch, status: int, answer: dict[str, object], is_stalled: bool
) -> None:
    async def look_up(host: str, port: int) -> Sequence[Address]:
        return [(socket.AF_INET, ("127.0.0.1", port))]

    async def complete(request: web.Request) -> web.Response:
        assert await request.json() == {"model": "m", "prompt": "1", "max_tokens": 1}
        return web.json_response(answer, status=status)

    engine = web.Application()
    engine.router.add_post("/v1/completions", complete)
    async with _stalled(monkeypatch, engine) as (watcher, live):
        port = live.upstream.addresses.port
        live.upstream.addresses = EngineAddresses("engine.invalid", port, look_up)
        live.endpoint = replace(live.endpoint, url=f"http://engine.invalid:{port}")
        watcher._requests.forget(live)
        await watcher._check_progress(live)
        assert live.is_stalled is is_stalled


@pytest.mark.parametrize(
    "error",
    [
        *(OSError(number, "cannot") for number in (errno.EMFILE, errno.EADDRNOTAVAIL)),
        socket.gaierror(socket.EAI_AGAIN, "no DNS server"),
    ],
)
@pytest.mark.parametrize("is_stalled", [False, True])
async def test_a_test_request_that_this_process_cannot_send_says_nothing_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, error: OSError, is_stalled: bool
) -> None:
    async def connect(*_: object, **__: object) -> None:
        raise type(error)(*error.args)

    async def health_status(*_: object) -> int:
        return 200

    async with _stalled(monkeypatch, web.Application()) as (watcher, live):
        watcher._requests._clients[live].close()
        monkeypatch.setattr(EngineAddresses, "connect", connect)
        if is_stalled:
            watcher._endpoints.on_stall(live)
            monkeypatch.setattr(watcher, "_health_status", health_status)
        before = live.health
        await (watcher._probe(live) if is_stalled else watcher._check_progress(live))
        assert (live.is_stalled, live.health) == (is_stalled, before)


def _unresolved() -> ConnectError:
    return ConnectError(socket.gaierror(-2, "Name or service not known"))


@pytest.mark.parametrize(
    ("status", "body", "encoding", "reason"),
    [
        (200, b"<html>chat</html>", None, "not a list of models: JSONDecodeError"),
        (200, b'{"models": []}', None, "not a list of models: KeyError('data')"),
        (200, b"\x1f\x8b", "gzip", "a Content-Encoding that was not requested"),
        (401, b"", None, "the engine answered 401"),
    ],
)
async def test_a_list_of_models_that_cannot_be_read_is_logged_once(
    status: int,
    body: bytes,
    encoding: str | None,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def lists(request: web.Request) -> web.Response:
        headers = {} if encoding is None else {"content-encoding": encoding}
        return web.Response(status=status, body=body, headers=headers)

    engine = web.Application()
    engine.router.add_get("/v1/models", lists)
    engine.router.add_get("/health", _in_pieces(b"ok"))
    with caplog.at_level("WARNING", "penstock"):
        async with _polled(engine) as (watcher, table, _):
            (live,) = table.all()
            await watcher._capabilities.read(live, limit_s=5.0)
            assert not live.has_list
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"the list of models of endpoint {live.endpoint.name} cannot be read")
    assert reason in message
