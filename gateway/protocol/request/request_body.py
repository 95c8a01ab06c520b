"""Parses the JSON body of an API request into a Call: model, prompt, limits, options. No I/O.

Only the outermost object of the body is decoded (json_members.py), so a long prompt is scanned but
not rebuilt. api_call.py has the Call, and the body that engines get.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
from xxhash import xxh3_128_digest

from gateway.protocol.api_table import CHAT, PREAMBLE, Api
from gateway.protocol.errors import Failure, GatewayError
from gateway.protocol.request.allowed_tools import (
    TOOL_CHOICE,
    names_allowed_tools,
    narrow_tools,
)
from gateway.protocol.request.api_call import ENGINE_INTERNAL, EXTRA_ARGS, Call, engine_body
from gateway.protocol.request.cache_salts import CacheSalts
from gateway.protocol.request.json_members import (
    bad_request,
    decode_members,
    join_members,
    member_value,
    missing_member,
    reject_ambiguous,
    string_member,
)
from gateway.protocol.request.lax_numbers import lax_integer
from gateway.protocol.request.media import (
    BYTES_PER_TOKEN,
    MIN_MEDIUM_BYTES,
    NO_MEDIA,
    MediaSize,
    may_contain_media,
    replace_embeddings,
    replace_media,
)
from gateway.protocol.request.options_cache import CONVERSATION, OptionsCache, ShapeKey, shape_key
from gateway.protocol.request.parameter_limits import MAX_NUMBERS, LaxNumberError, read_numbers
from gateway.protocol.request.sequence_count import (
    EMBEDS_MEMBER,
    SEQUENCE_MEMBERS,
    count_sequences,
    read_inputs,
    read_prompts,
    without_null_embeddings,
)
from gateway.protocol.request.service_level_headers import MAX_PRIORITY, RequestPreferences
from gateway.protocol.request.sessions import SESSION_MEMBERS, with_body_session
from gateway.protocol.request.unknown_model import unknown_model
from policies.admission.prompt_length_correction import PromptLengths
from policies.engine.output_length import DEFAULT_OUTPUT_TOKENS, OutputLengths
from policies.routing_types import Request, Slo

# max_tokens is an upper bound, rarely the expected length: a huge one must not look like much load.
MAX_EXPECTED_TOKENS = 2048


class ModelInfo(Protocol):
    """The properties of a model that are needed to parse a request for it."""

    @property
    def served_model(self) -> str:
        """Return the model name that engines know, which may differ from the client's."""
        ...

    @property
    def context_tokens(self) -> int | None:
        """Return the maximum context length of the model in tokens, or None if unknown."""
        ...

    @property
    def sequences(self) -> int:
        """Return how many sequences (prompts times choices) a request may generate."""
        ...

    @property
    def slo(self) -> Slo:
        """Return the latency targets of requests for the model that specify no others."""
        ...

    @property
    def is_low_first(self) -> bool:
        """Return whether a lower `priority` in the body means a more urgent request, as in vLLM."""
        ...


class CallContext(msgspec.Struct, frozen=True):
    """What is known about a request before its body is parsed.

    preferences     the service level that its headers and its tenant specify
    arrived_s       when the body was complete (monotonic seconds)
    output_lengths  lengths of earlier responses, to estimate requests without a token limit
    cache_salts     computes cache salts; None: requests get no salt
    prompt_lengths  ratios of counted to estimated prompt tokens, by model
    """

    request_id: str
    tenant: str
    preferences: RequestPreferences
    arrived_s: float
    output_lengths: OutputLengths | None = None
    cache_salts: CacheSalts | None = None
    prompt_lengths: PromptLengths | None = None


_ALL_LISTED: Mapping[str, str] = {}


