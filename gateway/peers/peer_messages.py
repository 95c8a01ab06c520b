"""The messages between gateways and their encoding: tagged msgpack arrays.

Endpoints, pools, tenants and sessions are identified by keyed digests of their names
(frame_auth.py). The decoder checks the range of all numbers.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from policies.admission.adaptive_session_limit import SessionUpdate
from policies.admission.peer_quota_usage import QuotaUsage
from policies.engine.peer_load import PeerShare

Amount = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Ratio = Annotated[float, msgspec.Meta(ge=0, le=1)]
NameDigest = Annotated[int, msgspec.Meta(ge=0)]
ShortText = Annotated[str, msgspec.Meta(max_length=64)]


class SentPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A message between gateways: a prompt was sent to an endpoint, which will cache it.

    blocks         number of blocks in the prompt's fingerprint (chain of block hashes)
    n_bytes        number of bytes that these blocks cover
    keys           hashes of the prompt's prefixes at sampled lengths
                   (policies/prefix/sampled_keys.py)
    cached_tokens  None if the prompt was sent. A number corrects an earlier message: the prompt was
                   not computed after all, and at most this many of its tokens are cached
    """

    endpoint: NameDigest
    blocks: Amount
    n_bytes: Amount
    prompt_tokens: Amount
    keys: bytes
    cached_tokens: Amount | None = None


class SentPrompts(msgspec.Struct, frozen=True, array_like=True, tag="picks"):
    """A message between gateways: prompts in the order in which they were sent to endpoints.

    All of them have the same block size.
    """

    block_bytes: Amount
    prompts: list[SentPrompt]


class CacheLoss(msgspec.Struct, frozen=True, array_like=True, tag="forgotten"):
    """A message between gateways: an endpoint has lost its prefix cache.

    It is sent only to a gateway that has just started. Later, each gateway detects the loss itself.
    """

    endpoint: NameDigest


class CacheReports(msgspec.Struct, frozen=True, array_like=True, tag="confirmed"):
    """A message between gateways: how much of some prompts was cached, as predicted and in fact.

    answers  (endpoint, predicted share, share that the engine reported); each is a share of the
             prompt's tokens, 0 to 1
    """

    answers: list[tuple[NameDigest, Ratio, Ratio]]


class PeerLoads(msgspec.Struct, frozen=True, array_like=True, tag="loads"):
    """A message between gateways: the capacity that the sender's requests hold at each endpoint.

    It is sent regularly, so that its absence shows that the sender has stopped (heartbeat).
    Endpoints without reservations are left out.

    is_warm  whether the sender can send the shared state to gateways that have just started
    shares   (endpoint, the sender's reservations there)
    tenants  (tenant with a limit on concurrent requests, its requests in progress at the sender);
             tenants without such requests are left out
    """

    uptime_s: Seconds
    is_warm: bool
    shares: list[tuple[NameDigest, PeerShare]]
    tenants: list[tuple[NameDigest, Amount]] = []


class HealthChanges(msgspec.Struct, frozen=True, array_like=True, tag="moved"):
    """A message between gateways: changes of endpoints' health that the sender observed.

    endpoints  (endpoint, new state, cause of the change)
    """

    endpoints: list[tuple[NameDigest, ShortText, ShortText]]


class TenantCharges(msgspec.Struct, frozen=True, array_like=True, tag="charged"):
    """A message between gateways: tokens that were computed for tenants since the last message.

    tenants  (pool, tenant, tokens); negative tokens correct an estimate of an earlier message
    """

    tenants: list[tuple[NameDigest, NameDigest, Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]]]


class QuotaUse(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """A message between gateways: quota that tenants have used since the last message.

    tenants  (tenant, requests and tokens used)
    """

    tenants: list[tuple[NameDigest, QuotaUsage]]


class ActiveSessions(msgspec.Struct, frozen=True, array_like=True, tag="inside"):
    """A message between gateways: a pool's sessions that were served since the last message."""

    pool: NameDigest
    members: list[SessionUpdate]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A gateway that has started or reconnected sends this to request the others' state.

    attempt  number of the sender's earlier Hello messages that no gateway has answered
    """

    attempt: Annotated[int, msgspec.Meta(ge=0, le=16)]


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """The message of a gateway that stops and has no reservations left."""


class WarmUpPart(msgspec.Struct, frozen=True, array_like=True, tag="part"):
    """A part of the state that a gateway sends in answer to the Hello of a new gateway.

    It contains encoded messages, to be applied in order, oldest first.
    """

    number: Amount
    is_last: bool
    messages: list[bytes]


Message = (
    SentPrompts
    | CacheLoss
    | CacheReports
    | PeerLoads
    | HealthChanges
    | TenantCharges
    | QuotaUse
    | ActiveSessions
    | Hello
    | Bye
    | WarmUpPart
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(body: bytes | memoryview) -> Message:
    """Decode a message from another gateway.

    Raises msgspec.DecodeError (or its subclass ValidationError) if it is invalid.
    """
    message: Message = _decoder.decode(body)
    return message


def message_kind(message: Message) -> str:
    """Return a message's tag, which identifies its type and is the `kind` label of metrics."""
    return str(message.__struct_config__.tag)
