"""Tests of the memory budget for request bodies: what it grants, and when memory is released."""

from __future__ import annotations

import pytest

from gateway.admission.body_memory_budget import BodyBudget
from gateway.protocol import api_table
from gateway.protocol.errors import GatewayError
from gateway.request_record import Exchange


def test_bodies_share_one_budget() -> None:
    budget = BodyBudget(100)
    assert budget.reserve_body(60) == 60
    with pytest.raises(GatewayError, match="60 of the 100") as shed:
        budget.reserve_body(60)
    assert (shed.value.status, shed.value.reason) == (429, "body_budget")
    budget.release_body(60)
    budget.reserve_body(100)
    budget.release_body(100)
    assert budget.used_bytes == 0


def test_a_refused_body_releases_its_memory_before_another_one_grows() -> None:
    budget = BodyBudget(100)
    refused, other = (Exchange("r", api_table.CHAT, "127.0.0.1", 0.0) for _ in range(2))
    refused.take_memory(budget, 50)
    other.take_memory(budget, 50)
    with pytest.raises(GatewayError):
        refused.take_memory(budget, 60)
    other.take_memory(budget, 60)
    assert budget.used_bytes == 60
    refused.release_memory()
    assert (budget.used_bytes, refused.body_bytes) == (60, 50)


def test_the_memory_of_a_body_is_released_at_the_first_token() -> None:
    budget = BodyBudget(100)
    exchange = Exchange("r", api_table.CHAT, "127.0.0.1", 0.0)
    exchange.take_memory(budget, 20)
    exchange.take_memory(budget, 60)
    exchange.on_first_token()
    assert (budget.used_bytes, exchange.body_bytes) == (0, 60)
    budget.reserve_body(100)
    exchange.release_memory()
    assert budget.used_bytes == 100