class CallShape(msgspec.Struct, frozen=True):
    """The properties of a request body apart from its prompt.

    requested      the model name that the client used
    output_tokens  the client's limit; None if it gave none
    choices        number of sequences to generate per prompt
    prompts        number of prompts in the body
    priority       the body's priority, higher first; None if it has none
    """

    requested: str
    model: ModelInfo
    output_tokens: int | None
    choices: int
    prompts: int
    is_stream: bool
    priority: int | None


CallShapes = OptionsCache[CallShape]


def parse_call(
    body: bytes,
    api: Api,
    models: Mapping[str, ModelInfo],
    context: CallContext,
    unlisted: Mapping[str, str] = _ALL_LISTED,
    shapes: CallShapes | None = None,
) -> Call:
    """Parse and check a request body, and return it as a Call.

    Raises GatewayError (400 or 404) with a message that says what is wrong.

    unlisted  the error message for each configured model that is not among `models`
    shapes    cache of the options of earlier chat requests for these models; the options of this
              request are added
    """
    key: ShapeKey | None = None
    if shapes is not None and api is CHAT:
        members = decode_members(body)
        key = shape_key(body, members)
        shape = None if key is None else shapes.get(key)
        if shape is not None:
            prompt, media = _separate_media(body, (members[CONVERSATION],))
            return _build_call(api, shape, body, members, (prompt, media, None), context)
        reject_ambiguous(body, members)
    else:
        members = api.read(body)
    if TOOL_CHOICE in members and names_allowed_tools(members[TOOL_CHOICE]):
        members = narrow_tools(members)
        body, key = join_members(members), None
    try:
        requested = string_member(members, "model")
        model = models[requested]  # models.get() would not follow patterns of names
        numbers = read_numbers(members)
    except (GatewayError, KeyError, LaxNumberError):
        body, requested, model, numbers = _read_unusual(members, models, unlisted, api.is_form)
        key = None
    prompt, media, ids, longest = _read_prompt(body, api, members, numbers, model)
    shape = _read_shape(api, requested, model, members, numbers)
    if model.context_tokens is not None:
        _check_context(longest, shape.output_tokens or 0, model.context_tokens)
    call = _build_call(api, shape, body, members, (prompt, media, ids), context)
    if not SESSION_MEMBERS.isdisjoint(members):
        call.request = with_body_session(call.request, members)
        key = None
    internal = ENGINE_INTERNAL.intersection(members)
    if internal and context.cache_salts is not None:
        call.salt = context.cache_salts.request_salt(context.tenant, members)
    if internal or requested != model.served_model or EXTRA_ARGS in members:
        call.body, call.members = engine_body(
            body, members, internal, requested, model.served_model, api.is_form
        )
    elif key is not None and shapes is not None and PREAMBLE.isdisjoint(members):
        shapes.add(key, body, members, shape)
    return call


def _read_shape(
    api: Api,
    requested: str,
    model: ModelInfo,
    members: Mapping[str, msgspec.Raw],
    numbers: Mapping[str, int],
) -> CallShape:
    choices = prompts = 1
    if not SEQUENCE_MEMBERS.isdisjoint(numbers):
        choices, prompts = count_sequences(numbers, model.sequences, generates=api.generates)
    limit = numbers.get(api.output_limit) or numbers.get("max_tokens")
    return CallShape(
        requested,
        model,
        limit if api.generates else 1,  # what computes no text ends at its first token
        choices,
        prompts,
        "stream" in members and bytes(members["stream"]) == b"true",
        _priority(members, model.is_low_first) if "priority" in members else None,
    )


