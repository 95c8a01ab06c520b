"""Runs an asyncio server in its own thread, for blocking callers such as SDKs and tests."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

HOST = "127.0.0.1"
PATIENCE_S = 5.0

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextmanager
def threaded_server(
    serve: Serve, port: int = 0, context: ssl.SSLContext | None = None
) -> Iterator[int]:
    """Serve connections on 127.0.0.1 in a thread during a `with` block, and yield the port.

    port     port to listen on; 0 chooses a free one
    context  if given, the server uses TLS

    At the end of the block, open connections are cancelled.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    starting = asyncio.start_server(serve, HOST, port, ssl=context)
    server = asyncio.run_coroutine_threadsafe(starting, loop).result(PATIENCE_S)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result(PATIENCE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
        loop.close()


async def _end(server: asyncio.Server) -> None:
    server.close()
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
