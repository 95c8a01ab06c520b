"""Property tests of TransferSource, the sending side of KV transfers, with events in any order.

Each offer of KV ends once.
"""

from __future__ import annotations

from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtransfer.layout.kv_layout import KvDtype, KvLayout
from kvtransfer.layout.memory_regions import Region
from kvtransfer.protocol.agent_messages import (
    Accept,
    AgentCard,
    Credit,
    Invite,
    Landed,
    ProtocolError,
    StopTransfer,
    pack_blocks,
)
from kvtransfer.protocol.outcomes import EndReason, OutcomeKind
from kvtransfer.transfer.commands import (
    AcceptGrant,
    BumpGenerations,
    Command,
    ComputePlan,
    DropWindows,
    PutWindow,
    ResolveHandle,
    SendMessage,
)
from kvtransfer.transfer.leased_offer import OfferSpec
from kvtransfer.transfer.source import TransferSource
from kvtransfer.transfer.transfer_counters import AgentStats
from kvtransfer.util.agent_options import AgentOptions

LAYOUT = KvLayout(layers=4, kv_heads=2, head_dim=4, dtype=KvDtype.BF16, block_tokens=4)
OTHER = msgspec.structs.replace(LAYOUT, layers=5)
BLOCKS, BUDGET = 16, 600
SOURCE = AgentCard("p", b"p" * 16, LAYOUT)


class FakeLink:
    transport, peer, received_bytes, window_bytes, is_one_sided = "fake", "d", 0, 200, False