def _build_call(
    api: Api,
    shape: CallShape,
    body: bytes,
    members: dict[str, msgspec.Raw],
    prompt: tuple[tuple[msgspec.Raw, ...], MediaSize, int | None],
    context: CallContext,
) -> Call:
    # Build the Call of a body; `prompt` has its raw values, its media, and its token ids if any.
    #
    # The Call has the salt of its tenant, and no session but that of the headers.
    parts, media, ids = prompt
    model, preferences, arrived_s = shape.model, context.preferences, context.arrived_s
    served, output_tokens = model.served_model, shape.output_tokens
    estimated, ids = _estimate(parts, context, served, media) if ids is None else (0, ids)
    slo = model.slo if preferences.is_default else preferences.resolve_slo(model.slo)
    if output_tokens is None:
        output_tokens = _expected_tokens(context, served, slo)
    if output_tokens > MAX_EXPECTED_TOKENS:
        output_tokens = MAX_EXPECTED_TOKENS
    request = Request(
        context.request_id,
        served,
        context.tenant,
        ids,
        output_tokens * shape.choices,
        shape.is_stream,
        slo,
        preferences.default_priority
        if shape.priority is None
        else preferences.effective_priority(shape.priority),
        arrived_s,
        None if preferences.patience_s is None else arrived_s + preferences.patience_s,
        preferences.session,
        shape.choices,
        shape.prompts,
        preferences.session_source,
        preferences.session_hints,
    )
    salts = context.cache_salts
    salt = b"" if salts is None else salts.defaults.get(context.tenant, b"")
    return Call(api, request, shape.requested, body, parts, members, salt, estimated, media)


def _read_prompt(
    body: bytes,
    api: Api,
    members: Mapping[str, msgspec.Raw],
    numbers: dict[str, int],
    model: ModelInfo,
) -> tuple[tuple[msgspec.Raw, ...], MediaSize, int | None, int]:
    # Return the prompt's members, media, number of token ids, and that of its longest prompt.
    #
    # None: the prompt is text. `numbers` receives the number of prompts if there are several.
    name, members = api.conversation, without_null_embeddings(members)
    if name not in members:
        name = _alternative(api, members)
    prompt: tuple[msgspec.Raw, ...] = (members[name],)
    if not PREAMBLE.isdisjoint(members):
        prompt = _prompt(api.prompt, members)
    if api.lists_prompts:
        count = read_prompts if api.generates else read_inputs
        prompts, ids, longest = count(members, name, api.max_prompts or model.sequences)
        if prompts > 1:
            numbers["prompt"] = prompts
        if EMBEDS_MEMBER in members and api.generates:
            return *replace_embeddings(prompt, members[EMBEDS_MEMBER]), ids, longest
        if api.generates or ids is not None:
            return prompt, NO_MEDIA, ids, longest
        return *_separate_each(body, prompt), None, 0
    prompt, media = _separate_media(body, prompt)
    is_text = media is not NO_MEDIA or api.is_admitted
    return prompt, media, None if is_text else 0, 0


def _alternative(api: Api, members: Mapping[str, msgspec.Raw]) -> str:
    # Return the name of the member that the body has in place of a conversation.
    #
    # Raises GatewayError if there is none.
    names = [name for name in api.prompt if name in api.alternatives and name in members]
    if not names:
        raise missing_member(api.conversation)
    return names[-1]


def _estimate(
    prompt: Sequence[msgspec.Raw], caller: CallContext, served: str, media: MediaSize
) -> tuple[int, int]:
    # Estimate a prompt's tokens from its bytes, corrected by a ratio learned from engines' counts.
    #
    # `served` is the engines' name of the model.
    length = len(prompt[0]) if len(prompt) == 1 else sum(map(len, prompt))
    estimated = length // BYTES_PER_TOKEN + 1
    if caller.prompt_lengths is None or not caller.prompt_lengths.ratios:
        return estimated, estimated
    return estimated, caller.prompt_lengths.correct(served, media.parts > 0, estimated)


