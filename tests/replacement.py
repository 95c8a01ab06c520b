"""Replaces methods of classes, or objects, in tests.

A test is skipped if the module is compiled, because compiled modules cannot be changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import pytest

from gateway.util.version import is_compiled


def replace_method(
    patch: pytest.MonkeyPatch, owner: type, name: str, by: Callable[..., Any]
) -> None:
    # Replace a method of a class for the duration of a test.
    #
    # On compiled modules, the test is skipped: methods of C classes cannot be replaced
    # (docs/decisions/0005).
    if is_compiled():
        pytest.skip(f"{owner.__name__} is a C class: its methods cannot be replaced")
    patch.setattr(owner, name, by)


Owner = TypeVar("Owner")


def stand_in(owner: type[Owner], look_alike: object) -> Owner:
    # Return a fake object, typed as an instance of `owner`.
    #
    # On compiled modules, the test is skipped: they accept only instances of the C class.
    if is_compiled():
        pytest.skip(f"{owner.__name__} is a C class: it cannot be replaced by a fake")
    return cast(Owner, look_alike)
