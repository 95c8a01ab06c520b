"""View: what this gateway tells the others, and what it makes of what they tell. Sans-IO: frames in, frames out.

Not here: what moves frames (bus.py) and when (pump.py), how they are sealed (seal.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain

import msgspec

from gateway.config import Tenant
from gateway.endpoints import EndpointTable
from gateway.gate import Gate
from gateway.metrics import Metrics
from gateway.roster import LiveEndpoint
from gateway.shared import words
from gateway.shared.bus import EVERYBODY
from gateway.shared.memory import Memory, in_parts
from gateway.shared.news import News
from gateway.shared.peers import GONE_S, Peers
from gateway.shared.seal import Refused, Seal
from gateway.shared.use import MOST_ROWS, Use, some
from gateway.shared.warming import State as Warmth
from gateway.shared.warming import Warming
from policies.foreign import NOTHING, Share
from policies.health import State
from policies.ledger import foreign, own
from policies.model import Endpoint
from policies.rungs import packed, unpacked

Frame = tuple[bytes, bytes]
"""(whom it is for, the sealed bytes)"""

HEARTBEAT_S = 0.5
BODY_BYTES = 32 << 10
NAMES_KEPT = 16384
LATE_S = GONE_S
OUT = frozenset({State.EJECTED, State.DEAD})


class View:
    """One gateway's part of the shared view. `news` is what its request path appends to; `suspect` is called with an
    endpoint that another gateway found broken, which is evidence and no verdict; `tenants` are those configured now."""

    def __init__(
        self, seal: Seal, endpoints: EndpointTable, gate: Gate, metrics: Metrics, block_bytes: int, memory_bytes: int
    ) -> None:
        self.news = News(lru_cache(NAMES_KEPT)(seal.digest))
        self.me = seal.me
        self.suspect: Callable[[LiveEndpoint], None] = lambda live: None
        self.tenants: Callable[[], Sequence[Tenant]] = lambda: ()
        self.peers = Peers()
        self.askers: list[bytes] = []
        self.memory = Memory(memory_bytes)
        self._seal = seal
        self._endpoints = endpoints
        self._gate = gate
        self._use = Use(gate, self.news, self.news.named)
        self._metrics = metrics
        self._block_bytes = block_bytes
        self._digests: dict[tuple[str, str], int] = {}
        self._live: dict[int, LiveEndpoint] = {}
        self._told: dict[int, Share] = {}
        self._told_at = float("-inf")

    def begin(self, now: float) -> None:
        """From now on."""
        self.warming = Warming(now)
        self._born_at = now

    # Telling

    def flush(self, now: float, *, connected: bool) -> list[Frame]:
        """What there is to tell. What only holds for a moment is told only if somebody can hear it."""
        frames = self._tell_prompts()
        if not connected:
            self._use.forget()
            del self.news.confirmed[:-MOST_ROWS], self.news.moved[:-MOST_ROWS]
            return frames
        frames += self._tell_rest()
        frames += map(self._frame, self._use.tell(now))
        if self._told_at + HEARTBEAT_S <= now:
            self._know()
        shares = self._shares()
        if shares != self._told or self._told_at + HEARTBEAT_S <= now:
            self._told, self._told_at = shares, now
            loads = words.Loads(now - self._born_at, self.warming.warm, list(shares.items()))
            frames.append(self._frame(loads))
        attempt = self.warming.ask(now, alone=not self.peers.anybody_warm)
        if attempt is not None:
            frames.append(self._frame(words.Hello(attempt)))
        return frames

    def bye(self) -> Frame:
        return self._frame(words.Bye())

    def parts(self, asker: bytes, now: float) -> Iterator[Frame]:
        """What a newcomer is told: a snapshot of what is remembered when this is first asked for."""
        bodies = chain(self.memory.all(), map(words.encode, self._use.everybody(now)))
        for number, part in enumerate(in_parts(bodies)):
            yield self._frame(words.Part(number, last=False, said=part), asker)
        yield self._frame(words.Part(number + 1, last=True, said=[]), asker)

    def _tell_prompts(self) -> list[Frame]:
        prompts, self.news.prompts = self.news.prompts, []
        if prompts and not self.warming.warm:
            self._metrics.blind_picks_total.inc(sum(kept is None for _, _, _, kept in prompts))
        frames: list[Frame] = []
        rows: list[words.Prompt] = []
        size = 0
        for fingerprint, endpoint, prompt_tokens, kept in prompts:
            if not fingerprint.keys:
                continue
            keys = packed(fingerprint.rungs)
            blocks, n_bytes = len(fingerprint.keys), fingerprint.n_bytes
            rows.append(words.Prompt(self._digest(endpoint), blocks, n_bytes, prompt_tokens, keys, kept))
            size += len(keys) + 32
            if size > BODY_BYTES:
                frames.append(self._picks(rows))
                rows, size = [], 0
        if rows:
            frames.append(self._picks(rows))
        return frames

    def _picks(self, rows: list[words.Prompt]) -> Frame:
        body = words.encode(words.Picks(self._block_bytes, rows))
        self.memory.keep(body)
        self._count("picks", "out")
        return EVERYBODY, self._seal.close(body)

    def _tell_rest(self) -> list[Frame]:
        news, frames = self.news, []
        if news.confirmed:
            answers = ((self._digest(endpoint), believed, found) for endpoint, believed, found in news.confirmed)
            frames += [self._frame(words.Confirmed(part)) for part in some(answers)]
            news.confirmed = []
        if news.moved:
            told = [(self._digest(endpoint), state, cause) for endpoint, state, cause in news.moved]
            frames.append(self._frame(words.Moved(told[-MOST_ROWS:])))
            for named, state, _ in told:
                if state in OUT:
                    self.memory.keep(words.encode(words.Forgotten(named)))
            news.moved = []
        return frames

    def _shares(self) -> dict[int, Share]:
        found = {named: own(live.load) for named, live in self._live.items() if live.load.in_flight}
        return {named: share for named, share in found.items() if share != NOTHING}

    def _frame(self, message: words.Message, to: bytes = EVERYBODY) -> Frame:
        self._count(words.kind(message), "out")
        return to, self._seal.close(words.encode(message), to)

    # Hearing

    def open(self, frame: bytes) -> tuple[bytes, bytes, words.Message] | None:
        """(sender, body, message), or None for what is not for us, or from nobody of ours: that is counted."""
        try:
            opened = self._seal.open(frame)
            if opened is None:
                return None
            sender, body = opened
            message = words.decode(body)
        except Refused as refused:
            self.drop(refused.reason)
            return None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.drop("malformed")
            return None
        self._count(words.kind(message), "in")
        return sender, bytes(body), message

    def take(self, frame: bytes, age_s: float, now: float) -> Iterator[None]:
        """Make something of a frame, in steps of some tens of microseconds: the caller's loop may turn in between."""
        opened = self.open(frame)
        if opened is None:
            return
        sender, body, message = opened
        if isinstance(message, words.Picks | words.Confirmed):
            if self.warming.warm:
                yield from self._learn(body, message)
            else:
                self.warming.hold(body, age_s, now)
        elif isinstance(message, words.Part):
            yield from self._told_part(message, now)
        elif isinstance(message, words.Inside):
            self._use.inside(message, age_s, now)
        elif age_s > LATE_S:
            if self.warming.warm:  # a newcomer reads what was said before it came
                self.drop("late")
        else:
            self._heed(sender, message, now)

    def _heed(self, sender: bytes, message: words.Message, now: float) -> None:
        """What holds for a moment."""
        match message:
            case words.Loads():
                self._loads(sender, message, now)
            case words.Moved(endpoints):
                broken = [self._live.get(named) for named, state, _ in endpoints if state in OUT]
                for live in broken:
                    if live is not None and live.load.available:
                        self.suspect(live)
            case words.Charged():
                self._use.charged(message)
            case words.Taken():
                self._use.taken(message, now)
            case words.Hello(attempt):
                self._told_at = float("-inf")  # it wants to know who is there
                if self.warming.warm and self.peers.answers(self._seal.me, self._born_at, sender, attempt):
                    self.askers.append(sender)
            case words.Bye():
                self._gone(sender, now)
            case _:
                self.drop("malformed")

    def _told_part(self, part: words.Part, now: float) -> Iterator[None]:
        if self.warming.state is Warmth.WARM:
            return
        for body in part.said:
            yield from self._repeat(body, now)
        self.warming.part(len(part.said), last=part.last, now=now)

    def settle(self, now: float) -> Iterator[None]:
        """Become warm if it is time: take what was said while we were told of the past."""
        held = self.warming.finished(now)
        if held is not None:
            for body in held:
                yield from self._repeat(body, now)

    def _repeat(self, body: bytes, now: float) -> Iterator[None]:
        try:
            message = words.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.drop("malformed")
            return
        if isinstance(message, words.Picks | words.Confirmed | words.Forgotten):
            yield from self._learn(body, message)
        elif isinstance(message, words.Inside):
            self._use.inside(message, 0.0, now)
            yield
        else:
            self.drop("malformed")

    def _learn(self, body: bytes, message: words.Picks | words.Confirmed | words.Forgotten) -> Iterator[None]:
        index = self._endpoints.prefixes.index
        if isinstance(message, words.Confirmed):
            for named, believed, found in message.answers:
                live = self._known(named)
                if live is not None:
                    index.confirm(live.load.slot, believed, found)
        elif isinstance(message, words.Forgotten):
            self.memory.keep(body)
            live = self._known(message.endpoint)
            if live is not None:
                index.forget(live.load.slot)
        elif message.block_bytes != self._block_bytes:
            self.drop("block_bytes")
        else:
            self.memory.keep(body)
            for prompt in message.prompts:
                self._learn_prompt(prompt)
                yield

    def _learn_prompt(self, prompt: words.Prompt) -> None:
        live = self._known(prompt.endpoint)
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

    def _loads(self, sender: bytes, loads: words.Loads, now: float) -> None:
        peer = self.peers.heard(sender, loads.uptime_s, warm=loads.warm, now=now)
        shares = dict(loads.shares)
        changed = [
            foreign(live.load, sender, shares.get(named), now)
            for named in peer.shares | shares.keys()
            if (live := self._live.get(named)) is not None
        ]
        peer.shares = frozenset(shares)
        if any(changed):
            self._gate.refresh()

    # Time

    def sweep(self, now: float) -> None:
        """Let go of what those held who are gone."""
        for sender in self.peers.silent(now):
            self._gone(sender, now)

    def _gone(self, sender: bytes, now: float) -> None:
        if self.peers.gone(sender) is not None:
            for live in self._endpoints.all():
                foreign(live.load, sender, None, now)
            self._gate.refresh()

    def _know(self) -> None:
        """Endpoints and tenants come and go with configurations."""
        self._use.know(self.tenants())
        self._live = {self._digest(live.endpoint): live for live in self._endpoints.all() if not live.leaving}

    def _known(self, named: int) -> LiveEndpoint | None:
        """Whose part of the index it is. One who left since we looked has lost his, perhaps to another."""
        live = self._live.get(named)
        return None if live is None or live.leaving else live

    def _digest(self, endpoint: Endpoint) -> int:
        key = endpoint.pool, endpoint.url
        found = self._digests.get(key)
        if found is None:
            if len(self._digests) >= NAMES_KEPT:
                self._digests.clear()
            found = self._digests[key] = self._seal.digest(f"{endpoint.pool}\0{endpoint.url}")
        return found

    def drop(self, reason: str) -> None:
        """Count something that nothing came of."""
        self._metrics.shared_dropped_total.labels(reason).inc()

    def _count(self, kind: str, direction: str) -> None:
        self._metrics.shared_messages_total.labels(kind, direction).inc()
