"""The KV handoff protocol of vLLM's NixlConnector, as the gateway uses it.

The prefill request is sent first. The object kv_transfer_params in its response says where the KV
is. The gateway copies the object to the decode request, and the decode engine reads the KV from
there.

The object is checked first, because an empty list of blocks ends the decode engine's process, and a
missing name makes the request wait forever. A loopback address in it is replaced by the host of the
prefill URL. Source: vLLM 0.11 to 0.33.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvtransfer.dialects.dialect import (
    DecodeRequest,
    Dialect,
    HandoffTerms,
    LegOrder,
    PrefillResponse,
    RequestEdits,
    UnusableResponse,
    encode_json,
    encode_members,
)

# Maximum size of the handoff object. It suffices for the block ids of ten million tokens.
MOST_OBJECT_BYTES = 4 * 1024 * 1024

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Size = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Block = Annotated[int, msgspec.Meta(ge=0, le=2**48)]


class HandoffObject(msgspec.Struct, frozen=True):
    """The members of vLLM's kv_transfer_params that a decode engine needs; others are not parsed.

    Block ids are one list per KV-cache group since vLLM 0.18, and a flat list before.
    """

    do_remote_prefill: bool
    remote_block_ids: list[Block | list[Block]]
    remote_engine_id: Name
    remote_request_id: Name
    remote_host: Name
    remote_port: Port
    tp_size: Size
    do_remote_decode: bool = False
    transfer_mode: str | None = None
    transport: str | None = None


_object = msgspec.json.Decoder(HandoffObject).decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

_ASKS = encode_json(
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
)
_ONE_TOKEN = {"max_tokens": b"1", "min_tokens": b"1", "stream": b"false"}
ONE_TOKEN = encode_members(_ONE_TOKEN)
"""Members that limit a prefill request to one token.

That token must not end the sequence, because the KV would be lost.
"""

NOT_FOR_PREFILL = frozenset(
    {*_ONE_TOKEN, "stream_options", "max_completion_tokens", "logprobs", "top_logprobs"}
)

_PREFILL = RequestEdits(ONE_TOKEN + encode_members({"kv_transfer_params": _ASKS}), NOT_FOR_PREFILL)


def prefill(terms: HandoffTerms) -> RequestEdits:
    """Return the changes of a prefill request for NixlConnector.

    The request generates one token and keeps its KV for a decode engine.
    """
    return _PREFILL


def decode(terms: HandoffTerms, answer: PrefillResponse | None) -> DecodeRequest | UnusableResponse:
    """Return the decode request for NixlConnector.

    It has the prefill engine's kv_transfer_params, if a decode engine can use them.
    """
    if answer is None:
        return UnusableResponse("there is no prefill response")
    raw = bytes(answer.handoff)
    handoff = validate(raw)
    if isinstance(handoff, UnusableResponse):
        return handoff
    if handoff.transfer_mode not in (None, "pull"):
        return UnusableResponse(
            f"the prefill engine has the transfer mode {handoff.transfer_mode[:32]}, not pull"
        )
    host = handoff.remote_host
    if host != terms.prefill_host and is_loopback(host) and not is_loopback(terms.prefill_host):
        raw = encode_json({**_members(raw), "remote_host": terms.prefill_host})
    own = b'"remote_prefill_cached_tokens"' in raw
    return DecodeRequest(RequestEdits(b',"kv_transfer_params":' + raw), own, handoff.transport)


def validate(raw: bytes) -> HandoffObject | UnusableResponse:
    """Parse kv_transfer_params, the JSON member by which a prefill engine says where its KV is.

    Returns an UnusableResponse if a required member is missing or implausible.
    """
    if raw == b"null":
        return UnusableResponse("the prefill response has no kv_transfer_params")
    if len(raw) > MOST_OBJECT_BYTES:
        return UnusableResponse(
            f"kv_transfer_params has {len(raw)} bytes, more than {MOST_OBJECT_BYTES}"
        )
    try:
        handoff = _object(raw)
        blocks = _blocks(handoff.remote_block_ids)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return UnusableResponse(f"kv_transfer_params: {error}"[:200])
    if not handoff.do_remote_prefill or handoff.do_remote_decode:
        return UnusableResponse("kv_transfer_params offers no KV to a decode engine")
    return handoff if blocks else UnusableResponse("kv_transfer_params names no blocks")


def _blocks(ids: list[int | list[int]]) -> int:
    # Return the number of blocks in a list of ids, flat or per cache group.
    #
    # Raises msgspec.ValidationError if both formats are mixed.
    try:
        return sum(map(len, ids))  # type: ignore[arg-type]
    except TypeError:
        if set(map(type, ids)) != {int}:
            raise msgspec.ValidationError(
                "kv_transfer_params mixes two formats: some block ids are in lists per cache "
                "group, others are not"
            ) from None
        return len(ids)


def is_loopback(host: str) -> bool:
    """Return whether a host name is a loopback address, which is useless to an engine elsewhere."""
    bare = host.strip("[]").lower()
    return bare in ("localhost", "::1") or bare.startswith("127.")


VLLM_NIXL = Dialect(
    "vllm_nixl", "vllm", LegOrder.SEQUENTIAL, prefill, decode, cache_salt_member="cache_salt"
)
