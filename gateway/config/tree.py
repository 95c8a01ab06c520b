"""The configuration as one immutable typed tree. Every field says what it is: reference page and schema come from here.

Lives here: types, defaults and rules for one value. Not here: rules between values (checks.py), the file (source.py).
Defaults are written the way an operator writes them ("30s", "32MiB"), and pass the same parser.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    SecretStr,
    StringConstraints,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from gateway import units
from gateway.config.source import number_if_substituted
from policies.model import EngineKind, Role


class Secret(SecretStr):
    """Text that never prints: not in a repr, a log line, a dump or a traceback. `reveal()` is the one way to it."""

    def reveal(self) -> str:
        """The text itself; for comparing and for putting on the wire only."""
        return self.get_secret_value()


def _from_duration(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise ValueError("is not a duration; write a number with a unit, as in 250ms or 1m30s")
    seconds = units.duration_s(value)
    if seconds <= 0:
        raise ValueError(f"{value!r} is no time at all; it must be longer than 0s")
    return seconds


def _from_size(value: object) -> int:
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise ValueError("is not a size; write a number with a unit, as in 32MiB")
    size = units.size_bytes(value)
    if size <= 0:
        raise ValueError(f"{value!r} is nothing; it must be more than 0B")
    return size


def _http_url(url: str) -> str:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        raise ValueError("has no valid port; write http://host:8000") from None
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError("is not the URL of an engine; write http://host:8000")
    if parts.username is not None or parts.query or parts.fragment or parts.path not in ("", "/"):
        raise ValueError("must be scheme, host and port alone, as in http://host:8000; the paths are the gateway's")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"http://{host}:{port or 80}"


def _host_and_port(text: str) -> str:
    parts = urlsplit(f"//{text}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or not port or parts.netloc != text or parts.username is not None:
        raise ValueError("is no address; write host:port, as in 10.0.0.7:8998")
    return text


Duration = Annotated[
    float,
    BeforeValidator(_from_duration),
    WithJsonSchema({"type": "string", "pattern": units.DURATION_PATTERN, "title": "Duration", "examples": ["250ms"]}),
]
"""Seconds, written with a unit."""

Size = Annotated[
    int,
    BeforeValidator(_from_size),
    WithJsonSchema({"type": "string", "pattern": units.SIZE_PATTERN, "title": "Size", "examples": ["32MiB"]}),
]
"""Bytes, written with a unit."""

Count = Annotated[int, Field(strict=True, ge=1, le=2**40), BeforeValidator(number_if_substituted)]
Port = Annotated[int, Field(strict=True, ge=0, le=65535), BeforeValidator(number_if_substituted)]
Name = Annotated[str, StringConstraints(pattern=r"^[^\s\x00-\x1f\x7f\"\\]+$", max_length=200)]
Host = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z.:_-]+$", max_length=253)]
Url = Annotated[str, StringConstraints(max_length=2048), AfterValidator(_http_url)]
HttpPath = Annotated[str, StringConstraints(pattern=r"^/[!-~]*$", max_length=200)]
Label = Annotated[str, StringConstraints(max_length=200)]
Bootstrap = Annotated[str, StringConstraints(max_length=300), AfterValidator(_host_and_port)]


def _set(default: object, text: str) -> Any:
    """A field with a default written as in a file, and what it is."""
    return Field(default, description=text, validate_default=True)


def _sendable(key: Secret | None) -> Secret | None:
    text = None if key is None else key.reveal()
    if text is not None and (not text or not text.isascii() or not text.isprintable() or text.strip() != text):
        raise ValueError("is empty or cannot be sent in a header (printable ASCII without outer blanks)")
    return key


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, populate_by_name=True)


class Listener(_Section):
    """Where one of the two servers listens."""

    host: Host
    port: Port


class ApiListener(Listener):
    """Where applications connect."""

    host: Host = _set("127.0.0.1", "Address of the OpenAI API. 0.0.0.0 listens on every interface.")
    port: Port = _set(8080, "Port of the OpenAI API; 0 takes a free one.")


class AdminListener(Listener):
    """Where operators and Prometheus connect."""

    host: Host = _set("127.0.0.1", "Address of /healthz, /readyz, /metrics, /endpoints and /config.")
    port: Port = _set(8081, "Port of the admin server; 0 takes a free one. Never the API port.")


class Listeners(_Section):
    """The two servers. The admin server answers no API request and the API server no admin request."""

    api: ApiListener = _set({}, "The OpenAI API.")
    admin: AdminListener = _set({}, "Health, metrics and state.")


class Split(_Section):
    """Prefill and decode in different TP groups, the KV cache handed over between them."""

    dialect: Literal["vllm_nixl", "vllm_push", "mooncake", "sglang", "trtllm"] = Field(
        description="The handoff its engines speak: vllm_nixl, vllm_push, mooncake, sglang or trtllm."
    )
    threshold_tokens: Count = _set(2048, "Prompts are split from so many tokens on that are not cached at the decoder.")
    hysteresis: Annotated[float, Field(ge=0, lt=1)] = _set(
        0.25, "Half the width of the band around the threshold, as a share of it, in which the mode stays as it was."
    )
    transfer_timeout: Duration = _set(
        "30s", "From the prefill's end to the first token; then the request is computed whole."
    )


class Model(_Section):
    """A model name that applications may ask for."""

    name: Name = Field(description="The name applications send and see in /v1/models.")
    aliases: tuple[Name, ...] = _set(
        (), "Other names for the same model; an answer carries the name that was asked for."
    )
    pool: Name = Field(description="The pool whose endpoints serve it.")
    context_tokens: Count | None = _set(None, "Longest prompt plus answer; longer requests are refused at the door.")
    split: Split | None = _set(None, "How to split it between prefill and decode endpoints; whole unless given.")


class Layout(_Section):
    """How one engine process spreads the model over GPUs."""

    tp: Count = _set(1, "Tensor parallel size.")
    pp: Count = _set(1, "Pipeline parallel size.")
    ep: Count = _set(1, "Expert parallel size; divides tp * dp, since experts are spread over those ranks.")
    dp: Count = _set(1, "Data parallel ranks inside the engine.")

    @model_validator(mode="after")
    def _spreads(self) -> Layout:
        if (self.tp * self.dp) % self.ep:
            raise ValueError(
                f"ep {self.ep} does not divide tp * dp = {self.tp * self.dp}, the ranks experts are spread over"
            )
        return self


class EndpointSpec(_Section):
    """One TP group: one engine process behind one URL."""

    url: Url = Field(description="Where the engine listens: scheme, host and port.")
    name: Name | None = _set(None, "How logs and metrics call it; host:port unless given.")
    role: Role = _set("both", "prefill, decode, or both (serves whole requests).")
    bootstrap: Bootstrap | None = _set(
        None, "host:port of a prefill endpoint's bootstrap server, as decode endpoints reach it (mooncake, sglang)."
    )
    engine: EngineKind = _set("vllm", "Whose dialect it speaks: vllm, sglang or trtllm.")
    served_model: Name | None = _set(None, "The model name the engine knows; the asked one unless given.")
    layout: Layout = _set({}, "How it spreads the model over GPUs.")
    labels: Mapping[Name, Label] = _set(
        {}, "Free text, such as zone or gpu. Endpoints are paired only when their version and kv_dtype labels agree."
    )
    max_concurrency: Count = _set(24, "Requests sent to it at once; further ones go elsewhere or wait in the gateway.")
    api_key: Secret | None = _set(None, "Sent to the engine as a bearer token, in place of the client's.")
    kv_tokens: Count | None = _set(None, "Tokens its KV cache holds; learnt from the engine unless given.")

    _sendable_key = field_validator("api_key")(_sendable)

    @property
    def shown_name(self) -> str:
        """The name, or host:port."""
        return self.name or self.url.removeprefix("http://")


class PolicySpec(_Section):
    """Who serves a request: a policy by name, alone or with parameters."""

    name: Name = Field(description="round_robin, least_loaded or prefix_aware.")
    params: Mapping[str, Annotated[Any, BeforeValidator(number_if_substituted)]] = Field(
        default={}, alias="parameters", description="The policy's own parameters; unknown ones are refused."
    )


class WaitingRoom(_Section):
    """Where requests wait while every endpoint of the pool is at its max_concurrency."""

    size: Annotated[int, Field(strict=True, ge=0, le=2**20), BeforeValidator(number_if_substituted)] = _set(
        256, "Requests that may wait; the next one is shed with 429. 0 sheds at once."
    )
    timeout: Duration = _set("30s", "Longest wait before a request is shed.")


def _policy(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


class _NameAlone:
    """Tells the schema that the name alone will do where the mapping would."""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string"}, handler(core)]}


class Pool(_Section):
    """Endpoints that serve the same models, and the policy that picks among them."""

    policy: Annotated[
        PolicySpec,
        BeforeValidator(_policy),
        _NameAlone(),
    ] = _set("prefix_aware", "The policy's name, or a mapping of name and parameters.")
    endpoints: tuple[EndpointSpec, ...] = Field(description="The TP groups.", min_length=1, max_length=4096)
    waiting_room: WaitingRoom = _set({}, "Where requests wait for a free endpoint.")


class Limits(_Section):
    """What one client may cost the gateway."""

    body: Size = _set("32MiB", "Largest request body; a larger one is refused with 413, early when it says so.")
    body_budget: Size = _set("512MiB", "Memory for all request bodies at once; beyond it new ones are shed with 429.")
    headers_timeout: Duration = _set("10s", "Time for a client to send its request line and headers.")
    body_timeout: Duration = _set("60s", "Time for a client to send its body.")
    body_min_rate: Size = _set("1KiB", "Bytes per second a body must keep up once the first second is over.")
    idle_timeout: Duration = _set("75s", "How long a client connection may stay open between requests.")
    slow_reader: Duration = _set("30s", "How long a client may leave its answer unread before it is cut off.")
    body_chunks: Count = _set(16384, "Most chunks in one chunked body.")
    connections: Count = _set(20000, "Most client connections at once.")

    @model_validator(mode="after")
    def _fits(self) -> Limits:
        if self.body > self.body_budget:
            raise ValueError("body is larger than body_budget, so the largest allowed request could never be served")
        return self


class Timeouts(_Section):
    """How long the gateway waits for an engine."""

    connect: Duration = _set("1s", "To accept a connection.")
    first_byte: Duration = _set("600s", "From the request sent to the first byte of the answer.")
    stall: Duration = _set("60s", "Between two pieces of an answer that has begun.")
    shutdown: Duration = _set("30s", "For running requests to end after SIGTERM.")


class Retries(_Section):
    """How often a request that failed before its first byte is tried on another endpoint."""

    budget: Annotated[float, Field(ge=0, le=1)] = _set(0.2, "Retries per request over the last seconds, fleet-wide.")
    floor: Annotated[int, Field(strict=True, ge=0, le=1000), BeforeValidator(number_if_substituted)] = _set(
        3, "Retries always allowed, so that a quiet fleet can retry at all."
    )
    attempts: Annotated[int, Field(strict=True, ge=1, le=16), BeforeValidator(number_if_substituted)] = _set(
        3, "Most endpoints one request tries."
    )


class Health(_Section):
    """When an endpoint is ejected and when it comes back."""

    interval: Duration = _set("1s", "Time between two active probes.")
    timeout: Duration = _set("1s", "Time for a probe to be answered.")
    failures: Count = _set(3, "Failures in a row, of probes or requests, that eject an endpoint.")
    backoff: Duration = _set("1s", "First time out; it doubles with every ejection in a row, with jitter.")
    backoff_max: Duration = _set("60s", "Longest time out.")
    path: HttpPath = _set("/health", "What a probe asks for.")
    progress: Duration = _set(
        "5s", "Silence with requests in flight, long prompts allowed for, after which an engine counts as wedged."
    )

    @model_validator(mode="after")
    def _grows(self) -> Health:
        if self.backoff > self.backoff_max:
            raise ValueError("backoff is longer than backoff_max")
        return self


class Scrape(_Section):
    """Reading the engines' own load from their /metrics."""

    interval: Duration = _set("1s", "Time between two readings of one endpoint.")
    timeout: Duration = _set("1s", "Time for a reading to be answered.")
    stale: Duration = _set("5s", "Age at which a reading is no longer believed.")


