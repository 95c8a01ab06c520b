"""Session: proof of both ends' identity under the fleet's key, and a seal on every control message after it. Sans-IO.

    sink                       source
    Hello(nonce, card)   ->                              (or Lane) the only message without a seal
                         <-    Welcome(nonce, card) + seal
    Ready + seal         ->                              from here on each side knows the other

A seal is HMAC-SHA256, cut to 16 bytes, of a counter and the message, under a key of this link and direction: what is
forged, altered, repeated, left out or put in another order does not open. Windows of KV are the transport's to seal
(`window_key`). Not here: what is said after Ready, or nonces (the caller has randomness).
"""

from __future__ import annotations

import hashlib
import hmac

from kvtransfer.messages import (
    VERSION,
    Card,
    Hello,
    Lane,
    Message,
    ProtocolError,
    Ready,
    Welcome,
    decode,
    encode,
)

SEAL_BYTES = 16
MOST_HELLO_BYTES = 16 << 10
_RANDOM_BYTES = 8  # of a greeting; the rest is its tag


def greeting_nonce(key: bytes, random: bytes) -> bytes:
    """A nonce for Hello or Lane that shows the key already: 8 random bytes and a tag over them.

    It can be replayed, so it proves nothing for good. It only says which new links are served before others.
    """
    random = random[:_RANDOM_BYTES]
    return (
        random + hmac.digest(key, b"penstock kv greeting" + random, "sha256")[: 16 - _RANDOM_BYTES]
    )


def shows_key(key: bytes, nonce: bytes) -> bool:
    """Whether a greeting's nonce was made with this key, now or earlier."""
    return hmac.compare_digest(greeting_nonce(key, nonce), nonce)


class Unproven(Exception):
    """The seal does not hold: another fleet's key, or bytes that somebody else has written."""


class Session:
    """One end of one link. `peer` is None until the other end has proven itself; `version`: what the other speaks.
    `greeting`: the Hello's nonce, by which both ends know the link; `lane_of`: that of the link whose lane this is."""

    def __init__(
        self,
        key: bytes,
        nonce: bytes,
        card: Card,
        *,
        dialled: bool,
        budget_bytes: int = 0,
        lane_of: bytes = b"",
    ) -> None:
        self.dialled = dialled
        self.peer: Card | None = None
        self.version = VERSION
        self.budget_bytes = budget_bytes
        self.greeting, self.lane_of = nonce, lane_of
        self.window_key = b""
        self._key, self._nonce, self._card = key, nonce, card
        self._hello = b""
        self._claimed: Card | None = None
        self._seal_key = self._open_key = b""
        self._sealed = self._opened = 0

    def hello(self) -> bytes:
        """What the dialling end sends first."""
        who = (VERSION, self._nonce, self._card)
        self._hello = encode(
            Lane(*who, self.lane_of) if self.lane_of else Hello(*who, self.budget_bytes)
        )
        return self._hello

    def answer(self, data: bytes) -> tuple[Message | None, bytes | None]:
        """Take the next message: (what it says, unless it is of the handshake; what must be sent back, if anything).

        Raises ProtocolError and Unproven; the link is then to be closed.
        """
        if self.peer is not None:
            return self._take(data), None
        if not self.dialled and not self._hello:
            return None, self._greet(data)
        if self.dialled:
            return None, self._thank(data)
        if not isinstance(self._take(data), Ready):
            raise ProtocolError("Ready was due")
        self.peer = self._claimed
        return None, None

    def seal(self, message: Message) -> bytes:
        """The message as it travels. Calls must be made in the order of sending."""
        return self._seal(encode(message))

    def _greet(self, data: bytes) -> bytes:
        """The dialled end: Hello came, Welcome goes. Nothing is believed yet."""
        if len(data) > MOST_HELLO_BYTES:
            raise ProtocolError(f"a Hello of {len(data)} bytes")
        hello = decode(data)
        if isinstance(hello, Hello):
            self.budget_bytes = hello.budget_bytes
        elif isinstance(hello, Lane):
            self.lane_of = hello.lane_of
        else:
            raise ProtocolError("Hello was due")
        self._hello, self._claimed = bytes(data), hello.card
        self.version, self.greeting = hello.version, hello.nonce
        welcome = encode(Welcome(VERSION, self._nonce, self._card))
        self._derive(welcome)
        return self._seal(welcome)

    def _thank(self, data: bytes) -> bytes:
        """The dialling end: Welcome came. Its seal covers our nonce, so it was made now, by somebody with the key."""
        body = bytes(data[:-SEAL_BYTES])
        if len(data) > MOST_HELLO_BYTES:
            raise ProtocolError(f"a Welcome of {len(data)} bytes")
        self._derive(body)
        welcome = self._take(data)
        if not isinstance(welcome, Welcome):
            raise ProtocolError("Welcome was due")
        self.version, self.peer = welcome.version, welcome.card
        return self.seal(Ready())

    def _derive(self, welcome: bytes) -> None:
        """Keys of this link: nobody gets the same again, both nonces are in it."""
        transcript = hashlib.sha256(
            len(self._hello).to_bytes(4, "big") + self._hello + welcome
        ).digest()
        secret = hmac.digest(self._key, b"penstock kv link" + transcript, "sha256")
        sink, source = (hmac.digest(secret, label, "sha256") for label in (b"sink", b"source"))
        self._seal_key, self._open_key = (sink, source) if self.dialled else (source, sink)
        self.window_key = hmac.digest(secret, b"windows", "sha256")

    def _seal(self, body: bytes) -> bytes:
        tag = hmac.digest(self._seal_key, self._sealed.to_bytes(8, "big") + body, "sha256")
        self._sealed += 1
        return body + tag[:SEAL_BYTES]

    def _take(self, data: bytes) -> Message:
        body, tag = bytes(data[:-SEAL_BYTES]), bytes(data[-SEAL_BYTES:])
        wanted = hmac.digest(self._open_key, self._opened.to_bytes(8, "big") + body, "sha256")[
            :SEAL_BYTES
        ]
        if not hmac.compare_digest(tag, wanted):
            raise Unproven("the seal does not hold")
        self._opened += 1
        return decode(body)
