"""Tests of the live page in a browser: engines, a failed engine, draining, no external requests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any, Literal

import msgspec
import pytest
from playwright.async_api import Browser, Page, expect

from tests.chaos.gateway_fleet import GatewayFleet, gateway_fleet
from tests.e2e.split_fleet import SENTENCE, SplitFleet, split_fleet
from tests.web.conftest import SHOTS

SEEN_WITHIN_S = 2.0
COLOUR = "getComputedStyle(document.documentElement).getPropertyValue('--{}').trim()"


@asynccontextmanager
async def opened(
    browser: Browser,
    fleet: GatewayFleet | SplitFleet,
    scheme: Literal["light", "dark"] = "light",
    width: int = 1440,
) -> AsyncIterator[Page]:
    # Open the live page and yield it once it has drawn a frame.
    #
    # The test fails if the page logs an error or sends a request to another server.
    context = await browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme
    )
    page = await context.new_page()
    complaints: list[str] = []
    page.on(
        "console",
        lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None,
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    elsewhere: list[str] = []
    page.on(
        "request",
        lambda asked: (
            None if asked.url.startswith(fleet.app.admin_url) else elsewhere.append(asked.url)
        ),
    )
    await page.goto(fleet.app.admin_url + "/")
    await expect(page.locator("#rows tr")).to_have_count(len(fleet.app.gateway.endpoints.all()))
    try:
        yield page
    finally:
        await context.close()
    assert (complaints, elsewhere) == ([], [])


async def busy(fleet: GatewayFleet, requests: int = 24) -> None:
    await asyncio.gather(
        *(fleet.ask(prompt=f"question {at % 4} " * 80, tokens=48) for at in range(requests))
    )


async def test_the_fleet_its_numbers_and_its_configuration_are_shown(browser: Browser) -> None:
    async with (
        gateway_fleet(4, speed=2.0, pool={"policy": "prefix_aware"}) as fleet,
        opened(browser, fleet) as page,
    ):
        await busy(fleet)
        await expect(page.locator("#summary")).to_have_text("4 of 4 groups serve, configuration v1")
        await expect(page.locator("#totals")).to_contain_text("SLO met100 %of 24 requests")
        await expect(page.locator("#why")).to_contain_text("all is well")
        await expect(page.locator("#slo")).to_contain_text("standard")
        await expect(page.locator("#versions")).to_contain_text("v1 in force")
        await expect(page.locator("#chart-traffic canvas")).to_have_count(1)
        await page.fill("#filter", fleet.groups[2].url.rpartition(":")[2])
        await expect(page.locator("#rows tr")).to_have_count(1)


async def test_one_who_leaves_keeps_its_row_beside_the_one_that_has_its_name(
    browser: Browser,
) -> None:
    async with gateway_fleet(2) as fleet, opened(browser, fleet) as page:
        old, new = fleet.app.gateway.endpoints.all()
        new.endpoint = msgspec.structs.replace(new.endpoint, name=old.endpoint.name)
        old.is_leaving = True
        await expect(page.locator("#rows")).to_contain_text("leaving")
        await expect(page.locator("#rows tr")).to_have_count(2)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_killed_group_shows_within_two_seconds(browser: Browser, scheme: Any) -> None:
    async with gateway_fleet(4, speed=2.0) as fleet, opened(browser, fleet, scheme) as page:
        await busy(fleet)
        fleet.groups[1].faults.apply("refuse")
        killed = monotonic()
        await expect(page.locator("#rows tr").first).to_have_class("s-bad", timeout=5000)
        assert monotonic() - killed < SEEN_WITHIN_S
        await expect(page.locator("#rows tr").first).to_contain_text("ejected")
        await expect(page.locator("#why li").first).to_contain_text("it accepts no connections")
        await expect(page.locator("#summary")).to_contain_text("3 of 4 groups serve")
        await expect(page).to_have_title("(1 out) Penstock")
        await page.screenshot(path=SHOTS / f"killed-{scheme}.png", full_page=True)
        fleet.groups[1].faults.apply("")
        await expect(page.locator("#rows tr.s-bad")).to_have_count(0, timeout=15_000)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_flow_of_kv_between_groups_is_shown_with_its_bytes(
    browser: Browser, scheme: Any
) -> None:
    quick = {"scrape": {"interval": "100ms"}, "health": {"interval": "100ms", "timeout": "5s"}}
    async with split_fleet("vllm_nixl", **quick) as fleet, opened(browser, fleet, scheme) as page:
        for number in range(12):
            await fleet.assert_right_answer(
                {"prompt": f"{number} " + SENTENCE * 60, "max_tokens": 4}
            )
        await expect(page.locator("#flow-note")).to_contain_text(
            re.compile(r"handoffs/s, 0 under way, .*B/s by")
        )
        await expect(page.locator("#matrix td").first).to_contain_text(
            re.compile(r"[1-9][0-9.]*/s .*[kM]B/s p95")
        )
        await expect(page.locator("#flow path")).to_have_count(4)
        await page.locator("#flow-panel").screenshot(path=SHOTS / f"flow-{scheme}.png")
        await page.screenshot(path=SHOTS / f"split-{scheme}.png", full_page=True)


async def test_nobody_can_change_anything_before_saying_so_and_a_wrong_key_changes_nothing(
    browser: Browser,
) -> None:
    async with (
        gateway_fleet(2, admin={"key": "an-admin-key"}) as fleet,
        opened_with_refusals(browser, fleet) as page,
    ):
        button = page.locator("#rows tr").first.get_by_role("button")
        await expect(button).to_be_hidden()
        await unlock(page, "wrong")
        await button.click()
        await expect(page.locator("#toast")).to_contain_text("changes need the key of admin.key")
        await page.click("#operate")
        await expect(button).to_be_hidden()
        await unlock(page, "an-admin-key")
        await button.click()
        await expect(page.locator("#rows tr").first).to_contain_text("drained")
        await expect(button).to_have_text("Bring back")
        await button.click()
        await expect(page.locator("#rows tr").first).to_contain_text("up")


@asynccontextmanager
async def opened_with_refusals(browser: Browser, fleet: GatewayFleet) -> AsyncIterator[Page]:
    page = await browser.new_page()
    await page.goto(fleet.app.admin_url + "/")
    yield page
    await page.close()


async def unlock(page: Page, key: str) -> None:
    await page.click("#operate")
    await page.fill("#key", key)
    await page.locator("#dialog").get_by_role("button", name="Operate").click()
    await expect(page.locator("#operate")).to_have_text("Only look")


async def test_a_script_that_is_put_into_the_page_does_not_run(browser: Browser) -> None:
    async with gateway_fleet(1) as fleet, opened_with_refusals(browser, fleet) as page:
        await page.evaluate("""() => {
                const script = document.createElement("script");
                script.textContent = "window.owned = 1";
                document.body.append(script);
            }""")
        assert await page.evaluate("window.owned") is None


async def test_a_narrow_screen_scrolls_tables_and_never_the_page(browser: Browser) -> None:
    async with gateway_fleet(3) as fleet, opened(browser, fleet, width=400) as page:
        await expect(page.locator("#totals div")).to_have_count(11)
        assert await page.evaluate("document.documentElement.scrollWidth") == 400
        await page.screenshot(path=SHOTS / "narrow.png", full_page=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_words_stand_out_from_what_is_behind_them(browser: Browser, scheme: Any) -> None:
    async with gateway_fleet(1) as fleet, opened(browser, fleet, scheme) as page:
        for ink, paper in (
            ("ink", "card"),
            ("soft", "card"),
            ("soft", "paper"),
            ("bad", "card"),
            ("warn", "card"),
            ("ink", "bad-soft"),
        ):
            pair = [await page.evaluate(COLOUR.format(name)) for name in (ink, paper)]
            assert contrast(*pair) >= 4.5, (scheme, ink, paper, contrast(*pair))


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted(map(luminance, (one, other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    parts = [int(part, 16) / 255 for part in re.findall("[0-9a-f]{2}", colour.lower())]
    red, green, blue = (
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


async def test_every_control_has_a_name_and_every_table_its_headings(browser: Browser) -> None:
    async with gateway_fleet(1) as fleet, opened(browser, fleet) as page:
        unnamed = await page.evaluate("""[...document.querySelectorAll("input, button")].filter(
                (each) => !each.labels?.length && !each.textContent.trim() && !each.ariaLabel).length""")
        assert unnamed == 0
        assert await page.evaluate("[...document.querySelectorAll('th')].every(e => e.scope)")


async def test_a_page_whose_gateway_has_gone_says_that_it_is_old(browser: Browser) -> None:
    async with gateway_fleet(1) as fleet, opened_with_refusals(browser, fleet) as page:
        await expect(page.locator("#summary")).to_contain_text("1 of 1 groups serve")
        await fleet.app.stop()
        await expect(page.locator("#summary")).to_contain_text(
            "what you see is old", timeout=10_000
        )
