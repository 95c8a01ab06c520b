"""Parses and checks chat and completion requests as vLLM does, with vLLM's error messages.

The result is a ParsedRequest, or an ApiError is raised. Responses are built in
mockgpu/http/openai_format.py, the text of prompts and answers in mock_tokenizer.py.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Mapping
from hashlib import shake_128
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from mockgpu.mock_tokenizer import (
    TOKEN_BYTES,
    pad_to_tokens,
    render_chat,
    token_bytes,
    token_count,
)
from mockgpu.requested_tool_or_schema import FREE_TEXT, RequestedForm, requested_form
from mockgpu.split_legs import DecodeLeg, PrefillLeg

MAX_PROMPTS = 1024
DEFAULT_COMPLETION_TOKENS = 16
EMBEDDING_BYTES = 8192  # of one token: 4,096 numbers of 16 bits
# Maximum number of tokens of an answer. All tokens are generated before the first one is sent,
# which takes about 1 us each, and a longer answer would block every group of the process for
# seconds.
MAX_GENERATED_TOKENS = 1 << 22

# Fields and headers by which one half of a split request refers to the other. A gateway must not
# pass them on from clients. An engine without a P/D role answers them with an error.
HANDOFF_FIELDS = (
    "kv_transfer_params",
    "ec_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "disaggregated_params",
    "disagg_request_id",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
)
HANDOFF_HEADERS = ("x-override-", "x-prefiller-")

_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "Method Not Allowed",
    413: "Request Entity Too Large",
    429: "Too Many Requests",
    500: "InternalServerError",
    503: "Service Unavailable",
}


class ApiError(Exception):
    """An error response in vLLM's format.

    `code` is the HTTP status. The body is `{"error": {message, type, param, code}}`. `headers` has
    further header fields of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = headers or {}

    @property
    def kind(self) -> str:
        """Return the error type that vLLM uses for this status, such as "BadRequestError"."""
        return _TYPES.get(self.status, "InternalServerError")

    def body(self) -> bytes:
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.status,
        }
        return msgspec.json.encode({"error": error})


class MalformedHandoffError(ApiError):
    """Raised for a split request whose fields about KV are malformed.

    what   the field, and what is wrong with it
    fatal  whether the real engine would crash instead of sending an error
    """

    def __init__(self, what: str, fatal: bool = False, status: int = 500) -> None:
        super().__init__(status, f"unexpected handoff in request: {what}")
        self.fatal = fatal


Kind = TypeVar("Kind")

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class StreamOptions(msgspec.Struct, frozen=True):
    """The JSON object `stream_options` of a chat or completion request."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RequestBody(msgspec.Struct, frozen=True):
    """The fields of a chat or completion request that the mock uses or checks.

    All other fields are ignored.
    """

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[Any] | None = None
    prompt_embeds: str | list[str] | None = None
    max_tokens: Natural | msgspec.UnsetType | None = msgspec.UNSET
    max_completion_tokens: Positive | None = None
    min_tokens: Natural = 0
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: bool | Natural | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool = False
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: Any = None
    structured_outputs: Any = None
    priority: int = 0
    cache_salt: str | None = None
    extra_key: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    disaggregated_params: Any = None
    disagg_request_id: Any = None
    routed_dp_rank: Any = None
    disagg_prefill_dp_rank: Any = None
    return_token_ids: bool | None = None
    prompt_token_ids: list[TokenId] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] = "left"


class ParsedHandoff(msgspec.Struct, frozen=True):
    """What the fields of a request say about KV to fetch from another engine or keep for one.

    leg        which half of a split request it is; None: it is a whole request
    prompt     the prompt as tokens, if the other engine has already rendered it
    one_token  whether the engine stops after the first token, whatever limit the request has
    """

    leg: PrefillLeg | DecodeLeg | None = None
    prompt: bytes | None = None
    one_token: bool = False


NO_LEG = ParsedHandoff()


class ParsedRequest(msgspec.Struct, frozen=True):
    """A valid request: its prompts as tokens, `n` choices for each, and response options.

    answer_noise  fraction of prompts whose answers differ from those of other engines
    """

    id: str
    chat: bool
    model: str
    prompts: list[bytes]
    n: int
    limit: int
    can_end: bool
    body: RequestBody
    stops: tuple[str, ...]
    form: RequestedForm
    leg: PrefillLeg | DecodeLeg | None = None
    one_token: bool = False
    answer_noise: float = 0.0

    @property
    def is_stream(self) -> bool:
        return bool(self.body.stream)

    @property
    def tool(self) -> str | None:
        """Return the name of the tool that the answer will call; None: the answer is text."""
        return self.form.tool

    @property
    def echoes_only(self) -> bool:
        """Return whether a completion consists of the prompt alone: `echo` and `max_tokens` 0."""
        return not self.chat and self.body.echo and self.body.max_tokens == 0

    @property
    def wants_logprobs(self) -> bool:
        """Return whether the client requests log probabilities of tokens.

        In a completion request, `logprobs: 0` requests them as well.
        """
        logprobs = self.body.logprobs
        return bool(logprobs) if self.chat else logprobs is not None and logprobs is not False

    @property
    def prompt_tokens(self) -> int:
        return sum(token_count(prompt) for prompt in self.prompts)


def decode_body(raw: bytes, kind: type[Kind]) -> Kind:
    """Decode a JSON body as a `kind`. Raises ApiError 400, in vLLM's words, if it is invalid."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"1 validation error: {error}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"JSON decode error: {error}") from None


