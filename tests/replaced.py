"""A method of a class replaced for one test, or an instance of it, where that can be done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import pytest

from gateway.util.version import is_compiled


def replace_method(
    patch: pytest.MonkeyPatch, owner: type, name: str, by: Callable[..., Any]
) -> None:
    """Skips the test on compiled modules: methods of a C class cannot be replaced (docs/decisions/0005)."""
    if is_compiled():
        pytest.skip(f"{owner.__name__} is a C class here: its methods cannot be replaced")
    patch.setattr(owner, name, by)


Owner = TypeVar("Owner")


def stand_in(owner: type[Owner], look_alike: object) -> Owner:
    """Skips the test on compiled modules: what is declared to be of a C class takes no look-alike there."""
    if is_compiled():
        pytest.skip(f"{owner.__name__} is a C class here: nothing can stand in for it")
    return cast(Owner, look_alike)
