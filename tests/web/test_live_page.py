"""The live page in a browser: the fleet, a failed group, draining, no requests to other hosts."""

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

from tests.chaos.house import House, house
from tests.e2e.split_house import SENTENCE, SplitHouse, split_house
from tests.web.conftest import SCREENSHOTS

SHOWN_WITHIN_S = 2.0
COLOUR = "getComputedStyle(document.documentElement).getPropertyValue('--{}').trim()"


@asynccontextmanager
async def open_page(
    browser: Browser,
    home: House | SplitHouse,
    scheme: Literal["light", "dark"] = "light",
    width: int = 1440,
) -> AsyncIterator[Page]:
    """Open the page and yield it after its first frame.

    Fails on messages on the console, errors of scripts, and requests to other hosts.
    """
    context = await browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme
    )
    page = await context.new_page()
    complaints: list[str] = []
    page.on(
        "console",
        lambda message: (
            complaints.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    foreign: list[str] = []
    page.on(
        "request",
        lambda request: (
            None if request.url.startswith(home.app.admin_url) else foreign.append(request.url)
        ),
    )
    await page.goto(home.app.admin_url + "/")
    await expect(page.locator("#rows tr")).to_have_count(len(home.app.gateway.endpoints.all()))
    try:
        yield page
    finally:
        await context.close()
    assert (complaints, foreign) == ([], [])


async def send_requests(home: House, requests: int = 24) -> None:
    await asyncio.gather(
        *(home.ask(prompt=f"question {n % 4} " * 80, tokens=48) for n in range(requests))
    )


async def test_the_fleet_its_numbers_and_its_configuration_are_shown(browser: Browser) -> None:
    async with (
        house(4, speed=2.0, pool={"policy": "prefix_aware"}) as home,
        open_page(browser, home) as page,
    ):
        await send_requests(home)
        await expect(page.locator("#summary")).to_have_text("4 of 4 groups serve, configuration v1")
        await expect(page.locator("#totals")).to_contain_text("SLO met100 %of 24 requests")
        await expect(page.locator("#why")).to_contain_text("all is well")
        await expect(page.locator("#slo")).to_contain_text("standard")
        await expect(page.locator("#versions")).to_contain_text("v1 in force")
        await expect(page.locator("#chart-traffic canvas")).to_have_count(1)
        await page.fill("#filter", fleet.groups[2].url.rpartition(":")[2])
        await expect(page.locator("#rows tr")).to_have_count(1)


async def test_a_leaving_endpoint_keeps_its_row_next_to_its_namesake(
    browser: Browser,
) -> None:
    async with house(2) as home, open_page(browser, home) as page:
        old, new = home.app.gateway.endpoints.all()
        new.endpoint = msgspec.structs.replace(new.endpoint, name=old.endpoint.name)
        old.is_leaving = True
        await expect(page.locator("#rows")).to_contain_text("leaving")
        await expect(page.locator("#rows tr")).to_have_count(2)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_failed_group_is_shown_within_two_seconds(browser: Browser, scheme: Any) -> None:
    async with house(4, speed=2.0) as home, open_page(browser, home, scheme) as page:
        await send_requests(home)
        home.groups[1].faults.set("refuse")
        failed_at = monotonic()
        await expect(page.locator("#rows tr").first).to_have_class("s-bad", timeout=5000)
        assert monotonic() - failed_at < SHOWN_WITHIN_S
        await expect(page.locator("#rows tr").first).to_contain_text("ejected")
        await expect(page.locator("#why li").first).to_contain_text("it takes no connections")
        await expect(page.locator("#summary")).to_contain_text("3 of 4 groups serve")
        await expect(page).to_have_title("(1 out) Penstock")
        await page.screenshot(path=SCREENSHOTS / f"killed-{scheme}.png", full_page=True)
        home.groups[1].faults.set("")
        await expect(page.locator("#rows tr.s-bad")).to_have_count(0, timeout=15_000)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_flow_of_kv_between_groups_is_shown_with_its_bytes(
    browser: Browser, scheme: Any
) -> None:
    quick = {"scrape": {"interval": "100ms"}, "health": {"interval": "100ms", "timeout": "5s"}}
    async with split_house("vllm_nixl", **quick) as home, open_page(browser, home, scheme) as page:
        for number in range(12):
            await home.right({"prompt": f"{number} " + SENTENCE * 60, "max_tokens": 4})
        await expect(page.locator("#flow-note")).to_contain_text(
            re.compile(r"handoffs/s, 0 under way, .*B/s by")
        )
        await expect(page.locator("#matrix td").first).to_contain_text(
            re.compile(r"[1-9][0-9.]*/s .*[kM]B/s p95")
        )
        await expect(page.locator("#flow path")).to_have_count(4)
        await page.locator("#flow-panel").screenshot(path=SCREENSHOTS / f"flow-{scheme}.png")
        await page.screenshot(path=SCREENSHOTS / f"split-{scheme}.png", full_page=True)


async def test_changes_need_operating_mode_and_the_right_key(
    browser: Browser,
) -> None:
    async with (
        house(2, admin={"key": "an-admin-key"}) as home,
        open_unchecked(browser, home) as page,
    ):
        button = page.locator("#rows tr").first.get_by_role("button")
        await expect(button).to_be_hidden()
        await unlock(page, "wrong")
        await button.click()
        await expect(page.locator("#toast")).to_contain_text("changes need the key in admin.key")
        await page.click("#operate")
        await expect(button).to_be_hidden()
        await unlock(page, "an-admin-key")
        await button.click()
        await expect(page.locator("#rows tr").first).to_contain_text("drained")
        await expect(button).to_have_text("Bring back")
        await button.click()
        await expect(page.locator("#rows tr").first).to_contain_text("up")


@asynccontextmanager
async def open_unchecked(browser: Browser, home: House) -> AsyncIterator[Page]:
    """Open the page without the checks of opened(): browsers print every 401 on the console."""
    page = await browser.new_page()
    await page.goto(fleet.app.admin_url + "/")
    yield page
    await page.close()


async def unlock(page: Page, key: str) -> None:
    await page.click("#operate")
    await page.fill("#key", key)
    await page.locator("#dialog").get_by_role("button", name="Operate").click()
    await expect(page.locator("#operate")).to_have_text("Only look")


async def test_an_injected_script_does_not_run(browser: Browser) -> None:
    async with house(1) as home, open_unchecked(browser, home) as page:
        await page.evaluate(
            """() => {
                const script = document.createElement("script");
                script.textContent = "window.owned = 1";
                document.body.append(script);
            }""")
        assert await page.evaluate("window.owned") is None


async def test_on_a_narrow_screen_only_tables_scroll(browser: Browser) -> None:
    async with house(3) as home, open_page(browser, home, width=400) as page:
        await expect(page.locator("#totals div")).to_have_count(11)
        assert await page.evaluate("document.documentElement.scrollWidth") == 400
        await page.screenshot(path=SCREENSHOTS / "narrow.png", full_page=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_has_enough_contrast(browser: Browser, scheme: Any) -> None:
    async with house(1) as home, open_page(browser, home, scheme) as page:
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
    """Return the contrast ratio of two colours (#rrggbb) by WCAG 2."""
    lighter, darker = sorted(map(luminance, (one, other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    parts = [int(part, 16) / 255 for part in re.findall("[0-9a-f]{2}", colour.lower())]
    red, green, blue = (
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


async def test_every_control_has_a_name_and_every_table_its_headings(browser: Browser) -> None:
    async with house(1) as home, open_page(browser, home) as page:
        unnamed = await page.evaluate(
            """[...document.querySelectorAll("input, button")].filter(
                (control) => !control.labels?.length && !control.textContent.trim()
                    && !control.ariaLabel).length"""
        )
        assert unnamed == 0
        assert await page.evaluate("[...document.querySelectorAll('th')].every(e => e.scope)")


async def test_a_page_without_its_gateway_is_marked_as_outdated(browser: Browser) -> None:
    async with house(1) as home, open_unchecked(browser, home) as page:
        await expect(page.locator("#summary")).to_contain_text("1 of 1 groups serve")
        await home.app.stop()
        await expect(page.locator("#summary")).to_contain_text(
            "what you see is old", timeout=10_000
        )
