"""Helpers for tests of two KV transfer agents: memory layouts, time limits, and invalid fetches."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np

from kvtransfer.layout.kv_layout import KvLayout
from kvtransfer.protocol.outcomes import EndReason, OutcomeKind
from tests.contract.kvtransfer.groups import SMALL, Group
from tests.contract.kvtransfer.links import PATIENCE_S


def shaped(layout: KvLayout = SMALL, **changes: object) -> KvLayout:
    return msgspec.structs.replace(layout, **changes)


async def soon(awaitable):  # type: ignore[no-untyped-def]
    return await asyncio.wait_for(awaitable, PATIENCE_S)


async def refused(
    source: Group, sink: Group, name: str, ticket: str | None, tokens: int = 16
) -> EndReason:
    # Fetch KV that the source must refuse, and return the reason.
    #
    # Asserts that no memory of the sink has changed.
    before = sink.snapshot()
    landing = sink.agent.fetch(
        source.agent.address, name, [1, 2], tokens, ticket=ticket, timeout_s=PATIENCE_S
    )
    end = await asyncio.wait_for(landing.wait_ended(), 2 * PATIENCE_S)
    assert end.kind in (OutcomeKind.FAILED, OutcomeKind.EXPIRED)
    assert end.n_bytes == 0
    assert all(np.array_equal(was, now) for was, now in zip(before, sink.snapshot(), strict=True))
    return end.reason
