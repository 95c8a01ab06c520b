"""Tests of the admission controller: its parts use the limits of the configuration."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.admission.admission_controller import AdmissionController
from gateway.config import Config, WaitingRoom
from gateway.protocol.errors import GatewayError
from tests.unit.gateway.admission.test_pool_queue import ask, candidate


def controller(**sections: Any) -> AdmissionController:
    return AdmissionController(config(**sections))


def config(**sections: Any) -> Config:
    pools = {"main": {"endpoints": [{"url": "http://127.0.0.1:9000"}]}}
    return Config.model_validate({"version": 1, "pools": pools} | sections)


async def test_retries_are_limited_by_the_requests_that_run_in_all_pools() -> None:
    gate = controller(retries={"floor": 0, "budget": 0.5})
    for name, count in (("main", 3), ("other", 1)):
        queue = gate.pool_queue(name)
        queue.configure(WaitingRoom(), (candidate(0, 24),))
        gate.add_queue(queue)
        for _ in range(count):
            await queue.enter(ask())
    assert gate.retries.left == 2
    gate.pool_queue("main").leave()
    gate.pool_queue("main").leave()
    assert gate.retries.left == 1


def test_a_new_configuration_replaces_the_limit_of_body_memory() -> None:
    gate = controller(limits={"body": "60B", "body_budget": "100B"})
    gate.bodies.reserve_body(60)
    gate.configure(config(limits={"body": "60B", "body_budget": "200B"}))
    gate.bodies.reserve_body(60)
    with pytest.raises(GatewayError, match="120 of the 200"):
        gate.bodies.reserve_body(100)
