"""Replace methods or instances of classes in a test; skips the test if modules are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import pytest

from gateway.util.version import is_compiled


def replace_method(
    patch: pytest.MonkeyPatch, owner: type, name: str, by: Callable[..., Any]
) -> None:
    """Replace a method for a test.

    Skips the test on compiled modules, as methods of C classes are fixed (docs/decisions/0005).
    """
    if is_compiled():
        pytest.skip(f"{owner.__name__} is a C class: its methods cannot be replaced")
    patch.setattr(owner, name, by)


Owner = TypeVar("Owner")


def stand_in(owner: type[Owner], look_alike: object) -> Owner:
    """Return a fake as an instance of `owner`.

    Skips the test on compiled modules, which accept only instances of the C class.
    """
    if is_compiled():
        pytest.skip(f"{owner.__name__} is a C class: it cannot be replaced by a fake")
    return cast(Owner, look_alike)
