"""Tests of the live page in a browser: charts, sorting, recent requests, no injected markup."""

from __future__ import annotations

import re

import msgspec
import pytest
from playwright.async_api import Browser, Locator, Page, expect

from gateway.protocol import api_table
from gateway.protocol.response.usage_and_error_search import TokenUsage
from gateway.request_record import Exchange
from tests.chaos.gateway_fleet import GatewayFleet, gateway_fleet
from tests.web.conftest import SHOTS
from tests.web.test_live_page import busy, opened

MARKUP = "<img src=x onerror=window.owned=1>"
BOUNDS = "(rows) => import('/web/charts.js').then((module) => module.bounds(rows, true))"
CLIPPED = """[...document.querySelectorAll("#why, #why li")].filter(
    (each) => each.scrollHeight > each.clientHeight + 1 || each.scrollWidth > each.clientWidth + 1).length"""


def name_of(fleet: GatewayFleet, number: int) -> str:
    return fleet.app.gateway.endpoints.all()[number].endpoint.name


def rename(fleet: GatewayFleet, number: int, name: str) -> None:
    live = fleet.app.gateway.endpoints.all()[number]
    live.endpoint = msgspec.structs.replace(live.endpoint, name=name)


async def test_charts_have_a_legend_and_show_time_and_values_under_the_pointer(
    browser: Browser,
) -> None:
    async with gateway_fleet(2, speed=2.0) as fleet, opened(browser, fleet) as page:
        await busy(fleet)
        legend, chart = page.locator("#chart-ttft-legend"), page.locator("#chart-ttft")
        await expect(legend).to_have_text(re.compile(r"TTFT p95 [0-9.]+ m?s.*budget 5\.00 s.*now"))
        await expect(page.locator("#chart-traffic-legend")).to_have_text(
            re.compile(r"requests [0-9.]+/s.*refused 0\.0/s.*failed 0\.0/s.*now")
        )
        box = await chart.bounding_box()
        assert box is not None
        await chart.hover(position={"x": box["width"] - 25, "y": 60})
        await expect(legend).to_have_text(re.compile(r"\d\d:\d\d:\d\d, \d+ s ago"))
        await page.mouse.move(1, 1)
        await expect(legend).to_have_text(re.compile("now"))
        await chart.focus()
        await page.keyboard.press("ArrowLeft")
        await expect(page.locator("#chart-said")).to_have_text(
            re.compile(r"budget 5\.00 s.*\d+ s ago")
        )
        await page.keyboard.press("Escape")
        await expect(legend).to_have_text(re.compile("now"))


async def test_the_budget_and_all_values_lie_inside_of_the_axis(browser: Browser) -> None:
    charts: list[list[list[float | None]]] = [
        [[None, None], [5, 5]],
        [[0.03, 0.05], [5, 5]],
        [[30.0, 120.0], [0.2, 0.2]],
        [[5.0], [5.0]],
        [[1e-5, None], [60.0, 60.0]],
    ]
    async with gateway_fleet(1) as fleet, opened(browser, fleet) as page:
        for rows in charts:
            low, high = await page.evaluate(BOUNDS, rows)
            values = [value for row in rows for value in row if value is not None]
            assert 0 < low < min(values) <= max(values) < high


async def test_broken_groups_come_first_and_every_column_sorts_by_pointer_and_keyboard(
    browser: Browser,
) -> None:
    async with gateway_fleet(4) as fleet, opened(browser, fleet) as page:
        await busy(fleet)
        fleet.groups[2].faults.apply("refuse")
        fleet.app.gateway.endpoints.set_drained(fleet.app.gateway.endpoints.all()[3], True)
        broken, drained = name_of(fleet, 2), name_of(fleet, 3)
        names = page.locator("#rows th")
        await expect(page.locator("#rows tr.s-bad")).to_have_count(1)
        await expect(names).to_have_text([broken, drained, name_of(fleet, 0), name_of(fleet, 1)])
        await expect(heading(page, "state")).to_have_attribute("aria-sort", "descending")
        for column in await page.locator("#fleet th[data-sort]").all():
            await column.get_by_role("button").click()
            await expect(column).to_have_attribute("aria-sort", re.compile("ascending|descending"))
            assert await page.locator("#fleet th[aria-sort$=cending]").count() == 1
        await heading(page, "name").get_by_role("button").focus()
        await page.keyboard.press("Enter")
        await expect(heading(page, "name")).to_have_attribute("aria-sort", "ascending")
        everyone = sorted(
            (name_of(fleet, number) for number in range(4)),
            key=lambda name: int(name.split(":")[-1]),
        )
        await expect(names).to_have_text(everyone)
        await page.keyboard.press("Enter")
        await expect(names).to_have_text(everyone[::-1])
        await page.wait_for_timeout(1200)  # several frames arrive; the order must not change
        await expect(names).to_have_text(everyone[::-1])
        await page.reload()
        await expect(heading(page, "name")).to_have_attribute("aria-sort", "descending")
        await expect(names).to_have_text(everyone[::-1])


