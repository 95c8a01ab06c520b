"""The types of a dialect: the protocol by which two engines hand over the KV of one request.

A handoff consists of a prefill request to one engine and a decode request to another one. A dialect
defines which JSON members each request gets, and which prefill responses are usable. It is data and
pure functions; the gateway sends the requests and handles failures.

Sources: the code of vLLM 0.11 to 0.33, SGLang 0.5.23, and TensorRT-LLM of mid-2026.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated

import msgspec

NULL = msgspec.Raw(b"null")


class LegOrder(StrEnum):
    """Whether the two requests of a handoff are sent one after the other or at the same time."""

    SEQUENTIAL = "sequential"
    CONCURRENT = "concurrent"


class Prerequisite(StrEnum):
    """What the gateway must know about a prefill engine to send both requests at the same time."""

    NOTHING = "nothing"
    ADDRESS = "address"  # address of the engine's bootstrap server, from the configuration
    QUERY = "query"  # the answer of the engine's bootstrap server
    FIRST_ANSWER = "first_answer"  # the engine's first response


class BootstrapAddress(msgspec.Struct, frozen=True):
    """The address of a bootstrap server, where decode engines learn how to fetch a prefill's KV."""

    host: str
    port: int

    @property
    def netloc(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PrefillIdentity(msgspec.Struct, frozen=True):
    """The identity of a prefill engine, by which decode engines find it. None means unknown.

    engine_id  identifier of the engine, new at every start
    host       host that decode engines connect to
    port       port that decode engines connect to
    tp_size    number of tensor-parallel ranks
    pp_size    number of pipeline stages
    rank       data-parallel rank
    card       signed text with the engine's addresses and KV layout, from PenstockConnector
    """

    engine_id: str
    host: str | None = None
    port: int | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    rank: int | None = None
    card: str | None = None


class HandoffTerms(msgspec.Struct, frozen=True):
    """The values that the gateway chooses for one KV handoff before it sends a request.

    request_id    the X-Request-Id of both requests
    number        63-bit number, unique among live handoffs and new in every attempt. SGLang calls
                  it the bootstrap room, TensorRT-LLM the disaggregated request id
    chat          True for /v1/chat/completions, False for /v1/completions
    prefill_host  the host in the prefill endpoint's URL
    bootstrap     address of that endpoint's bootstrap server; None: not configured
    identity      identity of the prefill engine, as far as known; None: nothing yet
    """

    request_id: str
    number: int
    chat: bool
    prefill_host: str
    bootstrap: BootstrapAddress | None = None
    identity: PrefillIdentity | None = None


class RequestEdits(msgspec.Struct, frozen=True):
    """Changes to a client's request before it is sent to an engine.

    put      JSON members to add, as returned by encode_members(). The client's own members of
             these names must be removed first
    drop     members of the client's request to remove
    keep     the only members of the client's request to send; None: all
    headers  header lines to add
    """

    put: bytes = b""
    drop: frozenset[str] = frozenset()
    keep: frozenset[str] | None = None
    headers: tuple[tuple[str, str], ...] = ()


class DecodeRequest(msgspec.Struct, frozen=True):
    """The changes for the decode request of a handoff, and how to read usage in its response.

    reports_own_cache  True if the decode engine reports the prefill engine's cache hits as cached
                       tokens; False if it reports all transferred tokens as cached
    transport          name of the KV transport, if the prefill response has it
    """

    edits: RequestEdits
    reports_own_cache: bool = True
    transport: str | None = None


class UnusableResponse(msgspec.Struct, frozen=True):
    """A prefill response without usable KV, so that the decode engine must compute the prompt.

    reason  text for logs
    """

    reason: str


class FinishedResponse(msgspec.Struct, frozen=True):
    """A prefill response that is already the complete answer. `body` is the JSON for the client."""

    body: bytes


class PrefillResponse(msgspec.Struct, frozen=True):
    """The parts of a prefill response that dialects need. Raw JSON members that are absent are
    `null`.
    """

    body: bytes
    handoff: msgspec.Raw
    disaggregated: msgspec.Raw
    prompt_token_ids: msgspec.Raw
    finish_reason: str | None
    prompt_tokens: int | None
    cached_tokens: int | None


class Dialect(msgspec.Struct, frozen=True):
    """The handoff protocol of one kind of engine, described by data and functions.

    engine              kind of engine, as named in the configuration
    order               whether the prefill and the decode request are sent at the same time
    needs               engine identities that must be known before a handoff. Until then, handoffs
                        are sequential (FIRST_ANSWER) or impossible
    reads_answer        whether the prefill response is parsed; False: only its end matters
    can_decode_alone    whether a decode engine can serve a whole request
    abort_frees         whether a prefill engine frees the KV when the connection of its request is
                        closed; False: only the decode engine can free it
    cache_salt_member   JSON member that separates a decode request's cached blocks from those of
                        all other requests. With it, a second decode engine may be asked for KV that
                        may be gone; None: only one decode engine may be asked
    standalone_members  JSON members for a request without a handoff, such as a probe
    prefill             function: chosen values -> changes of the prefill request
    decode              function: chosen values, prefill response -> decode request. The response is
                        None if both requests are sent at the same time
    identify            function: prefill response or bootstrap page -> identities by rank
    check               function for the order CONCURRENT: prefill response -> the reason why its KV
                        is not kept for the decode engine
    """

    name: str
    engine: str
    order: LegOrder
    prefill: Callable[[HandoffTerms], RequestEdits]
    decode: Callable[
        [HandoffTerms, PrefillResponse | None], DecodeRequest | UnusableResponse | FinishedResponse
    ]
    needs: Prerequisite = Prerequisite.NOTHING
    reads_answer: bool = True
    can_decode_alone: bool = True
    abort_frees: bool = False
    cache_salt_member: str | None = None
    standalone_members: Mapping[str, str | int] = {}
    identify: Callable[[bytes], tuple[PrefillIdentity, ...]] = lambda _: ()
    check: Callable[[PrefillResponse], UnusableResponse | None] = lambda _: None


_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None
    disaggregated_params: msgspec.Raw = NULL


class _Answer(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    kv_transfer_params: msgspec.Raw = NULL
    prompt_token_ids: msgspec.Raw = NULL
    usage: _Usage | None = None


_read = msgspec.json.Decoder(_Answer).decode
_NO_USAGE = _Usage()


def parse_response(body: bytes) -> PrefillResponse | UnusableResponse:
    """Parse the response to a prefill request.

    Returns an UnusableResponse unless it is a completion with one choice. Invalid UTF-8 is unusable
    too, because parts of the response are copied into the decode request.
    """
    try:
        if not body.isascii():
            body.decode()
        completion = _read(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return UnusableResponse("the prefill answer is not a completion")
    if len(completion.choices) != 1:
        return UnusableResponse(f"the prefill answer has {len(completion.choices)} choices")
    choice, usage = completion.choices[0], completion.usage or _NO_USAGE
    details = usage.prompt_tokens_details
    return PrefillResponse(
        body,
        completion.kv_transfer_params,
        choice.disaggregated_params,
        completion.prompt_token_ids,
        choice.finish_reason,
        usage.prompt_tokens,
        details.cached_tokens if details is not None else None,
    )


def is_null(value: msgspec.Raw) -> bool:
    """Return whether a member of a raw JSON object is absent or null."""
    return bytes(memoryview(value)[:1]) in (b"", b"n")


def encode_members(put: Mapping[str, bytes]) -> bytes:
    """Encode JSON members as bytes to append to a JSON object, each with a comma in front."""
    return b"".join(b',"%b":%b' % (name.encode(), value) for name, value in put.items())


def encode_json(value: object) -> bytes:
    return msgspec.json.encode(value)
