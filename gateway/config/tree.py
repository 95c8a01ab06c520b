"""The configuration as one immutable typed tree. Every field says what it is: reference page and schema come from here.

Lives here: sections, defaults and rules for one section. Not here: single values (values.py), rules between sections
(checks.py), the file (source.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    StringConstraints,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from gateway.config.choices import AdmissionChoice, Canary, PolicyChoice
from gateway.config.discover import Kubernetes
from gateway.config.limits import Limits
from gateway.config.models import Model
from gateway.config.seen import Observability
from gateway.config.shared import Shared
from gateway.config.source import number_if_substituted
from gateway.config.tenants import Cache, Tenant
from gateway.config.tls import EngineTls, ListenerTls
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
    Port,
    Secret,
    Section,
    Size,
    Url,
    Weight,
    sendable,
    setting,
    without_scheme,
)
from policies import admissions
from policies.model import EngineKind, Role
from policies.prefix_index import LEAST_CAP_BYTES


class Listener(Section):
    """Where one of the two servers listens."""

    host: Host
    port: Port
    tls: ListenerTls | None = setting(None, "TLS of this listener; plain HTTP unless given.")


class ApiListener(Listener):
    """Where applications connect."""

    host: Host = setting("127.0.0.1", "Address of the OpenAI API. 0.0.0.0 listens on every interface.")
    port: Port = setting(8080, "Port of the OpenAI API; 0 takes a free one.")
    trusted_proxies: Annotated[tuple[Cidr, ...], Field(max_length=256)] = setting(
        (),
        "Networks of your own proxies and balancers, in CIDR form. No limit per client address holds for them, and "
        "their X-Forwarded-For and x-request-id are believed.",
    )


class AdminListener(Listener):
    """Where operators and Prometheus connect."""

    host: Host = setting("127.0.0.1", "Address of /healthz, /readyz, /metrics, /endpoints and /config.")
    port: Port = setting(8081, "Port of the admin server; 0 takes a free one. Never the API port.")


class Listeners(Section):
    """The two servers. The admin server answers no API request and the API server no admin request."""

    api: ApiListener = setting({}, "The OpenAI API.")
    admin: AdminListener = setting({}, "Health, metrics and state.")


class Layout(Section):
    """How one engine process spreads the model over GPUs."""

    tp: Count = setting(1, "Tensor parallel size.")
    pp: Count = setting(1, "Pipeline parallel size.")
    ep: Count = setting(1, "Expert parallel size; divides tp * dp, since experts are spread over those ranks.")
    dp: Count = setting(1, "Data parallel ranks inside the engine.")

    @model_validator(mode="after")
    def _spreads(self) -> Layout:
        if (self.tp * self.dp) % self.ep:
            raise ValueError(
                f"ep {self.ep} does not divide tp * dp = {self.tp * self.dp}, the ranks experts are spread over"
            )
        return self


def _own_host(text: object, checked: ValidatorFunctionWrapHandler) -> object:
    """A port alone is of the endpoint's own host."""
    if isinstance(text, str) and text.startswith(":"):
        checked(f"host{text}")
        return text
    return checked(text)


