"""Configuration: one YAML file to one immutable typed tree, and every error says where.

source.py reads text and keeps places; tree.py is the types; checks.py the rules between values;
load.py puts them together.
"""

from gateway.config.load import MASK, SCHEMA_ID, Loaded, examine, examine_text, from_engines, json_schema, load
from gateway.config.problems import ConfigError, Problem
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
    Model,
    Observability,
    PolicySpec,
    Pool,
    Prefix,
    Reload,
    Retries,
    Scrape,
    Secret,
    Split,
    Tenant,
    Timeouts,
    WaitingRoom,
)

__all__ = [
    "MASK",
    "SCHEMA_ID",
    "Admin",
    "AutoRollback",
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
    "PolicySpec",
    "Pool",
    "Prefix",
    "Problem",
    "Reload",
    "Retries",
    "Scrape",
    "Secret",
    "Split",
    "Tenant",
    "Timeouts",
    "WaitingRoom",
    "examine",
    "examine_text",
    "from_engines",
    "json_schema",
    "load",
]
