"""The ZeroMQ sockets that receive one engine rank's KV events.

They need pyzmq, which the extra `events` installs. A thread of ZeroMQ receives messages into
bounded queues, without the interpreter lock. drain() handles the messages in these queues and never
waits.
"""

from __future__ import annotations

from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from gateway.fleet.kv_events.event_decoder import MAX_BATCH_BYTES
from gateway.fleet.kv_events.rank_event_stream import EventSource
from gateway.fleet.kv_events.zmq_addresses import SourceAddress

MAX_QUEUED = 10_000
"""Maximum number of messages that ZeroMQ queues; it drops further ones, which then appear as a
gap.
"""

HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 1000, 3000
RECONNECT_MS, MAX_RECONNECT_MS = 100, 2000
_END_OF_REPLAY = b"\xff" * 8


class Subscription:
    """The ZeroMQ sockets to one engine rank, for the rank's EventSource.

    It passes received messages and lost connections to the source, and sends replay requests.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: SourceAddress, source: EventSource
    ) -> None:
        self.address, self.source = address, source
        self._context = context
        self._subscriber = self._connectable(zmq.SUB)
        self._subscriber.subscribe(address.topic)
        self._monitor = self._subscriber.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._replayer: zmq.Socket[bytes] | None = None
        try:
            self._subscriber.connect(address.events)
        except zmq.ZMQError:
            self.close()
            raise

    def _connectable(self, kind: int) -> zmq.Socket[bytes]:
        # Return a new socket that reconnects by itself and notices a silent loss in 3 s.
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.rcvhwm = MAX_QUEUED
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        socket.setsockopt(zmq.IPV6, 1)
        return socket

    def drain(self, clock: Callable[[], float], ends: float) -> bool:
        """Handle the messages in the receive queues, until the monotonic time `ends` at the latest.

        Returns whether more messages may be waiting.
        """
        source, now = self.source, clock()
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                source.on_connected(now)
            else:
                source.on_disconnected()
                self._end_replay()
        self._request_replay()
        while self._replayer is not None and self._replayer.poll(0):
            self._on_replay_frames(self._replayer.recv_multipart(zmq.NOBLOCK), clock())
            self._request_replay()
            if clock() > ends:
                return True
        while self._subscriber.poll(0):
            frames = self._subscriber.recv_multipart(zmq.NOBLOCK)
            if len(frames) == 3 and len(frames[1]) == 8:
                source.on_message(int.from_bytes(frames[1], "big"), frames[2], clock())
            if clock() > ends:
                return True
        self._request_replay()
        return False

    def _request_replay(self) -> None:
        # Ask for a replay if the source wants one, on a new socket: old answers are dropped.
        start, self.source.replay_from = self.source.replay_from, None
        if start is None:
            return
        self._end_replay()
        try:
            self._replayer = self._connectable(zmq.DEALER)
            self._replayer.connect(self.address.replay)
            self._replayer.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._end_replay()
            self.source.fail(f"cannot ask {self.address.replay} for a replay: {error}")

    def _on_replay_frames(self, frames: list[bytes], now: float) -> None:
        if len(frames) != 4:
            return
        if frames[2] == _END_OF_REPLAY:
            self._end_replay()
            self.source.on_replay_end(now)
        elif len(frames[2]) == 8:
            self.source.on_replayed(int.from_bytes(frames[2], "big"), frames[3], now)

    def _end_replay(self) -> None:
        if self._replayer is not None:
            self._replayer.close()
            self._replayer = None

    def close(self) -> None:
        self._end_replay()
        self._subscriber.disable_monitor()
        self._monitor.close()
        self._subscriber.close()
