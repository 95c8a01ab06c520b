"""A method of a class replaced for one test, where that can be done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gateway.build import is_compiled


def replace_method(patch: pytest.MonkeyPatch, owner: type, name: str, by: Callable[..., Any]) -> None:
    """Skips the test on compiled modules: methods of a C class cannot be replaced (docs/decisions/0005)."""
    if is_compiled():
        pytest.skip(f"{owner.__name__} is a C class here: its methods cannot be replaced")
    patch.setattr(owner, name, by)
