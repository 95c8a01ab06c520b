"""The two ends of what NIXL moves: staging memory of one link, in slots. The source writes them, the sink owns them.

NIXL never hears of a KV block: deregistered memory can still be written over its UCX backend, so it gets none that is
ever anybody else's. Each end is one NIXL agent of one link; without it nothing of the link can be written any more.
Not here: when a slot is whose (nixl.py), or what lies in it.
"""

from __future__ import annotations

import importlib
import mmap
import os
import secrets
import struct
import threading
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.transports.base import TransportError

MOST_GRANT_BYTES = 16 << 10
MOST_STAGED_BYTES = 64 << 20
_PLACE = struct.Struct("<QII")  # address, slots, bytes of each
_GATE = threading.Lock()  # UCX sets itself up for the whole process with the first agent, and its teardown is as wide


def unavailable() -> str | None:
    """Why there is no NIXL here; None where there is."""
    try:
        importlib.import_module("nixl._api")
    except Exception as wrong:  # a wheel whose libraries do not load raises whatever its loader does
        return f"NIXL cannot be imported: {wrong}"
    if not os.environ.get("UCX_NET_DEVICES"):
        return "UCX_NET_DEVICES must name the interfaces on which UCX may listen: its own choice is all of them"
    return None


class _Staging:
    """A NIXL agent and its memory, for one thread at a time. Whatever NIXL complains of is raised as TransportError."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        api: Any = importlib.import_module("nixl._api")
        self.slots, self.slot_bytes = slots, slot_bytes
        self.memory: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, slots * slot_bytes), np.uint8)
        self.address: int = self.memory.__array_interface__["data"][0]
        self._handles: dict[int, Any] = {}
        try:
            with _GATE:
                # No thread of NIXL's own: what arrives is written while this end asks for it, and at no other time.
                config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
                self._agent: Any = api.nixl_agent(f"penstock-{secrets.token_hex(8)}", config)
                self._registered = self._agent.register_memory([(self.address, self.memory.size, 0, "")], "DRAM")
        except Exception as wrong:
            raise TransportError(f"no NIXL agent: {wrong}") from wrong

    def slot(self, number: int, n_bytes: int) -> NDArray[np.uint8]:
        return self.memory[number * self.slot_bytes :][:n_bytes]

    def close(self) -> None:
        """Nothing is read or written here once this returns: the agent's connections are closed with it."""
        with _GATE:
            while self._handles:
                with suppress(Exception):  # one that cannot be cancelled ends with the agent
                    self._agent.release_xfer_handle(self._handles.popitem()[1])
            with suppress(Exception):
                self._agent.deregister_memory(self._registered)
            self._agent = self._registered = None
        self.memory = np.empty(0, np.uint8)


class Arena(_Staging):
    """The sink's: granted to one peer for the link's life.

    posted   slot of each write under way, by its number
    """

    def __init__(self, slots: int, slot_bytes: int) -> None:
        super().__init__(slots, slot_bytes)
        self.posted: dict[int, int] = {}
        self._told: set[int] = set()
        try:
            self.grant = _PLACE.pack(self.address, slots, slot_bytes) + self._agent.get_agent_metadata()
        except Exception as wrong:
            raise TransportError(f"NIXL has no metadata: {wrong}") from wrong

    def post(self, number: int, slot: int) -> None:
        """The peer has begun to write. TransportError for a slot that it does not have, or is writing already."""
        if slot >= self.slots or number in self.posted or slot in self.posted.values():
            raise TransportError(f"slot {slot} is not the peer's to write")
        self.posted[number] = slot

    def progress(self) -> None:
        """Let NIXL write what has arrived, and hear of what is complete."""
        try:
            told = self._agent.get_new_notifs()
        except Exception as wrong:
            raise TransportError(f"NIXL: {wrong}") from wrong
        self._told.update(int.from_bytes(each[:8], "little") for some in told.values() for each in some)
        if len(self._told) > self.slots:
            raise TransportError("more notifications than slots")

    def written(self, number: int) -> bool:
        """Whether NIXL says that all of it is here. It is asked again until then."""
        if number not in self._told:
            self.progress()
        return number in self._told

    def done(self, number: int) -> int:
        """Its slot."""
        self._told.discard(number)
        return self.posted.pop(number)


class Writer(_Staging):
    """The source's, for one peer's arena. `free`: slots that are ours to fill, here and there alike."""

    def __init__(self, grant: bytes) -> None:
        """TransportError for bytes that are no grant, or one of more memory than anybody needs."""
        if not _PLACE.size < len(grant) <= MOST_GRANT_BYTES:
            raise TransportError(f"{len(grant)} bytes are no grant")
        self._there, slots, slot_bytes = _PLACE.unpack_from(grant)
        if not 0 < slots * slot_bytes <= MOST_STAGED_BYTES:
            raise TransportError(f"{slots} slots of {slot_bytes} bytes are no staging memory")
        super().__init__(slots, slot_bytes)
        self.free = deque(range(slots))
        try:
            self._peer = self._agent.add_remote_agent(grant[_PLACE.size :])
        except Exception as wrong:
            self.close()
            raise TransportError(f"NIXL does not take the peer's metadata: {wrong}") from wrong

    def post(self, slot: int, n_bytes: int, number: int) -> None:
        """Begin to write the slot's first bytes into the peer's. A notification with `number` follows them."""
        here, there = (base + slot * self.slot_bytes for base in (self.address, self._there))
        agent = self._agent
        try:
            ours, theirs = (agent.get_xfer_descs([(at, n_bytes, 0)], "DRAM") for at in (here, there))
            handle = agent.initialize_xfer("WRITE", ours, theirs, self._peer, number.to_bytes(8, "little"))
            self._handles[number] = handle
            if agent.transfer(handle) == "ERR":
                raise TransportError("NIXL could not begin to write")
        except TransportError:
            raise
        except Exception as wrong:
            raise TransportError(f"NIXL: {wrong}") from wrong

    def done(self, number: int) -> bool:
        """Whether that write is over. TransportError if it failed."""
        try:
            state = self._agent.check_xfer_state(self._handles[number])
            if state == "DONE":
                self._agent.release_xfer_handle(self._handles.pop(number))
        except Exception as wrong:
            raise TransportError(f"NIXL: {wrong}") from wrong
        if state == "ERR":
            raise TransportError("NIXL could not write")
        return bool(state == "DONE")
