"""The door: an OpenAI request's bytes become a Request. No HTTP library's types and no I/O past this module.

The body is decoded once, one level deep: values stay raw JSON, so a 400 kB prompt is scanned and never rebuilt.
Unknown fields pass; fields that steer an engine's internals are dropped; only a body that changes is re-encoded.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from gateway.answer import Failure, GatewayError
from gateway.cache_salts import MAX_CLIENT_SALT, CacheSalts
from gateway.media import BYTES_PER_TOKEN, LEAST_MEDIUM, may_hold_media, without_media
from gateway.sequences import MULTIPLE, counted, read_prompts
from gateway.slo import MAX_SESSION, MOST_PRIORITY, Wish, session_key
from policies.lengths import OutputLengths
from policies.model import Request, Slo
from policies.prompt_lengths import PromptLengths


class Api(StrEnum):
    """The generation calls on the line; upstream paths are exactly these."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


_COMPLETIONS = Api.COMPLETIONS  # asking an Enum for a member takes ten times as long

LINE: Mapping[str, Api] = {str(api): api for api in Api}

# Fields that make an engine read, write or wait for another request's KV cache, or pin its scheduling: an engine trusts
# them to the point of dying on a malformed one (engines.md B.0), so a client may not send them.
ENGINE_INTERNAL = frozenset(
    {
        "kv_transfer_params",
        "ec_transfer_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "bootstrap_pair_key",
        "disaggregated_params",
        "disagg_request_id",
        "routed_dp_rank",
        "data_parallel_rank",
        "disagg_prefill_dp_rank",
        "priority",
        "cache_salt",
        "extra_key",
        "rid",
        "request_id",
    }
)
CLIENT_SALTS = ("cache_salt", "extra_key")  # dropped as well, but what they say goes into the salt that is sent
XARGS = "vllm_xargs"  # merged by vLLM into its extra args, so the same names can hide inside

# What stands in front of the conversation in the rendered prompt, in rendering order (prefix identity).
PROMPT_MEMBERS: Mapping[Api, tuple[str, ...]] = {
    Api.CHAT: ("chat_template", "chat_template_kwargs", "tools", "documents", "messages"),
    Api.COMPLETIONS: ("prompt",),
}
CONVERSATION: Mapping[Api, str] = {api: names[-1] for api, names in PROMPT_MEMBERS.items()}
_BEFORE = frozenset(name for names in PROMPT_MEMBERS.values() for name in names[:-1])
DEFAULT_OUTPUT_TOKENS = 256
EXPECTED_CEILING = 2048  # max_tokens is a bound, seldom a plan: one client's million must not pass for a full house
LIMITS = {"n": 128, "best_of": 128, "max_tokens": 2**24, "max_completion_tokens": 2**24}
SIZES = {"stop": 16 * 1024, "stop_token_ids": 16 * 1024, "bad_words": 64 * 1024, "logit_bias": 256 * 1024}
_GUARDED = frozenset((*LIMITS, *SIZES))

SMALL_BODY = 256 * 1024  # up to here a body cannot hold enough members to be worth guarding against while decoding
MAX_MEMBERS = 256
MAX_NAME = 256
MAX_DIGITS = 4096  # interpreters refuse or choke on longer numbers (CPython: 4300 digits)
_OPENING = frozenset(b'{["')  # what begins so is no number, however long
_COMPOUND = frozenset(b"{[")

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_any = msgspec.json.Decoder().decode
_KEY = re.compile(rb'[ \t\r\n]*("(?:[^"\\]|\\.)*")[ \t\r\n]*:[ \t\r\n]*', re.DOTALL)
_NEXT = re.compile(rb"[ \t\r\n]*([,}])")


class Servable(Protocol):
    """What the door must know of a model: what engines call it, how long a context may be, how many sequences a request
    may ask for, what its requests are promised, and whether a low number in the body's `priority` goes first, as at
    vLLM."""

    @property
    def served_model(self) -> str: ...
    @property
    def context_tokens(self) -> int | None: ...
    @property
    def sequences(self) -> int: ...
    @property
    def slo(self) -> Slo: ...
    @property
    def low_first(self) -> bool: ...


