"""Fixtures of the mock engine's tests: a running mock engine, and uvloop as event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import uvloop

from tests.e2e.mock_group import MockGroup, mock_group


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    # Use uvloop, as `penstock mock` does; its transports are stricter than asyncio's.
    return uvloop.EventLoopPolicy()


@pytest.fixture
async def group() -> AsyncIterator[MockGroup]:
    async with mock_group() as running:
        yield running
