"""The gateway's configuration as one immutable typed tree, with a description of every key.

The reference page and the JSON schema are generated from it. Types of single values are in
values.py, rules between sections in cross_checks.py, and the parsing of the file in yaml_source.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    StringConstraints,
    WrapValidator,
    field_validator,
    model_validator,
)

from gateway.config.auto_section import AutoPolicy, without_auto_name
from gateway.config.batch_section import BatchApi
from gateway.config.discovery_sections import Kubernetes
from gateway.config.kv_event_sections import KvEvents, own_host
from gateway.config.limits import Limits
from gateway.config.mirror_section import Mirror
from gateway.config.model_sections import Model
from gateway.config.observability import Observability
from gateway.config.peer_sections import Shared
from gateway.config.policy_choice import AdmissionChoice, Canary, PolicyChoice
from gateway.config.price_sections import TokenPriceSpec
from gateway.config.reload_section import Reload
from gateway.config.sized_for import SizedFor
from gateway.config.tenant_sections import Cache, Tenant
from gateway.config.tls_sections import EngineTls, ListenerTls
from gateway.config.values import (
    Bootstrap,
    Cidr,
    Count,
    Duration,
    Host,
    HttpPath,
    Interval,
    Label,
    Name,
    Origin,
    Port,
    Secret,
    Section,
    Size,
    Url,
    Weight,
    WorkerCount,
    check_sendable,
    setting,
    without_scheme,
)
from gateway.config.yaml_source import number_if_substituted
from policies import admission_registry
from policies.engine_kinds import ENGINE_TRAITS
from policies.model import EngineKind, Role
from policies.prefix.prefix_index import LEAST_CAP_BYTES


class Listener(Section):
    """The address (host and port) and TLS of one of the gateway's two servers."""

    host: Host
    port: Port
    tls: ListenerTls | None = setting(None, "TLS settings of this listener; plain HTTP by default.")


class ApiListener(Listener):
    """The address of the OpenAI API, which applications connect to."""

    host: Host = setting(
        "127.0.0.1", "Address of the OpenAI API. 0.0.0.0 listens on every interface."
    )
    port: Port = setting(8080, "Port of the OpenAI API; 0 takes a free one.")
    trusted_proxies: Annotated[tuple[Cidr, ...], Field(max_length=256)] = setting(
        (),
        "Networks of your own proxies and balancers, in CIDR notation. They are exempt from "
        "limits per client address, and their X-Forwarded-For and x-request-id are trusted.",
    )
    cors_origins: Annotated[tuple[Origin, ...], Field(max_length=256)] = setting(
        (),
        "Origins of web pages that may call the API from a browser, as in https://app.example.com, "
        "or * for all. None by default.",
    )


class AdminListener(Listener):
    """The address of the admin server, which operators and Prometheus connect to."""

    host: Host = setting(
        "127.0.0.1", "Address of the admin server (/healthz, /readyz, /metrics and others)."
    )
    port: Port = setting(8081, "Port of the admin server, not the API port; 0 takes a free one.")


class Listeners(Section):
    """The gateway's two servers, each of which serves only its own kind of requests."""

    api: ApiListener = setting({}, "Address and TLS of the OpenAI API.")
    admin: AdminListener = setting(
        {}, "Address and TLS of the admin server: health, metrics and state."
    )


class LayoutSpec(Section):
    """The parallel layout with which one engine process distributes the model over GPUs."""

    tp: Count = setting(1, "Tensor parallel size: number of GPUs that share each layer.")
    pp: Count = setting(
        1, "Pipeline parallel size: number of groups of GPUs that each hold some layers."
    )
    ep: Count = setting(
        1, "Expert parallel size; must divide tp * dp, the ranks that experts are distributed over."
    )
    dp: Count = setting(1, "Data parallel size: number of ranks inside the engine.")
    domains: tuple[Name, ...] = setting(
        (),
        "Link domains of hardware.domains that hold the engine's GPUs, divided evenly among them "
        "in whole TP groups. By default, any domain of hardware.link_domain_gpus GPUs.",
    )


