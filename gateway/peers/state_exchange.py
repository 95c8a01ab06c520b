"""Builds messages to other gateways from this gateway's state, and applies their messages. No I/O.

It takes and returns frames. The bus is in bus_interface.py, the schedule in sync_loop.py, and the
authentication in frame_auth.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain

import msgspec

from gateway.admission.admission_controller import AdmissionController
from gateway.config import Tenant
from gateway.fleet.endpoint_load_and_health import EndpointTable
from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.fleet.updates_for_peers import OutgoingUpdates
from gateway.metrics.catalogue import Metrics
from gateway.peers import peer_messages
from gateway.peers.bus_interface import BROADCAST
from gateway.peers.frame_auth import FrameAuth, FrameRejectedError
from gateway.peers.known_peers import EXPIRY_S, PeerTable
from gateway.peers.replay_buffer import ReplayBuffer, split_into_parts
from gateway.peers.usage_sync import MAX_ROWS, UsageSync, batches
from gateway.peers.warm_up import WarmUp
from gateway.peers.warm_up import WarmUpState as Warmth
from policies.engine.peer_load import NOTHING, PeerShare
from policies.health.endpoint_health import HealthState
from policies.load_ledger import own_load, set_peer_load
from policies.prefix.sampled_keys import pack, unpack
from policies.routing_types import Endpoint

Frame = tuple[bytes, bytes]
"""A frame to send: (recipient, frame bytes with an authentication tag)."""

HEARTBEAT_S = 0.5
BODY_BYTES = 32 << 10
NAMES_CACHED = 16384
LATE_S = EXPIRY_S
OUT = frozenset({HealthState.EJECTED, HealthState.DEAD})


class PeerView:
    """The shared state as this gateway sees it: builds messages to others, and applies theirs.

    updates     collects updates for other gateways; the code that serves requests appends to it
    on_suspect  function that is called with an endpoint that another gateway has ejected. It should
                check the endpoint's health: the verdict of another gateway does not eject it here
    tenants     function that returns the configured tenants
    new_peers   ids of gateways that have just started and to which this one has to send its state
    """

    def __init__(
        self,
        frame_auth: FrameAuth,
        endpoints: EndpointTable,
        admission: AdmissionController,
        metrics: Metrics,
        block_bytes: int,
        memory_bytes: int,
    ) -> None:
        self.updates = OutgoingUpdates(lru_cache(NAMES_CACHED)(frame_auth.digest))
        self.own_id = frame_auth.own_id
        self.on_suspect: Callable[[LiveEndpoint], None] = lambda live: None
        self.tenants: Callable[[], Sequence[Tenant]] = lambda: ()
        self.peers = PeerTable()
        self.new_peers: list[bytes] = []
        self.replay_buffer = ReplayBuffer(memory_bytes)
        self._auth = frame_auth
        self._endpoints = endpoints
        self._admission = admission
        names = lru_cache(NAMES_CACHED)(frame_auth.digests)
        self._use = UsageSync(admission, self.updates, self.updates.session_digest, names)
        self._metrics = metrics
        self._block_bytes = block_bytes
        self._digests: dict[tuple[str, str], tuple[int, ...]] = {}
        self._live: dict[int, LiveEndpoint] = {}
        self._sent_state: tuple[dict[int, PeerShare], list[tuple[int, int]]] = ({}, [])
        self._sent_at = float("-inf")

    def start(self, now: float) -> None:
        """Start to request the shared state from other gateways (warm-up).

        Call this once, before any other method.
        """
        self.warm_up = WarmUp(now)
        self._started_at = now

    # Outgoing

    def outgoing_frames(self, now: float, *, is_connected: bool) -> list[Frame]:
        """Return the frames to send to the other gateways now.

        While the bus is disconnected, only messages about prompts are queued.
        """
        frames = self._prompt_frames()
        if not is_connected:
            self._use.discard()
            del self.updates.cache_reports[:-MAX_ROWS], self.updates.health_changes[:-MAX_ROWS]
            return frames
        frames += self._report_frames()
        frames += map(self._frame, self._use.usage_messages(now))
        is_due = self._sent_at + HEARTBEAT_S <= now
        if is_due:
            self._update_names()
        state = self._shares(), self._use.requests_in_progress()
        if state != self._sent_state or is_due:
            self._sent_state, self._sent_at = state, now
            shares, tenants = state
            uptime_s = now - self._started_at
            is_warm = self.warm_up.is_warm
            loads = peer_messages.PeerLoads(uptime_s, is_warm, list(shares.items()), tenants)
            frames.append(self._frame(loads))
        attempt = self.warm_up.next_hello(now, has_no_peers=not self.peers.has_warm_peer)
        if attempt is not None:
            frames.append(self._frame(peer_messages.Hello(attempt)))
        return frames

    def bye_frame(self) -> Frame:
        return self._frame(peer_messages.Bye())

    def warm_up_frames(self, new_peer: bytes, now: float) -> Iterator[Frame]:
        """Yield frames with the state that a gateway needs after its start.

        They contain the recent prompts, and the sessions that are active when the first frame is
        taken.
        """
        bodies = chain(
            self.replay_buffer.messages(), map(peer_messages.encode, self._use.all_sessions(now))
        )
        for number, part in enumerate(split_into_parts(bodies)):
            yield self._frame(
                peer_messages.WarmUpPart(number, is_last=False, messages=part), new_peer
            )
        yield self._frame(peer_messages.WarmUpPart(number + 1, is_last=True, messages=[]), new_peer)

    def _prompt_frames(self) -> list[Frame]:
        prompts, self.updates.prompts = self.updates.prompts, []
        if prompts and not self.warm_up.is_warm:
            picks = sum(cached_tokens is None for _, _, _, cached_tokens in prompts)
            self._metrics.blind_picks_total.inc(picks)
        frames: list[Frame] = []
        rows: list[peer_messages.SentPrompt] = []
        size = 0
        for fingerprint, endpoint, prompt_tokens, cached_tokens in prompts:
            if not fingerprint.keys:
                continue
            keys = pack(fingerprint.sampled_keys)
            blocks, n_bytes = len(fingerprint.keys), fingerprint.n_bytes
            digest = self._digest(endpoint)
            row = peer_messages.SentPrompt(
                digest, blocks, n_bytes, prompt_tokens, keys, cached_tokens
            )
            rows.append(row)
            size += len(keys) + 32
            if size > BODY_BYTES:
                frames.append(self._picks_frame(rows))
                rows, size = [], 0
        if rows:
            frames.append(self._picks_frame(rows))
        return frames

    def _picks_frame(self, rows: list[peer_messages.SentPrompt]) -> Frame:
        body = peer_messages.encode(peer_messages.SentPrompts(self._block_bytes, rows))
        self.replay_buffer.append(body)
        self._count("picks", "out")
        return BROADCAST, self._auth.seal(body)

    def _report_frames(self) -> list[Frame]:
        updates, frames = self.updates, []
        if updates.cache_reports:
            answers = (
                (self._digest(endpoint), believed, actual)
                for endpoint, believed, actual in updates.cache_reports
            )
            frames += [self._frame(peer_messages.CacheReports(part)) for part in batches(answers)]
            updates.cache_reports = []
        if updates.health_changes:
            rows = [
                (self._digest(endpoint), state, cause)
                for endpoint, state, cause in updates.health_changes
            ]
            frames.append(self._frame(peer_messages.HealthChanges(rows[-MAX_ROWS:])))
            for digest, state, _ in rows:
                if state in OUT:
                    self.replay_buffer.append(peer_messages.encode(peer_messages.CacheLoss(digest)))
            updates.health_changes = []
        return frames

    def _shares(self) -> dict[int, PeerShare]:
        shares = {
            digest: own_load(live.load)
            for digest, live in self._live.items()
            if live.load.in_flight
        }
        return {digest: share for digest, share in shares.items() if share != NOTHING}

    def _frame(self, message: peer_messages.Message, to: bytes = BROADCAST) -> Frame:
        self._count(peer_messages.message_kind(message), "out")
        return to, self._auth.seal(peer_messages.encode(message), to)

    # Incoming

    def open_frame(self, frame: bytes) -> tuple[bytes, bytes, peer_messages.Message] | None:
        """Return the sender, body and message of a frame that another gateway sent.

        Returns None for frames of this gateway, for frames to others, and for invalid frames, which
        are counted. Prompts that were hashed with another key are left out, because none would
        match.
        """
        try:
            opened = self._auth.verify(frame)
            if opened is None:
                return None
            message = peer_messages.decode(opened.body)
        except FrameRejectedError as refused:
            self.count_drop(refused.reason)
            return None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.count_drop("malformed")
            return None
        self._count(peer_messages.message_kind(message), "in")
        if not opened.has_known_blocks:
            if isinstance(message, peer_messages.SentPrompts):
                return None
            if isinstance(message, peer_messages.WarmUpPart):
                message = _without_prompts(message)
        return opened.sender, bytes(opened.body), message

    def apply_frame(self, frame: bytes, age_s: float, now: float) -> Iterator[None]:
        """Apply the messages in a frame from another gateway, in steps that each take little time.

        The caller may yield to the event loop between two steps.
        """
        opened = self.open_frame(frame)
        if opened is None:
            return
        sender, body, message = opened
        if isinstance(message, peer_messages.SentPrompts | peer_messages.CacheReports):
            if self.warm_up.is_warm:
                yield from self._learn(body, message)
            else:
                self.warm_up.buffer(body, age_s, now)
        elif isinstance(message, peer_messages.WarmUpPart):
            yield from self._apply_part(message, now)
        elif isinstance(message, peer_messages.ActiveSessions):
            self._use.on_sessions(message, age_s, now)
        elif age_s > LATE_S:
            # A new gateway also receives frames from before its start; those are not counted.
            if self.warm_up.is_warm:
                self.count_drop("late")
        else:
            self._apply(sender, message, now)

    def _apply(self, sender: bytes, message: peer_messages.Message, now: float) -> None:
        match message:
            case peer_messages.PeerLoads():
                self._apply_loads(sender, message, now)
            case peer_messages.HealthChanges(endpoints):
                ejected = [self._live.get(digest) for digest, state, _ in endpoints if state in OUT]
                for live in ejected:
                    if live is not None and live.load.is_available:
                        self.on_suspect(live)
            case peer_messages.TenantCharges():
                self._use.on_charges(message)
            case peer_messages.QuotaUse():
                self._use.on_quota_use(message, now)
            case peer_messages.Hello(attempt):
                self._sent_at = float(
                    "-inf"
                )  # send a heartbeat, so that the newcomer knows its peers
                if self.warm_up.is_warm and self.peers.is_responder(
                    self._auth.own_id, self._started_at, sender, attempt
                ):
                    self.new_peers.append(sender)
            case peer_messages.Bye():
                self._remove_peer(sender, now)
            case _:
                self.count_drop("malformed")

    def _apply_part(self, part: peer_messages.WarmUpPart, now: float) -> Iterator[None]:
        if self.warm_up.state is Warmth.WARM:
            return
        for body in part.messages:
            yield from self._replay(body, now)
        self.warm_up.on_part(len(part.messages), is_last=part.is_last, now=now)

    def finish_warm_up(self, now: float) -> Iterator[None]:
        """At the end of the warm-up, apply the messages that were buffered while it ran.

        They are newer than the state that another gateway has sent. Does nothing while the warm-up
        is in progress.
        """
        bodies = self.warm_up.finish(now)
        if bodies is not None:
            for body in bodies:
                yield from self._replay(body, now)

    def _replay(self, body: bytes, now: float) -> Iterator[None]:
        try:
            message = peer_messages.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.count_drop("malformed")
            return
        if isinstance(
            message,
            peer_messages.SentPrompts | peer_messages.CacheReports | peer_messages.CacheLoss,
        ):
            yield from self._learn(body, message)
        elif isinstance(message, peer_messages.ActiveSessions):
            self._use.on_sessions(message, 0.0, now)
            yield
        else:
            self.count_drop("malformed")

    def _learn(
        self,
        body: bytes,
        message: peer_messages.SentPrompts | peer_messages.CacheReports | peer_messages.CacheLoss,
    ) -> Iterator[None]:
        index = self._endpoints.prefixes.index
        if isinstance(message, peer_messages.CacheReports):
            for digest, believed, actual in message.answers:
                live = self._current(digest)
                if live is not None:
                    index.confirm(live.load.slot, believed, actual)
        elif isinstance(message, peer_messages.CacheLoss):
            self.replay_buffer.append(body)
            live = self._current(message.endpoint)
            if live is not None:
                index.forget(live.load.slot)
        elif message.block_bytes != self._block_bytes:
            self.count_drop("block_bytes")
        else:
            self.replay_buffer.append(body)
            for prompt in message.prompts:
                self._learn_prompt(prompt)
                yield

    def _learn_prompt(self, prompt: peer_messages.SentPrompt) -> None:
        live = self._current(prompt.endpoint)
        if live is None:
            self.count_drop("unknown_endpoint")
            return
        try:
            keys = unpack(prompt.keys, prompt.blocks, self._block_bytes, prompt.n_bytes)
        except ValueError:
            self.count_drop("malformed")
            return
        tokens_per_block = prompt.prompt_tokens * self._block_bytes / prompt.n_bytes
        prefixes = self._endpoints.prefixes
        prefixes.learn_from_peer(keys, live.load, tokens_per_block, prompt.cached_tokens)

    def _apply_loads(self, sender: bytes, loads: peer_messages.PeerLoads, now: float) -> None:
        peer = self.peers.update(sender, loads.uptime_s, is_warm=loads.is_warm, now=now)
        shares = dict(loads.shares)
        changes = [
            set_peer_load(live.load, sender, shares.get(digest), now)
            for digest in peer.shares | shares.keys()
            if (live := self._live.get(digest)) is not None
        ]
        peer.shares = frozenset(shares)
        self._use.on_requests_in_progress(sender, loads.tenants)
        if any(changes):
            self._admission.refresh()

    # Upkeep

    def expire_peers(self, now: float) -> None:
        """Remove gateways that have sent nothing for EXPIRY_S seconds, and their reservations."""
        for sender in self.peers.expired(now):
            self._remove_peer(sender, now)

    def _remove_peer(self, sender: bytes, now: float) -> None:
        if self.peers.remove(sender) is not None:
            self._use.on_requests_in_progress(sender, ())
            for live in self._endpoints.all():
                set_peer_load(live.load, sender, None, now)
            self._admission.refresh()

    def _update_names(self) -> None:
        self._use.set_tenants(self.tenants())
        self._live = {
            digest: live
            for live in self._endpoints.all()
            if not live.is_leaving
            for digest in self._digests_of(live.endpoint)
        }

    def _current(self, digest: int) -> LiveEndpoint | None:
        # Return the endpoint with this digest, or None if it is unknown or leaving.
        #
        # The slot of an endpoint that has left may belong to another one.
        live = self._live.get(digest)
        return None if live is None or live.is_leaving else live

    def _digest(self, endpoint: Endpoint) -> int:
        return self._digests_of(endpoint)[0]

    def _digests_of(self, endpoint: Endpoint) -> tuple[int, ...]:
        key = endpoint.key
        digests = self._digests.get(key)
        if digests is None:
            if len(self._digests) >= NAMES_CACHED:
                self._digests.clear()
            digests = self._digests[key] = self._auth.digests("\0".join(key))
        return digests

    def count_drop(self, reason: str) -> None:
        self._metrics.shared_dropped_total.labels(reason).inc()

    def _count(self, kind: str, direction: str) -> None:
        self._metrics.shared_messages_total.labels(kind, direction).inc()


def _without_prompts(part: peer_messages.WarmUpPart) -> peer_messages.WarmUpPart:
    kept = []
    for body in part.messages:
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            if not isinstance(peer_messages.decode(body), peer_messages.SentPrompts):
                kept.append(body)
    return msgspec.structs.replace(part, messages=kept)
