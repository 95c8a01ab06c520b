"""Tests of the registry of admission policies: names, defaults and errors."""

from __future__ import annotations

import pytest

from policies.admission_registry import build_admission, names
from policies.policy_registry import PolicyConfigError


@pytest.mark.parametrize("name", names())
def test_every_admission_is_built_by_its_name_and_its_defaults(name: str) -> None:
    built = build_admission(name, {})
    assert built.name == name
    assert built is not build_admission(name, {})


def test_a_wrong_name_or_parameter_is_refused_with_what_was_near() -> None:
    with pytest.raises(PolicyConfigError, match="did you mean 'cap'"):
        build_admission("cup", {})
    with pytest.raises(PolicyConfigError, match="it takes none"):
        build_admission("none", {"size": 1})
