"""Tests that a model is served only by engines that list it.

In particular, the base model must not answer requests for a LoRA adapter.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gateway.app import App
from gateway.cli.doctor.command import _engine_findings
from gateway.cli.doctor.findings import CheckFinding, CheckVerdict
from gateway.config import Config, ConfigError, LoadedConfig, load_with_warnings
from gateway.fleet import engine_capabilities
from tests.duration_limits import PATIENCE_S
from tests.unit.gateway.disagg import scripted_engines
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

BASE, ADAPTER, OTHER = "llama", "my-lora", "other-lora"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Engine:
    """A fake engine that lists `models`, and records by which model names it is called.

    models     the list; None: it has no page with models
    is_strict  whether it returns 404 for a name that it does not list, as vLLM does. Otherwise its
               base model answers, as in SGLang
    """

    def __init__(self, *models: str, is_strict: bool = True) -> None:
        self.models: Sequence[str] | None = models
        self.is_strict = is_strict
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.url = ""
        self.is_held = False

    async def list(self, _: web.Request) -> web.Response:
        if self.models is None:
            return web.Response(status=404)
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        name = body["model"]
        self.asked.append(name)
        self.bodies.append(body)
        self.headers.append({key.lower(): value for key, value in request.headers.items()})
        if self.is_strict and self.models is not None and name not in self.models:
            error = {
                "message": f"The model `{name}` does not exist.",
                "type": "NotFoundError",
                "code": 404,
            }
            return web.json_response({"error": error}, status=404)
        while self.is_held:
            await asyncio.sleep(0.01)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "hi"},
            "text": "hi",
            "finish_reason": "stop",
        }
        if not body.get("stream"):
            return web.json_response({"id": "x", "model": name, "choices": [choice]})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for delta, reason in (({"content": "hi"}, None), ({}, "stop")):
            event = {
                "model": name,
                "choices": [{"index": 0, "delta": delta, "text": "", "finish_reason": reason}],
            }
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def well(self, _: web.Request) -> web.Response:
        return web.Response()

    def application(self) -> web.Application:
        server = web.Application()
        server.router.add_get("/v1/models", self.list)
        server.router.add_get("/health", self.well)
        server.router.add_post(CHAT, self.answer)
        server.router.add_post(COMPLETIONS, self.answer)
        return server


class Running:
    def __init__(self, app: App, http: aiohttp.ClientSession) -> None:
        self.app, self.http = app, http

    async def ask(self, model: str, path: str = CHAT, **members: Any) -> tuple[int, str]:
        # Send a request; return its status and text.
        #
        # The text is the model name in every part of the answer, or a refusal's message.
        body = {"model": model, "max_tokens": 4, **members}
        body |= (
            {"prompt": "hi"}
            if path == COMPLETIONS
            else {"messages": [{"role": "user", "content": "hi"}]}
        )
        async with self.http.post(self.app.url + path, json=body) as answer:
            text = await answer.text()
        if answer.status != 200:
            return answer.status, json.loads(text)["error"]["message"]
        parts = text.split("\n\n") if body.get("stream") else [text]
        events = [part.removeprefix("data: ") for part in parts]
        names = {json.loads(event)["model"] for event in events if event.startswith("{")}
        assert len(names) == 1
        return answer.status, names.pop()

    async def names(self) -> list[str]:
        async with self.http.get(self.app.url + "/v1/models") as answer:
            return [card["id"] for card in (await answer.json())["data"]]

    async def reread(self, number: int) -> None:
        watching: Any = self.app._health_checker
        watching.relist(self.app.gateway.endpoints.all()[number])
        await self.lists_in_force()

    async def lists_in_force(self) -> None:
        watching: Any = self.app._health_checker
        await asyncio.gather(*watching._listings.values())
        while watching._model_lists._timer is not None:
            await asyncio.sleep(0.001)


def models(*names: str, **served: str) -> list[dict[str, str]]:
    return [{"name": name, "pool": "main"} for name in names] + [
        {"name": name, "pool": "main", "served_model": known} for name, known in served.items()
    ]


@asynccontextmanager
async def running(
    engines: Sequence[Engine],
    names: list[dict[str, str]],
    endpoint: dict[str, Any] | None = None,
    pool: dict[str, Any] | None = None,
    **more: Any,
) -> AsyncIterator[Running]:
    async with AsyncExitStack() as stack:
        for engine in engines:
            server = await stack.enter_async_context(
                TestServer(engine.application(), host="127.0.0.1")
            )
            engine.url = str(server.make_url("")).rstrip("/")
        settings = {
            "version": 1,
            "listeners": {"api": {"port": 0}, "admin": {"port": 0}},
            "observability": {"access_log": "off"},
            "models": names,
            "pools": {
                "main": {
                    "policy": "round_robin",
                    "endpoints": [{"url": engine.url, **(endpoint or {})} for engine in engines],
                    **(pool or {}),
                }
            },
        }
        app = App(Config.model_validate(settings | more))
        await app.start()
        stack.push_async_callback(app.stop)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Running(app, http)


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize("endpoint", [{}, {"served_model": BASE}])
async def test_an_adapter_that_no_endpoint_lists_is_not_answered_by_its_base_model(
    is_strict: bool, endpoint: dict[str, Any]
) -> None:
    engine = Engine(BASE, is_strict=is_strict)
    async with running([engine], models(BASE, ADAPTER), endpoint) as gateway:
        assert await gateway.ask(BASE) == (200, BASE)
        status, message = await gateway.ask(ADAPTER)
        assert (status, f"'{ADAPTER}'" in message, f"listed there: '{BASE}'" in message) == (
            404,
            True,
            True,
        )
        assert engine.asked == [BASE]
        assert await gateway.names() == [BASE]
        async with gateway.http.get(f"{gateway.app.url}/v1/models/{ADAPTER}") as answer:
            assert (answer.status, (await answer.json())["error"]["message"]) == (404, message)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
async def test_each_adapter_goes_only_where_it_is_listed_and_its_answers_have_its_name(
    path: str, stream: bool
) -> None:
    first, second = engines = [
        Engine(BASE, ADAPTER, is_strict=False),
        Engine(BASE, OTHER, is_strict=False),
    ]
    async with running(engines, models(BASE, ADAPTER, OTHER)) as gateway:
        for _ in range(4):
            for name in (BASE, ADAPTER, OTHER):
                assert await gateway.ask(name, path, stream=stream) == (200, name)
        assert (first.asked.count(ADAPTER), second.asked.count(ADAPTER)) == (4, 0)
        assert (first.asked.count(OTHER), second.asked.count(OTHER)) == (0, 4)
        assert [await gateway.ask(BASE) for _ in range(2)] == [(200, BASE)] * 2
        assert first.asked.count(BASE)
        assert second.asked.count(BASE)


async def test_an_engine_with_another_name_serves_once_the_configuration_gives_that_name() -> None:
    engine = Engine("meta/llama", ADAPTER)
    async with running([engine], models("chat", ADAPTER)) as gateway:
        status, message = await gateway.ask("chat")
        assert (status, "'meta/llama'" in message) == (404, True)
    async with running([engine], models(ADAPTER, chat="meta/llama")) as gateway:
        assert await gateway.ask("chat", stream=True) == (200, "chat")
        assert await gateway.ask(ADAPTER) == (200, ADAPTER)
        assert engine.asked == ["meta/llama", ADAPTER]


@pytest.mark.parametrize("stream", [False, True])
async def test_both_halves_of_a_split_request_get_the_engines_name_and_the_client_its_own(
    stream: bool,
) -> None:
    rule = {"dialect": "vllm_nixl", "threshold_tokens": 100}
    named = {"name": "chat", "served_model": scripted_engines.MODEL, "pool": "main", "split": rule}
    async with scripted_engines.split_gateway(
        "vllm_nixl", [scripted_engines.prefills()], [scripted_engines.decodes], models=[named]
    ) as front:
        reply = await front.ask(model="chat", stream=stream)
        parts = reply.events if stream else [reply.json]
        assert {part["model"] for part in parts} == {"chat"}
        bodies = [half.requests[0].json for half in (*front.prefill, *front.decode)]
        assert [body["model"] for body in bodies] == [scripted_engines.MODEL] * 2


async def test_a_request_is_not_split_over_an_endpoint_that_does_not_list_its_model() -> None:
    rule = {"dialect": "vllm_nixl", "threshold_tokens": 100}
    named = [
        {"name": name, "pool": "main", "split": rule} for name in (scripted_engines.MODEL, ADAPTER)
    ]
    async with scripted_engines.split_gateway(
        "vllm_nixl", [scripted_engines.prefills()], [scripted_engines.decodes], models=named
    ) as front:
        prefill, decode = front.app.gateway.endpoints.all()
        for live, names in (
            (prefill, (scripted_engines.MODEL,)),
            (decode, (scripted_engines.MODEL, ADAPTER)),
        ):
            live.models = names
        await front.app.swap.rebuild_after_model_news()
        assert (await front.ask(model=ADAPTER)).status == 200
        assert (len(front.prefill[0].requests), front.decode[0].requests[0].json["model"]) == (
            0,
            ADAPTER,
        )
        assert (await front.ask()).status == 200
        assert len(front.prefill[0].requests) == 1


async def test_an_adapter_is_served_while_the_newest_list_has_it() -> None:
    engine = Engine(BASE)
    async with running([engine], models(BASE, ADAPTER)) as gateway:
        generation = gateway.app.gateway.snapshot.generation
        assert (await gateway.ask(ADAPTER))[0] == 404
        engine.models = (BASE, ADAPTER)
        await gateway.reread(0)
        assert await gateway.ask(ADAPTER) == (200, ADAPTER)
        # OTHER is not a configured model, so the snapshot is not rebuilt.
        engine.models = (BASE, ADAPTER, OTHER)
        await gateway.reread(0)
        assert gateway.app.gateway.snapshot.generation == generation + 1
        engine.models = (BASE,)
        await gateway.reread(0)
        assert (await gateway.ask(ADAPTER))[0] == 404


async def test_lists_are_read_again_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_capabilities, "MODELS_EVERY_S", 0.05)
    engine = Engine(BASE)
    health = {"interval": "100ms", "timeout": "90ms"}
    async with running([engine], models(BASE, ADAPTER), health=health) as gateway:
        engine.models = (BASE, ADAPTER)
        async with asyncio.timeout(PATIENCE_S):
            while (await gateway.ask(ADAPTER))[0] == 404:
                await asyncio.sleep(0.02)
        assert await gateway.ask(ADAPTER) == (200, ADAPTER)


async def test_an_engine_that_lost_an_adapter_costs_no_client_an_error() -> None:
    first, second = engines = [Engine(BASE, ADAPTER), Engine(BASE, ADAPTER)]
    async with running(engines, models(BASE, ADAPTER), retries={"budget": 1.0}) as gateway:
        first.models = (BASE,)
        for _ in range(4):
            assert await gateway.ask(ADAPTER) == (200, ADAPTER)
        await gateway.lists_in_force()
        asked = first.asked.count(ADAPTER)
        for _ in range(4):
            assert await gateway.ask(ADAPTER) == (200, ADAPTER)
        assert first.asked.count(ADAPTER) == asked  # the new list does not have the adapter
        assert all(live.load.is_available for live in gateway.app.gateway.endpoints.all())
        second.models = (BASE,)
        status, message = await gateway.ask(ADAPTER)
        assert (status, "does not exist" in message) == (404, True)


async def test_an_engine_without_a_list_serves_the_configured_models() -> None:
    engine, other = Engine(), Engine(BASE)
    engine.models = None
    async with running([engine, other], models(BASE, ADAPTER)) as gateway:
        assert [await gateway.ask(ADAPTER) for _ in range(3)] == [(200, ADAPTER)] * 3
        assert other.asked == []
        async with gateway.http.get(gateway.app.admin_url + "/readyz") as answer:
            assert answer.status == 200


async def test_without_configured_models_requests_use_the_listed_names() -> None:
    engine = Engine(BASE, ADAPTER)
    async with running([engine], [], {"served_model": BASE}) as gateway:
        assert await gateway.ask(ADAPTER) == (200, ADAPTER)
        assert engine.asked == [ADAPTER]


async def test_a_full_endpoint_takes_a_request_that_no_other_one_lists() -> None:
    # Permits are per pool. One is free, so the request must not be refused although the only
    # endpoint with its model is full.
    first, second = engines = [Engine(BASE, ADAPTER), Engine(BASE)]
    async with running(engines, models(BASE, ADAPTER), {"max_concurrency": 1}) as gateway:
        first.is_held = True
        waiting = [asyncio.create_task(gateway.ask(ADAPTER)) for _ in range(2)]
        async with asyncio.timeout(PATIENCE_S):
            while len(first.asked) < 2:
                await asyncio.sleep(0.01)
        first.is_held = False
        assert await asyncio.gather(*waiting) == [(200, ADAPTER)] * 2
        assert second.asked == []


async def test_a_gateway_without_a_listed_model_is_not_ready_and_reports_why() -> None:
    async with running([Engine("meta/llama")], models(BASE)) as gateway:
        async with gateway.http.get(gateway.app.admin_url + "/readyz") as answer:
            assert (answer.status, "listed there: 'meta/llama'" in await answer.text()) == (
                503,
                True,
            )
        async with gateway.http.get(gateway.app.admin_url + "/config") as answer:
            assert list((await answer.json())["unlisted"]) == [BASE]
        async with gateway.http.get(gateway.app.admin_url + "/live") as answer:
            assert any("get 404" in json.dumps(line) for line in (await answer.json())["why"])


async def test_names_on_endpoints_reserved_for_a_tenant_are_not_in_messages() -> None:
    tenants = [{"name": "acme", "key": "k" * 16}]
    async with running(
        [Engine("secret-lora")], models(BASE), {"tenants": ["acme"]}, tenants=tenants
    ) as gateway:
        assert "secret" not in gateway.app.gateway.snapshot.unlisted[BASE]


def checked(tmp_path: Path, text: str) -> LoadedConfig:
    file = tmp_path / "gateway.yaml"
    file.write_text(f"version: 1\n{text}")
    return load_with_warnings(file, {})


POOL = (
    "pools: {main: {endpoints: "
    "[{url: 'http://gpu1:8000', served_model: meta/llama, layout: {tp: 1}}]}}\n"
)


def test_a_served_model_that_could_mean_several_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"endpoints\[0\]\.served_model: could mean any model"
    ) as refused:
        checked(
            tmp_path, f"models: [{{name: chat, pool: main}}, {{name: my-lora, pool: main}}]\n{POOL}"
        )
    assert (refused.value.problems[0].line, refused.value.problems[0].col) == (3, 68)
    clear = (
        "models: [{name: chat, pool: main}, {name: my-lora, served_model: my-lora, pool: main}]\n"
    )
    assert checked(tmp_path, clear + POOL).warnings == ()
    named = "models: [{name: meta/llama, pool: main}, {name: my-lora, pool: main}]\n"
    (warning,) = checked(tmp_path, named + POOL).warnings
    assert "is the name of meta/llama only" in warning.message
    (warning,) = checked(tmp_path, POOL).warnings
    assert "has no effect without models" in warning.message


def found(config: Config) -> list[CheckFinding]:
    findings = _engine_findings(LoadedConfig(config), with_file=True, measure=False, token=False)
    return [finding for finding in findings if finding.check == "models"]


async def test_doctor_shows_what_to_write_until_every_model_is_served() -> None:
    engines = [Engine("meta/llama", ADAPTER), Engine("meta/llama")]
    async with running(engines, models("chat", ADAPTER)) as gateway:
        first, second = await asyncio.to_thread(found, gateway.app.config)
        assert {first.verdict, second.verdict} == {CheckVerdict.FAIL}
        assert "models: [{name: chat, served_model: meta/llama}]" in first.fix
        assert "--lora-modules" in first.fix
    async with running(engines, models(ADAPTER, chat="meta/llama")) as gateway:
        first, second = await asyncio.to_thread(found, gateway.app.config)
        assert (first.verdict, second.verdict) == (CheckVerdict.PASS, CheckVerdict.PASS)
        assert f"other endpoints serve {ADAPTER}" in second.seen
        assert await gateway.ask("chat") == (200, "chat")


async def test_no_name_is_unknown_before_an_engine_has_listed_a_model() -> None:
    engine = Engine()
    async with running([engine], []) as gateway:
        status, message = await gateway.ask(BASE)
        assert (status, message) == (503, "No engine has listed a model yet.")
        engine.models = [BASE]
        await gateway.reread(0)
        assert (await gateway.ask(BASE))[0] == 200
        assert (await gateway.ask(OTHER))[0] == 404
