"""Tests of the message hub between workers: a slow worker loses messages, but delays no other.

Lost messages are counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from gateway.peers.bus_interface import BACKLOG_CAP_BYTES, FRAME_CAP_BYTES
from gateway.peers.local_bus import LocalBus, LocalHub
from tests.duration_limits import PATIENCE_S

SLOW, QUICK, TELLER = (bytes([number]) * 8 for number in (1, 2, 3))
FRAME = bytes(FRAME_CAP_BYTES)
FRAMES = 2 * BACKLOG_CAP_BYTES // len(FRAME)


async def test_a_client_that_does_not_read_loses_frames_and_the_others_get_all(
    tmp_path: Path,
) -> None:
    dropped = Counter[str]()
    heard: asyncio.Queue[int] = asyncio.Queue()
    hub = LocalHub(tmp_path / "hub", lambda reason: dropped.update([reason]))
    await hub.start()
    quick, teller = (
        LocalBus(tmp_path / "hub", lambda reason: dropped.update([reason])) for _ in range(2)
    )
    _, deaf = await asyncio.open_unix_connection(tmp_path / "hub")
    deaf.write(SLOW)
    await quick.start(QUICK, lambda frame, _: heard.put_nowait(len(frame)))
    await teller.start(TELLER, lambda frame, _: None)
    async with asyncio.timeout(PATIENCE_S):
        while not (quick.state(0.0).connected and teller.state(0.0).connected):
            await asyncio.sleep(0)
        for _ in range(FRAMES):
            teller.publish(FRAME)
            assert await heard.get() == len(FRAME)
    assert dropped.keys() == {"slow"}
    assert 0 < dropped["slow"] < FRAMES
    for bus in (quick, teller):
        await bus.stop()
    deaf.close()
    await hub.stop()
