"""The gateway's configuration as one immutable typed tree, with a description of every key.

The reference page and the JSON schema are generated from it. Types of single values are in
value_types.py, rules between sections are in cross_checks.py, and yaml_source.py parses the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from gateway.config.admin_section import Admin
from gateway.config.batch_section import BatchApi
from gateway.config.client_limits_section import Limits
from gateway.config.hardware_section import Hardware
from gateway.config.health_sections import HealthSpec, Scrape
from gateway.config.listener_sections import Listeners
from gateway.config.model_sections import Model
from gateway.config.observability_sections import Observability
from gateway.config.pool_section import Pool
from gateway.config.prefix_section import Prefix
from gateway.config.reload_section import Reload
from gateway.config.shared_section import Shared
from gateway.config.sized_for_section import SizedFor
from gateway.config.slo_section import Slos
from gateway.config.tenant_sections import Cache, Tenant
from gateway.config.timeout_sections import Retries, Timeouts
from gateway.config.value_types import Name, Section, WorkerCount, setting


class Config(Section):
    """The whole configuration of one gateway: the content of gateway.yaml."""

    version: Literal[1] = Field(description="Version of the configuration file's format.")
    listeners: Listeners = setting({}, "The two servers: the OpenAI API and the admin server.")
    models: tuple[Model, ...] = setting(
        (),
        "The models that clients can request. By default those that the engines list, if "
        "there is only one pool.",
    )
    pools: Mapping[Name, Pool] = Field(
        description="Pools of endpoints, by the name of the pool.", min_length=1
    )
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
