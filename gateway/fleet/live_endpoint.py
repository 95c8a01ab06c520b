"""One live endpoint: its configuration, connections, load, health, speed, and engine's models."""

from __future__ import annotations

from math import inf

from gateway.config import EndpointSpec
from gateway.fleet.engine_metrics import UNKNOWN_PROGRESS
from gateway.http.engine_connections import ConnectionPool
from gateway.http.engine_request import UpstreamTimeouts
from gateway.http.write_queue import WriteQueue
from gateway.util.tls_contexts import Encryption
from policies.endpoint_load import EndpointLoad
from policies.health.endpoint_health import Health
from policies.health.endpoint_speed import SpeedRecord, SpeedVerdict
from policies.health.late_request_detection import is_doubted
from policies.routing_types import Endpoint

# Health of an endpoint that has never failed. Callers compare by identity to skip success events.
INITIAL_HEALTH = Health()


class LiveEndpoint:
    """One endpoint (an engine process behind one URL) with its configuration and live state.

    backlog_tokens     prompt tokens still to be computed when the engine last sent a byte; a large
                       backlog explains a long silence
    progress           counters of the engine's work, from the last scrape of its metrics
    models             names of the models that its engine lists; valid only if has_list is set
    models_at          monotonic time at which its engine last sent its list of models, or reported
                       that it has none
    answers_whole      whether its engine answered the last request for a stream with whole JSON
    has_list           whether its engine has sent a list of models
    has_bad_list       whether its last answer to a request for that list could not be read
    lacks_health       whether its engine has no page at `health.path`; then its list of models is
                       requested as the health check
    api_paths          paths of the APIs that its engine lists at /openapi.json; empty if unknown
    has_tried_apis     whether the gateway has tried which translatable APIs its engine serves; only
                       for engines without /openapi.json
    missing_paths      those of the tried paths that its engine answered with 404, 405 or 501
    keeps_responses    whether its engine stores responses for later requests; None if unknown
    kv_received_bytes  KV bytes received from other engines since its start; None if not reported
    is_stalled         whether it stopped generating. Then its /health page is not trusted until it
                       generates a token
    throttled_until    monotonic time until which it gets few requests, because it was late; else
                       None
    refused_until      monotonic time until which its engine asked for no requests (429, 503); 0.0
                       if it never did
    is_unresolved      whether its host name could not be resolved at the last health check
    is_leaving         whether no current configuration contains it; older requests may still run
                       there
    is_drained         whether an operator drained it: it gets no new requests
    speed              the measurements of its speed, and the verdict on them
    slow_start_at      monotonic time at which it entered rotation, while its limit of concurrent
                       requests still rises; else None
    sent_tokens        total prompt tokens sent to it
    hit_tokens         those of sent_tokens that the prefix index predicted to be cached there
    """

    __slots__ = (
        *(
            "answers_whole",
            "api_paths",
            "backlog_tokens",
            "throttled_until",
            "refused_until",
            "is_unresolved",
            "is_drained",
            "encryption",
            "endpoint",
            "has_bad_list",
            "has_list",
            "has_tried_apis",
        ),
        *(
            "health",
            "hit_tokens",
            "keeps_responses",
            "key_header",
            "kv_received_bytes",
            "is_leaving",
            "lacks_health",
            "missing_paths",
            "load",
            "models",
        ),
        *(
            "models_at",
            "progress",
            "sent_tokens",
            "spec",
            "speed",
            "is_stalled",
            "upstream",
        ),
        "slow_start_at",
    )

    def __init__(
        self,
        endpoint: Endpoint,
        spec: EndpointSpec,
        load: EndpointLoad,
        timeouts: UpstreamTimeouts,
        write_queue: WriteQueue,
        encryption: Encryption | None = None,
    ) -> None:
        self.load = load
        self.upstream = ConnectionPool(spec.url, None, timeouts, write_queue, encryption)
        self.reconfigure(endpoint, spec, timeouts, encryption)
        self.health = INITIAL_HEALTH
        self.models: tuple[str, ...] = ()
        self.has_bad_list = self.has_list = False
        self.lacks_health = self.has_tried_apis = False
        self.api_paths: frozenset[str] = frozenset()
        self.missing_paths: frozenset[str] = frozenset()
        self.keeps_responses: bool | None = None
        self.models_at: float | None = None
        self.backlog_tokens = self.sent_tokens = self.hit_tokens = 0
        self.progress: tuple[int | None, float | None] = UNKNOWN_PROGRESS
        self.kv_received_bytes: int | None = None
        self.slow_start_at: float | None = None
        self.throttled_until: float | None = None
        self.refused_until = 0.0
        self.speed = SpeedRecord()
        self.is_stalled = self.is_leaving = self.is_drained = self.is_unresolved = False
        self.answers_whole = False

    def adopt(self, twin: LiveEndpoint | None) -> None:
        """Take over what is known of the engine from another endpoint with the same URL, if any.

        Nothing is taken over if the two differ in their kind of engine, API key or TLS settings.
        Each endpoint counts its own requests, and the list of models is read again soon.
        """
        if (
            twin is None
            or twin.endpoint.engine is not self.endpoint.engine
            or (twin.key_header, twin.encryption) != (self.key_header, self.encryption)
        ):
            return
        self.health, self.load.is_proven = twin.health, twin.load.is_proven
        self.is_stalled, self.is_drained = twin.is_stalled, twin.is_drained
        self.is_unresolved, self.refused_until = twin.is_unresolved, twin.refused_until
        self.upstream.addresses = twin.upstream.addresses
        self.models, self.has_list = twin.models, twin.has_list
        self.has_bad_list = twin.has_bad_list
        self.api_paths, self.missing_paths = twin.api_paths, twin.missing_paths
        self.lacks_health, self.has_tried_apis = twin.lacks_health, twin.has_tried_apis
        self.keeps_responses, self.answers_whole = twin.keeps_responses, twin.answers_whole

    @property
    def may_list_models(self) -> bool:
        """Return whether the engine has not answered a request for its list of models yet."""
        return self.models_at is None and not self.has_bad_list

    @property
    def cause(self) -> str | None:
        """Return in one word why the endpoint is or was out of rotation; None if it never was."""
        if self.is_unresolved:
            return "unresolved"
        return None if self.health.cause is None else str(self.health.cause)

    @property
    def is_doubted(self) -> bool:
        """Return whether the endpoint gets few requests because it was late or may be slow."""
        is_suspect = self.speed.verdict is SpeedVerdict.SUSPECT
        return (self.throttled_until is not None or is_suspect) and is_doubted(self.load)

    def reconfigure(
        self,
        endpoint: Endpoint,
        spec: EndpointSpec,
        timeouts: UpstreamTimeouts,
        encryption: Encryption | None,
    ) -> None:
        """Apply the settings that a new configuration has for this endpoint."""
        key = spec.api_key.reveal() if spec.api_key is not None else None
        self.endpoint = endpoint
        self.spec = spec
        if endpoint.stated_slots < inf:
            self.load.slots = endpoint.stated_slots
        self.key_header = {"Authorization": f"Bearer {key}"} if key else {}
        self.encryption = encryption
        self.upstream.reconfigure(key, timeouts, encryption, endpoint.rank)


def step_tokens(live: LiveEndpoint) -> int:
    """Return the maximum number of prompt tokens in the endpoint's current prefill step."""
    load, speed = live.load, live.speed
    others = load.in_flight - load.decoding - speed.waiting
    return speed.step_tokens(load.prefill_tokens, load.belief.shape.budget_tokens, others)