class Prefix(_Section):
    """What the gateway remembers about who holds which prompt prefix."""

    index: Size = _set("256MiB", "Memory for the index: a hard cap, oldest entries go first.")
    block_bytes: Annotated[
        int, Field(strict=True, ge=16, le=65536, multiple_of=8), BeforeValidator(number_if_substituted)
    ] = _set(512, "Prompt bytes per block, a multiple of 8; smaller is finer and larger in memory.")


class Tenant(_Section):
    """One client with a key of its own. Without tenants the API is open to whoever can reach it."""

    name: Name = Field(description="How logs and metrics call it.")
    key: Secret = Field(description="Its API key, by reference: ${NAME} or ${file:/path}.")

    _sendable_key = field_validator("key")(_sendable)


class Observability(_Section):
    """What the gateway writes about itself."""

    access_log: Annotated[str, StringConstraints(min_length=1, max_length=4096)] = _set(
        "stdout", "One JSON line per request to stdout, off, or the path of a file."
    )
    access_flush: Duration = _set("200ms", "Longest time a line waits to be written with others.")


class Admin(_Section):
    """Who may change something through the admin server. Reading needs no key."""

    key: Secret | None = _set(
        None, "Its credential, by reference: ${NAME} or ${file:/path}. Without it only this machine may change things."
    )
    hosts: tuple[Host, ...] = _set(
        (), "Further names it is reached by, as in a browser or a scrape; addresses and localhost always are."
    )

    _sendable_key = field_validator("key")(_sendable)


