"""What an agent knows about one of its connections (links): the other agent, and when it last sent.

The main class is PeerLink. This module also checks whether two agents fit each other.
link_manager.py handles the messages; transports/ implements links.
"""

from __future__ import annotations

import threading

import msgspec

from kvtransfer.protocol.agent_messages import VERSION, AgentCard, Message
from kvtransfer.protocol.outcomes import EndReason
from kvtransfer.protocol.session_authentication import LinkSession
from kvtransfer.transport_interface import Link, Transport
from kvtransfer.util.agent_options import AgentOptions


class DialRequest(msgspec.Struct, frozen=True, eq=False):
    """A request to connect to another agent.

    where     the peer's address for `transport`
    address   the peer's address as engines know it
    fallback  the link to use instead if this one fails; None: there is none
    lane_of   the link to which the new one is added as a parallel connection; None: it is not
    redials   number of earlier connections to `where` that ended before the peer proved its
              identity
    """

    transport: Transport
    where: str
    address: str
    fallback: PeerLink | None = None
    lane_of: PeerLink | None = None
    redials: int = 0

    @property
    def parent(self) -> PeerLink | None:
        """Return the existing link over which the other agent sent the address `where`.

        Returns None if the engine gave the address.
        """
        return self.fallback or self.lane_of


class PeerLink:
    """A connection to another agent (link), and what is known about that agent.

    is_proven         whether both agents have proven their identity
    is_in_use         whether fetches use the link
    is_handling       whether the link's thread handles a message, and may wait for the lock
    has_received      whether the peer has sent a message since the link came into use
    dial_request      the request for which the link was opened; None: the peer opened it
    lanes             parallel connections that share the link's KV traffic
    lane_owner        for such a parallel connection: the link whose traffic it shares
    is_dialling_lane  whether a parallel connection is being opened
    failed_lanes      number of parallel connections that failed
    """

    __slots__ = (
        "_heard_at",
        "_received",
        "_sending",
        "dial_request",
        "failed_lanes",
        "has_received",
        "is_dialling_lane",
        "is_handling",
        "is_in_use",
        "is_proven",
        "lane_owner",
        "lanes",
        "link",
        "session",
    )  # fmt: skip

    def __init__(
        self, link: Link, session: LinkSession, dialling: DialRequest | None, now: float
    ) -> None:
        self.link, self.session, self.dial_request = link, session, dialling
        self.lane_owner: PeerLink | None = None
        self.lanes: list[PeerLink] = []
        self.failed_lanes = 0
        self.is_proven = self.is_in_use = self.is_handling = self.has_received = (
            self.is_dialling_lane
        ) = False
        self._sending = threading.Lock()
        self._received = -1
        self._heard_at = now

    @property
    def peer(self) -> str:
        if self.session.peer is not None:
            return self.session.peer.agent
        return self.link.peer if self.dial_request is None else self.dial_request.address

    def has_same_peer(self, other: PeerLink) -> bool:
        """Return whether both links lead to the same agent, without a restart between them."""
        ours, theirs = self.session.peer, other.session.peer
        return (
            ours is not None
            and theirs is not None
            and (ours.agent, ours.epoch) == (theirs.agent, theirs.epoch)
        )

    def send(self, message: Message) -> None:
        """Sign and send a message. This is one step, because signatures contain a counter.

        May be called on any thread.
        """
        with self._sending:
            self.link.send(self.session.seal(message))

    def is_silent(self, now: float, late_s: float, options: AgentOptions) -> bool:
        """Return whether the other agent has sent nothing for too long.

        Call this twice per heartbeat.

        late_s  seconds by which this call is late; they do not count as silence

        An agent whose message still waits to be handled here is not silent. Before the peer has
        proven its identity, received bytes do not extend its time.
        """
        received = self.link.received_bytes
        if self.is_proven and (received != self._received or self.is_handling):
            self._received, self._heard_at = received, now
        self._heard_at = min(now, self._heard_at + late_s)
        limit_s = options.silence_s if self.is_proven else options.handshake_s
        return now - self._heard_at > limit_s - options.beat_s / 8


def incompatibility(
    mine: AgentCard, theirs: AgentCard, version: int
) -> tuple[EndReason, str] | None:
    """Return why two agents cannot exchange KV, as (reason, text); None if they can.

    mine     this agent's card (identity)
    theirs   the other agent's card
    version  protocol version of the other agent
    """
    if version != VERSION:
        return EndReason.VERSION, f"the protocol version is {VERSION} here, {version} there"
    if mine.family != theirs.family:
        return EndReason.LAYOUT, f"family differs: {mine.family} here, {theirs.family} there"
    mismatch = mine.layout.mismatch(theirs.layout)
    return None if mismatch is None else (EndReason.LAYOUT, mismatch)


def wrong_peer_error(peer_link: PeerLink) -> tuple[EndReason, str] | None:
    """Return an error if a new connection (link) reached another agent than expected, else None.

    An address that was reported by another host can mean a different agent on this host. The link
    over which the address was learned names the expected agent.
    """
    parent = None if peer_link.dial_request is None else peer_link.dial_request.parent
    if parent is None or parent.has_same_peer(peer_link):
        return None
    return EndReason.UNREACHABLE, f"the agent {peer_link.peer} answers instead of {parent.peer}"