class EndpointTraits(Section):
    """All settings of a TP group (an engine process) except its name and URL."""

    role: Role = setting(
        "both", "Phases that it serves: prefill, decode, or both (whole requests)."
    )
    bootstrap: Annotated[Bootstrap, WrapValidator(own_host)] | None = setting(
        None,
        "Address of a prefill endpoint's bootstrap server for decode endpoints (mooncake, sglang): "
        "host:port, or :port if it is on the endpoint's own host.",
    )
    engine: EngineKind = setting(
        "vllm",
        "The kind of engine, which decides its metrics and its additions to the API. openai is any "
        "other engine or provider with OpenAI's API.",
    )
    served_model: Name | None = setting(
        None,
        "The name by which the engine lists the pool's model at /v1/models; by default the "
        "model's name. In a pool with several models, set served_model of the model instead.",
    )
    layout: LayoutSpec = setting({}, "How the engine distributes the model over GPUs.")
    pin_ranks: Annotated[bool, Field(strict=True)] = setting(
        False,
        "Route to each of its layout.dp data-parallel ranks by itself, as an endpoint NAME/dp0, "
        "NAME/dp1 and so on; max_concurrency and kv_tokens then apply to each rank. vLLM and "
        "SGLang take the rank in the header x-data-parallel-rank.",
    )
    labels: Mapping[Name, Label] = setting(
        {},
        "Free text, such as zone. Only endpoints with equal version and kv_dtype labels are "
        "paired; gpu (a100, h100, h200, b200, l40s) gives a first estimate of the endpoint's "
        "speed.",
    )
    max_concurrency: Count = setting(
        24,
        "Maximum number of requests in progress at the endpoint; further ones go elsewhere or "
        "wait in the gateway.",
    )
    api_key: Secret | None = setting(
        None, "Bearer token for the engine; the client's own key is never sent to an engine."
    )
    kv_tokens: Count | None = setting(
        None, "Size of the endpoint's KV cache in tokens; by default the engine reports it."
    )
    kv_events: KvEvents | None = setting(
        None,
        "Where the engine publishes KV events, from which the gateway knows exactly what its "
        "prefix cache holds; {} asks the engine. Needs the extra `events`.",
    )
    context_tokens: Count | None = setting(
        None,
        "Maximum tokens of prompt plus response, if less than at other endpoints of the pool.",
    )
    cache_salt: Annotated[bool, Field(strict=True)] | None = setting(
        None,
        "Whether the engine supports cache salts. By default vllm (0.9 or newer) and sglang "
        "(0.5.3 or newer) do, others do not.",
    )
    tenants: Annotated[tuple[Name, ...], Field(max_length=4096)] = setting(
        (), "Names of the only tenants that the endpoint serves; by default all."
    )
    token_price: TokenPriceSpec | None = setting(
        None, "What a provider charges for tokens; counted in penstock_cost_usd_total."
    )
    tls: EngineTls | None = setting(
        None, "TLS settings for an https:// URL; by default the system's authorities are trusted."
    )

    _sendable_key = field_validator("api_key")(check_sendable)

    @model_validator(mode="after")
    def _has_ranks_to_pin(self) -> EndpointTraits:
        traits = ENGINE_TRAITS[self.engine]
        if self.kv_events is not None and not traits.has_kv_events:
            raise ValueError("kv_events requires vllm or sglang as engine")
        if self.pin_ranks and (self.layout.dp < 2 or not traits.takes_rank):
            raise ValueError("pin_ranks requires layout.dp above 1, and vllm or sglang as engine")
        if self.pin_ranks and self.role != "both":
            raise ValueError(
                "pin_ranks is possible only for endpoints that serve whole requests (role both)"
            )
        return self


class EndpointSpec(EndpointTraits):
    """One TP group: an engine process behind one URL."""

    url: Url = Field(
        description="Address of the engine: http or https, host, port, and a path prefix if "
        "the engine has one."
    )
    name: Name | None = setting(
        None, "Name of the endpoint in logs and metrics; by default host:port."
    )

    @model_validator(mode="after")
    def _needs_tls_url(self) -> EndpointSpec:
        if self.tls is not None and not self.url.startswith("https://"):
            raise ValueError("tls requires a url that begins with https://")
        return self

    @property
    def display_name(self) -> str:
        return self.name or without_scheme(self.url)


