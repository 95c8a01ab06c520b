"""Tests that the table of engine kinds is complete and consistent."""

from __future__ import annotations

import pytest

from gateway.fleet.engine_metrics import METRIC_NAMES
from gateway.protocol.api_table import APIS
from policies.engine_kinds import ENGINE_TRAITS
from policies.routing_types import EngineKind


def test_every_kind_of_engine_is_in_the_table() -> None:
    assert set(ENGINE_TRAITS) == set(EngineKind)


@pytest.mark.parametrize("kind", EngineKind)
def test_kinds_with_a_metrics_page_have_metric_names_that_begin_with_their_prefix(
    kind: EngineKind,
) -> None:
    traits = ENGINE_TRAITS[kind]
    assert bool(traits.metrics_path) == (kind in METRIC_NAMES) == bool(traits.metric_prefix)
    if kind in METRIC_NAMES:
        assert METRIC_NAMES[kind].running.startswith(traits.metric_prefix)


def test_lacked_paths_are_paths_of_the_api() -> None:
    paths = {api.path for api in APIS}
    for kind in EngineKind:
        assert ENGINE_TRAITS[kind].lacked_paths <= paths
