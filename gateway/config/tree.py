"""The gateway's configuration as one immutable typed tree, with a description of every key.

The reference page and the JSON schema are generated from it. Types of single values are in
values.py, rules between sections are in cross_checks.py, and yaml_source.py parses the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from gateway.config.auto_section import AutoPolicy, without_auto_name
from gateway.config.batch_section import BatchApi
from gateway.config.discovery_sections import Kubernetes
from gateway.config.endpoint_sections import EndpointSpec, EndpointTraits
from gateway.config.limits_section import Limits
from gateway.config.mirror_section import Mirror
from gateway.config.model_sections import Model
from gateway.config.observability_sections import Observability
from gateway.config.peer_sections import Shared
from gateway.config.policy_sections import AdmissionChoice, Canary, PolicyChoice
from gateway.config.reload_section import Reload
from gateway.config.sized_for_section import SizedFor
from gateway.config.tenant_sections import Cache, Tenant
from gateway.config.tls_sections import ListenerTls
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
    Weight,
    WorkerCount,
    check_sendable,
    setting,
)
from gateway.config.yaml_source import number_if_substituted
from policies import admission_registry
from policies.prefix.prefix_index import LEAST_CAP_BYTES


class Listener(Section):
    """The address (host and port) and TLS settings of one of the gateway's two servers."""

    host: Host
    port: Port
    tls: ListenerTls | None = setting(None, "TLS settings of this server; plain HTTP by default.")


class ApiListener(Listener):
    """The address of the server for the OpenAI API, which applications use."""

    host: Host = setting(
        "127.0.0.1", "Address on which the OpenAI API listens; 0.0.0.0 listens on every interface."
    )
    port: Port = setting(8080, "Port of the OpenAI API; 0 chooses a free one.")
    trusted_proxies: Annotated[tuple[Cidr, ...], Field(max_length=256)] = setting(
        (),
        "Networks, in CIDR notation, of proxies and load balancers that you operate. They are "
        "exempt from limits per client address, and their headers X-Forwarded-For and "
        "x-request-id are trusted.",
    )
    cors_origins: Annotated[tuple[Origin, ...], Field(max_length=256)] = setting(
        (),
        "Origins of web pages that may call the API from a browser, as in https://app.example.com, "
        "or * for all. None by default.",
    )


class AdminListener(Listener):
    """The address of the admin server, which operators and Prometheus use."""

    host: Host = setting(
        "127.0.0.1",
        "Address on which the admin server (/healthz, /readyz, /metrics and others) listens.",
    )
    port: Port = setting(
        8081, "Port of the admin server, different from that of the API; 0 chooses a free one."
    )


class Listeners(Section):
    """The gateway's two servers: one for applications, one for operators."""

    api: ApiListener = setting({}, "Address and TLS of the OpenAI API.")
    admin: AdminListener = setting(
        {}, "Address and TLS of the admin server: health, metrics and state."
    )


class WaitingRoom(Section):
    """The queue of requests that wait while all endpoints of the pool are at max_concurrency."""

    size: Annotated[
        int, Field(strict=True, ge=0, le=2**20), BeforeValidator(number_if_substituted)
    ] = setting(
        256,
        "Maximum number of waiting requests; further ones get 429. With 0, requests never wait.",
    )
    timeout: Duration = setting("30s", "Maximum time that a request waits before it gets 429.")


class Discover(Section):
    """How the endpoints of a pool are discovered: exactly one of dns, file and kubernetes."""

    dns: Bootstrap | None = setting(
        None, "DNS name:port; every address that the name resolves to is an endpoint."
    )
    file: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = setting(
        None,
        "Path of a YAML or JSON file with a list of URLs, or of mappings as under endpoints. A "
        "relative path starts at the configuration's folder. The gateway notices changes of the "
        "file.",
    )
    kubernetes: Kubernetes | None = setting(
        None, "Kubernetes Service whose ready endpoints join the pool."
    )
    interval: Interval = setting("10s", "Time between two DNS queries, varied randomly.")
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
                f"endpoint.bootstrap names one host for all discovered endpoints; write ':{port}' "
                "to use this port on each endpoint's own host"
            )
        return self


