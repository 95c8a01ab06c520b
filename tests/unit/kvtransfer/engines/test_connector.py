"""Tests of the connector's contact with vLLM, with stand-ins for vLLM's modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

MODULE = "kvtransfer.engines.vllm.connector"
CACHE_MEMORY = "kvtransfer.engines.vllm.cache_memory"
VLLM = (
    "vllm",
    "vllm.distributed.kv_transfer.kv_connector.factory",
    "vllm.distributed.kv_transfer.kv_connector.utils",
    "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "vllm.distributed.parallel_state",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.request",
)


class StandInModule(ModuleType):
    """A stand-in for a module of vLLM: each attribute is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        cls = type(name, (), {})
        setattr(self, name, cls)
        return cls


class ConnectorRegistry:
    """The part of vLLM's KVConnectorFactory that registers connectors by name."""

    registered: dict[str, tuple[str, str]]

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        if name in cls.registered:
            raise ValueError(f"Connector '{name}' is already registered.")
        cls.registered[name] = (module_path, class_name)


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    ConnectorRegistry.registered = {}
    for name in VLLM:
        monkeypatch.setitem(sys.modules, name, StandInModule(name))
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.32.0", raising=False)
    factory = sys.modules["vllm.distributed.kv_transfer.kv_connector.factory"]
    monkeypatch.setattr(factory, "KVConnectorFactory", ConnectorRegistry, raising=False)
    for name in (MODULE, CACHE_MEMORY):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(MODULE)
    for name in (MODULE, CACHE_MEMORY):
        sys.modules.pop(name, None)


def test_importing_the_connector_makes_it_known_to_vllm_by_its_name(connector: Any) -> None:
    # MultiConnector rebuilds each connector's statistics by the name of its class.
    module_path, class_name = ConnectorRegistry.registered["PenstockConnector"]
    assert (module_path, class_name) == (MODULE, connector.PenstockConnector.__name__)


def test_the_connector_may_be_imported_again(connector: Any) -> None:
    importlib.reload(connector)
    assert list(ConnectorRegistry.registered) == ["PenstockConnector"]


def test_addresses_of_another_connector_are_refused_with_a_sentence(connector: Any) -> None:
    # MultiConnector gives all connectors the addresses of the first one that has any.
    ours = object.__new__(connector.PenstockConnector)
    with pytest.raises(ValueError, match="MultiConnector must list PenstockConnector before"):
        ours.set_xfer_handshake_metadata({0: SimpleNamespace(agent_metadata_bytes=b"")})