def _separate_media(
    body: bytes, prompt: tuple[msgspec.Raw, ...]
) -> tuple[tuple[msgspec.Raw, ...], MediaSize]:
    # Replace each image, recording and file in a prompt by a placeholder.
    #
    # Also return their size.
    if len(body) <= MIN_MEDIUM_BYTES or not may_contain_media(body):
        return prompt, NO_MEDIA
    last = memoryview(prompt[-1])
    # If equal bytes occur earlier in the body, they serve as well.
    start = body.find(last[:MIN_MEDIUM_BYTES])
    end = start + len(last)
    # Hashes of views are compared in a fortieth of the time of the views.
    if xxh3_128_digest(memoryview(body)[start:end]) != xxh3_128_digest(last):
        body, start, end = bytes(last), 0, len(last)
    messages, media = replace_media(body, start, end)
    return ((*prompt[:-1], msgspec.Raw(messages)), media) if media.parts else (prompt, NO_MEDIA)


def _separate_each(
    body: bytes, prompt: tuple[msgspec.Raw, ...]
) -> tuple[tuple[msgspec.Raw, ...], MediaSize]:
    # Do the same as _separate_media() for each value, such as a query and several documents.
    values, parts, tokens = list[msgspec.Raw](), 0, 0
    for value in prompt:
        if len(value) <= MIN_MEDIUM_BYTES:
            values.append(value)
            continue
        separated, media = _separate_media(body, (value,))
        values += separated
        parts, tokens = parts + media.parts, tokens + media.tokens
    return (tuple(values), MediaSize(parts, tokens)) if parts else (prompt, NO_MEDIA)


def _expected_tokens(caller: CallContext, model: str, slo: Slo) -> int:
    # Return the expected answer tokens: the length of similar answers so far, or a default.
    expected = (
        None
        if caller.output_lengths is None
        else caller.output_lengths.estimate(model, caller.tenant, slo.name)
    )
    return DEFAULT_OUTPUT_TOKENS if expected is None else max(1, round(expected))


def _priority(members: Mapping[str, msgspec.Raw], low_first: bool) -> int:
    # Return the priority in the body, where a higher number is always more urgent.
    #
    # Engines interpret the number in opposite ways; `low_first` says that a lower one is more
    # urgent.
    value = member_value(members, "priority")
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, -value if low_first else value))


def _prompt(names: tuple[str, ...], members: Mapping[str, msgspec.Raw]) -> tuple[msgspec.Raw, ...]:
    return tuple(members[name] for name in names if name in members)


def _read_unusual(
    members: dict[str, msgspec.Raw],
    models: Mapping[str, ModelInfo],
    unlisted: Mapping[str, str],
    is_form: bool,
) -> tuple[bytes, str, ModelInfo, dict[str, int]]:
    # Read a request that names no model, or has integers in another form than a JSON integer.
    #
    # Return its body in the usual form, the name of the model, the model, and the integers by name.
    # Forms are not rewritten. Raises GatewayError for invalid values.
    if "model" not in members or bytes(members["model"]) == b"null":
        names = {model.served_model for model in models.values()}
        if is_form or len(names) != 1:
            raise missing_member("model")
        members["model"] = msgspec.Raw(msgspec.json.encode(names.pop()))
    requested = string_member(members, "model")
    try:
        model = models[requested]
    except KeyError:
        raise unknown_model(requested, models, unlisted) from None
    for name in () if is_form else MAX_NUMBERS.keys() & members:
        number = lax_integer(member_value(members, name))
        if number is not None:
            members[name] = msgspec.Raw(b"%d" % number)
    try:
        return join_members(members), requested, model, read_numbers(members)
    except LaxNumberError as error:
        raise bad_request(
            f"The form field '{error}' must be an integer such as 3.", str(error)
        ) from None


def _check_context(prompt_tokens: int, output_tokens: int, context_tokens: int) -> None:
    # Raise GatewayError for a request that certainly exceeds the model's context length.
    #
    # The tokens of text can only be estimated, so engines check prompts that are text.
    total = prompt_tokens + output_tokens
    if total > context_tokens:
        raise GatewayError(
            Failure.CONTEXT_TOO_LONG,
            f"This model's maximum context length is {context_tokens} tokens; the request asks for "
            f"{total} ({prompt_tokens} in the prompt, {output_tokens} to be generated).",
        )
