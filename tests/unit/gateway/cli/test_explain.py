"""Tests of the command `penstock explain` against a running gateway."""

from __future__ import annotations

import asyncio
import json

from gateway.cli import main
from tests.chaos.gateway_fleet import Answer, GatewayFleet, gateway_fleet
from tests.command_runner import CommandRunner
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME


async def typed(fleet: GatewayFleet, *words: str) -> tuple[int, str]:
    words = ("explain", *words, "--admin", fleet.app.admin_url)
    done = await asyncio.to_thread(CommandRunner().invoke, main.run, words)
    return done.exit_code, done.output


def id_of(response: Answer) -> str:
    return next(value for name, value in response.headers.items() if name.lower() == "x-request-id")


async def test_explain_prints_slo_pick_and_outcome() -> None:
    async with gateway_fleet(2, pool={"policy": "prefix_aware"}) as fleet:
        exit_code, output = await typed(fleet)
        assert (exit_code, "last: no request with this id" in output) == (1, True)
        response = await fleet.ask(prompt="why there " * 100)
        exit_code, output = await typed(fleet, id_of(response))
        assert exit_code == 0
        picked = response.headers["x-penstock-endpoint"]
        assert output.startswith(f"{id_of(response)}: demo-8b, 200 served\n")
        assert "  SLO       standard: first token within 5 s, then 100 ms per token\n" in output
        assert "  admitted  at once\n" in output
        assert f"  picked    {picked} of 2 by prefix_aware; next best " in output
        assert "  served    first token after " in output
        assert "  result    SLO met\n" in output
        assert f"> {picked}" in output
        assert (await typed(fleet)) == (0, output)
        exit_code, output_json = await typed(fleet, "--json")
        assert json.loads(output_json)["pick"]["endpoint"] == picked


async def test_explain_prints_rejections_and_unknown_ids() -> None:
    async with gateway_fleet(1) as fleet:
        fleet.groups[0].faults.apply("5xx")
        response = await fleet.ask()
        exit_code, output = await typed(fleet, id_of(response))
        assert exit_code == 0
        assert f"{response.status} refused" in output
        exit_code, output = await typed(fleet, "req_of_another_day")
        assert (exit_code, "req_of_another_day: no request with this id" in output) == (1, True)