class EndpointTraits(Section):
    """What may be said of a TP group besides where it is."""

    role: Role = setting("both", "prefill, decode, or both (serves whole requests).")
    bootstrap: Annotated[Bootstrap, WrapValidator(_own_host)] | None = setting(
        None,
        "host:port of a prefill endpoint's bootstrap server, as decode endpoints reach it (mooncake, sglang); :port "
        "where the host is the endpoint's own.",
    )
    engine: EngineKind = setting("vllm", "Whose dialect it speaks: vllm, sglang or trtllm.")
    served_model: Name | None = setting(
        None,
        "The name that its engine lists at /v1/models for the pool's model, where that is not the "
        "model's name. In a pool with several models, set served_model of the model instead.",
    )
    layout: Layout = setting({}, "How it spreads the model over GPUs.")
    labels: Mapping[Name, Label] = setting(
        {},
        "Free text, such as zone. Endpoints are paired only when their version and kv_dtype labels agree; gpu "
        "(a100, h100, h200, b200, l40s) tells what speed to expect at first.",
    )
    max_concurrency: Count = setting(
        24, "Requests sent to it at once; further ones go elsewhere or wait in the gateway."
    )
    api_key: Secret | None = setting(None, "Sent to the engine as a bearer token, in place of the client's.")
    kv_tokens: Count | None = setting(None, "Tokens its KV cache holds; learnt from the engine unless given.")
    context_tokens: Count | None = setting(
        None, "Longest prompt plus answer that it takes, where it takes less than others of its pool."
    )
    cache_salt: Annotated[bool, Field(strict=True)] | None = setting(
        None,
        "Whether it takes a cache salt; vllm (0.9 or newer) and sglang (0.5.3) do unless told otherwise, "
        "trtllm does not.",
    )
    tenants: Annotated[tuple[Name, ...], Field(max_length=4096)] = setting(
        (), "Names of the tenants that it serves, and no others; all unless given."
    )

    tls: EngineTls | None = setting(
        None, "TLS towards an https:// URL: files and names. Without it the system's authorities are trusted."
    )

    _sendable_key = field_validator("api_key")(sendable)


class EndpointSpec(EndpointTraits):
    """One TP group: one engine process behind one URL."""

    url: Url = Field(
        description="Where the engine listens: http or https, host, port, and a prefix of its paths if any."
    )
    name: Name | None = setting(None, "How logs and metrics call it; host:port unless given.")

    @model_validator(mode="after")
    def _encrypted(self) -> EndpointSpec:
        if self.tls is not None and not self.url.startswith("https://"):
            raise ValueError("tls needs a url that begins with https://")
        return self

    @property
    def shown_name(self) -> str:
        """The name, or host:port and the prefix."""
        return self.name or without_scheme(self.url)


class WaitingRoom(Section):
    """Where requests wait while every endpoint of the pool is at its max_concurrency."""

    size: Annotated[int, Field(strict=True, ge=0, le=2**20), BeforeValidator(number_if_substituted)] = setting(
        256, "Requests that may wait; the next one is shed with 429. 0 sheds at once."
    )
    timeout: Duration = setting("30s", "Longest wait before a request is shed.")


class Discover(Section):
    """Where a pool's further endpoints are found: by one of dns, file and kubernetes."""

    dns: Bootstrap | None = setting(None, "name:port; every address of the name is an endpoint.")
    file: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = setting(
        None,
        "Path of a YAML or JSON list of URLs, or of mappings as under endpoints; it is followed. A relative one starts "
        "at the configuration's folder.",
    )
    kubernetes: Kubernetes | None = setting(None, "A Service whose ready endpoints are followed.")
    interval: Interval = setting("10s", "How often DNS is asked, with jitter.")
    endpoint: EndpointTraits = setting({}, "What is said of each of them, as under endpoints.")

    @model_validator(mode="after")
    def _one_of_them(self) -> Discover:
        if sum(each is not None for each in (self.dns, self.file, self.kubernetes)) != 1:
            raise ValueError("needs one of dns, file and kubernetes")
        bootstrap = self.endpoint.bootstrap
        if self.file is None and bootstrap is not None and not bootstrap.startswith(":"):
            port = bootstrap.rpartition(":")[2]
            raise ValueError(
                f"endpoint.bootstrap would be one server for all that are found; write ':{port}' for each one's own"
            )
        return self


class Pool(Section):
    """Endpoints that serve the same models, and the policy that picks among them."""

    policy: PolicyChoice = setting("prefix_aware", "The policy's name, or a mapping of name and parameters.")
    shadow: Annotated[tuple[PolicyChoice, ...], Field(max_length=8)] = setting(
        (), "Policies that score this pool's requests beside the one that serves, and send nothing anywhere."
    )
    canary: Canary | None = setting(None, "A policy that serves a part of its requests; nobody unless given.")
    admission: AdmissionChoice = setting(
        admissions.DEFAULT, "The admission's name, or a mapping of name and parameters."
    )
    endpoints: Annotated[tuple[EndpointSpec, ...], Field(max_length=4096)] = setting(
        (), "The TP groups; none are needed where others are discovered."
    )
    discover: Discover | None = setting(None, "Where further ones are found; nowhere unless given.")
    waiting_room: WaitingRoom = setting({}, "Where requests wait for a free endpoint.")


