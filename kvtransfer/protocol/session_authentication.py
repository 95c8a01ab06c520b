"""How two agents prove to each other that they have the fleet's key, and then sign their messages.

    sink                       source
    Hello(nonce, card)   ->                              (or Lane) the only unsigned message
                         <-    Welcome(nonce, card) + seal
    Ready + seal         ->                              now both agents are proven

A seal is the signature of a message: HMAC-SHA256, truncated to 16 bytes, of a counter and the
message. Its key is derived for this connection and direction. It detects forged, altered, repeated,
missing and reordered messages.

Transports that encrypt KV use the key `window_key`. This module does no I/O.
"""

from __future__ import annotations

import hashlib
import hmac

from kvtransfer.protocol.agent_messages import (
    VERSION,
    AgentCard,
    Lane,
    LinkHello,
    LinkReady,
    Message,
    ProtocolError,
    Welcome,
    decode,
    encode,
)
from kvtransfer.protocol.message_mac import MessageMac

SEAL_BYTES = 16
MOST_HELLO_BYTES = 16 << 10
_RANDOM_BYTES = 8  # random part of a greeting; the other 8 bytes are its tag


def greeting_nonce(key: bytes, random: bytes) -> bytes:
    """Return a nonce for the first message of a connection, which shows knowledge of the fleet's
    key.

    It has 8 random bytes and their HMAC tag. It can be replayed, so it does not prove an identity.
    It only decides which new connections are served first.
    """
    random = random[:_RANDOM_BYTES]
    return (
        random + hmac.digest(key, b"penstock kv greeting" + random, "sha256")[: 16 - _RANDOM_BYTES]
    )


def shows_key(key: bytes, nonce: bytes) -> bool:
    """Return whether the sender of a connection's first message seems to have the fleet's key.

    That is so if `nonce` is a result of greeting_nonce() with this key, now or earlier.
    """
    return hmac.compare_digest(greeting_nonce(key, nonce), nonce)


class SealError(Exception):
    """Raised for a message whose signature is invalid.

    Either the other agent has another key, or the bytes were altered.
    """


class LinkSession:
    """One agent's side of a connection's handshake and signatures: its state, keys and message
    counters.

    peer      the identity of the other agent; None until it is proven
    version   protocol version that the other agent uses
    greeting  the nonce of the first message, which identifies the connection at both ends
    lane_of   for a connection that carries KV in parallel with an earlier one (a lane): the
              `greeting` of the earlier one; otherwise empty
    """

    def __init__(
        self,
        key: bytes,
        nonce: bytes,
        card: AgentCard,
        *,
        is_dialler: bool,
        budget_bytes: int = 0,
        lane_of: bytes = b"",
    ) -> None:
        self.is_dialler = is_dialler
        self.peer: AgentCard | None = None
        self.version = VERSION
        self.budget_bytes = budget_bytes
        self.greeting, self.lane_of = nonce, lane_of
        self.window_key = b""
        self._key, self._nonce, self._card = key, nonce, card
        self._hello = b""
        self._claimed: AgentCard | None = None
        # The handshake replaces these keys by the session's own.
        self._seal_mac = self._open_mac = MessageMac(b"")
        self._sealed = self._opened = 0

    def hello(self) -> bytes:
        """Return the first message of the agent that opened the connection, as bytes."""
        identity = (VERSION, self._nonce, self._card)
        self._hello = encode(
            Lane(*identity, self.lane_of)
            if self.lane_of
            else LinkHello(*identity, self.budget_bytes)
        )
        return self._hello

    def handle(self, data: bytes) -> tuple[Message | None, bytes | None]:
        """Verify and decode the next message from the other agent.

        Returns the message (None during the handshake), and the bytes to send back (None: nothing).

        Raises ProtocolError or SealError; the connection must then be closed.
        """
        if self.peer is not None:
            return self._open(data), None
        if not self.is_dialler and not self._hello:
            return None, self._answer_hello(data)
        if self.is_dialler:
            return None, self._answer_welcome(data)
        if not isinstance(self._open(data), LinkReady):
            raise ProtocolError(
                "the other agent did not complete the handshake with the message Ready"
            )
        self.peer = self._claimed
        return None, None

    def seal(self, message: Message) -> bytes:
        """Sign a message and return it as bytes.

        Call this in the order in which messages are sent, because signatures contain a counter.
        """
        return self._seal(encode(message))

    def _answer_hello(self, data: bytes) -> bytes:
        # Return the Welcome that answers a Hello; the peer's identity is not proven yet.
        if len(data) > MOST_HELLO_BYTES:
            raise ProtocolError(
                f"a Hello message of {len(data)} bytes exceeds the limit of {MOST_HELLO_BYTES}"
            )
        hello = decode(data)
        if isinstance(hello, LinkHello):
            self.budget_bytes = hello.budget_bytes
        elif isinstance(hello, Lane):
            self.lane_of = hello.lane_of
        else:
            raise ProtocolError(
                "the other agent did not begin the handshake with the message Hello or Lane"
            )
        self._hello, self._claimed = bytes(data), hello.card
        self.version, self.greeting = hello.version, hello.nonce
        welcome = encode(Welcome(VERSION, self._nonce, self._card))
        self._derive(welcome)
        return self._seal(welcome)

    def _answer_welcome(self, data: bytes) -> bytes:
        # Return the Ready that answers a Welcome.
        #
        # The Welcome's seal covers this end's nonce, so it proves the peer's identity.
        body = bytes(data[:-SEAL_BYTES])
        if len(data) > MOST_HELLO_BYTES:
            raise ProtocolError(
                f"a Welcome message of {len(data)} bytes exceeds the limit of {MOST_HELLO_BYTES}"
            )
        self._derive(body)
        welcome = self._open(data)
        if not isinstance(welcome, Welcome):
            raise ProtocolError(
                "the other agent did not answer Hello in the handshake with the message Welcome"
            )
        self.version, self.peer = welcome.version, welcome.card
        return self.seal(LinkReady())

    def _derive(self, welcome: bytes) -> None:
        # Derive the keys of this link from both nonces, so that no two links have the same keys.
        transcript = hashlib.sha256(
            len(self._hello).to_bytes(4, "big") + self._hello + welcome
        ).digest()
        secret = hmac.digest(self._key, b"penstock kv link" + transcript, "sha256")
        sink, source = (hmac.digest(secret, label, "sha256") for label in (b"sink", b"source"))
        seal_key, open_key = (sink, source) if self.is_dialler else (source, sink)
        self._seal_mac, self._open_mac = MessageMac(seal_key), MessageMac(open_key)
        self.window_key = hmac.digest(secret, b"windows", "sha256")

    def _seal(self, body: bytes) -> bytes:
        tag = self._seal_mac.digest(self._sealed.to_bytes(8, "big") + body)
        self._sealed += 1
        return body + tag[:SEAL_BYTES]

    def _open(self, data: bytes) -> Message:
        body, tag = bytes(data[:-SEAL_BYTES]), bytes(data[-SEAL_BYTES:])
        expected = self._open_mac.digest(self._opened.to_bytes(8, "big") + body)[:SEAL_BYTES]
        if not hmac.compare_digest(tag, expected):
            raise SealError(
                "the signature of a message is invalid: the other agent has "
                "another key, or the bytes were altered"
            )
        self._opened += 1
        return decode(body)