def check_rank(headers: Mapping[str, str]) -> None:
    """Check the header that selects a data-parallel rank; this engine has only rank 0.

    Raises ApiError 400 for any other rank. A value that is not an integer is ignored.
    """
    rank = headers.get("X-data-parallel-rank", "0")
    if re.fullmatch("-?[0-9]*[1-9][0-9]*", rank):
        raise ApiError(
            400, f"data_parallel_rank {rank} is out of range [0, 1).", "data_parallel_rank"
        )


def client_request_id(headers: Mapping[str, str]) -> str:
    """Return the request's X-Request-Id header, or "" if it is absent.

    Non-ASCII bytes are decoded as Latin-1, as real engines do.
    """
    return headers.get("X-Request-Id", "").encode("utf-8", "surrogateescape").decode("latin-1")


def check_handoff(body: RequestBody, headers: Mapping[str, str]) -> None:
    """Raise MalformedHandoffError if a whole request has fields or headers of a split request.

    Only a router that splits requests sends them, so a client's request must not have any.
    """
    for field in HANDOFF_FIELDS:
        if getattr(body, field) is not None:
            raise MalformedHandoffError(f"{field} must not be set: this request is not split")
    for name in headers:
        if name.lower().startswith(HANDOFF_HEADERS):
            raise MalformedHandoffError(
                f"the header {name} must not be sent: this request is not split"
            )


def parse_request(
    body: RequestBody,
    headers: Mapping[str, str],
    chat: bool,
    served: str,
    context: int,
    request_id: str,
    reading: ParsedHandoff = NO_LEG,
    may_end_from: int | None = None,
    answer_noise: float = 0.0,
) -> ParsedRequest:
    """Check a request whose handoff fields are already parsed, and convert its prompts to tokens.

    context       maximum number of tokens of a prompt and its answer together
    reading       the parsed handoff fields
    may_end_from  lowest token limit (max_tokens) of a request at which its answer may end earlier;
                  None: every answer reaches its limit
    answer_noise  fraction of prompts whose answers differ from those of other engines

    Raises ApiError if the request is invalid.
    """
    check_rank(headers)
    if body.model is not None and body.model != served:
        raise ApiError(404, f"The model `{body.model}` does not exist.", "model")
    _check_combinations(body)
    prompts = [reading.prompt] if reading.prompt is not None else _all_prompts(body, chat)
    requested = _requested_tokens(body, chat)
    limit = _limit(prompts, requested, context)
    _check_limit(body, limit, reading.leg)
    may_end = _may_end(body, requested, reading, may_end_from)
    n, stops, form = body.n or 1, _stops(body), _form(body) if chat else FREE_TEXT
    if form.fixed_text is not None:
        limit = min(limit, token_count(pad_to_tokens(form.fixed_text.encode())))
        may_end = False
    if reading.one_token:
        limit = 1
    if not may_end and len(prompts) * n * limit > MAX_GENERATED_TOKENS:
        raise ApiError(
            400,
            f"max_tokens is too large: this mock engine generates at most {MAX_GENERATED_TOKENS} "
            "tokens per request",
            "max_tokens",
        )
    return ParsedRequest(
        request_id,
        chat,
        served,
        prompts,
        n,
        limit,
        may_end,
        body,
        stops,
        form,
        reading.leg,
        reading.one_token,
        answer_noise=answer_noise,
    )


