"""Runs the tests of a module on virtual time: `pytestmark = VIRTUAL_TIME`.

The gateway, the engines and the clients of such a test share one event loop, whose clock jumps to
the next timer when there is nothing to do (bench/virtual_loop.py). So its waits take no time, and
nothing in it depends on how busy the machine is. Tests that start processes or wait for threads
of their own cannot use it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from bench.virtual_loop import VirtualLoop

VIRTUAL_TIME = pytest.mark.virtual_time

_PACKAGES = ("gateway", "kvtransfer", "mockgpu", "policies", "tests")
_real_monotonic = time.monotonic


class VirtualTimeLoop(VirtualLoop):
    """An event loop on virtual time. Until it is closed, `time.monotonic()` returns its time too."""

    def __init__(self) -> None:
        super().__init__()
        # The clock starts late, because 0.0 means "never" in many places.
        self._now = 10_000.0
        self._own_monotonic, self._has_paused = self.time, False
        _replace_monotonic(_real_monotonic, self._own_monotonic)

    def pause(self, seconds: float) -> None:
        """Let virtual time pass as if this process had no CPU: nothing runs, and bytes stay unread.

        After the current callback, timers that are due run before sockets are read, as on uvloop.
        """
        self._now += seconds
        self._has_paused = True

    def _select(self, timeout: float | None) -> Any:
        if self._has_paused:
            self._has_paused = False
            return []
        return super()._select(timeout)

    def close(self) -> None:
        _replace_monotonic(self._own_monotonic, _real_monotonic)
        super().close()


_examined: dict[str, ModuleType] = {}
_with_monotonic: list[ModuleType] = [time]


def _replace_monotonic(old: Callable[[], float], new: Callable[[], float]) -> None:
    # Replace the function in all modules that have imported it by name. Some import it only while a
    # test runs. Each module is examined once, because looking at 2,000 of them takes 4 ms.
    for name, module in tuple(sys.modules.items()):
        if _examined.get(name) is not module:
            _examined[name] = module
            if name.partition(".")[0] in _PACKAGES and getattr(module, "monotonic", None) is old:
                _with_monotonic.append(module)
    for module in _with_monotonic:
        if module.monotonic is old:
            module.monotonic = new  # type: ignore[attr-defined]
