"""A request as vLLM's OpenAI server reads it: JSON bytes in, a checked Ask out, ApiError with vLLM's status where not.

What is answered is dialect.py's, what the words are is text.py's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from mockgpu.handoff.legs import Give, Take
from mockgpu.text import render_chat, token_bytes, token_count

MAX_PROMPTS = 1024
DEFAULT_COMPLETION_TOKENS = 16
# Answers are made up whole before the first token is sent, about 1 us a token on the event loop: more than some seconds
# of that would stop every group of the process.
MOST_TOKENS_MADE_UP = 1 << 22

# Fields and headers by which one leg of a split request is told of the other. A gateway must not let a client's
# through; to a group that is no half of a pair, any of them means that somebody upstream is at fault.
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
    500: "InternalServerError",
    503: "Service Unavailable",
}


class ApiError(Exception):
    """An answer other than 2xx, in vLLM's shape: `{"error": {message, type, param, code}}` with the status as code."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param

    @property
    def kind(self) -> str:
        """The error's type in words."""
        return _TYPES.get(self.status, "InternalServerError")

    def body(self) -> bytes:
        """The JSON body."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.status,
        }
        return msgspec.json.encode({"error": error})


class MalformedHandoffError(ApiError):
    """A request that carries handoff fields this engine never asked for, or some that it cannot bear.

    `fatal`: the engine does not answer, it dies of them (engines.md B.0).
    """

    def __init__(self, what: str, fatal: bool = False, status: int = 500) -> None:
        super().__init__(status, f"unexpected handoff in request: {what}", what)
        self.fatal = fatal


Kind = TypeVar("Kind")

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options` of a request."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(msgspec.Struct, frozen=True):
    """The fields of a chat or completion request that this mock reads or checks; others are ignored."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[Any] | None = None
    max_tokens: Positive | msgspec.UnsetType | None = msgspec.UNSET
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


class Reading(msgspec.Struct, frozen=True):
    """What a dialect makes of a request's handoff fields: the leg it is, if any.

    `prompt`: the prompt as tokens, where the other leg has rendered it already. `one_token`: the engine stops this leg
    after its first token, whatever the request says.
    """

    leg: Give | Take | None = None
    prompt: bytes | None = None
    one_token: bool = False


NO_LEG = Reading()


class Ask(msgspec.Struct, frozen=True):
    """A checked request: one or more prompts as tokens, `n` choices of each, and how to answer."""

    id: str
    chat: bool
    model: str
    prompts: list[bytes]
    n: int
    limit: int
    may_end: bool
    body: Body
    stops: tuple[str, ...]
    tool: str | None
    leg: Give | Take | None = None
    one_token: bool = False

    @property
    def stream(self) -> bool:
        """Whether the answer is server-sent events."""
        return bool(self.body.stream)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer carries log probabilities (a completion's `logprobs: 0` does)."""
        asked = self.body.logprobs
        return bool(asked) if self.chat else asked is not None and asked is not False

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(token_count(prompt) for prompt in self.prompts)


def decoded(raw: bytes, kind: type[Kind]) -> Kind:
    """A body's JSON as that kind of object. ApiError 400 when it is none."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"1 validation error: {error}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"JSON decode error: {error}") from None


def check_rank(headers: Mapping[str, str]) -> None:
    """The data-parallel rank a caller pins: there is rank 0 only. ApiError 400 for another; no integer is ignored."""
    rank = headers.get("X-data-parallel-rank", "0")
    if re.fullmatch("-?[0-9]*[1-9][0-9]*", rank):
        raise ApiError(
            400, f"data_parallel_rank {rank} is out of range [0, 1).", "data_parallel_rank"
        )


def request_name(headers: Mapping[str, str]) -> str:
    """The caller's X-Request-Id, "" without one; bytes beyond ASCII are read as Latin-1, as engines' servers do."""
    return headers.get("X-Request-Id", "").encode("utf-8", "surrogateescape").decode("latin-1")


def check_handoff(body: Body, headers: Mapping[str, str]) -> None:
    """Raise MalformedHandoffError when the request carries what only a P/D router may send."""
    for field in HANDOFF_FIELDS:
        if getattr(body, field) is not None:
            raise MalformedHandoffError(field)
    for name in headers:
        if name.lower().startswith(HANDOFF_HEADERS):
            raise MalformedHandoffError(name)


def ask_of(
    body: Body,
    headers: Mapping[str, str],
    chat: bool,
    served: str,
    context: int,
    request_id: str,
    reading: Reading = NO_LEG,
) -> Ask:
    """A checked request of a body whose handoff fields have been read. Raises ApiError."""
    check_rank(headers)
    if body.model is not None and body.model != served:
        raise ApiError(404, f"The model `{body.model}` does not exist.", "model")
    _check_combinations(body)
    prompts = [reading.prompt] if reading.prompt is not None else _all_prompts(body, chat)
    asked = _asked(body, chat)
    limit = _limit(prompts, asked, context)
    if body.min_tokens > limit:
        raise ApiError(
            400,
            f"min_tokens must be less than or equal to max_tokens={limit}, got {body.min_tokens}.",
        )
    if isinstance(reading.leg, Take) and token_count(reading.leg.first) > limit:
        raise ApiError(
            400,
            f"{token_count(reading.leg.first)} tokens were made already, but at most {limit} asked for",
        )
    may_end = asked is None and not body.ignore_eos
    if isinstance(reading.leg, Give) and not reading.one_token:
        # The one token that it was asked for may be the end, unless it was told to make one at least.
        may_end = not body.ignore_eos and not body.min_tokens
    n, stops, tool = body.n or 1, _stops(body), _forced_tool(body) if chat else None
    if reading.one_token:
        limit = 1
    if not may_end and len(prompts) * n * limit > MOST_TOKENS_MADE_UP:
        raise ApiError(
            400,
            f"this mock makes up at most {MOST_TOKENS_MADE_UP} tokens for one request",
            "max_tokens",
        )
    return Ask(
        request_id,
        chat,
        served,
        prompts,
        n,
        limit,
        may_end,
        body,
        stops,
        tool,
        reading.leg,
        reading.one_token,
    )


def _all_prompts(body: Body, chat: bool) -> list[bytes]:
    return [render_chat(_chat_parts(body))] if chat else _prompts(body.prompt)


def prompt_of(raw: bytes) -> bytes:
    """The prompt of a /tokenize body, chat or prompt form, as tokens. Raises ApiError."""
    body = decoded(raw, Body)
    return render_chat(_chat_parts(body)) if body.messages is not None else _prompts(body.prompt)[0]


def _check_combinations(body: Body) -> None:
    """What vLLM refuses although each field alone is well-formed."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(
            400, "Stream options can only be defined when `stream=True`.", "stream_options"
        )
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


