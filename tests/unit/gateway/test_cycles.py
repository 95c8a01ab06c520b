"""Tests that a request leaves no reference cycles behind, however it ends.

A cycle would keep the request's body, its response and its configuration until the next garbage
collection, which is rare.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.chaos.gateway_fleet import GatewayFleet, gateway_fleet
from tests.duration_limits import pace
from tests.e2e.split_fleet import MODEL, SENTENCE, SplitFleet, split_fleet
from tests.unit.gateway.http.connection_harness import FakeTransport, Harness, request, turns
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

LONG = {
    "model": "demo-8b",
    "stream": True,
    "max_tokens": 400,
    "messages": [{"role": "user", "content": "hello"}],
}


@contextmanager
def assert_no_garbage(*of: str) -> Iterator[None]:
    # Assert that the block leaves no garbage of the gateway's objects, or of these modules.
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = (f"{type(leaked).__module__}.{type(leaked).__name__}" for leaked in gc.garbage)
        ours = Counter(kind for kind in kinds if kind.startswith(("gateway.", "policies.", *of)))
        assert not ours
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def succeeds(running: GatewayFleet) -> None:
    assert (await running.ask()).fate == "ok"
    assert (await running.ask(stream=False)).fate == "ok"


async def is_rejected(running: GatewayFleet) -> None:
    assert (await running.ask(tokens=0)).status == 400


async def disconnects_before_the_response(running: GatewayFleet) -> None:
    for group in running.groups:
        group.faults.apply("stall:after=0")
    with suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            await running.ask()


async def disconnects_within_the_response(running: GatewayFleet) -> None:
    async with running.http.post(f"{running.app.url}/v1/chat/completions", json=LONG) as answer:
        await answer.content.readany()


async def breaks_and_is_retried(running: GatewayFleet) -> None:
    running.groups[0].faults.apply("reset-before-headers")
    for _ in range(2):
        assert (await running.ask()).fate == "ok"


async def breaks_within_the_response(running: GatewayFleet) -> None:
    for group in running.groups:
        group.faults.apply("reset-mid-stream:after=3")
    assert (await running.ask()).fate == "error_event"


async def breaks_and_is_resumed(running: GatewayFleet) -> None:
    running.groups[0].faults.apply("reset-mid-stream:after=3")
    fates = [(await running.ask()).fate for _ in range(2)]
    assert fates == ["ok", "ok"]
    assert running.metric("penstock_resumes_total") > 0


async def all_engines_fail(running: GatewayFleet) -> None:
    for group in running.groups:
        group.faults.apply("5xx")
    assert (await running.ask()).status == 502


@pytest.mark.parametrize(
    "way",
    [
        *(succeeds, is_rejected, disconnects_before_the_response, disconnects_within_the_response),
        *(
            breaks_and_is_retried,
            breaks_within_the_response,
            breaks_and_is_resumed,
            all_engines_fail,
        ),
    ],
)
async def test_a_request_leaves_no_reference_cycle_however_it_ends(
    way: Callable[[GatewayFleet], Awaitable[None]],
) -> None:
    models = [
        {"name": "demo-8b", "pool": "main"}
        | ({"resume": {}} if way is breaks_and_is_resumed else {})
    ]
    async with gateway_fleet(speed=20.0, models=models) as running:
        await running.ask()
        with assert_no_garbage():
            await way(running)
            for group in running.groups:
                group.faults.apply("")
            await running.ask()
            await running.at_rest()


CHUNKED = request(b"", length="Transfer-Encoding: chunked") + b"400\r\nabc"


@pytest.mark.parametrize("sent", [CHUNKED, CHUNKED + b"x", b"GET / HTTP/9.9\r\nA b\r\n\r\n"])
async def test_a_client_that_leaves_inside_its_request_leaves_no_reference_cycle(
    sent: bytes,
) -> None:
    harness = Harness(slow=True)
    with assert_no_garbage("aiohttp."):
        transport = FakeTransport(harness.fast_connection())
        transport.protocol.connection_made(transport)
        await transport.deliver(sent)
        transport.close()
        await turns()
        transport.protocol = asyncio.Protocol()


async def split_disconnects(running: SplitFleet, body: dict[str, object]) -> None:
    for after_s in (0.01, 0.2):
        with suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                await running.ask(body | {"max_tokens": 4000})


async def split_breaks(running: SplitFleet, body: dict[str, object]) -> None:
    for member, fault in (
        (running.prefill[0], "5xx"),
        (running.decode[0], "5xx"),
        (running.prefill[1], "refuse"),
    ):
        member.faults.apply(fault)
        for number in range(4):
            await running.ask(body | {"prompt": f"{number} {body['prompt']}"})
        member.faults.apply("")


async def split_decoders_die(running: SplitFleet, body: dict[str, object]) -> None:
    for member in running.decode:
        member.faults.apply("die-mid-decode:after=3")
    request = body | {"model": MODEL, "stream": True}
    async with running.http.post(f"{running.app.url}/v1/completions", json=request) as answer:
        assert b'data: {"error"' in await answer.read()
    for member in running.decode:
        member.faults.clear()


@pytest.mark.parametrize("dialect", ["vllm_nixl", "sglang"])
@pytest.mark.parametrize("way", [split_disconnects, split_breaks, split_decoders_die])
async def test_a_split_request_leaves_no_reference_cycle_however_it_ends(
    dialect: str, way: Callable[[SplitFleet, dict[str, object]], Awaitable[None]]
) -> None:
    body = {"prompt": SENTENCE * 20, "max_tokens": 12}
    soon_s = 3.0 * pace()
    async with split_fleet(dialect, kv={"wait_s": soon_s, "lease_s": soon_s}, speed=2.0) as running:
        await running.assert_right_answer(body)
        with assert_no_garbage():
            await way(running, body)
            await running.at_rest(within_s=7.5 + soon_s)


@pytest.mark.parametrize("fault", ["refuse", "freeze"])
async def test_a_failing_probe_leaves_no_reference_cycle(fault: str) -> None:
    async with gateway_fleet(
        1, health={"interval": "1h", "timeout": "50ms"}, scrape={"interval": "1h"}
    ) as running:
        live, watcher = running.app.gateway.endpoints.all()[0], running.app._health_checker
        running.groups[0].faults.apply(fault)
        with assert_no_garbage(
            "aiohttp.client",
            "builtins.traceback",
            "builtins.ConnectionRefused",
            "builtins.TimeoutError",
        ):
            for _ in range(3):
                await watcher._probe(live)
