"""What every dialect is made of: the terms of one handoff in, edits of two requests out, or why not.

A dialect is data and pure functions. The gateway owns sending, deadlines and blame; a dialect owns the words: which
members the prefill request and the decode request get, and what in a prefill answer may be believed. Sources:
reference engines.md B, D, E (vLLM 0.11 to 0.33, SGLang 0.5.23, TensorRT-LLM mid-2026).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated

import msgspec

NULL = msgspec.Raw(b"null")


class Order(StrEnum):
    """Prefill and then decode, or both at once."""

    SEQUENTIAL = "sequential"
    CONCURRENT = "concurrent"


class Needs(StrEnum):
    """What must be known of a prefill endpoint before both legs can go out at once."""

    NOTHING = "nothing"
    ADDRESS = "address"  # of its bootstrap server, from the configuration
    QUERY = "query"  # what its bootstrap server says of it
    FIRST_ANSWER = "first_answer"  # what its first answer says of it


class Bootstrap(msgspec.Struct, frozen=True):
    """The bootstrap server of a prefill endpoint, as decode endpoints reach it."""

    host: str
    port: int

    @property
    def netloc(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Identity(msgspec.Struct, frozen=True):
    """Who a prefill engine is to its decoders: its engine id, and where its side channel listens when it told."""

    engine_id: str
    host: str | None = None
    port: int | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    rank: int | None = None


class Terms(msgspec.Struct, frozen=True):
    """What the gateway fixes for one handoff before anything is sent.

    request_id     the X-Request-Id of both legs
    number         63 bits, unique among live handoffs, new in every attempt: room and disagg request id
    chat           True for /v1/chat/completions, False for /v1/completions
    prefill_host   the host in the prefill endpoint's URL
    bootstrap      where its bootstrap server listens; None when the configuration names none
    identity       what is known of the prefill engine; None before anything was learnt
    """

    request_id: str
    number: int
    chat: bool
    prefill_host: str
    bootstrap: Bootstrap | None = None
    identity: Identity | None = None


class Edits(msgspec.Struct, frozen=True):
    """Changes to the client's request.

    put      members added, as members() writes them. What a client may send under such a name has to be dropped
    drop     members of the client's that are removed
    keep     when given, the only members of the client's that are sent at all
    headers  further header lines
    """

    put: bytes = b""
    drop: frozenset[str] = frozenset()
    keep: frozenset[str] | None = None
    headers: tuple[tuple[str, str], ...] = ()


class Handover(msgspec.Struct, frozen=True):
    """The decode request, and whose word on cached tokens is true.

    reports_own_cache  the decoder will report the prefiller's cache hits; False: it reports the transfer as a hit
    transport          how the KV will travel, when the prefill answer says so
    """

    edits: Edits
    reports_own_cache: bool = True
    transport: str | None = None


class Unusable(msgspec.Struct, frozen=True):
    """The prefill answer holds nothing a decoder may be given; `why` in a few words. Decode must compute for itself."""

    why: str


class Finished(msgspec.Struct, frozen=True):
    """The prefill answer is the whole answer: nothing is left to decode. `body` is JSON for the client."""

    body: bytes


class Answer(msgspec.Struct, frozen=True):
    """A prefill answer, read as far as any dialect needs it. Raw members are JSON, `null` when absent."""

    body: bytes
    handoff: msgspec.Raw
    disaggregated: msgspec.Raw
    prompt_token_ids: msgspec.Raw
    finish_reason: str | None
    prompt_tokens: int | None
    cached_tokens: int | None


class Dialect(msgspec.Struct, frozen=True):
    """One engine's handoff.

    engine        the engine kind that speaks it, in the configuration's word
    order         how the two legs follow each other
    needs         what must be known first; without it the first handoff is sequential (FIRST_ANSWER) or not at all
    reads_answer  the prefill answer is read; otherwise it is only waited for
    decode_alone  a decode endpoint can serve a whole request by itself
    abort_frees   an engine whose prefill request is closed frees the KV itself; otherwise only its decoder can say so
    apart         the member by whose value a decode request shares its cached blocks with no other request. So another
                  decoder may be asked for KV that may be gone by then, if the engine does not mind; None: it may not
    by_itself     members that a half wants of a request for which there is no other half, such as a probe
    prefill       terms -> edits of the prefill request
    decode        terms, prefill answer -> decode request. The answer is None when both legs go out at once
    identify      what tells who a prefill engine is (its answer, or its bootstrap server's page) -> identities, by rank
    check         CONCURRENT only: whether a prefill answer means that the KV really waits for its decoder
    """

    name: str
    engine: str
    order: Order
    prefill: Callable[[Terms], Edits]
    decode: Callable[[Terms, Answer | None], Handover | Unusable | Finished]
    needs: Needs = Needs.NOTHING
    reads_answer: bool = True
    decode_alone: bool = True
    abort_frees: bool = False
    apart: str | None = None
    by_itself: Mapping[str, str | int] = {}
    identify: Callable[[bytes], tuple[Identity, ...]] = lambda _: ()
    check: Callable[[Answer], Unusable | None] = lambda _: None


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


def read_answer(body: bytes) -> Answer | Unusable:
    """A prefill endpoint's answer. Whatever is no completion of one choice is Unusable. So is what is no text: members
    of it go into the decode request as they are."""
    try:
        if not body.isascii():
            body.decode()
        found = _read(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return Unusable("the prefill answer is not a completion")
    if len(found.choices) != 1:
        return Unusable(f"the prefill answer has {len(found.choices)} choices")
    choice, usage = found.choices[0], found.usage or _NO_USAGE
    details = usage.prompt_tokens_details
    return Answer(
        body,
        found.kv_transfer_params,
        choice.disaggregated_params,
        found.prompt_token_ids,
        choice.finish_reason,
        usage.prompt_tokens,
        details.cached_tokens if details is not None else None,
    )


def is_null(value: msgspec.Raw) -> bool:
    """Absent, or null."""
    return bytes(memoryview(value)[:1]) in (b"", b"n")


def members(put: Mapping[str, bytes]) -> bytes:
    """Names and JSON values as they stand in an object behind other members: each with a comma in front."""
    return b"".join(b',"%b":%b' % (name.encode(), value) for name, value in put.items())


def json_of(value: object) -> bytes:
    """A member's value as JSON bytes."""
    return msgspec.json.encode(value)