class Call(msgspec.Struct):
    """A parsed call: the policy's view, and the bytes that go upstream.

    asked_model   the name the client used, echoed in answers when engines use another
    body, prompt  the JSON sent on, and the raw values in it that the engine renders first, with stand-ins for media;
                  empty after release()
    members       all raw values in it by name; empty as well
    salt          hex; only requests with the same one may share cached prompts. Empty: all without one may
    estimated_tokens  of the prompt, from its bytes alone; 0 where it was counted. media  images and files in it
    """

    api: Api
    request: Request
    asked_model: str
    body: bytes
    prompt: tuple[msgspec.Raw, ...]
    members: Mapping[str, msgspec.Raw] = {}
    salt: bytes = b""
    estimated_tokens: int = 0
    media: int = 0

    def salt_member(self, name: str) -> bytes:
        """The salt as it stands in a body behind another member; nothing for an engine that takes none (no name)."""
        return b',"%b":"%b"' % (name.encode(), self.salt) if name and self.salt else b""

    def salted(self, member: bytes) -> Call:
        """The same call with that member, spliced in before the closing brace."""
        body = self.body
        end = body.rindex(b"}")
        return msgspec.structs.replace(self, body=b"".join((memoryview(body)[:end], member, b"}")))

    def fitted(self, model: str, known: frozenset[str] | None) -> Call:
        """The same call for an engine that has another name for the model, or refuses members that it does not know."""
        members = self.members
        kept = {name: value for name, value in members.items() if known is None or name in known}
        if model == self.request.model and len(kept) == len(members):
            return self
        kept["model"] = msgspec.Raw(msgspec.json.encode(model))
        return msgspec.structs.replace(self, body=_joined(kept), members=kept)

    def release(self) -> None:
        """Let go of the bytes: the engine has them, and after the first token nobody else will need them."""
        self.body, self.prompt, self.members = b"", (), {}


class Caller(msgspec.Struct, frozen=True):
    """Who calls, and what was learnt of the request before its body: `arrived_s` is when that was whole. `lengths`: of
    answers so far, for one that names no bound. `salts`: of tenants and clients; None: requests get no salt.
    `prompts`: of prompts, as engines counted them."""

    request_id: str
    tenant: str
    wish: Wish
    arrived_s: float
    lengths: OutputLengths | None = None
    salts: CacheSalts | None = None
    prompts: PromptLengths | None = None


def parse(body: bytes, api: Api, models: Mapping[str, Servable], caller: Caller) -> Call:
    """Body bytes to Call. Raises GatewayError (400 or 404) naming what is wrong; nothing is forwarded then."""
    members = _members(body)
    asked = _string(members, "model")
    model = models.get(asked)
    if model is None:
        raise _unknown_model(asked, models)
    served, numbers = model.served_model, _numbers(members)
    name = CONVERSATION[api]
    if name not in members:
        raise GatewayError(Failure.BAD_REQUEST, f"Missing required parameter: '{name}'.", param=name)
    prompt = (members[name],) if _BEFORE.isdisjoint(members) else _prompt(PROMPT_MEMBERS[api], members)
    ids, media, estimated, longest = None, 0, 0, 0
    if api is _COMPLETIONS:
        prompts, ids, longest = read_prompts(members, model.sequences)
        if prompts > 1:
            numbers["prompt"] = prompts
    elif len(body) > LEAST_MEDIUM and may_hold_media(body):
        prompt, media = _without_media(prompt)
    output_tokens = numbers.get("max_completion_tokens") or numbers.get("max_tokens")
    if model.context_tokens is not None:
        _check_context(longest, output_tokens or 0, model.context_tokens)
    if ids is None:
        estimated = ids = sum(map(len, prompt)) // BYTES_PER_TOKEN + 1
        if caller.prompts is not None and caller.prompts.ratios:
            ids = caller.prompts.corrected(served, media > 0, estimated)
    choices, prompts = (1, 1) if MULTIPLE.isdisjoint(numbers) else counted(numbers, model.sequences)
    wish, arrived_s = caller.wish, caller.arrived_s
    slo = model.slo if wish.usual else wish.of(model.slo)
    request = Request(
        caller.request_id,
        served,
        caller.tenant,
        ids,
        min(output_tokens or _usual_tokens(caller, served, slo), EXPECTED_CEILING) * choices,
        "stream" in members and bytes(members["stream"]) == b"true",
        slo,
        wish.rank(_priority(members, model.low_first)) if "priority" in members else wish.ranked,
        arrived_s,
        None if wish.patience_s is None else arrived_s + wish.patience_s,
        wish.session or (_session(members, caller.tenant) if "prompt_cache_key" in members else ""),
        choices,
        prompts,
    )
    internal, salts = ENGINE_INTERNAL.intersection(members), caller.salts
    salt = b"" if salts is None else salts.usual.get(caller.tenant, b"")
    if internal and salts is not None:
        client_salt = _client_salt(members)
        salt = salts.salt(caller.tenant, client_salt) if client_salt else salt
    if internal or asked != served or XARGS in members:
        body, members = _outbound(body, members, internal, asked, served)
    return Call(api, request, asked, body, prompt, members, salt, estimated, media)


