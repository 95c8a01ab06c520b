"""Tests that a KV agent refuses and counts agents that are unauthorised or send wrong data."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random

import msgspec
import pytest

from kvtransfer.protocol.agent_messages import (
    VERSION,
    Accept,
    AgentCard,
    Beat,
    Credit,
    Invite,
    Landed,
    LinkHello,
    LinkReady,
    Message,
    StopTransfer,
    encode,
    pack_blocks,
)
from kvtransfer.protocol.outcomes import EndReason
from kvtransfer.protocol.session_authentication import LinkSession
from kvtransfer.transport_interface import Link, TransportError
from kvtransfer.transports.inproc import InprocWire
from kvtransfer.util.clock import ThreadClock
from tests.contract.kvtransfer.groups import KEY, PATIENT, SMALL, Group, group, until
from tests.contract.kvtransfer.links import PATIENCE_S, TRANSPORTS, Owner, make

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


class UnprovenPeer:
    def __init__(self, link: Link, owner: Owner, key: bytes) -> None:
        self.link, self.owner = link, owner
        self.session = LinkSession(
            key,
            secrets.token_bytes(16),
            AgentCard("x", bytes(16), SMALL),
            is_dialler=True,
            budget_bytes=1 << 20,
        )

    async def hear(self, kind: str, count: int = 1) -> list[object]:
        return await asyncio.to_thread(self.owner.wait, kind, count)

    async def greet(self) -> None:
        self.link.send(self.session.hello())
        (welcome,) = await self.hear("message")
        assert isinstance(welcome, bytes)
        _, ready = self.session.handle(welcome)
        assert ready is not None
        self.link.secure(
            self.session.window_key
        )  # as agents do before they invite; the near end would close otherwise
        self.link.send(ready)

    def say(self, message: Message) -> None:
        self.link.send(self.session.seal(message))

    async def gone(self) -> None:
        await self.hear("lost")


class OfferingAgent:
    def __init__(self, transport: str, agent_options: object = None) -> None:
        self._clock = ThreadClock()
        self._wire = InprocWire(self._clock)
        options = agent_options if agent_options is not None else PATIENT
        self._make = lambda: make(transport, self._wire)
        self.source: Group = group("p", SMALL, [self._make()], options=options)  # type: ignore[arg-type]
        self._ends: list[object] = []

    async def stranger(self, key: bytes = KEY) -> UnprovenPeer:
        end, owner = self._make(), Owner()
        end.start(owner, self.source.regions)
        self._ends.append(end)
        return UnprovenPeer(
            await asyncio.to_thread(end.dial, self.source.agent.address), owner, key
        )

    async def still_works(self) -> None:
        # Assert that an honest peer is still served, and that no resource is in use afterwards.
        peer = group("d", SMALL, [self._make()], options=PATIENT)
        await peer.agent.start()
        offer = self.source.agent.offer("proof", [0], 16)
        landing = peer.agent.fetch(self.source.agent.address, "proof", [3], 16, ticket=offer.ticket)
        assert (await asyncio.wait_for(landing.wait_ended(), PATIENCE_S)).has_landed
        await asyncio.wait_for(offer.wait_ended(), PATIENCE_S)
        await peer.agent.close()
        peer.forget()

    async def close(self) -> None:
        await self.source.agent.close()
        for end in self._ends:
            end.close()  # type: ignore[attr-defined]
        self.source.forget()
        self._clock.close()


@asynccontextmanager
async def offering_agent(transport: str, **changes: object) -> AsyncIterator[OfferingAgent]:
    agent = OfferingAgent(transport, msgspec.structs.replace(PATIENT, **changes))
    await agent.source.agent.start()
    try:
        yield agent
        await agent.still_works()
        assert agent.source.held == 0
    finally:
        await agent.close()


@pytest.mark.parametrize(
    "noise",
    [
        b"",
        b"\x00",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x91" * 5_000,
        encode(LinkReady()),
        encode(Beat()),
        bytes(20_000),
    ],
    ids=["empty", "zero", "http", "nested", "ready", "beat", "long"],
)
async def test_noise_instead_of_a_greeting_ends_the_link(transport: str, noise: bytes) -> None:
    if transport == "rdma" and not noise:
        pytest.skip("an empty message is none")
    async with offering_agent(transport) as here:
        stranger = await here.stranger()
        stranger.link.send(noise)
        await stranger.gone()
        assert here.source.agent.stats()["faults"] == {"protocol": 1}


async def test_silence_is_not_waited_for(transport: str) -> None:
    async with offering_agent(transport, handshake_s=PATIENCE_S / 50) as here:
        stranger = await here.stranger()
        await stranger.gone()
        here.source.agent._link_manager.options = PATIENT  # a proven peer may take longer


async def test_unproven_links_are_limited(transport: str) -> None:
    async with offering_agent(transport, max_unproven_links=2) as here:
        strangers = []
        for _ in range(5):
            with suppress(TransportError):  # refused while it was still dialling
                strangers.append(await here.stranger())
        await until(
            lambda: here.source.agent.stats()["faults"].get("strangers"), "nobody was turned away"
        )
        assert len(strangers) >= 2
        assert here.source.agent.stats()["links"] <= 2
        for stranger in strangers:
            stranger.link.close()
        await until(lambda: not here.source.agent.stats()["links"], "links are left")


async def test_without_the_key_a_perfect_greeting_gets_nowhere(transport: str) -> None:
    async with offering_agent(transport) as here:
        offer = here.source.agent.offer("r", [0], 16)
        stranger = await here.stranger(b"not the fleet's key, but as long")
        stranger.link.send(stranger.session.hello())
        await stranger.hear("message")
        for message in (LinkReady(), invite(1, "r", offer.ticket)):
            stranger.link.send(encode(message) + bytes(16))
        await stranger.gone()
        assert offer.outcome is None
        assert here.source.agent.stats()["faults"] == {"unproven": 1}
        offer.revoke()


async def test_another_version_is_refused_by_both(transport: str) -> None:
    async with offering_agent(transport) as here:
        stranger = await here.stranger()
        hello = encode(
            LinkHello(VERSION + 1, secrets.token_bytes(16), AgentCard("x", bytes(16), SMALL), 1)
        )
        stranger.link.send(hello)
        stranger.session._hello = hello
        (welcome,) = await stranger.hear("message")
        _, ready = stranger.session.handle(welcome)  # type: ignore[arg-type]
        stranger.link.send(ready)  # type: ignore[arg-type]
        await stranger.gone()
        assert here.source.agent.stats()["refused"] == {EndReason.VERSION: 1}


def invite(transfer: int, name: str, ticket: str | None = None, **changes: object) -> Invite:
    invitation = Invite(transfer, name, pack_blocks([1]), 16, 0, 9.0, 9.0, 0, 1 << 20, ticket)
    return msgspec.structs.replace(invitation, **changes)


LIES = {
    "says the source's lines": [Accept(1, b"", 1, 1)],
    "greets again": [LinkHello(1, bytes(16), AgentCard("x", bytes(16), SMALL), 1)],
    "landed what was not sent": [invite(1, "r"), Landed(1, 8192)],
    "claims that its stop is a landing": [invite(1, "r"), StopTransfer(1, EndReason.LANDED)],
    "gives back credit it never had": [invite(1, "r"), Credit(1, 1 << 30)],
    "uses a number twice": [invite(1, "r"), invite(1, "other")],
    "goes back in its numbers": [invite(5, "r"), invite(4, "other")],
    "names a piece of a block": [invite(1, "r", blocks=b"12345")],
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_proven_peer_that_lies_loses_its_link_and_claims(transport: str, lie: str) -> None:
    async with offering_agent(transport) as here:
        offer = here.source.agent.offer("r", [0], 16, ready_layers=0, public=True)
        stranger = await here.stranger()
        await stranger.greet()
        for message in LIES[lie]:
            stranger.say(message)
        await stranger.gone()
        assert here.source.agent.stats()["faults"] == {"protocol": 1}
        if isinstance(LIES[lie][0], Invite) and "piece" not in lie:
            assert (
                await asyncio.wait_for(offer.wait_ended(), PATIENCE_S)
            ).reason is EndReason.PROTOCOL
        offer.revoke()


async def test_conversations_of_nonsense_hold_nothing(transport: str) -> None:
    rng = Random(7)
    rounds = 60 if transport != "rdma" else 5
    async with offering_agent(transport) as here:
        for number in range(rounds):
            offers = [
                here.source.agent.offer(f"r{index}", [index], 16, ready_layers=rng.choice([0, 4]))
                for index in range(3)
            ]
            stranger = await here.stranger()
            await stranger.greet()
            for _ in range(rng.randrange(1, 20)):
                stranger.say(anything(rng, [offer.ticket for offer in offers]))
            stranger.link.send(rng.randbytes(rng.randrange(1, 200)))
            await stranger.gone()
            for offer in offers:
                offer.revoke()
                await asyncio.wait_for(offer.wait_ended(), PATIENCE_S)
            assert here.source.held == 0, number


def anything(rng: Random, tickets: list[str]) -> Message:
    transfer = rng.randrange(8)
    return rng.choice(
        [
            invite(
                transfer,
                f"r{rng.randrange(4)}",
                rng.choice([None, *tickets]),
                tokens=rng.randrange(20),
            ),
            invite(
                transfer,
                f"r{rng.randrange(4)}",
                skip_tokens=rng.randrange(30),
                window_bytes=rng.randrange(3),
            ),
            StopTransfer(transfer, rng.choice(list(EndReason))),
            Credit(transfer, rng.randrange(9000)),
            Landed(transfer, rng.choice([0, 8192])),
            Beat(),
        ]
    )