class Timeouts(Section):
    """How long the gateway waits for an engine."""

    connect: Duration = setting("1s", "To accept a connection.")
    first_byte: Duration = setting("600s", "From the request sent to the first byte of the answer.")
    stall: Duration = setting("60s", "Between two pieces of an answer that has begun.")
    grace: Duration | None = setting(
        None, "For a balancer to notice after SIGTERM: /readyz says draining, and requests are served still."
    )
    handover: Duration = setting("1h", "For requests of a process that a restart has replaced to end.")
    shutdown: Duration = setting(
        "30s", "For running requests to end after that. A stream that is not over by then ends with an error event."
    )


class Retries(Section):
    """How often a request that failed before its first byte is tried on another endpoint."""

    budget: Annotated[float, Field(ge=0, le=1)] = setting(
        0.2, "Retries at the same time, as a share of the requests that are under way in this gateway."
    )
    floor: Annotated[int, Field(strict=True, ge=0, le=1000), BeforeValidator(number_if_substituted)] = setting(
        3, "Retries allowed on top of that share, so that a quiet gateway can retry at all."
    )
    hedge: Annotated[float, Field(ge=0, le=0.2)] = setting(
        0.05,
        "Requests that may be sent to a second endpoint as well when their first byte is late, as a share of all; the "
        "first answer wins. Within the retry budget. 0: none.",
    )
    attempts: Annotated[int, Field(strict=True, ge=1, le=16), BeforeValidator(number_if_substituted)] = setting(
        3,
        "Most endpoints one request is sent to. Those that refuse the connection do not count; nor do those that fail "
        "the health check before a retry.",
    )


class Health(Section):
    """When an endpoint is ejected and when it comes back."""

    interval: Interval = setting("1s", "Time between two active probes; 1s at most for an endpoint that is out.")
    timeout: Duration = setting("1s", "Time for a probe to be answered.")
    failures: Count = setting(3, "Failures in a row, of probes or requests, that eject an endpoint.")
    backoff: Duration = setting("1s", "First time out; it doubles with every return that ends badly, with jitter.")
    backoff_max: Duration = setting("60s", "Longest time out.")
    slow_start: Duration = setting(
        "10s", "How long one that came, or came back, is given fewer requests at once than others while they have room."
    )
    slow_factor: Annotated[float, Field(ge=0, le=100)] = setting(
        2.5,
        "How many times as long as its peers an endpoint must take for the same work to be ejected as slow; 0: never. "
        "Peers have the same role, engine, layout and label `gpu`.",
    )
    path: HttpPath = setting("/health", "What a probe asks for.")
    progress: Duration = setting(
        "5s", "Silence with requests in flight, long prompts allowed for, after which an engine counts as wedged."
    )

    @model_validator(mode="after")
    def _grows(self) -> Health:
        if self.backoff > self.backoff_max:
            raise ValueError("backoff is longer than backoff_max")
        if 0 < self.slow_factor < 1.5:
            raise ValueError("slow_factor is below 1.5, which equal endpoints reach by chance; 0 turns it off")
        return self


class Scrape(Section):
    """Reading the engines' own load from their /metrics."""

    interval: Interval = setting("1s", "Time between two readings of one endpoint.")
    timeout: Duration = setting("1s", "Time for a reading to be answered.")
    stale: Duration = setting("5s", "Age at which a reading is no longer believed.")


class Prefix(Section):
    """What the gateway remembers about who holds which prompt prefix."""

    index: Size = setting("256MiB", "Memory for the index: a hard cap, oldest entries go first.")
    block_bytes: Annotated[
        int, Field(strict=True, ge=16, le=65536, multiple_of=8), BeforeValidator(number_if_substituted)
    ] = setting(512, "Prompt bytes per block, a multiple of 8; smaller is finer and larger in memory.")

    @field_validator("index")
    @classmethod
    def _large_enough(cls, index: int) -> int:
        if index < LEAST_CAP_BYTES:
            raise ValueError(f"is too small to remember anything; it must be at least {LEAST_CAP_BYTES >> 10}KiB")
        return index