def _stops(body: Body) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def _chat_parts(body: Body) -> dict[str, Any]:
    if not body.messages:
        raise ApiError(
            400, "1 validation error: messages: field required and not empty", "messages"
        )
    if not all(isinstance(message.get("role"), str) for message in body.messages):
        raise ApiError(400, "1 validation error: messages: each needs a role", "messages")
    return {
        "messages": body.messages,
        "tools": body.tools,
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
    }


def _prompts(prompt: str | list[Any] | None) -> list[bytes]:
    """A completion's prompt in its four forms: text, ids, a list of either."""
    if not prompt:
        raise ApiError(
            400, "Either prompt or prompt_embeds must be provided and non-empty.", "prompt"
        )
    many = prompt if isinstance(prompt, list) and isinstance(prompt[0], str | list) else [prompt]
    if len(many) > MAX_PROMPTS:
        raise ApiError(400, f"at most {MAX_PROMPTS} prompts, got {len(many)}", "prompt")
    return [_one_prompt(part) for part in many]


def _one_prompt(part: object) -> bytes:
    if isinstance(part, str) and part:
        return token_bytes(part)
    ids = isinstance(part, list) and part and all(type(i) is int and 0 <= i < 1 << 32 for i in part)
    if not ids or not isinstance(part, list):
        raise ApiError(
            400, "prompt must be text or token ids, or a list of one of these; none empty", "prompt"
        )
    return token_bytes(part)


def _asked(body: Body, chat: bool) -> int | None:
    """The most tokens that each answer may have; None: what the context leaves, as a chat that names no bound, or a
    completion with a bound of null. A completion without one gets 16."""
    if chat and body.max_completion_tokens is not None:
        return body.max_completion_tokens
    if body.max_tokens is msgspec.UNSET:
        return None if chat else DEFAULT_COMPLETION_TOKENS
    return body.max_tokens


def _limit(prompts: list[bytes], asked: int | None, context: int) -> int:
    """The most tokens each answer may have, as asked or as the context leaves."""
    longest = max(token_count(prompt) for prompt in prompts)
    wanted = 1 if asked is None else asked
    if longest + wanted > context:
        message = (
            f"This model's maximum context length is {context} tokens. However, you requested {wanted} output tokens "
            f"and your prompt contains {longest} input tokens, for a total of {longest + wanted} tokens. Please reduce "
            f"the length of the input prompt or the number of requested output tokens."
        )
        raise ApiError(400, message, "input_tokens")
    return context - longest if asked is None else wanted


def _forced_tool(body: Body) -> str | None:
    """The tool that must be called: the one named, or the first of the list when one is required."""
    choice = body.tool_choice
    names = [_function_name(tool) for tool in body.tools or ()]
    if isinstance(choice, dict):
        name = _function_name(choice)
        if name is None or name not in names:
            raise ApiError(
                400,
                "The tool specified in `tool_choice` does not match any of the specified `tools`",
            )
        return name
    if choice == "required":
        if not names or names[0] is None:
            raise ApiError(400, "When using `tool_choice`, `tools` must be set.", "tool_choice")
        return names[0]
    return None


def _function_name(tool: Mapping[str, Any]) -> str | None:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None
