"""Types that describe a dialect: the protocol by which two engines pass on the KV of one request.

The gateway splits a request in two: a prefill request to one engine, and a decode request to
another one. Passing the KV between them is called a handoff. A dialect says which JSON members each
of the two requests gets, and which prefill responses are usable. It is data and pure functions; the
gateway sends the requests and handles failures.

Sources: the code of vLLM 0.11 to 0.33, SGLang 0.5.23, and TensorRT-LLM of mid-2026.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated

import msgspec

NULL = msgspec.Raw(b"null")


class LegOrder(StrEnum):
    """Whether prefill and decode request are sent one after the other or at the same time."""

    SEQUENTIAL = "sequential"
    CONCURRENT = "concurrent"


class Prerequisite(StrEnum):
    """The facts about a prefill engine that the gateway must know to send both requests at once."""

    NOTHING = "nothing"
    ADDRESS = "address"  # address of the engine's bootstrap server, from the configuration
    QUERY = "query"  # the answer of the engine's bootstrap server
    FIRST_ANSWER = "first_answer"  # the engine's first response


class BootstrapAddress(msgspec.Struct, frozen=True):
    """Where a bootstrap server listens, which decode engines ask for a prefill engine's address."""

    host: str
    port: int

    @property
    def netloc(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PrefillIdentity(msgspec.Struct, frozen=True):
    """What a decode engine must know about a prefill engine in order to find it.

    engine_id  identifier of the engine, new at every start
    host       host that decode engines connect to
    port       port that decode engines connect to
    tp_size    number of tensor-parallel ranks
    pp_size    number of pipeline stages
    rank       data-parallel rank
    card       signed text with the engine's addresses and KV layout, from PenstockConnector

    None means that the value is unknown, or that the engine's protocol does not use it.
    """

    engine_id: str
    host: str | None = None
    port: int | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    rank: int | None = None
    card: str | None = None


class HandoffTerms(msgspec.Struct, frozen=True):
    """What the gateway chooses or knows about one KV handoff before it sends the two requests.

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

    put      JSON members to add, as returned by encode_members(). Remove the client's own members
             of the same names first
    drop     members of the client's request to remove
    keep     the only members of the client's request to send; None: all
    headers  header lines to add
    """

    put: bytes = b""
    drop: frozenset[str] = frozenset()
    keep: frozenset[str] | None = None
    headers: tuple[tuple[str, str], ...] = ()


class DecodeRequest(msgspec.Struct, frozen=True):
    """How to change a client's request into the decode request of a handoff.

    reports_own_cache  how to read `cached_tokens` in the response. True: they are the prefill
                       engine's cache hits; False: they are all tokens whose KV was transferred
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
    """The parts of a prefill response that dialects need.

    JSON members that are absent are `null` here.
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
    needs               what must be known about a prefill engine before both requests can be sent
                        at once. Until then they are sent one after the other (FIRST_ANSWER), or not
                        at all
    reads_answer        whether the prefill response is parsed; False: only its end matters
    can_decode_alone    whether a decode engine can serve a whole request
    abort_frees         whether a prefill engine frees the KV when the connection of its request is
                        closed; False: only the decode engine can free it
    cache_salt_member   JSON member that separates a decode request's cached blocks from those of
                        all other requests. With it, the gateway may retry at a second decode engine
                        although the KV may be gone by then; None: only one decode engine is tried
    standalone_members  JSON members for a request without a handoff, such as a probe
    prefill             function that returns the changes of the prefill request
    decode              function that returns the decode request, from the prefill response. The
                        response is None if both requests are sent at the same time
    identify            function that reads the identities of an engine's ranks in a prefill
                        response, or in the answer of a bootstrap server
    check               function for the order CONCURRENT. It returns why a prefill response shows
                        that its KV is not kept for the decode engine, or None if it is kept
    pulls               the dialect by which the KV of a prompt's beginning is handed over, to an
                        engine that computes the rest; None: engines take only whole prompts
    truncate            function that returns the JSON members that shorten the prompt of a request
                        to its first tokens; it is used with the dialect `pulls`
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
    pulls: Dialect | None = None
    truncate: Callable[[int], bytes] = lambda _: b""


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
        return UnusableResponse("the prefill response is not a completion")
    if len(completion.choices) != 1:
        return UnusableResponse(f"the prefill response has {len(completion.choices)} choices")
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
    """Return whether a JSON member, which is not decoded yet, is absent or null."""
    return bytes(memoryview(value)[:1]) in (b"", b"n")


def encode_members(put: Mapping[str, bytes]) -> bytes:
    """Encode JSON members as bytes to append to a JSON object, each with a comma in front."""
    return b"".join(b',"%b":%b' % (name.encode(), value) for name, value in put.items())


def encode_json(value: object) -> bytes:
    return msgspec.json.encode(value)