class Pool(Section):
    """A pool: endpoints that serve the same models, and the policy that picks among them."""

    policy: PolicyChoice = setting(
        "prefix_aware",
        "Name of the routing policy, or a mapping of name and parameters. `auto` means the "
        "default policy together with the section `auto`.",
    )
    auto: AutoPolicy | None = setting(
        None,
        "How to choose the routing policy by replaying recent requests. By default the policy "
        "does not change.",
    )
    shadow: Annotated[tuple[PolicyChoice, ...], Field(max_length=8)] = setting(
        (),
        "Policies that also pick an endpoint for each request, only for comparison; nothing is "
        "sent to these picks.",
    )
    mirror: Mirror | None = setting(
        None,
        "How answers to live requests are compared with those of another pool; not by default.",
    )
    canary: Canary | None = setting(
        None, "A routing policy on trial that serves part of the pool's requests; none by default."
    )
    admission: AdmissionChoice = setting(
        admission_registry.DEFAULT,
        "Name of the admission policy, or a mapping of name and parameters.",
    )
    endpoints: Annotated[tuple[EndpointSpec, ...], Field(max_length=4096)] = setting(
        (), "The endpoints of the pool. The list may be empty if endpoints are discovered."
    )
    discover: Discover | None = setting(None, "Source of further endpoints; none by default.")
    waiting_room: WaitingRoom = setting({}, "The queue for requests while no endpoint is free.")
    native_apis: tuple[Literal["messages", "responses"], ...] | None = setting(
        None,
        "Which of the APIs messages and responses all engines of the pool support; requests to "
        "the others are translated to chat completions. By default the engines' /openapi.json "
        "decides.",
    )

    _auto_name = model_validator(mode="before")(without_auto_name)


class Timeouts(Section):
    """Timeouts: how long the gateway waits for an engine, and for requests when it stops."""

    connect: Duration = setting("1s", "Maximum time to connect to an engine.")
    first_byte: Duration = setting(
        "600s",
        "Maximum time from sending a request to an engine to the first byte of its response.",
    )
    stall: Duration = setting("60s", "Maximum time between two chunks of an engine's response.")
    grace: Duration | None = setting(
        None,
        "Time after SIGTERM in which /readyz reports draining and requests are still accepted, so "
        "that a load balancer can notice. None by default.",
    )
    handover: Duration = setting(
        "1h", "Maximum time for the running requests of a process that a restart has replaced."
    )
    shutdown: Duration = setting(
        "30s",
        "Maximum time for running requests to end after drain_delay. A stream that is still "
        "running then ends with an error event.",
    )


class Retries(Section):
    """Settings for retrying a request on another endpoint, if it fails before its first byte."""

    budget: Annotated[float, Field(ge=0, le=1)] = setting(
        0.2,
        "Maximum number of concurrent retries, as a share of the requests in progress in this "
        "gateway.",
    )
    floor: Annotated[
        int, Field(strict=True, ge=0, le=1000), BeforeValidator(number_if_substituted)
    ] = setting(
        3,
        "Number of concurrent retries allowed in addition to that share, so that a gateway with "
        "few requests can retry.",
    )
    hedge: Annotated[float, Field(ge=0, le=0.2)] = setting(
        0.05,
        "Maximum share of requests that are also sent to a second endpoint when their first byte "
        "is late. The first response wins. These requests count towards the retry budget. 0 turns "
        "this off.",
    )
    attempts: Annotated[
        int, Field(strict=True, ge=1, le=16), BeforeValidator(number_if_substituted)
    ] = setting(
        3,
        "Maximum number of endpoints that one request is sent to. Endpoints that refuse the "
        "connection or fail the health check before a retry do not count.",
    )