def _may_end(
    body: RequestBody, requested: int | None, reading: ParsedHandoff, may_end_from: int | None
) -> bool:
    # Return whether an answer may end before its token limit.
    if body.ignore_eos:
        return False
    if isinstance(reading.leg, PrefillLeg) and not reading.one_token:
        # The requested token may end the answer, unless at least one token is required.
        return not body.min_tokens
    return requested is None or (may_end_from is not None and requested >= may_end_from)


def _check_limit(body: RequestBody, limit: int, leg: PrefillLeg | DecodeLeg | None) -> None:
    # Raise ApiError if the token limit is below `min_tokens` or the tokens already generated.
    if body.min_tokens > limit:
        raise ApiError(
            400,
            f"min_tokens must be less than or equal to max_tokens={limit}, got {body.min_tokens}.",
        )
    if isinstance(leg, DecodeLeg) and token_count(leg.first) > limit:
        raise ApiError(
            400,
            f"the prefill engine already generated {token_count(leg.first)} tokens, but the "
            f"limit is {limit}",
        )


def _all_prompts(body: RequestBody, chat: bool) -> list[bytes]:
    prompts = [render_chat(_chat_parts(body))] if chat else _completion_prompts(body)
    # -1 stands for the model's context, which the mock does not cut prompts to.
    if body.truncate_prompt_tokens is None or body.truncate_prompt_tokens < 1:
        return prompts
    size = body.truncate_prompt_tokens * TOKEN_BYTES
    is_right = body.truncation_side == "right"
    return [prompt[:size] if is_right else prompt[-size:] for prompt in prompts]


def chat_prompt(body: RequestBody) -> bytes:
    """Return the tokens of a chat, rendered as a prompt.

    Raises ApiError if a message is invalid.
    """
    return render_chat(_chat_parts(body))


def parse_prompt(raw: bytes) -> bytes:
    """Return the prompt of a /tokenize request as tokens. It is a chat or a plain prompt.

    Raises ApiError if the body is invalid.
    """
    body = decode_body(raw, RequestBody)
    return render_chat(_chat_parts(body)) if body.messages is not None else _prompts(body.prompt)[0]


def _check_combinations(body: RequestBody) -> None:
    # Raise ApiError for fields that vLLM accepts singly but refuses in combination.
    if body.stream_options is not None and not body.stream:
        raise ApiError(
            400, "Stream options can only be defined when `stream=True`.", "stream_options"
        )
    if body.tool_choice not in (None, "none") and body.tools is None:
        raise ApiError(400, "When using `tool_choice`, `tools` must be set.", "tool_choice")
    if body.tools is not None and not body.tools:
        raise ApiError(400, "`tools` must not be an empty list.", "tools")
    if body.priority:
        raise ApiError(400, "Got priority but priority scheduling is not enabled.", "priority")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(
            400, "when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs"
        )
    if "" in _stops(body):
        raise ApiError(400, "stop cannot contain an empty string.", "stop")
    if body.cache_salt is not None and (
        not 0 < len(body.cache_salt) <= 128 or set(body.cache_salt) & set("@/\\\0")
    ):
        raise ApiError(
            400, "cache_salt must be 1 to 128 characters without @ / \\ NUL.", "cache_salt"
        )


def _stops(body: RequestBody) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def _chat_parts(body: RequestBody) -> dict[str, Any]:
    if not body.messages:
        raise ApiError(
            400, "1 validation error: messages: field required and not empty", "messages"
        )
    if not all(isinstance(message.get("role"), str) for message in body.messages):
        raise ApiError(
            400, "1 validation error: messages: each message must have a role", "messages"
        )
    return {
        "messages": body.messages,
        "tools": body.tools,
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
    }


