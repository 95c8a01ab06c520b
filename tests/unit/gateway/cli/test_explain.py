"""`penstock explain` as an operator reads it."""

from __future__ import annotations

import asyncio
import json

from typer.testing import CliRunner

from gateway.cli import main
from tests.chaos.gateway_fleet import Answer, GatewayFleet, gateway_fleet


async def typed(home: GatewayFleet, *words: str) -> tuple[int, str]:
    words = ("explain", *words, "--admin", home.app.admin_url)
    done = await asyncio.to_thread(CliRunner().invoke, main.app, words)
    return done.exit_code, done.output


def id_of(answer: Answer) -> str:
    return next(value for name, value in answer.headers.items() if name.lower() == "x-request-id")


async def test_a_request_is_told_from_its_promise_to_its_outcome() -> None:
    async with gateway_fleet(2, pool={"policy": "prefix_aware"}) as home:
        code, said = await typed(home)
        assert (code, "last: no such request" in said) == (1, True)
        answer = await home.ask(prompt="why there " * 100)
        code, said = await typed(home, id_of(answer))
        assert code == 0
        picked = answer.headers["x-penstock-endpoint"]
        assert said.startswith(f"{id_of(answer)}: demo-8b, 200 served\n")
        assert "  promised  standard: first token within 5 s, then 100 ms a token\n" in said
        assert "  admitted  at once\n" in said
        assert f"  picked    {picked} of 2 by prefix_aware; next best " in said
        assert "  came      first token after " in said
        assert "  promise   met\n" in said
        assert f"> {picked}" in said
        assert (await typed(home)) == (0, said)
        code, told = await typed(home, "--json")
        assert json.loads(told)["pick"]["endpoint"] == picked


async def test_a_refusal_and_an_unknown_id_are_told_too() -> None:
    async with gateway_fleet(1) as home:
        home.groups[0].faults.set("5xx")
        answer = await home.ask()
        code, said = await typed(home, id_of(answer))
        assert code == 0
        assert f"{answer.status} refused" in said
        code, said = await typed(home, "req_of_another_day")
        assert (code, "req_of_another_day: no such request" in said) == (1, True)
