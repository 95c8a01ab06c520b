"""Runs a local S3 server for tests, in a thread or as a process.

The server is moto. It serves one request at a time, so that its conditional writes are atomic as
those of S3. If PENSTOCK_TEST_WEED is the path of SeaweedFS's program, that server is used instead
in tests of the storage and of gateways.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.seaweed import seaweed

BUCKET = "penstock-test"
ROOT = Path(__file__).parents[1]
WEED = os.environ.get("PENSTOCK_TEST_WEED", "")
KEYS = {"AWS_ACCESS_KEY_ID": "test-id", "AWS_SECRET_ACCESS_KEY": "test-secret"}

Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class S3Server:
    """An S3 server for tests, which runs in a thread of this process.

    log    method, path, query and range of each request
    fault  function that gets each request and returns how it fails:

    - "lose": it is carried out, but the response is 500
    - "refuse": the response is 500 at once
    - "forbid": the response is 403
    - None: it does not fail
    """

    def __init__(self, port: int = 0) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.log: list[str] = []
        self.fault: Callable[[str], str | None] = lambda _: None
        app = DomainDispatcherApplication(create_backend_app)
        self._app: Wsgi = app  # type: ignore[assignment]
        self._server = make_server("127.0.0.1", port, self._serve)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def _serve(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        query = environ.get("QUERY_STRING", "")
        span = environ.get("HTTP_RANGE", "")
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{query} {span}".strip()
        self.log.append(request)
        fault = self.fault(request)
        if fault in ("refuse", "forbid"):
            # A connection that is closed with unread bytes of a request is reset.
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start("403 Forbidden" if fault == "forbid" else "500 Internal Server Error", [])
            return [b""]
        if fault == "lose":
            list(self._app(environ, lambda *_: lambda _: None))
            start("500 Internal Server Error", [])
            return [b""]
        return self._app(environ, start)

    def start(self) -> None:
        self._thread.start()
        urlopen(Request(f"{self.url}/{BUCKET}", method="PUT")).close()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def reset(self) -> None:
        """Delete all objects and unfinished uploads, but keep the bucket."""
        self.fault = lambda _: None
        urlopen(Request(f"{self.url}/moto-api/reset", method="POST")).close()
        urlopen(Request(f"{self.url}/{BUCKET}", method="PUT")).close()
        self.log.clear()


@contextmanager
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def s3_process(port: int = 0) -> Iterator[str]:
    """Run an S3 server as a process during a `with` block, and yield its URL."""
    pytest.importorskip("botocore", reason="the extra `s3` is not installed")
    if WEED:
        keys = KEYS["AWS_ACCESS_KEY_ID"], KEYS["AWS_SECRET_ACCESS_KEY"]
        with seaweed(WEED, BUCKET, keys, port) as url:
            yield url
        return
    pytest.importorskip("moto", reason="moto is not installed")
    command = [sys.executable, "-m", "tests.s3_server", str(port)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.kill()


def main() -> None:
    server = S3Server(int(sys.argv[1]))
    server.start()
    print(json.dumps(server.url), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