def _completion_prompts(body: RequestBody) -> list[bytes]:
    # Return a completion's prompts as tokens: its texts or token ids, and its embeddings.
    embeds = [body.prompt_embeds] if isinstance(body.prompt_embeds, str) else body.prompt_embeds
    prompts = _prompts(body.prompt) if body.prompt or not embeds else []
    return [*prompts, *map(_embedded, embeds or ())]


def _embedded(text: str) -> bytes:
    # Return tokens for the embeddings of a prompt, a tensor in base64. Equal ones get equal tokens.
    try:
        tensor = b64decode(text, validate=True)
    except ValueError:
        raise ApiError(400, "prompt_embeds must be base64", "prompt_embeds") from None
    return shake_128(tensor).digest(TOKEN_BYTES * max(1, len(tensor) // EMBEDDING_BYTES))


def _prompts(prompt: str | list[Any] | None) -> list[bytes]:
    # Return a completion's prompts as tokens.
    #
    # The field may be a text, a list of token ids, or a list of either.
    if not prompt:
        raise ApiError(
            400, "Either prompt or prompt_embeds must be provided and non-empty.", "prompt"
        )
    many = prompt if isinstance(prompt, list) and isinstance(prompt[0], str | list) else [prompt]
    if len(many) > MAX_PROMPTS:
        raise ApiError(
            400, f"A request may have at most {MAX_PROMPTS} prompts, got {len(many)}", "prompt"
        )
    return [one_prompt(part) for part in many]


def one_prompt(part: object) -> bytes:
    """Convert one prompt to tokens. It is a text or a list of token ids.

    Raises ApiError for any other value.
    """
    if isinstance(part, str) and part:
        return token_bytes(part)
    ids = isinstance(part, list) and part and all(type(i) is int and 0 <= i < 1 << 32 for i in part)
    if not ids or not isinstance(part, list):
        raise ApiError(
            400,
            "prompt must be a text, a list of token ids, or a list of these; none may be empty",
            "prompt",
        )
    return token_bytes(part)


def _requested_tokens(body: RequestBody, chat: bool) -> int | None:
    # Return the requested limit of output tokens; None: as many as the context allows.
    #
    # A chat without a limit has none, as has a completion with null. A completion without the field
    # gets 16. For a completion that only echoes its prompt one token is generated but not sent, as
    # by vLLM. Raises ApiError for any other limit of 0.
    if chat and body.max_completion_tokens is not None:
        return body.max_completion_tokens
    if body.max_tokens is msgspec.UNSET:
        return None if chat else DEFAULT_COMPLETION_TOKENS
    if body.max_tokens == 0:
        if chat or not body.echo:
            raise ApiError(400, "max_tokens must be at least 1, got 0.", "max_tokens")
        return 1
    return body.max_tokens


def _limit(prompts: list[bytes], requested: int | None, context: int) -> int:
    # Return the limit of output tokens per answer. Raises ApiError if it exceeds the context.
    longest = max(token_count(prompt) for prompt in prompts)
    at_least = 1 if requested is None else requested
    if longest + at_least > context:
        message = (
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{at_least} output tokens and your prompt contains {longest} input tokens, for a "
            f"total of {longest + at_least} tokens. Please reduce the length of the input prompt "
            f"or the number of requested output tokens."
        )
        raise ApiError(400, message, "input_tokens")
    return context - longest if requested is None else at_least


def check_context(prompts: list[bytes], context: int) -> None:
    """Raise ApiError 400 if one of the prompts alone is longer than the context length."""
    longest = max(token_count(prompt) for prompt in prompts)
    if longest > context:
        message = (
            f"This model's maximum context length is {context} tokens. However, your input "
            f"contains {longest} tokens. Please reduce the length of the input."
        )
        raise ApiError(400, message, "input_tokens")


def _form(body: RequestBody) -> RequestedForm:
    # Return the form of a chat's answer: text, JSON or tool call. Raises ApiError if invalid.
    try:
        return requested_form(
            body.messages or (),
            body.tools or (),
            body.tool_choice,
            body.response_format,
            body.structured_outputs,
        )
    except ValueError as error:
        raise ApiError(400, str(error), "tool_choice" if body.tools else "tools") from None
