"""Tests that no turn of the event loop does much work, although there are a thousand endpoints.

An instruction takes 7 to 10 ns, so the limit stands for 2 ms. A plan of 1,024 endpoints takes more
than 500,000 instructions.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from gateway.admin.live_metric_samples import sample_steps
from gateway.app import App
from gateway.config import Config, Model, config_from_engines
from policies.routing_types import Pick, Request, RoutingQuery
from tests.unit.gateway.instruction_count import most_per_step, most_per_turn

ENDPOINTS = 1024
MOST_INSTRUCTIONS = 250_000


def config_of(first: int, policy: str = "prefix_aware") -> Config:
    urls = [f"http://10.0.{n // 256}.{n % 256}:8000" for n in range(first, first + ENDPOINTS)]
    config = config_from_engines(urls, policy, "127.0.0.1", 0, 0).config
    return config.model_copy(update={"models": (Model(name="m", pool=next(iter(config.pools))),)})


async def change(app: App, config: Config) -> None:
    swap = app.swap
    async with swap.exclusive():
        plan = await swap.plan(config)
        await swap.prepare(plan)
        swap.apply(plan)
    async with swap.exclusive():  # the rest of the change has been done
        pass


@pytest.mark.parametrize(
    "config", [config_of(0, "priced"), config_of(256)], ids=["another policy", "other endpoints"]
)
async def test_a_change_of_the_configuration_takes_many_short_turns(config: Config) -> None:
    app = App(config_of(0))
    assert await most_per_turn(lambda: change(app, config)) < MOST_INSTRUCTIONS
    app.swap.sweep()
    assert await most_per_turn(lambda: change(app, config)) < MOST_INSTRUCTIONS, "freed in parts"
    assert len(app.gateway.endpoints.all()) == ENDPOINTS
    assert not app.swap.retiring


async def test_the_first_pick_after_a_change_does_not_sort_all_endpoints() -> None:
    app = App(config_of(0))
    await change(app, config_of(0))
    (route,) = app.gateway.snapshot.routes.values()
    order = route.order
    assert order is not None

    def pick() -> Iterator[Pick | None]:
        yield order.pick(RoutingQuery(Request("a", "m", "", 1000, 100), 1.0, Random(1)))

    assert most_per_step(pick()) < MOST_INSTRUCTIONS / 10


async def test_pages_and_sweeps_take_many_short_turns() -> None:
    app = App(config_of(0))
    table = app.gateway.endpoints
    for live in table.all():
        app.metrics.ttft_seconds.labels("m", live.endpoint.name).observe_request(
            (0.1, 1.0, "request", "")
        )
    assert most_per_step(app.metrics.collect_in_parts()) < MOST_INSTRUCTIONS
    assert most_per_step(sample_steps(app, 1.0)) < MOST_INSTRUCTIONS
    assert most_per_step(table.sweep_steps(1.0)) < MOST_INSTRUCTIONS
