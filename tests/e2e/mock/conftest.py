"""Fixtures of the mock server tests: a running mock TP group, and the event loop of the command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import uvloop

from tests.e2e.mock_group import MockGroup, mock_group


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """Use uvloop, as the command does. Its transports are stricter than asyncio's."""
    return uvloop.EventLoopPolicy()


@pytest.fixture
async def group() -> AsyncIterator[MockGroup]:
    async with mock_group() as running:
        yield running