class World:
    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.has_ranks = seed % 2 == 1
        self.now = 100.0
        size = LAYOUT.rank_block_bytes(0)
        self.region = Region.over(bytearray(BLOCKS * size), size, name="p")
        self.book = TransferSource(
            SOURCE,
            [self.region],
            b"k" * 32,
            AgentOptions(invite_wait_s=5, max_waiting_invites=3),
            AgentStats(),
        )
        self.links: list[FakeLink] = []
        self.numbers = 0
        self.blocks: dict[int, list[int]] = {}
        self.tickets = ["forged"]
        self.resolved: dict[int, OutcomeKind] = {}
        self.put: dict[tuple[object, int], int] = {}
        self.transfers: dict[FakeLink, int] = {}
        self.over: set[tuple[object, int]] = set()
        self.accepted: dict[tuple[object, int], int] = {}
        self.shown: dict[tuple[object, int], bool] = {}
        self.reckoning: list[ComputePlan] = []

    def step(self) -> None:
        steps = [
            self.link,
            self.offer,
            self.revoke,
            self.renew,
            self.wait,
            self.lose,
            self.decline,
            self.land,
        ]
        steps += [self.invite, self.ready, self.credit, self.land] * 2 + [self.message, self.reckon]
        self.rng.choice(steps)()
        assert self.taken_is_bounded()

    def obey(self, commands: list[Command]) -> None:
        for before, command in zip([None, *commands], commands, strict=False):
            match command:
                case ResolveHandle(number, end):
                    assert isinstance(before, BumpGenerations)
                    assert number not in self.resolved
                    self.resolved[number] = end.kind
                    assert isinstance(end.reason, EndReason)
                case PutWindow(link, head, window):
                    assert (link, head.transfer) not in self.over
                    assert window.is_current is not None
                    assert window.is_current()
                    self.put[link, head.transfer] = (
                        self.put.get((link, head.transfer), 0) + head.n_bytes
                    )
                case BumpGenerations(blocks):
                    before_bump = self.region.generations_of(blocks)
                    self.region.bump(blocks)
                    assert (self.region.generations_of(blocks) == before_bump + 1).all()
                case DropWindows(link, transfer):
                    self.over.add((link, transfer))
                case SendMessage(link, Accept(transfer)):
                    assert (link, transfer) not in self.accepted
                    send_queue = self.book._send_queues[link]
                    ware = send_queue.claimed[transfer].spec
                    assert ware.sink in (None, send_queue.card.agent)
                    assert self.shown.get((link, transfer)) or ware.sink or ware.public
                    self.accepted[link, transfer] = transfer
                case SendMessage(_, StopTransfer(_, reason)):
                    assert reason is not EndReason.LANDED
                case ComputePlan():
                    self.reckoning.append(command)
                case AcceptGrant():
                    pass

    def reckon(self) -> None:
        # Finish a deferred plan. Other links may have sent messages since.
        while self.reckoning:
            self.obey(self.reckoning.pop(0).work()(self.now))

    def told(self, tell, link: FakeLink) -> None:  # type: ignore[no-untyped-def]
        try:
            self.obey(tell() or [])
        except ProtocolError:
            self.drop(link)

    def link(self) -> None:
        if len(self.links) < 3:
            self.links.append(FakeLink())
            layout = OTHER if self.rng.random() < 0.1 else LAYOUT
            card = AgentCard(f"d{self.rng.randrange(2)}", b"d" * 16, layout)
            if self.has_ranks:
                two = msgspec.structs.replace(layout, tp=2)
                rank, group = self.rng.randrange(2), f"g{self.rng.random() < 0.1}"
                card = AgentCard(card.agent, card.epoch, two, rank=rank, group=group)
            self.book.on_linked(self.links[-1], card, BUDGET)

    def offer(self) -> None:
        self.numbers += 1
        blocks = self.rng.sample(range(BLOCKS), self.rng.randrange(1, 6))
        tokens = self.rng.randrange(1, len(blocks) * 4 + 1)
        name, sink = f"r{self.rng.randrange(4)}", self.rng.choice([None, None, "d0"])
        ware = OfferSpec ( name , np . array ( blocks ) , tokens , self . rng . choice ( [ 0.5 , 30.0 ] ) , self . rng . choice ( [ 0 , 4 ] ) , self . rng . randbytes ( 16 ) , sink , self . rng . random ( ) < 0.7 )  # fmt: skip
        try:
            ticket, commands = self.book.offer(self.numbers, ware, self.now)
        except ValueError:
            self.resolved[self.numbers] = OutcomeKind.FAILED
            return
        self.blocks[self.numbers] = blocks
        self.tickets.append(ticket)
        self.obey(commands)

    def invite(self) -> None:
        if not self.links:
            return
        rng, link = self.rng, self.rng.choice(self.links)
        tokens = rng.randrange(1, 21)
        skip = rng.randrange(tokens) if rng.random() < 0.9 else tokens
        blocks = rng.sample(range(BLOCKS), rng.randrange(1, 7))
        ticket = rng.choice(self.tickets) if rng.random() < 0.4 else None
        invite = Invite(
            transfer=self.next_transfer(link),
            name=f"r{rng.randrange(4)}",
            blocks=pack_blocks(blocks),
            tokens=tokens,
            skip_tokens=skip,
            wait_s=rng.choice([0.0, 9.0]),
            slack_s=rng.random(),
            priority=rng.randrange(3),
            window_bytes=rng.choice([1, 100, 1 << 20]),
            ticket=ticket,
        )
        self.shown[link, invite.transfer] = ticket is not None
        self.told(lambda: self.book.on_invite(link, invite, self.now), link)

    def next_transfer(self, link: FakeLink) -> int:
        last = self.transfers.get(link, 0)
        self.transfers[link] = last + 1
        return last + 1 if self.rng.random() < 0.97 else last

    def message(self) -> None:
        if self.links:
            link = self.rng.choice(self.links)
            transfer = self.rng.randrange(self.transfers.get(link, 0) + 2)
            stop = StopTransfer(transfer, self.rng.choice(list(EndReason)))
            message = self . rng . choice ( [ lambda : self . book . on_stop ( link , stop , self . now ) , lambda : self . book . on_beat ( link , self . now ) , lambda : self . book . on_beat ( link , self . now ) , lambda : self . book . on_landed ( link , Landed ( transfer , self . rng . randrange ( 1000 ) ) , self . now ) ] )  # fmt: skip
            self.told(message, link)

    def credit(self) -> None:
        if self.put and self.links:
            (link, transfer), n_bytes = self.rng.choice(list(self.put.items()))
            if link in self.links and isinstance(link, FakeLink):
                credit = Credit(
                    transfer, self.rng.choice([n_bytes, n_bytes // 2, 1, n_bytes + 5000])
                )
                self.told(lambda: self.book.on_credit(link, credit, self.now), link)

    def land(self) -> None:
        for (link, transfer), n_bytes in list(self.put.items()):
            if link in self.links and isinstance(link, FakeLink) and self.rng.random() < 0.5:
                self.told(
                    lambda link=link, t=transfer, n=n_bytes: self.book.on_landed(
                        link, Landed(t, n), self.now
                    ),
                    link,
                )  # type: ignore[misc]
                return

    def ready(self) -> None:
        self.obey(
            self.book.mark_ready(
                self.rng.randrange(self.numbers + 1), self.rng.randrange(6), self.now
            )
        )

    def revoke(self) -> None:
        self.obey(
            self.book.revoke(self.rng.randrange(self.numbers + 1), EndReason.REVOKED, "", self.now)
        )

    def renew(self) -> None:
        ticket = self.book.renew(self.rng.randrange(self.numbers + 1), 10.0, self.now)
        if ticket is not None:
            self.tickets.append(ticket)

    def decline(self) -> None:
        self.obey(self.book.decline(f"r{self.rng.randrange(4)}", "prefill failed", self.now))

    def wait(self) -> None:
        self.now += self.rng.choice([0.0, 0.1, 1.0, 6.0])
        self.obey(self.book.tick(self.now))
        due = self.book.next_deadline()
        assert due is None or due > self.now

    def lose(self) -> None:
        if self.links and self.rng.random() < 0.3:
            self.drop(self.rng.choice(self.links))

    def drop(self, link: FakeLink) -> None:
        self.links.remove(link)
        self.obey(self.book.on_lost(link, EndReason.LINK_LOST, "", self.now))

    def taken_is_bounded(self) -> bool:
        # Return whether the bytes in flight are within their limit.
        #
        # A window may exceed its size by one run, which may be as long as a request.
        return self.book.in_flight_bytes() <= (BUDGET + 6 * self.region.block_bytes) * len(
            self.links
        )


@pytest.fixture(autouse=True)
def some_plans_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    # Make some plans count as long, so that they are computed without the lock.
    monkeypatch.setattr("kvtransfer.transfer.commands._MAX_INLINE_BLOCKS", 2)


@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.integers(0, 1 << 32), st.integers(1, 120))
def test_every_offer_ends_once_and_keeps_nothing_under_any_events(seed: int, steps: int) -> None:
    world = World(seed)
    for _ in range(steps):
        world.step()
    world.obey(world.book.close(world.now))
    world.reckon()
    for link in list(world.links):
        world.drop(link)
    assert set(world.resolved) == set(range(1, world.numbers + 1))
    assert sum(world.book.counts.values()) == 0
    assert world.book.in_flight_bytes() == 0
    assert not world.book._blocks._offers.any()


def test_any_order_reaches_every_end() -> None:
    ends: set[OutcomeKind] = set()
    for seed in range(60):
        world = World(seed)
        for _ in range(200):
            world.step()
        ends |= set(world.resolved.values())
    assert ends == set(OutcomeKind)


def test_any_order_reaches_ranks_that_share_an_offer() -> None:
    shared, half_landed = 0, 0
    for seed in range(1, 240, 2):
        world = World(seed)
        for _ in range(200):
            world.step()
            wholes = [offer for offer in world.book._offers.values() if offer.claimed_by]
            shared += len(wholes)
            half_landed += sum(len(offer.shares) == 1 for offer in wholes)
    assert shared > 100
    assert half_landed > 10


def test_landed_is_believed_only_of_what_was_sent() -> None:
    world = World(1)
    world.links.append(FakeLink())
    world.book.on_linked(world.links[0], AgentCard("d0", b"d" * 16, LAYOUT), 1 << 20)
    world.book.offer(
        1, OfferSpec("r", np.array([0, 1]), 8, 30.0, 2, bytes(16), public=True), world.now
    )
    invite = Invite(1, "r", pack_blocks([3, 4]), 8, 0, 5.0, 5.0, 0, 1 << 20)
    world.obey(world.book.on_invite(world.links[0], invite, world.now))
    whole = 8 * LAYOUT.bytes_per_token
    with pytest.raises(ProtocolError):
        world.book.on_landed(world.links[0], Landed(1, whole), world.now)
