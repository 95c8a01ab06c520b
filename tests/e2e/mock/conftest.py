"""What the tests of one mock TP group over real sockets share: the group, and the loop that the command runs on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import uvloop

from tests.e2e.mock_group import Mock, mock


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """uvloop, as in the command: its transports are stricter than asyncio's."""
    return uvloop.EventLoopPolicy()


@pytest.fixture
async def group() -> AsyncIterator[Mock]:
    async with mock() as running:
        yield running