class WaitingRoom(Section):
    """The queue for requests while every endpoint of the pool is at its max_concurrency."""

    size: Annotated[
        int, Field(strict=True, ge=0, le=2**20), BeforeValidator(number_if_substituted)
    ] = setting(256, "Most requests that may wait; further ones get 429. With 0, none waits.")
    timeout: Duration = setting("30s", "Maximum time that a request waits before it gets 429.")


class Discover(Section):
    """The source of a pool's discovered endpoints: one of dns, file and kubernetes."""

    dns: Bootstrap | None = setting(
        None, "DNS name:port; every address of the name is an endpoint."
    )
    file: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = setting(
        None,
        "Path of a YAML or JSON list of URLs, or of mappings as under endpoints; changes are "
        "picked up. A relative one starts at the configuration's folder.",
    )
    kubernetes: Kubernetes | None = setting(
        None, "Kubernetes Service whose ready endpoints are used."
    )
    interval: Interval = setting("10s", "Time between two queries of the DNS name, with jitter.")
    endpoint: EndpointTraits = setting(
        {}, "Settings of each discovered endpoint, as under endpoints."
    )

    @model_validator(mode="after")
    def _has_one_source(self) -> Discover:
        if sum(source is not None for source in (self.dns, self.file, self.kubernetes)) != 1:
            raise ValueError("discover needs exactly one of dns, file and kubernetes")
        bootstrap = self.endpoint.bootstrap
        if self.file is None and bootstrap is not None and not bootstrap.startswith(":"):
            port = bootstrap.rpartition(":")[2]
            raise ValueError(
                "endpoint.bootstrap names one server, but each discovered endpoint has its "
                f"own; write ':{port}' for this port of each endpoint"
            )
        return self


class Pool(Section):
    """Endpoints that serve the same models, and the policy that picks among them."""

    policy: PolicyChoice = setting(
        "prefix_aware",
        "The policy's name, or a mapping of name and parameters. `auto` is the default policy with "
        "the section `auto`.",
    )
    auto: AutoPolicy | None = setting(
        None,
        "Choose the policy by replaying recent requests through a portfolio of policies; not by "
        "default.",
    )
    shadow: Annotated[tuple[PolicyChoice, ...], Field(max_length=8)] = setting(
        (),
        "Policies that pick for this pool's requests too, for comparison, without sending any "
        "request.",
    )
    mirror: Mirror | None = setting(
        None, "Compares answers to live requests with those of another pool; off by default."
    )
    canary: Canary | None = setting(
        None, "A routing policy on trial that serves part of the requests; none by default."
    )
    admission: AdmissionChoice = setting(
        admission_registry.DEFAULT,
        "The admission policy's name, or a mapping of name and parameters.",
    )
    endpoints: Annotated[tuple[EndpointSpec, ...], Field(max_length=4096)] = setting(
        (), "The endpoints of the pool; may be empty if others are discovered."
    )
    discover: Discover | None = setting(None, "Where further endpoints are found; none by default.")
    waiting_room: WaitingRoom = setting({}, "The queue for requests while no endpoint is free.")
    native_apis: tuple[Literal["messages", "responses"], ...] | None = setting(
        None,
        "Which of messages and responses all engines of the pool serve themselves; the others are "
        "translated to chat completions. By default engines' /openapi.json decides.",
    )

    _auto_name = model_validator(mode="before")(without_auto_name)


class Timeouts(Section):
    """Timeouts: how long the gateway waits for an engine, and for requests when it stops."""

    connect: Duration = setting("1s", "Maximum time for an engine to accept a connection.")
    first_byte: Duration = setting(
        "600s", "Maximum time from sending a request to the first byte of its response."
    )
    stall: Duration = setting("60s", "Maximum time between two chunks of a response.")
    grace: Duration | None = setting(
        None,
        "After SIGTERM, time for a load balancer to notice: /readyz reports draining, and "
        "requests are still served. None by default.",
    )
    handover: Duration = setting(
        "1h", "Maximum time for the requests of a process that a restart has replaced."
    )
    shutdown: Duration = setting(
        "30s",
        "Maximum time for running requests to end after that; a stream that is still running then"
        " ends with an error event.",
    )