class SloClass(Section):
    """A service class: what its requests are promised, and what keeping the promise to one of them is worth."""

    ttft: Duration = Field(description="From its last byte to the first token of the answer.")
    tpot: Duration = Field(description="From there on for each further token, in the mean.")
    weight: Weight = setting(1.0, "Worth of one request in relation to those of other classes.")


class Slos(Section):
    """Service classes. Requests choose one with x-slo-class; else their tenant's holds, their model's, the default."""

    default: Name = setting("standard", "The class of those for whom nothing else says one.")
    classes: Annotated[Mapping[Name, SloClass], Field(min_length=1, max_length=32)] = setting(
        {
            "interactive": {"ttft": "1s", "tpot": "50ms", "weight": 4.0},
            "standard": {"ttft": "5s", "tpot": "100ms"},
            "batch": {"ttft": "60s", "tpot": "500ms", "weight": 0.25},
        },
        "Classes by name, in place of these three.",
    )


class Admin(Section):
    """Who may change something through the admin server. Reading needs no key."""

    key: Secret | None = setting(
        None, "Its credential, by reference: ${NAME} or ${file:/path}. Without it only this machine may change things."
    )
    hosts: tuple[Host, ...] = setting(
        (), "Further names it is reached by, as in a browser or a scrape; addresses and localhost always are."
    )

    _sendable_key = field_validator("key")(sendable)


class AutoRollback(Section):
    """When a change takes itself back."""

    window: Duration = setting("60s", "Time after a change that is compared with as much time before it.")
    error_ratio: Annotated[float, Field(gt=0, le=1)] = setting(
        0.05, "How much larger the share of failed requests may become, as a share of all: 0.05 is five in a hundred."
    )
    requests: Count = setting(50, "Requests that must have ended since the change before it is judged.")


class Reload(Section):
    """How changes of this configuration are taken over."""

    watch: Annotated[bool, Field(strict=True)] = setting(True, "Whether to follow the file and the files it names.")
    state_dir: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = setting(
        None, "Folder in which the last 20 versions outlive a restart; they live in memory alone unless given."
    )
    auto_rollback: AutoRollback | None = setting(
        None, "When to take a change back without being asked; never unless set."
    )


class Hardware(Section):
    """The GPUs behind the endpoints. `check` and `doctor` judge layouts by it."""

    gpus: Count | None = setting(
        None, "GPUs of the whole fleet; layouts that need more are an error. Not checked unless given."
    )
    link_domain_gpus: Count = setting(
        8, "GPUs joined by fast links such as NVLink: 8 in an HGX server, 72 in an NVL72 rack."
    )


class Config(Section):
    """The whole configuration of one gateway."""

    version: Literal[1] = Field(description="Version of this format.")
    listeners: Listeners = setting({}, "The two servers.")
    models: tuple[Model, ...] = setting((), "Model names; without any, every name the engines of the only pool list.")
    pools: Mapping[Name, Pool] = Field(description="Pools by name.", min_length=1)
    limits: Limits = setting({}, "What one client may cost the gateway.")
    timeouts: Timeouts = setting({}, "How long the gateway waits for an engine.")
    retries: Retries = setting({}, "Trying again elsewhere.")
    health: Health = setting({}, "Ejecting endpoints and taking them back.")
    scrape: Scrape = setting({}, "Reading the engines' own load.")
    prefix: Prefix = setting({}, "Memory of who holds which prompt prefix.")
    slo: Slos = setting({}, "What requests are promised.")
    hardware: Hardware = setting({}, "The GPUs behind the endpoints.")
    tenants: tuple[Tenant, ...] = setting((), "Clients with keys; empty leaves the API open.")
    cache: Cache = setting({}, "Whose requests may share cached prompts.")
    observability: Observability = setting({}, "What the gateway writes about itself.")
    admin: Admin = setting({}, "Who may change something.")
    reload: Reload = setting({}, "How changes are taken over.")
    shared: Shared | None = setting(None, "One view among several gateways; each for itself unless given.")
    workers: Annotated[int, Field(strict=True, ge=1, le=64), BeforeValidator(number_if_substituted)] = setting(
        1, "Gateway processes on this machine, which share the API port and one view."
    )
