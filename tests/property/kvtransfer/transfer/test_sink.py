"""Property tests of TransferSink, the receiving side of KV transfers, with events in any order.

Each fetch of KV ends once. After its end, no more bytes are written to its blocks. It ends as
LANDED only if it is complete.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvtransfer.layout.kv_layout import KvDtype, KvLayout, pair_fingerprint
from kvtransfer.layout.memory_regions import Region
from kvtransfer.layout.transfer_plan import plan_transfer
from kvtransfer.protocol.agent_messages import (
    Accept,
    Credit,
    Landed,
    Message,
    ProtocolError,
    StopTransfer,
    Unwanted,
    pack_blocks,
)
from kvtransfer.protocol.outcomes import EndReason, OutcomeKind
from kvtransfer.transfer.commands import (
    Command,
    ComputePlan,
    DialPeer,
    FenceTransfer,
    ReportLayers,
    ResolveHandle,
    SendInvite,
    SendMessage,
)
from kvtransfer.transfer.fetch_state import FetchRequest, SinkState
from kvtransfer.transfer.receive_tracker import WindowError
from kvtransfer.transfer.sink import TransferSink
from kvtransfer.transfer.transfer_counters import AgentStats
from kvtransfer.transfer.transfer_order import Priority
from kvtransfer.transport_interface import WindowHead, WindowVerdict
from kvtransfer.util.agent_options import AgentOptions

LAYOUT = KvLayout(layers=4, kv_heads=2, head_dim=4, dtype=KvDtype.BF16, block_tokens=4)
BLOCKS, WINDOW = 16, 100
ADDRESSES = ("a:1", "b:2")


class FakeLink:
    transport, peer, received_bytes, window_bytes, is_one_sided = "fake", "p", 0, 1 << 20, False


class World:
    """A TransferSink under test, with a simulated sending agent and a simulated transport.

    The sending agent sends random messages. The transport writes until the sink calls its fence,
    which stops all writes.
    """

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.now = 100.0
        size = LAYOUT.rank_block_bytes(0)
        self.region = Region.over(bytearray(BLOCKS * size), size, name="d")
        self.book = TransferSink(
            LAYOUT, [self.region], AgentOptions(window_bytes=WINDOW), AgentStats()
        )
        self.links: dict[str, FakeLink] = {}
        self.left: list[FakeLink] = []
        self.dialling: set[str] = set()
        self.numbers = 0
        self.wishes: dict[int, FetchRequest] = {}
        self.invited: dict[int, FakeLink] = {}
        self.said: set[int] = set()
        self.unwanted: set[int] = set()
        self.windows: dict[int, list[WindowHead]] = {}
        self.begun: list[tuple[FakeLink, WindowHead]] = []
        self.good: dict[int, int] = {}
        self.fencing: list[tuple[FakeLink, int]] = []
        self.fenced: set[int] = set()
        self.resolved: dict[int, OutcomeKind] = {}
        self.layers: dict[int, int] = {}

    def step(self) -> None:
        steps = ( self . fetch , self . fetch , self . register , self . register , self . link , self . link , self . accept , self . accept , self . window , self . window , self . window , self . window , self . window , self . settle , self . settle , self . settle , self . fence , self . fence , self . cancel , self . stop , self . wait , self . lose , self . leave , self . nonsense )  # fmt: skip
        self.rng.choice(steps)()

    def obey(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case DialPeer(address):
                    assert address not in self.dialling
                    self.dialling.add(address)
                case SendInvite(link, invite, written):
                    assert link not in self.left
                    assert invite.transfer not in self.invited
                    # The other blocks of the request are cached, and possibly shared.
                    wish = self.wishes[invite.transfer]
                    spans = range(0, wish.tokens, LAYOUT.block_tokens)
                    assert list(written) == [
                        block
                        for block, begin in zip(wish.blocks, spans, strict=False)
                        if begin + LAYOUT.block_tokens > wish.skip_tokens
                    ]
                    self.invited[invite.transfer] = link  # type: ignore[assignment]
                    if self.rng.random() < 0.5:
                        self.say(invite.transfer)
                case FenceTransfer(link, transfer):
                    self.fencing.append((link, transfer))  # type: ignore[arg-type]
                case ResolveHandle(number, end):
                    assert number not in self.resolved
                    assert number not in self.invited or number in self.fenced
                    assert isinstance(end.reason, EndReason)
                    if end.kind is OutcomeKind.LANDED:
                        assert self.good[number] == end.n_bytes == self.whole(number)
                        assert self.layers[number] == LAYOUT.layers
                    self.resolved[number] = end.kind
                case ReportLayers(number, layers):
                    assert number not in self.resolved
                    assert number in self.fenced or not self.invited[number].is_one_sided
                    assert self.layers.get(number, 0) < layers <= LAYOUT.layers
                    self.layers[number] = layers
                case ComputePlan(work):
                    then = work()
                    if self.rng.random() < 0.3:
                        self.rng.choice((self.cancel, self.wait, self.lose))()
                    self.obey(then(self.now))
                case SendMessage(_, message):
                    self.hear(message)

    def hear(self, message: Message) -> None:
        match message:
            case StopTransfer(transfer):
                assert transfer in self.said
            case Unwanted(name):
                number = int(name.removeprefix("r"))
                assert number not in self.said | self.unwanted
                self.unwanted.add(number)
            case Landed(transfer, n_bytes):
                assert n_bytes == self.whole(transfer)

    def say(self, number: int) -> None:
        # Finish registering memory, and send the invitation unless the transfer is over.
        if self.book.confirm_invite(self.invited[number], number):  # type: ignore[arg-type]
            assert number not in self.unwanted
            self.said.add(number)
        else:
            assert number in self.fencing_or_over()

    def fencing_or_over(self) -> set[int]:
        return {number for _, number in self.fencing} | self.fenced | self.resolved.keys()

    def register(self) -> None:
        if late := self.invited.keys() - self.said:
            self.say(self.rng.choice(sorted(late)))

    def whole(self, number: int) -> int:
        wish = self.wishes[number]
        transfer_plan = plan_transfer(
            LAYOUT,
            LAYOUT,
            list(range(BLOCKS)),
            wish.blocks,
            wish.tokens,
            skip_tokens=wish.skip_tokens,
        )
        return transfer_plan.n_bytes

    def fetch(self) -> None:
        self.numbers += 1
        blocks = self.rng.sample(range(BLOCKS), self.rng.randrange(1, 6))
        tokens = self.rng.randrange(1, len(blocks) * 4 + 1)
        skip = self.rng.randrange(tokens)
        address, timeout_s = self.rng.choice(ADDRESSES), self.rng.choice([1.0, 30.0])
        wish = FetchRequest(
            address, f"r{self.numbers}", np.array(blocks), tokens, skip, timeout_s, Priority.BULK
        )
        self.wishes[self.numbers] = wish
        self.obey(self.book.fetch(self.numbers, wish, self.now))

    def link(self) -> None:
        if self.dialling:
            address = self.rng.choice(sorted(self.dialling))
            self.dialling.discard(address)
            if self.rng.random() < 0.2:
                self.obey(self.book.on_link_failed(address, EndReason.UNREACHABLE, "", self.now))
            else:
                self.links[address] = FakeLink()
                self.links[address].is_one_sided = self.rng.random() < 0.5
                self.obey(self.book.on_linked(address, self.links[address], LAYOUT, "p", self.now))

    def accept(self) -> None:
        waiting = [
            number
            for number in self.said
            if number not in self.resolved and number not in self.windows
        ]
        if waiting:
            number = self.rng.choice(waiting)
            group, size = (
                self.rng.choice([1, 2, 4]),
                self.rng.choice([1, WINDOW, WINDOW, WINDOW, WINDOW + 1]),
            )
            wish, source = self.wishes[number], self.rng.sample(range(BLOCKS), BLOCKS)
            source = source if self.rng.random() < 0.95 else []
            known = self.rng.random() < 0.95
            accept = Accept(
                number,
                pack_blocks(source),
                group,
                size,
                pair_fingerprint(LAYOUT, LAYOUT) if known else "",
            )
            if (
                self.told(
                    lambda: self.book.on_accept(self.invited[number], accept, self.now),
                    self.invited[number],
                )
                and source
                and known
            ):
                transfer_plan = plan_transfer(
                    LAYOUT,
                    LAYOUT,
                    source,
                    wish.blocks,
                    wish.tokens,
                    skip_tokens=wish.skip_tokens,
                    group_layers=group,
                )
                heads = [
                    WindowHead(number, group, *w)
                    for group in range(transfer_plan.groups)
                    for w in transfer_plan.windows(group, size)
                ]
                self.rng.shuffle(heads)
                self.windows[number] = heads

    def window(self) -> None:
        for number, heads in self.windows.items():
            if heads and self.rng.random() < 0.5:
                head = heads[-1] if self.rng.random() < 0.1 else heads.pop()
                link = self.invited[number]
                if self.book.place_window(link, head) is not None:
                    assert number not in self.resolved
                    assert (link, number) not in self.fencing
                    self.begun.append((link, head))

    def settle(self) -> None:
        self.rng.shuffle(self.begun)
        if self.begun and self.rng.random() < 0.5:
            return self.settle_together(self.begun[0][1].transfer)
        for _ in range(min(len(self.begun), 8)):
            link, head = self.begun.pop()
            verdict = self.rng.choice(
                [WindowVerdict.OK] * 30 + [WindowVerdict.STALE, WindowVerdict.CORRUPT]
            )
            if verdict is WindowVerdict.OK:
                self.good[head.transfer] = self.good.get(head.transfer, 0) + head.n_bytes
            self.obey(self.book.on_landed(link, head, verdict, self.now))
        return None

    def settle_together(self, transfer: int) -> None:
        # Let the windows of one transfer arrive intact in a batch, which costs one message at most.
        link = self.begun[0][0]
        heads = [head for where, head in self.begun if where is link and head.transfer == transfer]
        self.begun = [begun for begun in self.begun if begun[1] not in heads]
        self.good[transfer] = self.good.get(transfer, 0) + sum(head.n_bytes for head in heads)
        commands = self.book.on_intact_windows(link, heads, self.now)
        messages = [command.message for command in commands if isinstance(command, SendMessage)]
        assert len(messages) <= 1
        for message in messages:
            assert not isinstance(message, Credit) or message.n_bytes == sum(
                head.n_bytes for head in heads
            )
        self.obey(commands)

    def fence(self) -> None:
        if self.fencing:
            link, transfer = self.fencing.pop(self.rng.randrange(len(self.fencing)))
            self.fenced.add(transfer)
            self.begun = [(where, head) for where, head in self.begun if head.transfer != transfer]
            self.obey(self.book.on_fenced(link, transfer, self.now))

    def cancel(self) -> None:
        if self.rng.random() < 0.3:
            self.obey(
                self.book.cancel(
                    self.rng.randrange(self.numbers + 1), EndReason.CANCELLED, "", self.now
                )
            )

    def stop(self) -> None:
        if self.invited and self.rng.random() < 0.3:
            number = self.rng.choice(list(self.invited))
            stop = StopTransfer(number, self.rng.choice(list(EndReason)))
            self.told(
                lambda: self.book.on_stop(self.invited[number], stop, self.now),
                self.invited[number],
            )

    def nonsense(self) -> None:
        link = self.rng.choice([*self.links.values(), FakeLink()])
        number = self.rng.randrange(self.numbers + 3)
        if self.invited.get(number) is not link:
            head = WindowHead(number, 0, 0, 0, 1, 8)
            assert self.book.place_window(link, head) is None
            assert self.book.on_landed(link, head, WindowVerdict.OK, self.now) == []
            assert self.book.on_fenced(link, number, self.now) == []
            assert self.book.on_stop(link, StopTransfer(number, EndReason.STALE), self.now) == []
            assert self.book.on_accept(link, Accept(number, b"", 1, 1), self.now) == []
        else:
            for head in (
                WindowHead(number, 99, 0, 0, 1, 8),
                WindowHead(number, 0, 0, 0, 1, 7),
                WindowHead(number, 0, 9, 0, 1, 8),
            ):
                if self.moving(number):
                    with pytest.raises(WindowError):
                        self.book.place_window(link, head)
                else:
                    assert self.book.place_window(link, head) is None
            if self.rng.random() < 0.2:
                self.obey(self.book.on_bad_window(link, number, "no such window", self.now))

    def moving(self, number: int) -> bool:
        reservation = self.book._reservations.get(number)
        return reservation is not None and reservation.state is SinkState.MOVING

    def wait(self) -> None:
        self.now += self.rng.choice([0.0, 0.1, 2.0])
        self.obey(self.book.tick(self.now))
        due = self.book.next_deadline()
        assert due is None or due > self.now

    def lose(self) -> None:
        known = [*self.links.values(), *self.left]
        if known and self.rng.random() < 0.2:
            self.drop(self.rng.choice(known))

    def leave(self) -> None:
        if self.links and self.rng.random() < 0.2:
            link = self.links.pop(self.rng.choice(sorted(self.links)))
            self.left.append(link)
            self.book.retire_link(link)  # type: ignore[arg-type]

    def told(self, tell, link: FakeLink) -> bool:  # type: ignore[no-untyped-def]
        try:
            self.obey(tell())
        except ProtocolError:
            if link in (*self.links.values(), *self.left):
                self.drop(link)
            return False
        return True

    def drop(self, link: FakeLink) -> None:
        self.links = {address: known for address, known in self.links.items() if known is not link}
        self.left = [known for known in self.left if known is not link]
        self.obey(self.book.on_lost(link, EndReason.LINK_LOST, "", self.now))  # type: ignore[arg-type]

    def finish(self) -> None:
        self.obey(self.book.close(self.now))
        while self.fencing:
            self.fence()


@pytest.fixture(autouse=True)
def some_plans_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    # Make some plans count as long, so that they are computed without the lock.
    monkeypatch.setattr("kvtransfer.transfer.commands._MAX_INLINE_BLOCKS", 2)


@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.integers(0, 1 << 32), st.integers(1, 200))
def test_every_landing_ends_once_behind_its_fence_under_any_events(seed: int, steps: int) -> None:
    world = World(seed)
    for _ in range(steps):
        world.step()
    world.finish()
    assert set(world.resolved) == set(range(1, world.numbers + 1))
    assert sum(world.book.counts.values()) == 0
    assert world.book.next_deadline() is None


def test_a_plan_between_very_many_ranks_is_long_however_few_its_blocks() -> None:
    link, many = FakeLink(), replace(LAYOUT, tp=512, pp=4)
    book = TransferSink(many, [World(0).region], AgentOptions(), AgentStats())
    book.fetch(1, FetchRequest("a:1", "r", np.array([3]), 4, 0, 9.0), 0.0)
    book.on_linked("a:1", link, LAYOUT, "p", 0.0)  # type: ignore[arg-type]
    accept = Accept(1, pack_blocks([1]), 4, WINDOW, pair_fingerprint(LAYOUT, many))
    (long,) = book.on_accept(link, accept, 0.1)  # type: ignore[arg-type]
    assert isinstance(long, ComputePlan)
    assert long.work()(0.2) == []
    assert book.counts["moving"] == 1


def test_any_order_reaches_every_end() -> None:
    ends: set[OutcomeKind] = set()
    unwanted = 0
    for seed in range(60):
        world = World(seed)
        for _ in range(300):
            world.step()
        ends |= set(world.resolved.values())
        unwanted += len(world.unwanted)
    assert ends == set(OutcomeKind)
    assert unwanted
