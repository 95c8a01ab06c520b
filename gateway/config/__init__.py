"""Reads a YAML configuration file into an immutable typed tree, with a position for every error.

- file_reader.py reads files; yaml_source.py parses their text and keeps positions.
- The section modules define the keys, root_section.py the whole, value_types.py types of values.
- cross_checks.py and the rule modules check relations between values.
- loader.py combines all of this.
"""

from gateway.config.admin_section import Admin
from gateway.config.auto_section import AutoPolicy
from gateway.config.batch_section import BatchApi
from gateway.config.client_limits_section import Limits
from gateway.config.endpoint_sections import EndpointSpec, LayoutSpec
from gateway.config.hardware_section import Hardware
from gateway.config.health_sections import HealthSpec, Scrape
from gateway.config.listener_sections import AdminListener, Listener, Listeners
from gateway.config.loader import (
    SCHEMA_ID,
    SECRET_MASK,
    LoadedConfig,
    config_from_engines,
    json_schema,
    load_config,
    load_text,
    load_with_warnings,
)
from gateway.config.mirror_section import Mirror
from gateway.config.model_sections import Model, Overflow, Resume, Split
from gateway.config.observability_sections import Observability, OperatorLog, Traces
from gateway.config.policy_sections import AdmissionSpec, Canary, PolicySpec
from gateway.config.pool_section import Pool, WaitingRoom
from gateway.config.prefix_section import Prefix
from gateway.config.problems import ConfigError, Problem
from gateway.config.reload_section import AutoRollback, Reload
from gateway.config.root_section import Config
from gateway.config.s3_section import BatchS3
from gateway.config.sized_for_section import SizedFor
from gateway.config.slo_section import SloClass, Slos
from gateway.config.tenant_rules import salt_member
from gateway.config.tenant_sections import Cache, Tenant
from gateway.config.timeout_sections import Retries, Timeouts
from gateway.config.tls_sections import ClientTls, EngineTls, ListenerTls
from gateway.config.value_types import Secret

__all__ = [
    "SCHEMA_ID",
    "SECRET_MASK",
    "Admin",
    "AdminListener",
    "AdmissionSpec",
    "AutoPolicy",
    "AutoRollback",
    "BatchApi",
    "BatchS3",
    "Cache",
    "Canary",
    "ClientTls",
    "Config",
    "ConfigError",
    "EndpointSpec",
    "EngineTls",
    "Hardware",
    "HealthSpec",
    "LayoutSpec",
    "Limits",
    "Listener",
    "ListenerTls",
    "Listeners",
    "LoadedConfig",
    "Mirror",
    "Model",
    "Observability",
    "OperatorLog",
    "Overflow",
    "PolicySpec",
    "Pool",
    "Prefix",
    "Problem",
    "Reload",
    "Resume",
    "Retries",
    "Scrape",
    "Secret",
    "SizedFor",
    "SloClass",
    "Slos",
    "Split",
    "Tenant",
    "Timeouts",
    "Traces",
    "WaitingRoom",
    "config_from_engines",
    "json_schema",
    "load_config",
    "load_text",
    "load_with_warnings",
    "salt_member",
]
