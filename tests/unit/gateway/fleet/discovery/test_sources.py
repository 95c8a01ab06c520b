"""Tests of finding endpoints in DNS, files and Kubernetes, also while these cannot be read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from aiohttp import web

from gateway.config.discovery_sections import Kubernetes
from gateway.config.endpoint_sections import EndpointTraits
from gateway.fleet.discovery.dns import DnsSource
from gateway.fleet.discovery.file_list import FileSource
from gateway.fleet.discovery.kubernetes import KubernetesSource, ServiceAccount
from gateway.fleet.discovery.source_interface import DiscoveredEndpoints, Source, specs_for
from tests.duration_limits import PATIENCE_S

TRAITS = EndpointTraits(max_concurrency=7, labels={"gpu": "h100"})


class Naps:
    def __init__(self) -> None:
        self.asked_s: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.asked_s.append(seconds)
        await asyncio.sleep(0)


def urls(specs: DiscoveredEndpoints) -> list[str]:
    return [spec.url for spec in specs]


async def first(source: Source, count: int) -> list[list[str]]:
    listings = []
    async with asyncio.timeout(PATIENCE_S):
        async for listing in source.watch():
            listings.append(urls(listing))  # listings before the end of the source count
            if len(listings) == count:
                break
    return listings


def test_addresses_become_sorted_endpoints_with_the_shared_traits() -> None:
    listing = specs_for(
        [("10.0.0.2", 8000), ("10.0.0.1", 8000), ("fd00::1", 8000), ("10.0.0.2", 8000)], TRAITS
    )
    assert urls(listing) == [
        "http://10.0.0.1:8000",
        "http://10.0.0.2:8000",
        "http://[fd00::1]:8000",
    ]
    assert {(item.max_concurrency, item.labels["gpu"], item.name) for item in listing} == {
        (7, "h100", None)
    }


async def test_the_last_known_endpoints_stay_while_a_name_cannot_be_resolved() -> None:
    answers: list[Sequence[str] | OSError] = [
        ["10.0.0.1"],
        OSError("no such host"),
        [],
        ["10.0.0.1"],
        ["10.0.0.2", "10.0.0.1"],
    ]

    async def resolve(name: str, port: int) -> Sequence[str]:
        assert (name, port) == ("engines.default.svc", 8000)
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    naps = Naps()
    listings = await first(
        DnsSource("engines.default.svc:8000", 10.0, TRAITS, Random(1), resolve, naps), 2
    )
    assert listings == [["http://10.0.0.1:8000"], ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]]
    assert len(naps.asked_s) == 4
    assert all(8.0 <= item <= 12.0 for item in naps.asked_s)
    assert len(set(naps.asked_s)) == 4


async def test_the_systems_resolver_is_the_default() -> None:
    assert await first(DnsSource("127.0.0.1:9009", 1.0, TRAITS, Random(1)), 1) == [
        ["http://127.0.0.1:9009"]
    ]


async def test_a_changed_file_is_read_and_an_invalid_one_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    texts = [
        "- http://127.0.0.1:9001\n- {url: http://127.0.0.1:9002, max_concurrency: 3, name: two}\n",
        "- not a url\n",
        "- http://127.0.0.1:9001\n- http://127.0.0.1:9001\n",
        "- {url: http://127.0.0.1:9001, name: a}\n- {url: http://127.0.0.1:9002, name: a}\n",
        "- http://127.0.0.1:9001\n- {url: http://127.0.0.1:9002, name: '127.0.0.1:9001'}\n",
        "a mapping: 1\n",
        "[unclosed\n",
        "- {url: http://127.0.0.1:9001, unknown: 1}\n",
        "x" * (2 << 20),
        '["http://127.0.0.1:9003"]',
    ]
    looks = 0

    async def nap(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks % 3 == 0 and texts:
            file.write_text(texts.pop(0))

    listings = []
    async with asyncio.timeout(PATIENCE_S):
        async for listing in FileSource(file, TRAITS, nap).watch():
            listings.append([(item.url, item.max_concurrency, item.name) for item in listing])
            if len(listings) == 2:
                break
    assert listings == [
        [("http://127.0.0.1:9001", 7, None), ("http://127.0.0.1:9002", 3, "two")],
        [("http://127.0.0.1:9003", 7, None)],
    ]


async def test_the_last_known_endpoints_stay_when_the_file_is_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "engines.yaml"
    file.write_text("- http://127.0.0.1:9001\n")
    naps = 0

    async def nap(seconds: float) -> None:
        nonlocal naps
        naps += 1
        if naps == 2:
            file.unlink()
        if naps == 20:
            raise asyncio.CancelledError

    listings = []
    with suppress(asyncio.CancelledError):
        async for listing in FileSource(file, TRAITS, nap).watch():
            listings.append(urls(listing))  # noqa: PERF401  # what was said before the end counts
    assert listings == [["http://127.0.0.1:9001"]]
    assert [
        f"the file {file} cannot be read, so its last known endpoints stay" in line
        for line in caplog.messages
    ] == [True]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- http://h:1\n- nonsense\n", "entry 2, url: the URL of an engine must have the form"),
        ("- {url: 'http://h:1/v1'}\n", "entry 1, url: the URL of an engine must not end with /v1"),
        (
            "- {url: 'http://h:1', max_concurency: 3}\n",
            'entry 1, max_concurency: unknown key; did you mean "max_concurrency"?',
        ),
        ("- {name: a}\n", "entry 1, url: is missing"),
        ("- http://h:1\n- [\n", "it is not valid YAML, line 3"),
    ],
)
async def test_the_entry_that_makes_a_file_invalid_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, reason: str
) -> None:
    file = tmp_path / "engines.yaml"
    file.write_text(text)
    assert FileSource(file, TRAITS)._parse(file.read_bytes()) is None
    (line,) = caplog.messages
    assert line.startswith(f"service discovery: the file {file} is ignored: {reason}"), line


def piece(name: str, version: int, *addresses: str, **endpoint: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "resourceVersion": str(version)},
        "ports": [{"name": "metrics", "port": 9090}, {"name": "http", "port": 8000}],
        "endpoints": [
            {"addresses": [each], "conditions": {"ready": True}, **endpoint} for each in addresses
        ],
    }


Script = Callable[[web.StreamResponse], Awaitable[None]]


class Server:
    def __init__(self) -> None:
        self.lists: list[dict[str, Any]] = []
        self.watches: list[Script | int] = []
        self.asked: list[dict[str, str]] = []
        self.tokens: list[str] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        assert request.path == "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"
        assert request.query["labelSelector"] == "kubernetes.io/service-name=engines"
        self.asked.append(dict(request.query))
        self.tokens.append(request.headers.get("Authorization", ""))
        if "watch" not in request.query:
            return web.json_response(self.lists.pop(0))
        script = self.watches.pop(0)
        if isinstance(script, int):
            return web.json_response({"kind": "Status"}, status=script)
        answer = web.StreamResponse()
        await answer.prepare(request)
        await script(answer)
        return answer


@asynccontextmanager
async def api(folder: Path) -> AsyncIterator[tuple[Server, KubernetesSource, Naps]]:
    server, naps = Server(), Naps()
    app = web.Application()
    app.router.add_get("/{path:.*}", server.answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    (folder / "token").write_text("the-token\n")
    (folder / "namespace").write_text("models\n")
    account = ServiceAccount(f"http://127.0.0.1:{runner.addresses[0][1]}", folder)
    try:
        yield (
            server,
            KubernetesSource(
                Kubernetes(service="engines", port="http"), TRAITS, Random(1), account, naps
            ),
            naps,
        )
    finally:
        await runner.cleanup()


def says(*events: dict[str, Any]) -> Script:
    async def play(answer: web.StreamResponse) -> None:
        for event in events:
            await answer.write(json.dumps(event).encode() + b"\n")

    return play


async def breaks(answer: web.StreamResponse) -> None:
    await answer.write(b'{"type": "MODIFIED", "obj')
    assert answer._req is not None
    assert answer._req.transport is not None
    answer._req.transport.abort()


def event(kind: str, payload: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "object": payload}


async def test_slices_are_listed_and_then_watched(tmp_path: Path) -> None:
    async with api(tmp_path) as (server, source, _):
        server.lists = [
            {"metadata": {"resourceVersion": "5"}, "items": [piece("a", 4, "10.0.0.1")]}
        ]
        unready = piece("b", 7, "10.0.0.8", conditions={"ready": False})
        server.watches = [
            says(event("ADDED", piece("b", 6, "10.0.0.2")), event("MODIFIED", unready)),
            says(
                event("BOOKMARK", {"metadata": {"resourceVersion": "9"}}),
                event("DELETED", piece("a", 10)),
            ),
        ]
        assert await first(source, 4) == [
            ["http://10.0.0.1:8000"],
            ["http://10.0.0.1:8000", "http://10.0.0.2:8000"],
            ["http://10.0.0.1:8000"],
            [],
        ]
        assert [item.get("resourceVersion") for item in server.asked] == [None, "5", "7"]
        assert set(server.tokens) == {"Bearer the-token"}


async def test_an_expired_watch_lists_again(tmp_path: Path) -> None:
    async with api(tmp_path) as (server, source, naps):
        server.lists = [
            {
                "metadata": {"resourceVersion": str(index)},
                "items": [piece("a", index, f"10.0.0.{index}")],
            }
            for index in (1, 2, 3)
        ]
        server.watches = [says(event("ERROR", {"code": 410})), 410]
        listings = await first(source, 3)
        assert listings == [
            ["http://10.0.0.1:8000"],
            ["http://10.0.0.2:8000"],
            ["http://10.0.0.3:8000"],
        ]
        assert len(naps.asked_s) == 2  # two lists in a row without an event: back-off applies


async def test_a_broken_watch_keeps_the_endpoints_and_resumes_at_its_version(
    tmp_path: Path,
) -> None:
    async with api(tmp_path) as (server, source, naps):
        server.lists = [
            {"metadata": {"resourceVersion": "5"}, "items": [piece("a", 4, "10.0.0.1")]}
        ] * 2
        server.watches = [breaks, 500, breaks, says(event("ADDED", piece("b", 6, "10.0.0.2")))]
        listings = await first(source, 2)
        assert listings == [
            ["http://10.0.0.1:8000"],
            ["http://10.0.0.1:8000", "http://10.0.0.2:8000"],
        ]
        assert [item.get("resourceVersion") for item in server.asked] == [
            None,
            "5",
            "5",
            None,
            "5",
            "5",
        ]
        assert [
            most / 2 <= item <= most
            for item, most in zip(naps.asked_s, (0.5, 1.0, 2.0), strict=True)
        ] == [True] * 3


async def test_a_failing_api_server_is_logged_once_per_outage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with api(tmp_path) as (server, source, _):
        server.lists = [
            {"metadata": {"resourceVersion": "5"}, "items": [piece("a", 4, "10.0.0.1")]}
        ] * 2
        server.watches = [500, 500, 500, says(event("ADDED", piece("b", 6, "10.0.0.2")))]
        server.watches += [503, 503, says(event("ADDED", piece("c", 7, "10.0.0.3")))]
        server.lists.append(
            {"metadata": {"resourceVersion": "6"}, "items": [piece("b", 6, "10.0.0.2")]}
        )
        assert [len(listings) for listings in await first(source, 4)] == [1, 2, 1, 2]
        assert [line for line in caplog.messages if "EndpointSlices of engines" in line] == [
            f"service discovery: the EndpointSlices of engines cannot be read: the Kubernetes API server responded with status {status}; the last known endpoints stay"
            for status in (500, 503)
        ]


async def test_a_watch_that_fails_after_an_event_is_logged_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with api(tmp_path) as (server, source, _):
        server.lists = [
            {"metadata": {"resourceVersion": "5"}, "items": [piece("a", 4, "10.0.0.1")]}
        ]
        heard = says(event("ADDED", piece("b", 6, "10.0.0.2")), event("ERROR", {"code": 500}))
        server.watches = [503, heard, 503, says(event("ADDED", piece("c", 7, "10.0.0.3")))]
        assert [len(listings) for listings in await first(source, 3)] == [1, 2, 3]
        assert [
            line.partition("; ")[0] for line in caplog.messages if "EndpointSlices" in line
        ] == [
            "service discovery: the EndpointSlices of engines cannot be read: the Kubernetes API server responded with status 503",
            "service discovery: the EndpointSlices of engines cannot be read: the Kubernetes API server ended the watch of EndpointSlices with status 500",
        ]


@pytest.mark.parametrize("refusal", [504, says(event("ERROR", {"code": 500}))])
async def test_a_version_unknown_to_the_server_leads_to_a_new_list(
    tmp_path: Path, refusal: Script | int
) -> None:
    async with api(tmp_path) as (server, source, naps):
        server.lists = [
            {"metadata": {"resourceVersion": "9000"}, "items": [piece("a", 9000, "10.0.0.1")]},
            {"metadata": {"resourceVersion": "100"}, "items": [piece("a", 100, "10.0.0.2")]},
        ]
        server.watches = [refusal, refusal]
        assert await first(source, 2) == [["http://10.0.0.1:8000"], ["http://10.0.0.2:8000"]]
        assert [item.get("resourceVersion") for item in server.asked] == [
            None,
            "9000",
            "9000",
            None,
        ]
        assert len(naps.asked_s) == 2
