"""Replace a method or an instance of a class for one test, unless the class is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import pytest

from gateway.util.version import is_compiled


def replace_method(
    patch: pytest.MonkeyPatch, owner: type, name: str, by: Callable[..., Any]
) -> None:
    """Replace a method.

    Skips the test on compiled modules, whose methods are fixed (decision 0005).
    """
    if is_compiled():
        pytest.skip(f"{owner.__name__} is a C class here: its methods cannot be replaced")
    patch.setattr(owner, name, by)


Owner = TypeVar("Owner")


def stand_in(owner: type[Owner], look_alike: object) -> Owner:
    """Return the look-alike, cast to `owner`.

    Skips the test on compiled modules, which check types.
    """
    if is_compiled():
        pytest.skip(f"{owner.__name__} is a C class here: no other object can replace it")
    return cast(Owner, look_alike)