def _client_salt(members: Mapping[str, msgspec.Raw]) -> bytes:
    """What the client wants its cached prompts kept apart by, in both members for it; empty: it names nothing."""
    found = [_salt_text(members, name) if name in members else None for name in CLIENT_SALTS]
    return msgspec.json.encode(found) if any(found) else b""


def _salt_text(members: Mapping[str, msgspec.Raw], name: str) -> str | None:
    value = _value(members, name)
    if value is not None and (not isinstance(value, str) or not value or len(value) > MAX_CLIENT_SALT):
        message = f"'{name}' must be a string of 1 to {MAX_CLIENT_SALT} characters."
        raise GatewayError(Failure.BAD_REQUEST, message, param=name)
    return value


def _without_media(prompt: tuple[msgspec.Raw, ...]) -> tuple[tuple[msgspec.Raw, ...], int]:
    """The prompt with a stand-in for each image, recording and file, and how many there were."""
    messages, media = without_media(bytes(prompt[-1]))
    return ((*prompt[:-1], msgspec.Raw(messages)), media) if media else (prompt, 0)


def _usual_tokens(caller: Caller, model: str, slo: Slo) -> int:
    """What answers to the like of it came to, where anything was seen of the model."""
    found = None if caller.lengths is None else caller.lengths.expected(model, caller.tenant, slo.name)
    return DEFAULT_OUTPUT_TOKENS if found is None else max(1, round(found))


def _priority(members: Mapping[str, msgspec.Raw], low_first: bool) -> int:
    """The body's own member for it, which engines read in opposite ways; higher first."""
    found = _value(members, "priority")
    if not isinstance(found, int) or isinstance(found, bool):
        return 0
    return max(-MOST_PRIORITY, min(MOST_PRIORITY, -found if low_first else found))


def _session(members: Mapping[str, msgspec.Raw], tenant: str) -> str:
    """What agents put their conversation's id in, for want of another member."""
    found = _value(members, "prompt_cache_key")
    return session_key(tenant, found) if isinstance(found, str) and len(found) <= MAX_SESSION else ""


def _prompt(names: tuple[str, ...], members: Mapping[str, msgspec.Raw]) -> tuple[msgspec.Raw, ...]:
    return tuple(members[name] for name in names if name in members)


