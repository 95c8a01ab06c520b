"""Configuration: one YAML file to one immutable typed tree, and every error says where.

source.py reads text and keeps places; values.py, tree.py and models.py are the types; checks.py the rules between
values; load.py puts them together.
"""

from gateway.config.choices import AdmissionSpec, Canary, PolicySpec
from gateway.config.load import MASK, SCHEMA_ID, Loaded, examine, examine_text, from_engines, json_schema, load
from gateway.config.models import Model, Overflow, Resume, Split
from gateway.config.problems import ConfigError, Problem
from gateway.config.seen import Observability, Traces
from gateway.config.tree import (
    Admin,
    AutoRollback,
    Config,
    EndpointSpec,
    Health,
    Layout,
    Limits,
    Listener,
    Listeners,
    Pool,
    Prefix,
    Reload,
    Retries,
    Scrape,
    SloClass,
    Slos,
    Tenant,
    Timeouts,
    WaitingRoom,
)
from gateway.config.values import Secret

__all__ = [
    "MASK",
    "SCHEMA_ID",
    "Admin",
    "AdmissionSpec",
    "AutoRollback",
    "Canary",
    "Config",
    "ConfigError",
    "EndpointSpec",
    "Health",
    "Layout",
    "Limits",
    "Listener",
    "Listeners",
    "Loaded",
    "Model",
    "Observability",
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
    "SloClass",
    "Slos",
    "Split",
    "Tenant",
    "Timeouts",
    "Traces",
    "WaitingRoom",
    "examine",
    "examine_text",
    "from_engines",
    "json_schema",
    "load",
]
