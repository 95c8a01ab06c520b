"""Tests that the gateway knows engines' caches exactly with KV events, and estimates them without.

KV events are messages over ZeroMQ in which engines report cached blocks.
"""

from __future__ import annotations

from time import monotonic

import pytest

from tests.duration_limits import within
from tests.e2e.event_fleet import EventFleet, event_fleet

TEXT = "The reservoir behind the dam is deep. " * 200
"""A prompt of about 7.6 kB: 15 blocks of bytes, 119 blocks of tokens."""


async def learned(fleet: EventFleet, prompts: int) -> None:
    await fleet.until(lambda: len(fleet.exact.prompts) >= prompts)


def predicted(fleet: EventFleet, group: int = 0) -> int:
    return fleet.app.gateway.endpoints.all()[group].hit_tokens


async def test_an_endpoint_that_names_its_publisher_becomes_exact() -> None:
    async with event_fleet() as fleet:
        await fleet.until(fleet.is_exact)
        await fleet.ask(TEXT)
        await fleet.quiet()
        assert fleet.index(0)
        (row,) = await fleet.endpoints()
        assert row["prefix_cache"] == "exact"
        assert row["kv_events"]["ranks"][0]["blocks"] == len(fleet.index(0))


@pytest.mark.parametrize("events", ["configured", "no replay"])
async def test_a_configured_publisher_is_read(events: str) -> None:
    async with event_fleet(events=events) as fleet:
        await fleet.until(
            lambda: bool(fleet.events(0).sources) and fleet.events(0).sources[0].is_connected
        )
        for part in range(4):
            await fleet.ask(f"{part} {TEXT}")
        await fleet.until(lambda: fleet.index(0) == fleet.truth(0))


async def test_what_was_cached_before_the_gateway_came_is_replayed() -> None:
    async with event_fleet() as fleet:
        await fleet.ask(TEXT)
        await fleet.quiet()
        fleet.exact.endpoints[0].sources[0].resynchronize(monotonic())
        assert not fleet.index(0)
        await fleet.quiet()
        assert fleet.index(0)


async def test_a_known_prompt_is_predicted_to_the_block() -> None:
    async with event_fleet() as fleet:
        await fleet.until(fleet.is_exact)
        await fleet.ask("a short first prompt, so that the size of blocks is known" * 4)
        await fleet.ask(TEXT)
        await learned(fleet, 1)
        await fleet.quiet()
        answer = await fleet.ask(TEXT)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        endpoint = fleet.events(0)
        assert cached > 1800
        assert (endpoint.audits >= 1, endpoint.errors) == (True, 0)


async def test_an_evicted_prompt_is_no_longer_predicted_to_be_cached() -> None:
    async with event_fleet(kv_tokens=8192) as fleet:
        await fleet.until(fleet.is_exact)
        await fleet.ask(TEXT)
        await fleet.ask(TEXT + "once more")
        await learned(fleet, 1)
        for part in range(6):
            await fleet.ask(f"{part} {TEXT}")
        await fleet.quiet()
        for later_s in (10, 20):  # what was sent a moment ago may be on its way
            fleet.exact.refresh(monotonic() + later_s)
        before = predicted(fleet)
        answer = await fleet.ask(TEXT)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached < 64
        assert predicted(fleet) - before < 64


async def test_lost_doubled_and_reordered_messages_leave_no_trace() -> None:
    async with event_fleet(2, kv_tokens=8192) as fleet:
        await fleet.until(lambda: fleet.is_exact(0) and fleet.is_exact(1))
        faults = "events-lost@0.2,events-doubled@0.2,events-reordered@0.1,events-late@0.1,events-restarted@0.01"
        for member in fleet.groups:
            member.faults.apply(faults)
        for part in range(60):
            await fleet.ask(f"{part % 20} {TEXT}")
        for member in fleet.groups:
            member.faults.apply("")
        for part in range(4):
            await fleet.ask(f"{part} more {TEXT}")
        await fleet.quiet()
        sources = [fleet.events(group).sources[0] for group in (0, 1)]
        assert sum(source.gaps + source.duplicates + source.restarts for source in sources)


async def test_an_endpoint_whose_events_stop_is_believed_again_within_five_seconds() -> None:
    async with event_fleet() as fleet:
        await fleet.until(fleet.is_exact)
        fleet.groups[0].faults.apply("events-lost")

        async def until_believed() -> None:
            # The lost events may be replayed in between, by a check for the newest message.
            state = ""
            while state != "believed: answers without events":
                await fleet.ask(f"{monotonic()} {TEXT}")
                (row,) = await fleet.endpoints()
                state = row["prefix_cache"]

        await within(5.0, until_believed())


async def test_an_engine_that_dies_is_not_exact_and_is_read_anew_when_it_returns() -> None:
    async with event_fleet() as fleet:
        await fleet.ask(TEXT)
        await fleet.quiet()
        fleet.groups[0].faults.apply("lost-rank")
        fleet.groups[0].faults.apply("")
        await fleet.until(lambda: fleet.app.gateway.endpoints.all()[0].load.is_available)
        await fleet.ask(f"another {TEXT}")
        await fleet.quiet()
        assert fleet.events(0).sources[0].restarts == 1


async def test_tenants_do_not_see_each_others_blocks() -> None:
    tenants = [
        {"name": name, "key": f"key-of-tenant-{name}-0123456789"} for name in ("first", "second")
    ]
    async with event_fleet(further={"tenants": tenants}) as fleet:
        await fleet.until(fleet.is_exact)
        body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}
        for tenant in tenants:
            for _ in range(2):
                await fleet.post(body, tenant["key"])
                await fleet.quiet()
        await learned(fleet, 2)
        before = predicted(fleet)
        await fleet.post(
            body | {"messages": [{"role": "user", "content": TEXT + "!"}]}, tenants[0]["key"]
        )
        assert predicted(fleet) > before
        assert fleet.events(0).errors == 0
