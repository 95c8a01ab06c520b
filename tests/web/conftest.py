"""A headless Chromium, driven by playwright, for tests of the live page (`make web`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, async_playwright

SCREENSHOTS = Path(__file__).parents[2] / "build" / "web"
FLAGS = [
    *("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    path = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    assert path, "make web needs Chromium: apt-get install chromium"
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # root cannot use Chromium's sandbox
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=path, args=[*FLAGS, *sandbox])
        yield chromium
        await chromium.close()
