"""Tests of calls between vLLM and Penstock's KV connector, with stand-ins for vLLM's modules."""

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
    """A stand-in for a module of vLLM. Each of its attributes is an empty class."""

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


def cache_of(spec: str, **members: object) -> SimpleNamespace:
    # Return vLLM's KVCacheConfig of one group, whose layers have caches of this class.
    group = SimpleNamespace(
        kv_cache_spec=type(spec, (), {})(), enable_kv_transfer=True, layer_names=["0"]
    )
    for name, value in members.items():
        setattr(group.kv_cache_spec, name, value)
    return SimpleNamespace(kv_cache_groups=[group], kv_cache_tensors=[object()])


def test_only_vllms_window_that_frees_blocks_counts_as_one(connector: Any) -> None:
    read_window = sys.modules[CACHE_MEMORY].read_window
    assert read_window(cache_of("SlidingWindowSpec", sliding_window=256)) == 256
    # Beside full attention, vLLM keeps the blocks before a window.
    assert read_window(cache_of("FullAttentionSpec", sliding_window=256)) == 0


@pytest.mark.parametrize("spec", ["ChunkedLocalAttentionSpec", "MambaSpec", "SlidingWindowMLASpec"])
def test_caches_whose_blocks_vllm_frees_or_replaces_are_refused(connector: Any, spec: str) -> None:
    parallel = SimpleNamespace(pipeline_parallel_size=1, decode_context_parallel_size=1)
    config = SimpleNamespace(parallel_config=parallel)
    with pytest.raises(connector.UnsupportedCache, match=f"class {spec} is not supported"):
        sys.modules[CACHE_MEMORY].read_facts(config, cache_of(spec))
