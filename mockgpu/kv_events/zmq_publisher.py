"""Publishes an engine's KV events over ZeroMQ, and sends missed events again on request.

- A PUB socket sends `[topic, number (8 bytes, big-endian), payload]`.
- A ROUTER socket receives `[empty, first number]`. It answers with `[empty, topic, number,
  payload]` for each message from that number on, and ends with the number -1.

Requires pyzmq (the extra `events`).
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import zmq

from mockgpu.fault_grammar import FaultKind
from mockgpu.kv_events.numbered_event_batches import KvEventSpec, KvEventStream
from mockgpu.scheduler import Scheduler

POLL_S = 0.02
END_NUMBER = b"\xff" * 8


class KvPublisher:
    """Publishes one engine's KV events on a ZeroMQ socket, and repeats missed ones on another."""

    def __init__(
        self,
        spec: KvEventSpec,
        scheduler: Scheduler,
        loop: asyncio.AbstractEventLoop,
        host: str,
    ) -> None:
        # Bind the event socket and the replay socket. Raises OSError if a port is taken.
        self.stream = KvEventStream(spec, scheduler.pool.block_tokens, _never)
        self._spec, self._scheduler, self._loop = spec, scheduler, loop
        self._topic = spec.topic.encode()
        self._host = host
        self._context = zmq.Context()
        self.port, self.replay_port = spec.port, spec.replay_port
        self._sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]] | None = None
        self._open()
        scheduler.on_shared = self.stream.on_stored
        scheduler.pool.on_evicted = self.stream.on_removed
        scheduler.pool.on_cleared = self.stream.on_cleared
        self._timer = loop.call_later(POLL_S, self._poll)

    def _open(self) -> None:
        # Bind both sockets. Raises OSError if a port is taken.
        publisher, router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        try:
            self.port = _bind(publisher, self._host, self.port)
            self.replay_port = _bind(router, self._host, self.replay_port)
        except OSError:
            publisher.close(linger=0)
            router.close(linger=0)
            raise
        self._sockets = publisher, router

    def restart(self) -> None:
        """Close all connections, and restart the numbers of messages at 0, like a new process."""
        self.stream.restart()
        for socket in self._sockets or ():
            socket.close(linger=0)
        self._sockets = None

    def flush(self) -> None:
        """Publish the KV events recorded since the last call, as one message."""
        if self.stream.has_events and self.stream.delivery.strikes(FaultKind.EVENTS_RESTARTED):
            self._scheduler.pool.clear_prefix_cache()
            self.restart()
        messages = self.stream.flush(time.time(), self._loop.time())
        if self._sockets is not None:
            for number, payload in messages:
                message = [self._topic, number.to_bytes(8, "big"), payload]
                self._sockets[0].send_multipart(message, zmq.NOBLOCK)

    def hashes(self) -> list[int]:
        """Return the hashes of all blocks in the prefix cache, as KV events contain them."""
        return [self.stream.hash_of(key) for key in self._scheduler.pool.cached_keys()]

    def describe(self) -> dict[str, Any]:
        """Return how KV events are published, in the format of vLLM's /kv_event_sources."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
            "buffer_steps": self._spec.buffer_steps,
            "topic": self._spec.topic,
        }

    def describe_as_sglang(self) -> dict[str, Any]:
        """Return how KV events are published, in the format of SGLang's /server_info."""
        return {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": self.port,
            "replay_endpoint_port_base": self.replay_port,
            "topic": self._spec.topic,
            "block_size": self._scheduler.pool.block_tokens,
            "dp_size": 1,
        }

    def _poll(self) -> None:
        self._timer = self._loop.call_later(POLL_S, self._poll)
        if self._sockets is None:
            with suppress(OSError):  # the old sockets may not have left their ports yet
                self._open()
        self.flush()
        if self._sockets is None:
            return
        router = self._sockets[1]
        while router.poll(0):
            frames = router.recv_multipart(zmq.NOBLOCK)
            if len(frames) == 3 and len(frames[2]) == 8:
                self._replay(router, frames[0], int.from_bytes(frames[2], "big"))

    def _replay(self, router: zmq.Socket[bytes], peer: bytes, start: int) -> None:
        for number, payload in self.stream.replay(start):
            router.send_multipart([peer, b"", self._topic, number.to_bytes(8, "big"), payload])
        router.send_multipart([peer, b"", b"", END_NUMBER, b""])

    def close(self) -> None:
        self._timer.cancel()
        self._context.destroy(linger=0)


def _never(kind: FaultKind) -> bool:
    return False


def _bind(socket: zmq.Socket[bytes], host: str, port: int) -> int:
    # Bind a ZeroMQ socket and return its port. Raises OSError if the port is taken.
    socket.sndhwm = 0
    if not port:
        return socket.bind_to_random_port(f"tcp://{host}")
    try:
        socket.bind(f"tcp://{host}:{port}")
    except zmq.ZMQError as error:
        raise OSError(
            error.errno, f"cannot listen on port {port} for KV events: {error.strerror}"
        ) from None
    return port