class HealthSpec(Section):
    """Settings of health checks: when an endpoint leaves rotation, and when it returns."""

    interval: Interval = setting(
        "1s",
        "Time between two probes of an endpoint (at most 1s while it is ejected). An answer to a "
        "request replaces a probe. Endpoints without requests get at most 256 probes per second "
        "in total.",
    )
    timeout: Duration = setting("1s", "Maximum time for an engine to answer a probe.")
    failures: Count = setting(
        3,
        "Number of consecutive failures, of probes or requests, after which an endpoint is "
        "ejected.",
    )
    backoff: Duration = setting(
        "1s",
        "Duration of the first ejection. It doubles, with random variation, each time the "
        "endpoint fails again after its return.",
    )
    backoff_max: Duration = setting("60s", "Maximum duration of an ejection.")
    slow_start: Duration = setting(
        "10s",
        "Time in which a new or returned endpoint gets fewer concurrent requests, as long as "
        "other endpoints have capacity.",
    )
    slow_factor: Annotated[float, Field(ge=0, le=100)] = setting(
        2.5,
        "An endpoint is ejected as slow if it takes this many times as long as its peers for the "
        "same work. 0 turns this off. Peers have the same role, engine, layout and label `gpu`.",
    )
    path: HttpPath = setting("/health", "HTTP path of health probes.")
    progress: Duration = setting(
        "5s",
        "Time without output, while requests are in progress, after which an engine counts as "
        "stalled. It is longer while long prompts are computed, and for engines without metrics. "
        "Only engines that generate a test token beside running requests are checked: vllm, "
        "sglang, trtllm and tgi.",
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> HealthSpec:
        if self.backoff > self.backoff_max:
            raise ValueError("backoff must not be longer than backoff_max")
        if 0 < self.slow_factor < 1.5:
            raise ValueError(
                "slow_factor must be at least 1.5, because equally fast endpoints can differ by "
                "less than that by chance"
            )
        return self


class Scrape(Section):
    """Settings for scraping: reading the engines' load from their metrics pages."""

    interval: Interval = setting(
        "1s",
        "Time between two scrapes of an endpoint with requests; without requests, three "
        "times as long.",
    )
    timeout: Duration = setting("1s", "Maximum time for an engine to send its metrics page.")
    stale: Duration = setting("5s", "Age of a scrape from which its values are not used any more.")


class Prefix(Section):
    """Settings of the prefix index: a record of the prompt prefixes cached at each endpoint."""

    index: Size = setting(
        "256MiB",
        "Memory for the prefix index, a hard limit; when it is full, the oldest entries "
        "are dropped.",
    )
    events: Size = setting(
        "256MiB",
        "Memory, at about 300 bytes per block, for the blocks that engines report in KV events, "
        "and for prompts whose token ids are known. Used only with kv_events.",
    )
    block_bytes: Annotated[
        int,
        Field(strict=True, ge=16, le=65536, multiple_of=8),
        BeforeValidator(number_if_substituted),
    ] = setting(
        512,
        "Bytes of prompt text per block, a multiple of 8. Smaller blocks match prefixes more "
        "exactly and take more memory.",
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
    """A service class: latency targets of a request, and its value if they are met."""

    ttft: Duration = Field(
        description="Target for the time to first token, measured from the arrival of the "
        "complete request."
    )
    tpot: Duration = Field(description="Target for the mean time per output token after the first.")
    weight: Weight = setting(
        1.0, "Worth of a request of this class that meets its targets, relative to other classes."
    )


class Slos(Section):
    """The service classes of requests, and the default class.

    The first of these that exists decides a request's class: its header x-slo-class, its tenant's
    class, its model's class, the default.
    """

    default: Name = setting(
        "standard", "Name of the class of requests for which no other one is given."
    )
    classes: Annotated[Mapping[Name, SloClass], Field(min_length=1, max_length=32)] = setting(
        {
            "interactive": {"ttft": "1s", "tpot": "50ms", "weight": 4.0},
            "standard": {"ttft": "5s", "tpot": "100ms"},
            "batch": {"ttft": "60s", "tpot": "500ms", "weight": 0.25},
        },
        "Service classes by name. They replace the three built-in classes.",
    )


class Admin(Section):
    """Settings of the admin server that decide who may make changes. Reading needs no key."""

    key: Secret | None = setting(
        None,
        "Key that requests for changes must send, by reference: ${NAME} or ${file:/path}. Without "
        "it, changes are accepted only from this machine.",
    )
    hosts: tuple[Host, ...] = setting(
        (),
        "Further host names that the admin server accepts in the Host header; addresses and "
        "localhost are always accepted.",
    )

    _sendable_key = field_validator("key")(check_sendable)


class LinkDomain(Section):
    """A group of GPUs that are connected by fast links such as NVLink, in a server or a rack."""

    gpus: Count = Field(
        description="Number of GPUs in this link domain; each GPU belongs to one endpoint only."
    )


class Hardware(Section):
    """The GPUs on which the endpoints run.

    `penstock check` and `penstock doctor` compare the endpoints' layouts with them.
    """

    gpus: Count | None = setting(
        None,
        "Number of GPUs in the fleet; layouts that need more are an error. Not checked by default.",
    )
    link_domain_gpus: Count = setting(
        8,
        "Number of GPUs in a link domain (connected by fast links such as NVLink): 8 in an HGX "
        "server, 72 in an NVL72 rack.",
    )
    domains: Mapping[Name, LinkDomain] = setting(
        {}, "Link domains by name, for endpoints that name theirs in layout.domains."
    )
    price_per_hour: Mapping[Label, Annotated[float, Field(gt=0)]] = setting(
        {},
        "Price in dollars per GPU and hour, by the endpoints' label gpu. With a price, the cost "
        "of requests and of idle time is counted.",
    )


class Config(Section):
    """The whole configuration of one gateway."""

    version: Literal[1] = Field(description="Version of the format of this file.")
    listeners: Listeners = setting({}, "The two servers: the OpenAI API and the admin server.")
    models: tuple[Model, ...] = setting(
        (),
        "The models that clients can request. By default those that the engines list, if "
        "there is only one pool.",
    )
    pools: Mapping[Name, Pool] = Field(description="Pools of endpoints by name.", min_length=1)
    limits: Limits = setting({}, "How much memory, time and how many connections clients may use.")
    timeouts: Timeouts = setting(
        {}, "How long the gateway waits for engines, and for running requests when it stops."
    )
    retries: Retries = setting(
        {}, "How requests that fail before their first byte are retried on another endpoint."
    )
    health: HealthSpec = setting({}, "When failing endpoints are ejected, and when they return.")
    scrape: Scrape = setting({}, "How the engines' load is read from their metrics pages.")
    prefix: Prefix = setting(
        {}, "The index of which endpoint holds which prompt prefix in its cache."
    )
    slo: Slos = setting({}, "Service classes with their latency targets.")
    hardware: Hardware = setting({}, "The GPUs behind the endpoints.")
    sized_for: Mapping[Name, SizedFor] = setting(
        {},
        "The workload that each pool was sized for, by pool; penstock drift compares a log "
        "with it.",
    )
    tenants: tuple[Tenant, ...] = setting(
        (), "Clients with API keys. Without any, the API needs no key."
    )
    cache: Cache = setting({}, "Which tenants may share cached prompts on the engines.")
    observability: Observability = setting({}, "What the gateway reports about itself.")
    admin: Admin = setting({}, "Who may make changes through the admin server.")
    reload: Reload = setting({}, "How changes of this configuration take effect.")
    batch: BatchApi | None = setting(
        None, "The Batch API. Without this section, requests to its paths get 404."
    )
    shared: Shared | None = setting(
        None,
        "State that several gateways share through Redis; by default each gateway has its own.",
    )
    workers: WorkerCount = setting(
        1,
        "Number of gateway processes on this machine, which share the API port and their state. "
        "`auto`: one for each core that the gateway may use.",
    )