def heading(page: Page, column: str) -> Locator:
    return page.locator(f"#fleet th[data-sort={column}]")


async def test_recent_requests_are_listed_and_a_click_shows_why_one_went_where_it_went(
    browser: Browser,
) -> None:
    async with (
        gateway_fleet(2, pool={"policy": "prefix_aware"}) as fleet,
        opened(browser, fleet) as page,
    ):
        await expect(page.locator("#requests-empty")).to_have_text("No request has ended yet.")
        await busy(fleet, 6)
        rows = page.locator("#requests tr")
        await expect(rows).to_have_count(6)
        await expect(rows.first).to_contain_text(
            re.compile(r"\d\d:\d\d:\d\d.*demo-8b.*200 served.* m?s.* tok.*req_")
        )
        await rows.first.get_by_role("button").focus()
        await page.keyboard.press("Enter")
        dialog = page.locator("#explain")
        await expect(dialog).to_be_visible()
        await expect(dialog).to_contain_text(
            re.compile("Picked.*of 2 candidates by prefix_aware.*TTFT.*Candidate")
        )
        await expect(dialog.locator("tr.chosen")).to_have_count(1)
        await page.screenshot(path=SHOTS / "explain.png")
        await page.keyboard.press("Escape")
        await expect(dialog).to_be_hidden()
        fleet.groups[0].faults.apply("refuse")
        fleet.groups[1].faults.apply("refuse")
        await fleet.ask()
        await page.check("#problems")
        await expect(rows).to_have_count(1)
        await expect(rows.first).to_have_class("s-bad")
        await rows.first.click()
        await expect(dialog).to_contain_text("refused")


async def test_markup_in_names_is_shown_as_text_and_never_runs(browser: Browser) -> None:
    async with (
        gateway_fleet(2, pool={"policy": "prefix_aware"}) as fleet,
        opened(browser, fleet) as page,
    ):
        rename(fleet, 0, MARKUP)
        for _ in range(4):
            await fleet.ask()
        x = Exchange("req_markup", api_table.CHAT, "127.0.0.1", 0.0)
        x.model = x.tenant = x.detail = x.reason = MARKUP
        x.outcome, x.status, x.retries = "refused", 503, [MARKUP]
        fleet.app.gateway.accounts.recent_exchanges.add(x, TokenUsage(), 0, 1.0)
        fleet.groups[0].faults.apply("refuse")
        await expect(page.locator("#rows")).to_contain_text(MARKUP)
        await expect(page.locator("#map")).to_contain_text(MARKUP)
        await expect(page.locator("#why")).to_contain_text(f"{MARKUP} is out")
        await expect(page.locator("#requests")).to_contain_text(MARKUP)
        await page.locator("#requests tr", has_text="req_markup").get_by_role("button").click()
        await expect(page.locator("#explain")).to_contain_text(MARKUP)
        assert await page.locator("img:not(h1 img)").count() == 0
        assert await page.evaluate("window.owned") is None


@pytest.mark.parametrize("width", [400, 1280])
async def test_reasons_wrap_and_are_never_clipped(browser: Browser, width: int) -> None:
    async with gateway_fleet(12) as fleet, opened(browser, fleet, width=width) as page:
        for number, group in enumerate(fleet.groups):
            rename(
                fleet,
                number,
                f"group-{number}-with-a-name-that-has-no-place-to-break-it-in-two-{number}" * 2,
            )
            group.faults.apply("refuse")
        await expect(page.locator("#why li")).to_have_count(8, timeout=10_000)
        await expect(page.locator("#why li").last).to_contain_text("more: group-")
        assert await page.evaluate(CLIPPED) == 0
        assert await page.evaluate("document.documentElement.scrollWidth") == width


async def test_values_in_the_table_and_the_tiles_have_their_units(browser: Browser) -> None:
    async with gateway_fleet(1, speed=2.0) as fleet, opened(browser, fleet) as page:
        await busy(fleet, 8)
        await expect(page.locator("#rows td.num").nth(3)).to_have_text(re.compile(r"\d m?s"))
        for cell in await page.locator("#rows td.num").all_inner_texts():
            assert re.fullmatch(r"–|[0-9.k]+ (req|tok|%|ms|s)", cell), cell
        for tile in await page.locator("#totals dd").all_inner_texts():
            assert re.match(
                r"–|[0-9.k]+ (req/s|tok/s|req|%|ms|s)(?= |$)", tile.replace("\n", " ")
            ), tile
