"""KV benchmark: NIXL 1.5.1 with UCX and prepared descriptor lists, as vLLM uses it.

Settings: op (READ or WRITE), progress (True to use NIXL's progress thread). The environment
variables UCX_TLS and UCX_NET_DEVICES select the network.

Without a progress thread, the process that does not start transfers must poll for notifications. An
engine does so between its steps. Here the process polls continuously, which is the fastest way.
"""

from __future__ import annotations

import base64
import threading
from typing import Any

import numpy as np
from block_memory import Bytes, Draw


class Nixl:
    """One end of the benchmark's transfers by NIXL, configured as vLLM configures it.

    The process that starts transfers has one handle for all blocks, or one per block.
    """

    def __init__(self, role: str, pool_bytes: int, settings: dict[str, Any]) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.op = settings["op"]
        self.initiates = role == ("source" if self.op == "WRITE" else "sink")
        self.progress = settings["progress"]
        self.agent = nixl_agent(
            role, nixl_agent_config(enable_prog_thread=self.progress, backends=["UCX"])
        )
        self.pool: Bytes = np.zeros(pool_bytes, np.uint8)
        self.base = self.pool.ctypes.data
        self.registered = self.agent.register_memory([(self.base, pool_bytes, 0, "")], "DRAM")
        self.peer = ""
        self.peer_base = 0
        self.handles: list[Any] = []
        self.lists: list[Any] = []
        self.thread: threading.Thread | None = None
        self.expected = 0

    def address(self) -> dict[str, Any]:
        return {
            "metadata": base64.b64encode(self.agent.get_agent_metadata()).decode(),
            "base": self.base,
        }

    def connect(self, peer: dict[str, Any]) -> None:
        self.peer = self.agent.add_remote_agent(base64.b64decode(peer["metadata"]))
        if isinstance(self.peer, bytes):
            self.peer = self.peer.decode()
        self.peer_base = peer["base"]

    def prepare(self, drawn: Draw, each: bool) -> None:
        self.expected = len(drawn.src) if each else 1
        if not self.initiates:
            return
        for handle in self.handles:
            self.agent.release_xfer_handle(handle)
        mine, theirs = (drawn.src, drawn.dst) if self.op == "WRITE" else (drawn.dst, drawn.src)
        self.lists = [
            self.agent.prep_xfer_dlist("", self._slots(self.base, drawn.block_bytes), "DRAM"),
            self.agent.prep_xfer_dlist(
                self.peer, self._slots(self.peer_base, drawn.block_bytes), "DRAM"
            ),
        ]
        parts = [slice(i, i + 1) for i in range(len(mine))] if each else [slice(None)]
        self.handles = [self._handle(mine[part], theirs[part]) for part in parts]

    def _slots(self, base: int, block_bytes: int) -> np.ndarray:
        count = len(self.pool) // block_bytes
        slots = np.zeros((count, 3), np.uint64)
        slots[:, 0] = base + np.arange(count, dtype=np.uint64) * np.uint64(block_bytes)
        slots[:, 1] = block_bytes
        return slots

    def _handle(self, mine: np.ndarray, theirs: np.ndarray) -> Any:
        ours, far = self.lists
        return self.agent.make_prepped_xfer(
            self.op, ours, mine.astype(np.int32), far, theirs.astype(np.int32), notif_msg=b"done"
        )

    def begin(self) -> None:
        if not self.initiates:
            self.thread = threading.Thread(target=self._poll_notifications, daemon=True)
            self.thread.start()

    def _poll_notifications(self) -> None:
        received = 0
        while received < self.expected:
            received += sum(map(len, self.agent.get_new_notifs().values()))

    def finish(self) -> None:
        if self.thread is not None:
            self.thread.join()

    def run(self) -> None:
        self.post(0)

    def post(self, index: int) -> None:
        handle, agent = self.handles[index], self.agent
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL's transfer ended in the state {state} instead of DONE")


def open_side(role: str, pool_bytes: int, settings: dict[str, Any]) -> Nixl:
    return Nixl(role, pool_bytes, settings)
