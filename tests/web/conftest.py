"""Fixtures for the live page in a real browser: headless Chromium, controlled by playwright.

`make web` runs these tests.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, async_playwright

SHOTS = Path(__file__).parents[2] / "build" / "web"
FLAGS = [
    *("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    found = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    assert found, "make web needs Chromium: apt-get install chromium"
    SHOTS.mkdir(parents=True, exist_ok=True)
    alone = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses its sandbox to root
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(executable_path=found, args=[*FLAGS, *alone])
        yield started
        await started.close()
