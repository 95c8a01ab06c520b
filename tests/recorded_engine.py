"""An engine on a free port that answers with recorded HTTP responses from a folder."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer

FOLDER = Path(__file__).parent / "data" / "engines"
PATHS: Mapping[str, str] = {
    "/health": "health",
    "/api/version": "version",
    "/v1/models": "models",
    "/metrics": "metrics",
    "/prometheus/metrics": "metrics",
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
    "/v1/embeddings": "embeddings",
    "/openapi.json": "openapi",
}
"""The beginning of the name of the file with a recorded response, by the path of the request.

For all other paths the name begins with `missing`.
"""


class RecordedEngine(ThreadingTCPServer):
    """Serves recorded responses from a folder, and keeps the requests that it received.

    prefix  path with which the path of each request must begin
    key     bearer token that each request must have; "" for none
    """

    allow_reuse_address, daemon_threads = True, True

    def __init__(self, name: str, prefix: str, key: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.prefix, self.key = FOLDER / name, prefix, key
        self.requests: list[tuple[str, bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{self.prefix}"

    def respond(self, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
        self.requests.append((path, body))
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            return b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n"
        name = PATHS.get(path.removeprefix(self.prefix)) if path.startswith(self.prefix) else None
        if name is not None and body and json.loads(body).get("stream"):
            name += "_stream"
        file = self.folder / f"{name}.http"
        return (file if file.exists() else self.folder / "missing.http").read_bytes()


class _Handler(StreamRequestHandler):
    def handle(self) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = self.rfile.readline()
            if not line:
                return
            head += line
        first, *lines = head.decode().split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines if line)
        }
        body = self.rfile.read(int(headers.get("content-length", 0)))
        assert isinstance(self.server, RecordedEngine)
        self.wfile.write(self.server.respond(first.split(" ")[1], headers, body))


@contextmanager
def recorded_engine(name: str, *, prefix: str = "", key: str = "") -> Iterator[RecordedEngine]:
    with RecordedEngine(name, prefix, key) as engine:
        thread = threading.Thread(target=engine.serve_forever, daemon=True)
        thread.start()
        try:
            yield engine
        finally:
            engine.shutdown()
            thread.join()
