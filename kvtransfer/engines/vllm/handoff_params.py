"""Texts (handoffs and cards) by which a decode engine finds KV of a prefill engine.

Requests carry them in the member kv_transfer_params:

handoff  for the complete KV of one prompt: the name of its offer, a hash of the prompt, and for
         each rank an address and a ticket (permission to fetch)
card     for KV that is still being computed: the engine's addresses and its KV layout. The KV is
         offered in parts (prefill_parts.py)

An HMAC with the fleet's key protects both texts. Workers check the tickets (protocol/ticket.py).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec
import numpy as np

from kvtransfer.layout.kv_layout import KvLayout

_T = TypeVar("_T")

_DOMAIN = b"penstock vllm handoff 1\0"
_CARD_DOMAIN = b"penstock vllm engine 1\0"
_MAC_BYTES = 32
_MAX_CHARS = 1 << 20


class HandoffRefused(Exception):
    """Raised for a malformed or forged handoff or card. The message does not contain its text."""


class WorkerAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where the KV transfer agent of one rank can be reached.

    address  the agent's address
    agent    its name
    epoch    16 random bytes, drawn at every start of the agent
    """

    address: str
    agent: str
    epoch: bytes


class RankSource(msgspec.Struct, frozen=True, array_like=True):
    """Where to fetch one rank's KV: the address of its agent, and the ticket (permission).

    Without a ticket, the KV is fetched by name.
    """

    address: str
    ticket: str | None = None


class Handoff(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a decode engine can fetch the KV of one prompt, which a prefill engine has computed.

    name     name of the offer, the same at every rank
    prompt   `digest_prompt` of the tokens
    tokens   number of prompt tokens whose KV is offered
    layout   KV layout of the prefill engine's cache
    family   text that must be equal at both engines: model, weights, quantisation, version
    sources  where to fetch the KV of each rank of the prefill engine
    """

    name: str
    prompt: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    tokens: Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]
    layout: KvLayout
    family: str
    sources: list[RankSource]


class EngineCard(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a decode engine needs to fetch KV that a prefill engine is still computing.

    addresses    addresses of the agents of all ranks, in order
    layout       KV layout of the prefill engine's cache
    family       text that must be equal at both engines: model, weights, quantisation, version
    part_tokens  minimum number of tokens in each part of an offer (prefill_parts.py)
    """

    addresses: list[str]
    layout: KvLayout
    family: str
    part_tokens: Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]


_DECODER = msgspec.msgpack.Decoder(Handoff)
_CARD_DECODER = msgspec.msgpack.Decoder(EngineCard)
_ENCODER = msgspec.msgpack.Encoder()


def digest_prompt(tokens: Sequence[int], variant: str = "") -> bytes:
    """Return a 16-byte hash of everything that decides a prompt's KV; equal hashes mean equal KV.

    tokens   the prompt's token identifiers
    variant  text with what else changes the KV, such as the adapter's name or identities of images
    """
    state = hashlib.blake2b(digest_size=16, person=b"kv-prompt")
    state.update(len(variant.encode()).to_bytes(8, "little") + variant.encode())
    state.update(np.asarray(tokens, "<u4").tobytes())
    return state.digest()


def seal_handoff(key: bytes, handoff: Handoff) -> str:
    """Encode a handoff as signed text, which only holders of the fleet's key can make."""
    return _seal(key, _DOMAIN, handoff)


def open_handoff(key: bytes, text: object) -> Handoff:
    """Verify the signature of a handoff's text, and return the decoded handoff.

    Raises HandoffRefused if the text is malformed or forged.
    """
    return _open(key, _DOMAIN, text, _DECODER)


def seal_card(key: bytes, card: EngineCard) -> str:
    """Encode an engine's card (its addresses and KV layout) as signed text.

    Equal cards give equal texts.
    """
    return _seal(key, _CARD_DOMAIN, card)


def open_card(key: bytes, text: object) -> EngineCard:
    """Verify a signed text, and return the engine card in it: an engine's addresses and KV layout.

    Raises HandoffRefused if the text is malformed or forged.
    """
    return _open(key, _CARD_DOMAIN, text, _CARD_DECODER)


def _seal(key: bytes, domain: bytes, value: Handoff | EngineCard) -> str:
    body = _ENCODER.encode(value)
    return base64.urlsafe_b64encode(_mac(key, domain, body) + body).decode()


def _open(key: bytes, domain: bytes, text: object, decoder: msgspec.msgpack.Decoder[_T]) -> _T:
    if not isinstance(text, str) or len(text) > _MAX_CHARS:
        raise HandoffRefused(f"the handoff is not a text of at most {_MAX_CHARS} characters")
    try:
        data = base64.b64decode(text, altchars=b"-_", validate=True)
    except ValueError as error:
        raise HandoffRefused("the handoff is not base64url text") from error
    if not hmac.compare_digest(_mac(key, domain, data[_MAC_BYTES:]), data[:_MAC_BYTES]):
        raise HandoffRefused(
            "the signature of the handoff is invalid: it was made with another key, or altered"
        )
    try:
        return decoder.decode(data[_MAC_BYTES:])
    except (msgspec.DecodeError, ValueError) as error:
        raise HandoffRefused(
            "the handoff was made by an engine with another protocol version"
        ) from error


def _mac(key: bytes, domain: bytes, body: bytes) -> bytes:
    return hmac.digest(key, domain + body, "sha256")
