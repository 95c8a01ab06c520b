"""Tests that policies are built by name, and that unknown names give a clear message."""

from __future__ import annotations

import msgspec
import pytest

from policies import policy_registry
from policies.policy_registry import PolicyConfigError


def test_names_are_stable() -> None:
    assert policy_registry.names()[:3] == ("round_robin", "least_loaded", "prefix_aware")
    assert set(policy_registry.names()) >= {
        *(
            "power_of_two",
            "consistent_hash",
            "sglang_cache_aware",
            "dynamo_kv",
            "llmd_blend",
            "llmd_token",
            "llmd_predictor",
        ),
        *("preble", "mooncake", "lmetric", "llumnix", "dualmap"),
    }


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        PolicyConfigError,
        match=r"unknown routing policy 'least_load'.*did you mean 'least_loaded'.*known: round",
    ) as wrong:
        policy_registry.build("least_load", {})
    assert wrong.value.param is None


def test_an_unknown_parameter_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        PolicyConfigError,
        match=r"no parameter 'fresh'.*did you mean 'fresh_s'.*it takes output_weight",
    ) as wrong:
        policy_registry.build("least_loaded", {"fresh": 1})
    assert wrong.value.param == "fresh"
    with pytest.raises(PolicyConfigError, match="it takes none"):
        policy_registry.build("round_robin", {"fresh_s": 1})


def test_a_parameter_of_the_wrong_kind_is_named() -> None:
    with pytest.raises(
        PolicyConfigError, match=r"prefix_aware.decode_weight: Expected `float`, got `str`"
    ):
        policy_registry.build("prefix_aware", {"decode_weight": "much"})


@pytest.mark.parametrize("name", policy_registry.names())
def test_every_policy_builds_from_its_defaults_and_has_its_name(name: str) -> None:
    kind = policy_registry.params_type(name)
    assert policy_registry.build(name, {}).name == name
    assert policy_registry.build(name, msgspec.to_builtins(kind())).name == name
    assert kind.__doc__


def test_two_builds_share_no_memory() -> None:
    assert (
        policy_registry.build("round_robin", {}).picker
        is not policy_registry.build("round_robin", {}).picker
    )
