"""Tests that a mock engine publishes KV events on a real ZeroMQ socket, and replays them on
request.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import msgspec
import zmq
import zmq.asyncio

from mockgpu.kv_events.numbered_event_batches import KvEventSpec
from tests.duration_limits import PATIENCE_S
from tests.e2e.mock_group import CHAT, SPEC, MockGroup, mock_group

PUBLISHING = msgspec.structs.replace(SPEC, kv_events=KvEventSpec())


async def sources(group: MockGroup) -> dict[str, Any]:
    async with group.http.get(group.member.url + "/kv_event_sources") as response:
        return (await response.json())["0"]


async def cached(group: MockGroup) -> dict[str, Any]:
    async with group.http.get(group.member.url + "/mock/kv_blocks") as response:
        return await response.json()


async def replayed(address: str, start: int) -> list[tuple[int, list[Any]]]:
    # Request a replay with a DEALER socket; return the messages as (number, events).
    found = []
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(address)
        await dealer.send_multipart([b"", start.to_bytes(8, "big")])
        async with asyncio.timeout(PATIENCE_S):
            while True:
                _, _, number, payload = await dealer.recv_multipart()
                if number == b"\xff" * 8:
                    return found
                found.append((int.from_bytes(number, "big"), msgpack.unpackb(payload)[1]))


async def test_events_and_their_replay_say_what_is_cached() -> None:
    async with mock_group(PUBLISHING) as group:
        source = await sources(group)
        await group.answer("/v1/chat/completions", CHAT | {"max_tokens": 64})
        address = source["replay_endpoint"].replace("*", "127.0.0.1")
        batches = await replayed(address, 0)
        stored = [name for _, batch in batches for event in batch for name in event["block_hashes"]]
        truth = await cached(group)
        assert sorted(stored) == sorted(truth["hashes"])
        assert [number for number, _ in batches] == list(range(truth["number"]))
        assert await replayed(address, truth["number"]) == []


async def test_a_subscriber_receives_topic_number_and_payload() -> None:
    async with mock_group(PUBLISHING) as group:
        source = await sources(group)
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as subscriber:
            subscriber.subscribe(b"")
            subscriber.connect(source["endpoint"].replace("*", "127.0.0.1"))
            received = asyncio.ensure_future(subscriber.recv_multipart())
            async with asyncio.timeout(PATIENCE_S):
                # Repeat, because events from before the subscription are lost.
                while not received.done():
                    prompt = {
                        "model": "demo-8b",
                        "prompt": f"{group.member.group.metrics.steps} " * 99,
                    }
                    await group.answer("/v1/completions", prompt)
                topic, number, payload = await received
        assert topic == b"kv"
        assert len(number) == 8
        assert msgpack.unpackb(payload)[1][0]["type"] == "BlockStored"


async def test_a_restart_of_the_engine_begins_again_at_number_zero() -> None:
    async with mock_group(PUBLISHING) as group:
        await group.answer("/v1/chat/completions", CHAT)
        assert (await cached(group))["number"] > 0
        await group.fault("lost-rank")
        await group.fault("")
        assert await cached(group) == {"hashes": [], "number": 0}


async def test_a_group_without_events_has_no_sources_and_takes_no_fault_of_events() -> None:
    async with mock_group() as group:
        async with group.http.get(group.member.url + "/kv_event_sources") as response:
            assert await response.json() == {}
        status, body = await group.answer("/mock/fault", {"spec": "events-lost@0.5"})
        assert status == 400
        assert "--kv-events-port" in body["error"]["message"]
