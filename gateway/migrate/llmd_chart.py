"""Converts the Helm values of llm-d's router and of its predecessor, the inference pool."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gateway.migrate import llmd
from gateway.migrate.config_draft import Draft, MigrationError
from gateway.migrate.yaml_text import load_documents

_ENGINES: Mapping[str, str] = MappingProxyType(
    {"vllm": "vllm", "sglang": "sglang", "triton-tensorrt-llm": "trtllm", "trtllm": "trtllm"}
)
_PICKER_KEYS = frozenset({"pluginsConfigFile", "pluginsCustomConfig"})
_POOL_KEYS = frozenset({"targetPorts", "targetPortNumber", "modelServerType", "modelServers"})
_DEFAULT: Mapping[str, Any] = MappingProxyType(
    {
        "plugins": [
            {"type": "queue-scorer"},
            {"type": "kv-cache-utilization-scorer"},
            {"type": "prefix-cache-scorer"},
        ]
    }
)
"""The plugins in the chart's own default-plugins.yaml."""


def is_chart(data: Mapping[str, Any]) -> bool:
    """Return whether plain data are the Helm values of llm-d's router or of its inference pool."""
    router = data.get("router")
    is_router = isinstance(router, dict) and ("epp" in router or "modelServers" in router)
    return is_router or "inferenceExtension" in data or "inferencePool" in data


def convert_values(chart: Mapping[str, Any], draft: Draft) -> None:
    """Write the Helm values of a chart of llm-d into the draft of a gateway.yaml.

    Raises MigrationError if they cannot be converted.
    """
    path = "router" if isinstance(chart.get("router"), dict) else "inferencePool"
    pool = _mapping(chart.get(path))
    picker = _mapping(pool.get("epp") if path == "router" else chart.get("inferenceExtension"))
    llmd.convert(_picker_config(picker, draft), draft, _target(pool, draft))
    prefix = "router.epp" if path == "router" else "inferenceExtension"
    for key in picker.keys() - _PICKER_KEYS:
        _note_picker(f"{prefix}.{key}", key, picker[key], draft)
    for key in pool.keys() - _POOL_KEYS - {"epp"}:
        draft.drop(f"{path}.{key}", "the gateway's own chart sets its deployment")
    for key in chart.keys() - {"router", "inferenceExtension", "inferencePool"}:
        draft.drop(key, "the chart's own")


def _picker_config(picker: Mapping[str, Any], draft: Draft) -> Mapping[str, Any]:
    # Return the EndpointPickerConfig that the chart's values select. Raises MigrationError.
    files = _mapping(picker.get("pluginsCustomConfig"))
    name = str(picker.get("pluginsConfigFile") or next(iter(files), "default-plugins.yaml"))
    if name not in files:
        text = "the values lack this file; its plugins are taken to be queue, KV and prefix scorers"
        draft.differ(f"pluginsConfigFile {name}", text)
        return _DEFAULT
    for other in files.keys() - {name}:
        draft.drop(f"pluginsCustomConfig {other}", "pluginsConfigFile names another file")
    documents = load_documents(str(files[name]))
    if not documents or not isinstance(documents[0], dict):
        raise MigrationError(
            f"pluginsCustomConfig[{name}] must be an EndpointPickerConfig, which is a YAML mapping"
        )
    return documents[0]


def _target(pool: Mapping[str, Any], draft: Draft) -> llmd.Target:
    servers = _mapping(pool.get("modelServers"))
    ports = pool.get("targetPorts") or servers.get("targetPorts") or ()
    numbers = [int(port["number"]) for port in ports if isinstance(port, dict)]
    number = numbers[0] if numbers else int(pool.get("targetPortNumber") or 8000)
    for other in numbers[1:]:
        draft.differ(f"target port {other}", "one endpoint per pod: its engine balances its ranks")
    kind = str(pool.get("modelServerType") or servers.get("type") or "vllm")
    if kind not in _ENGINES:
        draft.drop(f"modelServerType {kind}", "the endpoints are taken for vLLM's")
    labels = _mapping(servers.get("matchLabels") or servers.get("labels"))
    return llmd.Target(dict(labels), number, _ENGINES.get(kind, "vllm"))


def _note_picker(item: str, key: str, value: Any, draft: Draft) -> None:
    if key == "tracing" and _mapping(value).get("enabled"):
        address = str(_mapping(value).get("otelExporterEndpoint") or "http://localhost:4317")
        host = address.partition("://")[2].rpartition(":")[0] or "localhost"
        draft.set(f"http://{host}:4318/v1/traces", "observability", "traces", "endpoint")
        draft.differ(item, "traces go by OTLP over HTTP, port 4318, and 1 % are traced")
    elif key == "replicas" and value not in (None, 1):
        draft.do(item, "several gateways need `shared` to have one view")
    elif key == "flags":
        for flag in _mapping(value):
            draft.drop(f"{item}.{flag}", "engines' metrics are recognized by their names")
    else:
        draft.drop(item, "the gateway's own chart sets its deployment")


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
