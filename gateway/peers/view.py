"""The peer view: what this gateway sends to the others, and how it applies their messages.

Sans-IO: frames in, frames out. Not here: the bus (gateway/peers/bus.py), when frames move (sync_loop.py), and how
they are authenticated (frame_auth.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain

import msgspec

from gateway.admission.controller import Gate
from gateway.config import Tenant
from gateway.fleet.endpoint_registry import LiveEndpoint
from gateway.fleet.endpoint_table import EndpointTable
from gateway.fleet.outgoing_updates import News
from gateway.metrics.catalogue import Metrics
from gateway.peers import messages
from gateway.peers.bus import EVERYBODY
from gateway.peers.frame_auth import Refused, Seal
from gateway.peers.members import GONE_S, Peers
from gateway.peers.replay_buffer import Memory, in_parts
from gateway.peers.usage_sync import MOST_ROWS, Use, some
from gateway.peers.warm_up import State as Warmth
from gateway.peers.warm_up import Warming
from policies.engine.peer_load import NOTHING, Share
from policies.health.health import State
from policies.ledger import foreign, own
from policies.model import Endpoint
from policies.prefix.sampled_keys import packed, unpacked

Frame = tuple[bytes, bytes]
"""(recipient, sealed bytes)"""

HEARTBEAT_S = 0.5
BODY_BYTES = 32 << 10
NAMES_KEPT = 16384
LATE_S = GONE_S
OUT = frozenset({State.EJECTED, State.DEAD})


class View:
    """One gateway's part of the shared state.

    updates     the path of a request appends to it
    on_suspect  called with an endpoint that another gateway ejected: a reason to probe it, no more
    tenants     returns the configured tenants
    newcomers   ids of gateways that this one has to warm up
    """

    def __init__(
        self,
        seal: Seal,
        endpoints: EndpointTable,
        gate: Gate,
        metrics: Metrics,
        block_bytes: int,
        memory_bytes: int,
    ) -> None:
        self.news = News(lru_cache(NAMES_KEPT)(seal.digest))
        self.me = seal.me
        self.suspect: Callable[[LiveEndpoint], None] = lambda live: None
        self.tenants: Callable[[], Sequence[Tenant]] = lambda: ()
        self.peers = Peers()
        self.askers: list[bytes] = []
        self.memory = Memory(memory_bytes)
        self._auth = seal
        self._endpoints = endpoints
        self._admission = gate
        self._use = Use(gate, self.news, self.news.named)
        self._metrics = metrics
        self._block_bytes = block_bytes
        self._digests: dict[tuple[str, str], int] = {}
        self._live: dict[int, LiveEndpoint] = {}
        self._sent_shares: dict[int, Share] = {}
        self._sent_at = float("-inf")

    def begin(self, now: float) -> None:
        """Start the warm-up. Call it once, before all other methods."""
        self.warming = Warming(now)
        self._started_at = now

    # Outgoing

    def flush(self, now: float, *, connected: bool) -> list[Frame]:
        """Return the frames to send. While the bus is disconnected, only prompts are queued."""
        frames = self._prompt_frames()
        if not connected:
            self._use.forget()
            del self.news.confirmed[:-MOST_ROWS], self.news.moved[:-MOST_ROWS]
            return frames
        frames += self._report_frames()
        frames += map(self._frame, self._use.tell(now))
        is_due = self._sent_at + HEARTBEAT_S <= now
        if is_due:
            self._update_names()
        shares = self._shares()
        if shares != self._sent_shares or is_due:
            self._sent_shares, self._sent_at = shares, now
            uptime_s = now - self._started_at
            loads = messages.Loads(uptime_s, self.warming.warm, list(shares.items()))
            frames.append(self._frame(loads))
        attempt = self.warming.ask(now, alone=not self.peers.anybody_warm)
        if attempt is not None:
            frames.append(self._frame(messages.Hello(attempt)))
        return frames

    def bye(self) -> Frame:
        return self._frame(messages.Bye())

    def parts(self, newcomer: bytes, now: float) -> Iterator[Frame]:
        """Yield the frames that warm up another gateway: the stored state as of the first step."""
        bodies = chain(self.memory.all(), map(messages.encode, self._use.everybody(now)))
        for number, part in enumerate(in_parts(bodies)):
            yield self._frame(messages.Part(number, last=False, said=part), newcomer)
        yield self._frame(messages.Part(number + 1, last=True, said=[]), newcomer)

    def _prompt_frames(self) -> list[Frame]:
        prompts, self.news.prompts = self.news.prompts, []
        if prompts and not self.warming.warm:
            picks = sum(cached_tokens is None for _, _, _, cached_tokens in prompts)
            self._metrics.blind_picks_total.inc(picks)
        frames: list[Frame] = []
        rows: list[messages.Prompt] = []
        size = 0
        for fingerprint, endpoint, prompt_tokens, cached_tokens in prompts:
            if not fingerprint.keys:
                continue
            keys = packed(fingerprint.rungs)
            blocks, n_bytes = len(fingerprint.keys), fingerprint.n_bytes
            digest = self._digest(endpoint)
            row = messages.Prompt(digest, blocks, n_bytes, prompt_tokens, keys, cached_tokens)
            rows.append(row)
            size += len(keys) + 32
            if size > BODY_BYTES:
                frames.append(self._picks_frame(rows))
                rows, size = [], 0
        if rows:
            frames.append(self._picks_frame(rows))
        return frames

    def _picks_frame(self, rows: list[messages.Prompt]) -> Frame:
        body = messages.encode(messages.Picks(self._block_bytes, rows))
        self.memory.keep(body)
        self._count("picks", "out")
        return EVERYBODY, self._auth.close(body)

    def _report_frames(self) -> list[Frame]:
        updates, frames = self.news, []
        if updates.confirmed:
            answers = (
                (self._digest(endpoint), believed, actual)
                for endpoint, believed, actual in updates.confirmed
            )
            frames += [self._frame(messages.Confirmed(part)) for part in some(answers)]
            updates.confirmed = []
        if updates.moved:
            rows = [
                (self._digest(endpoint), state, cause) for endpoint, state, cause in updates.moved
            ]
            frames.append(self._frame(messages.Moved(rows[-MOST_ROWS:])))
            for digest, state, _ in rows:
                if state in OUT:
                    self.memory.keep(messages.encode(messages.Forgotten(digest)))
            updates.moved = []
        return frames

    def _shares(self) -> dict[int, Share]:
        shares = {
            digest: own(live.load) for digest, live in self._live.items() if live.load.in_flight
        }
        return {digest: share for digest, share in shares.items() if share != NOTHING}

    def _frame(self, message: messages.Message, to: bytes = EVERYBODY) -> Frame:
        self._count(messages.kind(message), "out")
        return to, self._auth.close(messages.encode(message), to)

    # Incoming

    def open(self, frame: bytes) -> tuple[bytes, bytes, messages.Message] | None:
        """Return (sender, body, message); None for own frames, those for others, and invalid ones.

        Invalid frames are counted.
        """
        try:
            opened = self._auth.open(frame)
            if opened is None:
                return None
            sender, body = opened
            message = messages.decode(body)
        except Refused as refused:
            self.drop(refused.reason)
            return None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.drop("malformed")
            return None
        self._count(messages.kind(message), "in")
        return sender, bytes(body), message

    def take(self, frame: bytes, age_s: float, now: float) -> Iterator[None]:
        """Apply a frame in short steps, between which the caller may yield to the loop."""
        opened = self.open(frame)
        if opened is None:
            return
        sender, body, message = opened
        if isinstance(message, messages.Picks | messages.Confirmed):
            if self.warming.warm:
                yield from self._learn(body, message)
            else:
                self.warming.hold(body, age_s, now)
        elif isinstance(message, messages.Part):
            yield from self._apply_part(message, now)
        elif isinstance(message, messages.Inside):
            self._use.inside(message, age_s, now)
        elif age_s > LATE_S:
            # A new gateway also receives frames from before its start; those are not counted.
            if self.warming.warm:
                self.drop("late")
        else:
            self._apply(sender, message, now)

    def _apply(self, sender: bytes, message: messages.Message, now: float) -> None:
        """Apply a message about the current moment, which is useless when it is late."""
        match message:
            case messages.Loads():
                self._apply_loads(sender, message, now)
            case messages.Moved(endpoints):
                ejected = [self._live.get(digest) for digest, state, _ in endpoints if state in OUT]
                for live in ejected:
                    if live is not None and live.load.available:
                        self.suspect(live)
            case messages.Charged():
                self._use.charged(message)
            case messages.Taken():
                self._use.taken(message, now)
            case messages.Hello(attempt):
                self._sent_at = float(
                    "-inf"
                )  # send a heartbeat, so that the newcomer knows its peers
                if self.warming.warm and self.peers.answers(
                    self._auth.me, self._started_at, sender, attempt
                ):
                    self.askers.append(sender)
            case messages.Bye():
                self._remove_peer(sender, now)
            case _:
                self.drop("malformed")

    def _apply_part(self, part: messages.Part, now: float) -> Iterator[None]:
        if self.warming.state is Warmth.WARM:
            return
        for body in part.said:
            yield from self._replay(body, now)
        self.warming.part(len(part.said), last=part.last, now=now)

    def settle(self, now: float) -> Iterator[None]:
        """Finish the warm-up if it is over: apply the messages that were buffered meanwhile."""
        bodies = self.warming.finished(now)
        if bodies is not None:
            for body in bodies:
                yield from self._replay(body, now)

    def _replay(self, body: bytes, now: float) -> Iterator[None]:
        try:
            message = messages.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.drop("malformed")
            return
        if isinstance(message, messages.Picks | messages.Confirmed | messages.Forgotten):
            yield from self._learn(body, message)
        elif isinstance(message, messages.Inside):
            self._use.inside(message, 0.0, now)
            yield
        else:
            self.drop("malformed")

    def _learn(
        self, body: bytes, message: messages.Picks | messages.Confirmed | messages.Forgotten
    ) -> Iterator[None]:
        index = self._endpoints.prefixes.index
        if isinstance(message, messages.Confirmed):
            for digest, believed, actual in message.answers:
                live = self._current(digest)
                if live is not None:
                    index.confirm(live.load.slot, believed, actual)
        elif isinstance(message, messages.Forgotten):
            self.memory.keep(body)
            live = self._current(message.endpoint)
            if live is not None:
                index.forget(live.load.slot)
        elif message.block_bytes != self._block_bytes:
            self.drop("block_bytes")
        else:
            self.memory.keep(body)
            for prompt in message.prompts:
                self._learn_prompt(prompt)
                yield

    def _learn_prompt(self, prompt: messages.Prompt) -> None:
        live = self._current(prompt.endpoint)
        if live is None:
            self.drop("unknown_endpoint")
            return
        try:
            keys = unpacked(prompt.keys, prompt.blocks, self._block_bytes, prompt.n_bytes)
        except ValueError:
            self.drop("malformed")
            return
        tokens_per_block = prompt.prompt_tokens * self._block_bytes / prompt.n_bytes
        self._endpoints.learn_elsewhere(keys, live.load, tokens_per_block, prompt.kept)

    def _apply_loads(self, sender: bytes, loads: messages.Loads, now: float) -> None:
        peer = self.peers.heard(sender, loads.uptime_s, warm=loads.warm, now=now)
        shares = dict(loads.shares)
        changes = [
            foreign(live.load, sender, shares.get(digest), now)
            for digest in peer.shares | shares.keys()
            if (live := self._live.get(digest)) is not None
        ]
        peer.shares = frozenset(shares)
        if any(changes):
            self._admission.refresh()

    # Upkeep

    def sweep(self, now: float) -> None:
        """Remove the gateways that have sent nothing for GONE_S, and their bookings."""
        for sender in self.peers.silent(now):
            self._remove_peer(sender, now)

    def _remove_peer(self, sender: bytes, now: float) -> None:
        if self.peers.gone(sender) is not None:
            for live in self._endpoints.all():
                foreign(live.load, sender, None, now)
            self._admission.refresh()

    def _update_names(self) -> None:
        """Update the digests of tenants and endpoints, which change with configurations."""
        self._use.know(self.tenants())
        self._live = {
            self._digest(live.endpoint): live for live in self._endpoints.all() if not live.leaving
        }

    def _current(self, digest: int) -> LiveEndpoint | None:
        """Return the endpoint, unless it has left: its slot may be another's."""
        live = self._live.get(digest)
        return None if live is None or live.leaving else live

    def _digest(self, endpoint: Endpoint) -> int:
        key = endpoint.pool, endpoint.url
        digest = self._digests.get(key)
        if digest is None:
            if len(self._digests) >= NAMES_KEPT:
                self._digests.clear()
            digest = self._auth.digest(f"{endpoint.pool}\0{endpoint.url}")
            self._digests[key] = digest
        return digest

    def drop(self, reason: str) -> None:
        """Count a message that is dropped."""
        self._metrics.shared_dropped_total.labels(reason).inc()

    def _count(self, kind: str, direction: str) -> None:
        self._metrics.shared_messages_total.labels(kind, direction).inc()
