"""Tests that modules avoid forbidden operations: I/O in pure modules, unsafe calls, lost tasks."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

import pytest

from tests.architecture.sources import SHIPPED, Module, modules

MODULES = modules(*SHIPPED)
IMPURE = frozenset(
    [
        "aiohttp",
        "asyncio",
        "os",
        "redis",
        "secrets",
        "socket",
        "subprocess",
        "threading",
        "time",
        "uvloop",
    ]
)
# Policies take a Random as an argument; the type may be imported, the functions may not.
TYPE_ONLY = {"random": {"Random"}}

# In addition to transports/, these modules of kvtransfer do I/O; the rest is plain functions and
# state.
KVTRANSFER_IO = frozenset(
    [
        "asyncio",
        "ctypes",
        "fcntl",
        "mmap",
        "os",
        "select",
        "socket",
        "subprocess",
        "threading",
        "time",
    ]
)
MAY_DO_IO = {
    "kvtransfer.agent": KVTRANSFER_IO,
    "kvtransfer.engines.vllm.block_report": {"socket", "threading"},
    "kvtransfer.engines.vllm.cache_memory": {"ctypes"},
    "kvtransfer.engines.vllm.connector": {"threading", "time"},
    "kvtransfer.engines.vllm.transfer_trace": {"threading", "time"},
    "kvtransfer.transfer.handles": {"asyncio", "os", "threading"},
    "kvtransfer.links.peer_link": {"threading"},
    "kvtransfer.util.agent_lock": {"threading"},
    "kvtransfer.util.clock": {"threading", "time"},
    "kvtransfer.layout.memory_files": {"fcntl", "mmap", "os"},
    "kvtransfer.layout.sealed_files": {"fcntl", "mmap", "os"},
    "kvtransfer.store.block_store": {"threading", "time"},
    "kvtransfer.store.client": {"os", "socket", "threading"},
    "kvtransfer.store.disk_slots": {"fcntl", "os"},
    "kvtransfer.store.memory_slots": {"os"},
    "kvtransfer.store.reconnecting_client": {"time"},
    "kvtransfer.store.unix_socket_server": {"fcntl", "os", "socket", "threading"},
    "kvtransfer.store.slot_format": {"os"},
    "kvtransfer.store.socket_io": {"socket"},
}
# What penstock-kv and its extra `numpy` require, and what single modules need in addition.
PACKAGES_OF_KV = {"msgspec", "numpy", "xxhash"}
KV_OPTIONAL = {
    "kvtransfer.engines.vllm.cache_memory": {"vllm"},
    "kvtransfer.engines.vllm.connector": {"vllm"},
    "kvtransfer.engines.vllm.connector_metadata": {"vllm"},
    "kvtransfer.engines.vllm.vllm_objects": {"vllm"},
    "kvtransfer.transports.rdma.verbs": {"pyverbs"},
    "kvtransfer.transports.stream.kv_encryption": {"cryptography"},
}
UNSAFE_MODULES = {"dill", "marshal", "pickle", "shelve"}
UNSAFE_CALLS = {"compile", "eval", "exec"}

# A request runs without a Task until it must wait (gateway/http/eager_task.py), so code on its path
# must not ask asyncio for the current Task. `timeout` of eager_task creates one first.
NEEDS_TASK = {"current_task", "timeout", "timeout_at", "wait_for"}
MAY_NEED_TASK = {
    "gateway.http.eager_task": {"timeout"},
    "gateway.http.aiohttp_connection": {"current_task"},
}
# Packages that no request passes through.
OTHER_PACKAGES = (
    *(
        "gateway.admin",
        "gateway.app",
        "gateway.auto",
        "gateway.batch",
        "gateway.cli",
        "gateway.config",
    ),
    "gateway.process_lifecycle",
    *("gateway.reload", "gateway.restart", "gateway.peers", "gateway.workers"),
    *("gateway.fleet.discovery", "gateway.fleet.health_checks", "gateway.fleet.engine_metrics"),
    *("gateway.http.health_api", "gateway.http.listener_sockets", "gateway.http.api_application"),
    *("gateway.http.engine_poll_client", "gateway.http.url_errors"),
)


def imports(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    # Yield each imported module with the names imported from it.
    #
    # The set of names is empty if the module itself is imported.
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, set()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", {alias.name for alias in node.names}


def named(prefix: str) -> list[str]:
    return [name for name in MODULES if name.startswith(prefix)]


@pytest.mark.parametrize("name", named("policies"))
def test_policies_are_pure(name: str) -> None:
    for module, names in imports(MODULES[name].tree):
        top = module.split(".")[0]
        assert top not in IMPURE
        assert top not in TYPE_ONLY or (names and names <= TYPE_ONLY[top])


@pytest.mark.parametrize("name", named("kvtransfer"))
def test_kvtransfer_does_io_only_at_its_edge(name: str) -> None:
    is_transport = name.startswith("kvtransfer.transports")
    allowed = KVTRANSFER_IO if is_transport else MAY_DO_IO.get(name, set())
    assert MODULES[name].outside & KVTRANSFER_IO - allowed == set()


@pytest.mark.parametrize("name", named("kvtransfer"))
def test_kvtransfer_imports_nothing_that_an_engine_lacks(name: str) -> None:
    # Its distribution penstock-kv is installed in engines, without the rest of the project.
    theirs = {*sys.stdlib_module_names, *PACKAGES_OF_KV, *KV_OPTIONAL.get(name, ())}
    assert MODULES[name].outside - theirs == set()
    ours = MODULES[name].imported | MODULES[name].imported_types
    assert {other.split(".")[0] for other in ours} <= {"kvtransfer"}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_nothing_is_unpickled_or_evaluated(name: str) -> None:
    tree = MODULES[name].tree
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    assert called & UNSAFE_CALLS == set()
    assert MODULES[name].outside & UNSAFE_MODULES == set()


def asyncio_names(tree: ast.AST) -> set[str]:
    names = {
        name for module, taken in imports(tree) if module.startswith("asyncio") for name in taken
    }
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="asyncio"), attr=name):
                names.add(name)
    return names


def is_on_request_path(module: Module) -> bool:
    return not module.name.startswith(OTHER_PACKAGES)


@pytest.mark.parametrize("name", named("gateway"))
def test_nothing_on_a_requests_path_needs_a_task(name: str) -> None:
    if is_on_request_path(MODULES[name]):
        assert asyncio_names(MODULES[name].tree) & NEEDS_TASK <= MAY_NEED_TASK.get(name, set())


@pytest.mark.parametrize(
    "line", ["async with asyncio.timeout(1): ...", "from asyncio import wait_for as bounded"]
)
def test_every_way_to_such_a_name_is_found(line: str) -> None:
    tree = ast.parse(f"import asyncio\nasync def waits():\n    {line}")
    assert asyncio_names(tree) & NEEDS_TASK
