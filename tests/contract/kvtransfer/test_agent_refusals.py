"""Tests that a KV transfer agent refuses other agents' requests for KV if they are not allowed.

Reasons are invalid tickets (permissions), limits, other layouts and other keys.
"""

from __future__ import annotations

import msgspec
import pytest

from kvtransfer.layout.kv_layout import KvDtype
from kvtransfer.protocol.outcomes import EndReason
from tests.contract.kvtransfer.agent_pairs import refused, shaped, soon
from tests.contract.kvtransfer.groups import PATIENT, SMALL, groups, until
from tests.contract.kvtransfer.links import PATIENCE_S, TRANSPORTS

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


async def test_a_ticket_is_valid_for_its_own_offer_once(transport: str) -> None:
    async with groups(transport, SMALL, SMALL) as (source, sink):
        one, other = (
            source.agent.offer(name, [index], 16) for index, name in enumerate(("one", "other"))
        )
        forged = one.ticket[:-4] + ("AAAA" if one.ticket[-4:] != "AAAA" else "BBBB")
        assert await refused(source, sink, "one", forged) is EndReason.BAD_TICKET
        assert await refused(source, sink, "one", "no ticket at all") is EndReason.BAD_TICKET
        assert await refused(source, sink, "other", one.ticket) is EndReason.BAD_TICKET
        assert (
            await soon(
                sink.agent.fetch(
                    source.agent.address, "one", [5], 16, ticket=one.ticket
                ).wait_ended()
            )
        ).has_landed
        assert (await soon(one.wait_ended())).has_landed
        assert await refused(source, sink, "one", one.ticket) is EndReason.TICKET_SPENT
        again = source.agent.offer("one", [3], 16)
        assert await refused(source, sink, "one", one.ticket) is EndReason.TICKET_SPENT
        again.revoke()
        assert await refused(source, sink, "one", again.ticket) is EndReason.GONE
        other.revoke()


async def test_an_offer_is_claimed_once(transport: str) -> None:
    async with groups(transport, SMALL, SMALL) as (source, sink):
        offer = source.agent.offer("r", [0], 16, ready_layers=0, public=True)
        first = sink.agent.fetch(source.agent.address, "r", [5], 16)
        await until(lambda: source.agent.stats()["leases"]["claimed"], "not claimed")
        assert await refused(source, sink, "r", None) is EndReason.NAME_TAKEN
        offer.mark_ready(4)
        assert (await soon(first.wait_ended())).has_landed
        assert source.agent.stats()["refused"] == {EndReason.NAME_TAKEN: 1}


async def test_only_one_invitation_may_wait_for_a_name(transport: str) -> None:
    async with groups(transport, SMALL, SMALL) as (source, sink):
        first = sink.agent.fetch(source.agent.address, "r", [5], 16)
        await until(lambda: source.agent.stats()["leases"]["waiting_invitations"], "not waiting")
        assert await refused(source, sink, "r", None) is EndReason.NAME_TAKEN
        source.agent.decline("r", "prefill failed")
        end = await soon(first.wait_ended())
        assert (end.reason, end.is_retriable, end.detail) == (
            EndReason.DECLINED,
            True,
            "prefill failed",
        )


async def test_waiting_invitations_are_limited(transport: str) -> None:
    strict = msgspec.structs.replace(PATIENT, max_waiting_invites=2)
    async with groups(transport, SMALL, SMALL, options=[strict]) as (source, sink):
        waiting = [
            sink.agent.fetch(source.agent.address, f"r{index}", [index], 16) for index in range(2)
        ]
        await until(
            lambda: source.agent.stats()["leases"]["waiting_invitations"] == 2, "not waiting"
        )
        assert await refused(source, sink, "one more", None) is EndReason.TOO_MANY_WAITING
        for transfer in waiting:
            transfer.cancel()


async def test_an_invitation_waits_for_a_limited_time(transport: str) -> None:
    hasty = msgspec.structs.replace(PATIENT, invite_wait_s=0.1)
    async with groups(transport, SMALL, SMALL, options=[hasty]) as (source, sink):
        landing = sink.agent.fetch(source.agent.address, "r", [0], 16, timeout_s=10 * PATIENCE_S)
        assert (await soon(landing.wait_ended())).reason is EndReason.NEVER_OFFERED


async def test_an_offer_for_one_agent_is_refused_to_others(transport: str) -> None:
    async with groups(transport, SMALL, SMALL) as (source, sink):
        offer = source.agent.offer("r", [0], 16, sink="somebody else")
        assert await refused(source, sink, "r", offer.ticket) is EndReason.BAD_TICKET
        assert await refused(source, sink, "r", None) is EndReason.BAD_TICKET
        mine = source.agent.offer("m", [1], 16, sink="p1")
        assert (
            await soon(
                sink.agent.fetch(
                    source.agent.address, "m", [4], 16, ticket=mine.ticket
                ).wait_ended()
            )
        ).has_landed
        offer.revoke()


async def test_more_tokens_than_are_on_offer_are_refused(transport: str) -> None:
    async with groups(transport, SMALL, SMALL) as (source, sink):
        offer = source.agent.offer("r", [0], 16, public=True)
        assert await refused(source, sink, "r", None, tokens=17) is EndReason.TOKENS
        offer.revoke()


@pytest.mark.parametrize(
    ("change", "field"),
    [({"layers": 8}, "layers"), ({"head_dim": 32}, "head_dim"), ({"dtype": KvDtype.FP16}, "dtype")],
)
async def test_another_layout_is_refused_with_the_reason(
    transport: str, change: dict[str, object], field: str
) -> None:
    async with groups(transport, SMALL, shaped(**change)) as (source, sink):
        landing = sink.agent.fetch(source.agent.address, "r", [1], 16)
        end = await soon(landing.wait_ended())
        assert (end.reason, end.is_retriable) == (EndReason.LAYOUT, False)
        assert field in end.detail


async def test_another_family_is_refused(transport: str) -> None:
    families = [
        msgspec.structs.replace(PATIENT, family=family) for family in ("llama@1", "llama@2")
    ]
    async with groups(transport, SMALL, SMALL, options=families) as (source, sink):
        end = await soon(sink.agent.fetch(source.agent.address, "r", [1], 16).wait_ended())
        assert (end.reason, end.is_retriable) == (EndReason.LAYOUT, False)


async def test_without_the_fleets_key_nothing_is_answered(transport: str) -> None:
    async with groups(transport, SMALL, SMALL, keys=[b"k" * 32, b"q" * 32]) as (source, sink):
        offer = source.agent.offer("r", [0], 16)
        end = await soon(
            sink.agent.fetch(source.agent.address, "r", [1], 16, ticket=offer.ticket).wait_ended()
        )
        assert (end.reason, end.is_retriable) == (EndReason.WRONG_KEY, False)
        offer.revoke()