def _members(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        members = _decode(body) if len(body) <= SMALL_BODY else _decode_large(body)
        if not body.isascii():
            body.decode()  # raw values are not validated by the scan; an engine would choke later and elsewhere
    except RecursionError:
        raise GatewayError(Failure.BAD_REQUEST, "The JSON body is nested too deeply.") from None
    except UnicodeDecodeError as error:
        raise GatewayError(Failure.BAD_REQUEST, f"The body is not valid UTF-8 (byte {error.start}).") from None
    except _TooManyMembersError:
        raise _too_many_members() from None
    except msgspec.ValidationError:
        raise GatewayError(Failure.BAD_REQUEST, "The body must be a JSON object.") from None
    except msgspec.DecodeError as error:
        raise GatewayError(Failure.BAD_REQUEST, f"Could not parse the JSON body: {error}.") from None
    if len(members) > MAX_MEMBERS:
        raise _too_many_members()
    _refuse_odd(body, members)
    return members


class _TooManyMembersError(Exception):
    """The decoder's way out of a body of a million members."""


class _Name(str):
    """A member's name, counted while decoding."""

    __slots__ = ()


def _decode_large(body: bytes) -> dict[str, msgspec.Raw]:
    """As _decode, but a body of a million members is given up after the first few."""
    left = MAX_MEMBERS

    def count(_: type, name: str) -> _Name:
        nonlocal left
        left -= 1
        if left < 0:
            raise _TooManyMembersError
        return _Name(name)

    counted = msgspec.json.decode(body, type=dict[_Name, msgspec.Raw], dec_hook=count)
    return {str(name): value for name, value in counted.items()}


def _too_many_members() -> GatewayError:
    return GatewayError(Failure.BAD_REQUEST, f"The JSON body has more than {MAX_MEMBERS} members.")


def _refuse_odd(body: bytes, members: dict[str, msgspec.Raw]) -> None:
    """Numbers that no engine holds. And two members of one name, which let gateway and engine read different requests.

    The members found, written compactly, are never longer than the body, and exactly as long only if the body is
    compact and has no other member. SDKs send that form, so the walk below is for hand-written bodies.
    """
    if len(body) > MAX_DIGITS and members:
        longest = max(members.values(), key=len)  # nearly always the conversation: then no other one is long
        if len(body) - len(longest) > MAX_DIGITS or memoryview(longest)[0] not in _OPENING:
            _refuse_long_numbers(members)
    compact = 1 + 4 * len(members) + sum(map(len, members)) + sum(map(len, members.values()))
    if compact != len(body):
        _walk(body, members)


def _refuse_long_numbers(members: Mapping[str, msgspec.Raw]) -> None:
    for name, value in members.items():
        if len(value) > MAX_DIGITS and memoryview(value)[0] not in _OPENING:
            raise GatewayError(Failure.BAD_REQUEST, f"'{name[:64]}' has too many digits.", param=name[:64])


def _walk(body: bytes, members: dict[str, msgspec.Raw]) -> None:
    """Go from member to member; the decoder keeps the last of equal names, so an earlier one differs or repeats."""
    if max(map(len, members), default=0) > MAX_NAME:  # the pattern below takes memory with the length of a name
        raise GatewayError(Failure.BAD_REQUEST, f"A member's name is longer than {MAX_NAME} characters.")
    at = body.index(b"{") + 1
    seen: set[str] = set()
    while (key := _KEY.match(body, at)) is not None:
        name = str(_decode_any(key[1]))
        value = bytes(members[name])
        if name in seen or not body.startswith(value, key.end()):
            raise GatewayError(Failure.BAD_REQUEST, f"Duplicate member '{name}' in the JSON body.", param=name)
        seen.add(name)
        following = _NEXT.match(body, key.end() + len(value))
        if following is None:  # the value found is a prefix of an earlier, longer one of the same name
            raise GatewayError(Failure.BAD_REQUEST, f"Duplicate member '{name}' in the JSON body.", param=name)
        at = following.end()


def _string(members: Mapping[str, msgspec.Raw], name: str) -> str:
    if name not in members:
        raise GatewayError(Failure.BAD_REQUEST, f"Missing required parameter: '{name}'.", param=name)
    value = _value(members, name)
    if not isinstance(value, str):
        raise GatewayError(Failure.BAD_REQUEST, f"'{name}' must be a string.", param=name)
    return value


def _value(members: Mapping[str, msgspec.Raw], name: str) -> Any:
    """One member that is a string, a number or less, decoded; of a list or an object, a million objects maybe, only
    that it is neither. Numbers no decoder can hold are only found here."""
    raw = members[name]
    if memoryview(raw)[0] in _COMPOUND:
        return ()
    try:
        return _decode_any(raw)
    except msgspec.DecodeError as error:
        raise GatewayError(Failure.BAD_REQUEST, f"'{name}' cannot be read: {error}.", param=name) from None


def _unknown_model(asked: str, models: Mapping[str, Servable]) -> GatewayError:
    shown = asked if len(asked) <= 64 and asked.isprintable() else asked[:64].encode("unicode_escape").decode() + "..."
    near = difflib.get_close_matches(asked[:128], models, n=3)
    hint = f" Did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
    return GatewayError(Failure.MODEL_NOT_FOUND, f"The model '{shown}' does not exist.{hint}", param="model")


def _numbers(members: Mapping[str, msgspec.Raw]) -> dict[str, int]:
    """The bounded integers a client gave. What would hurt an engine is refused here (faults.md A06)."""
    numbers: dict[str, int] = {}
    for name in _GUARDED.intersection(members):
        if name in SIZES:
            if len(members[name]) > SIZES[name]:
                raise GatewayError(Failure.BAD_REQUEST, f"'{name}' is larger than {SIZES[name]} bytes.", param=name)
        elif (value := _value(members, name)) is not None:
            numbers[name] = value if type(value) is int and 1 <= value <= LIMITS[name] else _bounded(name, value)
    return numbers


def _bounded(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise GatewayError(Failure.BAD_REQUEST, f"'{name}' must be an integer.", param=name)
    if not 1 <= value <= LIMITS[name]:
        message = f"'{name}' must be between 1 and {LIMITS[name]}, not {value}."
        raise GatewayError(Failure.BAD_REQUEST, message, param=name)
    return value


def _check_context(prompt_tokens: int, output_tokens: int, context_tokens: int) -> None:
    """Refuse what cannot fit by any count. Text can only be estimated here, so the engine has the last word on it."""
    if prompt_tokens + output_tokens > context_tokens:
        raise GatewayError(
            Failure.CONTEXT_TOO_LONG,
            f"This model's maximum context length is {context_tokens} tokens; the request asks for "
            f"{prompt_tokens + output_tokens} ({prompt_tokens} in the prompt, {output_tokens} to be generated).",
        )


def _outbound(
    body: bytes, members: dict[str, msgspec.Raw], internal: frozenset[str], asked: str, served: str
) -> tuple[bytes, dict[str, msgspec.Raw]]:
    """What is sent on, and its members. `internal`: those to be dropped."""
    xargs = _without_internal(members[XARGS]) if XARGS in members else None
    if not internal and asked == served and xargs is None:
        return body, members
    kept: dict[str, msgspec.Raw] = {name: value for name, value in members.items() if name not in internal}
    kept["model"] = msgspec.Raw(msgspec.json.encode(served))
    if xargs is not None:
        kept[XARGS] = xargs
    return _joined(kept), kept


def _without_internal(value: msgspec.Raw) -> msgspec.Raw | None:
    """An object without its engine-internal members; None when there is nothing to drop (or it is no object)."""
    try:
        members = _decode(value) if len(value) <= SMALL_BODY else _decode_large(bytes(value))
    except _TooManyMembersError:
        message = f"'{XARGS}' has more than {MAX_MEMBERS} members."
        raise GatewayError(Failure.BAD_REQUEST, message, param=XARGS) from None
    except msgspec.ValidationError:
        return None
    if ENGINE_INTERNAL.isdisjoint(members):
        return None
    return msgspec.Raw(_joined({name: value for name, value in members.items() if name not in ENGINE_INTERNAL}))


def _joined(members: Mapping[str, msgspec.Raw]) -> bytes:
    return b"{" + b",".join(json.dumps(name).encode() + b":" + bytes(value) for name, value in members.items()) + b"}"