class Retries(Section):
    """Settings of retries on another endpoint, for requests that fail before their first byte."""

    budget: Annotated[float, Field(ge=0, le=1)] = setting(
        0.2,
        "Maximum concurrent retries, as a share of the requests in progress in this gateway.",
    )
    floor: Annotated[
        int, Field(strict=True, ge=0, le=1000), BeforeValidator(number_if_substituted)
    ] = setting(
        3,
        "Number of retries allowed beyond that share, so that a gateway with little load can "
        "retry.",
    )
    hedge: Annotated[float, Field(ge=0, le=0.2)] = setting(
        0.05,
        "Maximum share of requests that are also sent to a second endpoint when their first byte "
        "is late; the first response wins. Counts towards the retry budget. 0: none.",
    )
    attempts: Annotated[
        int, Field(strict=True, ge=1, le=16), BeforeValidator(number_if_substituted)
    ] = setting(
        3,
        "Maximum number of endpoints that one request is sent to. Endpoints that refuse the "
        "connection or fail the health check before a retry do not count.",
    )


class HealthSpec(Section):
    """Settings of health checks: when an endpoint is ejected, and when it returns."""

    interval: Interval = setting(
        "1s",
        "Time between two probes; at most 1s for an ejected endpoint. Answers stand for probes; "
        "endpoints without requests get at most 256 probes per second, all together.",
    )
    timeout: Duration = setting("1s", "Maximum time for an engine to answer a health probe.")
    failures: Count = setting(
        3, "Consecutive failures, of probes or requests, that eject an endpoint."
    )
    backoff: Duration = setting(
        "1s",
        "Duration of the first ejection; it doubles, with jitter, each time the endpoint fails "
        "again after its return.",
    )
    backoff_max: Duration = setting("60s", "Maximum time for which an endpoint is ejected.")
    slow_start: Duration = setting(
        "10s",
        "How long a new or returned endpoint gets fewer concurrent requests, while others have "
        "capacity.",
    )
    slow_factor: Annotated[float, Field(ge=0, le=100)] = setting(
        2.5,
        "How many times as long as its peers an endpoint must take for the same work to be "
        "ejected as slow; 0: never. Peers have the same role, engine, layout and label `gpu`.",
    )
    path: HttpPath = setting("/health", "HTTP path that a health probe requests.")
    progress: Duration = setting(
        "5s",
        "Time without output while requests are in progress (longer for long prompts) after which "
        "an engine counts as stalled.",
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> HealthSpec:
        if self.backoff > self.backoff_max:
            raise ValueError("backoff must not be longer than backoff_max")
        if 0 < self.slow_factor < 1.5:
            raise ValueError(
                "slow_factor must be at least 1.5, because equal endpoints reach less by chance"
            )
        return self


class Scrape(Section):
    """Settings for reading the engines' load from their metrics pages."""

    interval: Interval = setting(
        "1s", "Time between two scrapes of a busy endpoint; three times as long without requests."
    )
    timeout: Duration = setting("1s", "Maximum time for an engine to send its metrics.")
    stale: Duration = setting("5s", "Age from which the load in a scrape is not used any more.")


class Prefix(Section):
    """Settings of the prefix index, which records what prompt prefixes each endpoint has cached."""

    index: Size = setting(
        "256MiB", "Memory for the prefix index, a hard limit; the oldest entries are dropped."
    )
    events: Size = setting(
        "256MiB",
        "Memory for the blocks that engines report in KV events, and for prompts whose tokens are "
        "known; about 300 bytes per block. Used only with kv_events.",
    )
    block_bytes: Annotated[
        int,
        Field(strict=True, ge=16, le=65536, multiple_of=8),
        BeforeValidator(number_if_substituted),
    ] = setting(
        512, "Prompt bytes per block, a multiple of 8; smaller is finer and takes more memory."
    )

    @field_validator("index")
    @classmethod
    def _large_enough(cls, index: int) -> int:
        if index < LEAST_CAP_BYTES:
            raise ValueError(
                "the size is too small for a prefix index; it must be at least "
                f"{LEAST_CAP_BYTES >> 10}KiB"
            )
        return index


class SloClass(Section):
    """A service class: latency targets, and the value of a request that meets them."""

    ttft: Duration = Field(
        description="Target for the time to first token, measured from the end of the request."
    )
    tpot: Duration = Field(description="Target for the mean time per output token after the first.")
    weight: Weight = setting(
        1.0, "Worth of one request of this class relative to those of other classes."
    )


class Slos(Section):
    """The service classes of requests, and the default one.

    A request has the class that it names (x-slo-class), else its tenant's, its model's or the
    default.
    """

    default: Name = setting("standard", "The class of requests for which no other is given.")
    classes: Annotated[Mapping[Name, SloClass], Field(min_length=1, max_length=32)] = setting(
        {
            "interactive": {"ttft": "1s", "tpot": "50ms", "weight": 4.0},
            "standard": {"ttft": "5s", "tpot": "100ms"},
            "batch": {"ttft": "60s", "tpot": "500ms", "weight": 0.25},
        },
        "Service classes by name; they replace the three built-in ones.",
    )


class Admin(Section):
    """Settings that decide who may make changes through the admin server. Reading needs no key."""

    key: Secret | None = setting(
        None,
        "Key that changes through the admin server need, by reference: ${NAME} or ${file:/path}. "
        "Without it, changes are only allowed from this machine.",
    )
    hosts: tuple[Host, ...] = setting(
        (),
        "Further host names by which browsers or scrapes reach the admin server; addresses and "
        "localhost are always allowed.",
    )

    _sendable_key = field_validator("key")(check_sendable)


class LinkDomain(Section):
    """GPUs that fast links such as NVLink connect: a server, or a rack."""

    gpus: Count = Field(description="GPUs in this domain; each belongs to one endpoint only.")


class Hardware(Section):
    """The GPUs behind the endpoints, by which `penstock check` and `doctor` judge layouts."""

    gpus: Count | None = setting(
        None,
        "Number of GPUs in the fleet; layouts that need more are an error. Not checked by default.",
    )
    link_domain_gpus: Count = setting(
        8,
        "GPUs connected by fast links such as NVLink: 8 in an HGX server, 72 in an NVL72 rack.",
    )
    domains: Mapping[Name, LinkDomain] = setting(
        {}, "Link domains by name, for endpoints that name theirs in layout.domains."
    )
    price_per_hour: Mapping[Label, Annotated[float, Field(gt=0)]] = setting(
        {},
        "Dollars per GPU and hour by the endpoints' label gpu. With a price, the cost of requests "
        "and of idle time is counted.",
    )


class Config(Section):
    """The whole configuration of one gateway."""

    version: Literal[1] = Field(description="Version of this file format.")
    listeners: Listeners = setting({}, "The two servers: the OpenAI API and the admin server.")
    models: tuple[Model, ...] = setting(
        (), "Model names; by default the names that the engines of the only pool list."
    )
    pools: Mapping[Name, Pool] = Field(description="Pools of endpoints by name.", min_length=1)
    limits: Limits = setting({}, "What clients may use of the gateway's resources.")
    timeouts: Timeouts = setting(
        {}, "How long the gateway waits for engines, and for requests when it stops."
    )
    retries: Retries = setting(
        {}, "How failed requests are retried on another endpoint, before the first byte."
    )
    health: HealthSpec = setting({}, "When failing endpoints are ejected, and when they return.")
    scrape: Scrape = setting({}, "How engines' load is read from their metrics.")
    prefix: Prefix = setting({}, "The index of which endpoint holds which prompt prefix.")
    slo: Slos = setting({}, "Service classes with their latency targets.")
    hardware: Hardware = setting({}, "The GPUs behind the endpoints.")
    sized_for: Mapping[Name, SizedFor] = setting(
        {}, "What pools were sized for, by pool; penstock drift compares a log with it."
    )
    tenants: tuple[Tenant, ...] = setting(
        (), "Clients with keys; without any, the API is open to all."
    )
    cache: Cache = setting({}, "Which tenants may share cached prompts.")
    observability: Observability = setting({}, "What the gateway reports about itself.")
    admin: Admin = setting({}, "Who may make changes through the admin server.")
    reload: Reload = setting({}, "How changes of this configuration take effect.")
    batch: BatchApi | None = setting(
        None, "The Batch API; without this section, its paths are unknown."
    )
    shared: Shared | None = setting(
        None,
        "State that several gateways share through Redis; by default each gateway has its own.",
    )
    workers: WorkerCount = setting(
        1,
        "Gateway processes on this machine, which share the API port and their state. `auto`: one"
        " for each core that the gateway may use.",
    )
