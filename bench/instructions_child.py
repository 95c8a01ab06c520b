"""Runs a gateway in callgrind that serves one request at a time, for bench/instructions.py.

    instructions_child.py TREE KIND FUNCTION WARM_UP COUNTED PORT ENGINE_URL...

TREE is the folder of the gateway, possibly compiled or of an older revision. FUNCTION is the
function or method to count, or "" for all callbacks of a request. WARM_UP and COUNTED are numbers
of requests.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

TREE, KIND, FUNCTION, WARM_UP, COUNTED, PORT, *URLS = sys.argv[1:]
# Folders in which revisions of the project have their benchmarks; compiled trees have neither.
BENCHES = ("bench", "tests/bench")

sys.path[:0] = [*(f"{TREE}/{folder}" for folder in BENCHES), TREE]
for package in ("gateway", "policies", "kvtransfer"):  # opcodes adds its own sources to the path
    importlib.import_module(package)

import opcodes  # noqa: E402
import uvloop  # noqa: E402

switch = ctypes.PyDLL(os.environ["SWITCH_LIBRARY"])
toggle = switch.toggle
running: list[str] = []
"""The names of the counted functions on the call stack, outermost first."""


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that the processor instructions which it executes are counted.

    Recursive calls are counted only once.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        running.append(function.__name__)
        if len(running) == 1:
            toggle()
        try:
            return function(*arguments, **named)
        finally:
            running.pop()
            if not running:
                toggle()

    return call


def owners(name: str) -> list[tuple[Any, str]]:
    """Find where the gateway defines a function or method, so that it can be replaced there.

    Returns pairs (owner, name). An owner is a module or class that has the function by this name.

    name  name of the function, such as `parse_call` or `Relay.feed`
    """
    class_name, _, last = name.rpartition(".")
    modules = [
        module for path, module in sys.modules.items() if path.startswith(("gateway", "policies"))
    ]
    if not class_name:
        return [(module, last) for module in modules if callable(vars(module).get(last))]
    kinds = {id(kind): kind for module in modules for kind in vars(module).values()}
    return [
        (kind, last)
        for kind in kinds.values()
        if isinstance(kind, type) and kind.__name__ == class_name and last in vars(kind)
    ]


def count_functions(names: list[str]) -> None:
    """Make each of the named functions count the processor instructions that it executes.

    Raises SystemExit if a name does not exist.
    """
    for name in names:
        found = owners(name)
        if not found:
            sys.exit(f"no function {name} in {TREE}")
        for owner, last in found:
            replace(owner, last, counted(vars(owner)[last]))


def replace(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a module or a class; also of a compiled class, whose attributes are
    read-only.
    """
    if not isinstance(owner, type):
        setattr(owner, name, value)
        return
    [attributes] = gc.get_referents(vars(owner))  # the dictionary behind the read-only view
    attributes[name] = value
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))


def write_config(policy: str, folder: Path) -> Path:
    """Write a configuration that all revisions of the gateway can read, and return its path."""
    endpoints = "".join(f"      - {{url: {url}, max_concurrency: 8192}}\n" for url in URLS)
    path = folder / "gateway.yaml"
    path.write_text(
        f"version: 1\nlisteners:\n  api: {{port: {PORT}}}\n  admin: {{port: {int(PORT) + 1}}}\n"
        "models:\n  - {name: bench-model, pool: main}\n"
        f"pools:\n  main:\n    policy: {policy}\n    endpoints:\n{endpoints}"
        f"observability:\n  access_log: {folder / 'access.log'}\n"
    )
    return path


async def serve(config: Path, bodies: list[bytes]) -> None:
    load = getattr(opcodes, "load_config", None) or opcodes.load
    read_answer = getattr(opcodes, "read_answer", None) or opcodes.answered
    app = opcodes.App(load(config, {}))
    await app.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(PORT))
    for number in range(int(WARM_UP) + int(COUNTED)):
        if number == int(WARM_UP):
            switch.forget()
        body = bodies[number % len(bodies)].replace(b"#" * 16, b"%016x" % number)
        writer.write((opcodes.HEAD % len(body)).encode() + body)
        await read_answer(reader)
        await asyncio.sleep(0)
    writer.close()
    await app.stop()


def main() -> None:
    kind = next(kind for kind in opcodes.kinds() if kind.name == KIND)
    count_functions([FUNCTION] if FUNCTION else sorted(opcodes.CALLBACKS))
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(serve(write_config(kind.policy, Path(folder)), kind.bodies))


if __name__ == "__main__":
    main()