class AutoRollback(_Section):
    """When a change takes itself back."""

    window: Duration = _set("60s", "Time after a change that is compared with as much time before it.")
    error_ratio: Annotated[float, Field(gt=0, le=1)] = _set(
        0.05, "How much larger the share of failed requests may become, as a share of all: 0.05 is five in a hundred."
    )
    requests: Count = _set(50, "Requests that must have ended since the change before it is judged.")


class Reload(_Section):
    """How changes of this configuration are taken over."""

    watch: Annotated[bool, Field(strict=True)] = _set(True, "Whether to follow the file and the files it names.")
    state_dir: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = _set(
        None, "Folder in which the last 20 versions outlive a restart; they live in memory alone unless given."
    )
    auto_rollback: AutoRollback | None = _set(None, "When to take a change back without being asked; never unless set.")


class Config(_Section):
    """The whole configuration of one gateway."""

    version: Literal[1] = Field(description="Version of this format.")
    listeners: Listeners = _set({}, "The two servers.")
    models: tuple[Model, ...] = _set((), "Model names; without any, every name the engines of the only pool list.")
    pools: Mapping[Name, Pool] = Field(description="Pools by name.", min_length=1)
    limits: Limits = _set({}, "What one client may cost the gateway.")
    timeouts: Timeouts = _set({}, "How long the gateway waits for an engine.")
    retries: Retries = _set({}, "Trying again elsewhere.")
    health: Health = _set({}, "Ejecting endpoints and taking them back.")
    scrape: Scrape = _set({}, "Reading the engines' own load.")
    prefix: Prefix = _set({}, "Memory of who holds which prompt prefix.")
    tenants: tuple[Tenant, ...] = _set((), "Clients with keys; empty leaves the API open.")
    observability: Observability = _set({}, "Access log.")
    admin: Admin = _set({}, "Who may change something.")
    reload: Reload = _set({}, "How changes are taken over.")
