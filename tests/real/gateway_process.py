"""Runs a gateway in front of the two real engines, as a process with its own configuration."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.processes import ENV, GatewayProcess
from tests.real.engines import BLOCK_TOKENS, MODEL

THRESHOLD_TOKENS = BLOCK_TOKENS  # one block of the engines
SPLIT = f"split: {{dialect: vllm_nixl, threshold_tokens: {THRESHOLD_TOKENS}, hysteresis: 0, transfer_timeout: 60s}}"


def config(endpoints: dict[str, tuple[str, str]], *, serving: str = SPLIT, most: int = 24) -> str:
    # Return a gateway configuration for endpoints given by name as (url, role).
    #
    # `serving` has further members of the model, `most` limits concurrent requests. Engines without
    # a GPU are slow, so the health timeouts are long.
    lines = [
        f"      - {{name: {name}, url: '{url}', role: {role}, max_concurrency: {most}, kv_tokens: 32768}}"
        for name, (url, role) in endpoints.items()
    ]
    model = f"  - {{name: {MODEL}, pool: main, {serving}}}"
    pool = "pools:\n  main:\n    policy: prefix_aware\n    endpoints:\n" + "\n".join(lines)
    health = "health: {timeout: 5s, progress: 60s, interval: 500ms}\nscrape: {timeout: 5s, interval: 500ms}"
    return f"models:\n{model}\n{pool}\n{health}\n"


@contextmanager
def gateway(folder: Path, text: str) -> Iterator[GatewayProcess]:
    # Run a gateway during a `with` block; its access log is `folder`/access.jsonl.
    file = folder / "gateway.yaml"
    log = folder / "access.jsonl"
    head = "version: 1\nlisteners: {api: {port: 0}, admin: {port: 0}}\n"
    file.write_text(f"{head}observability: {{access_log: '{log}'}}\n{text}")
    command = [sys.executable, "-m", "gateway", "serve", "--config", str(file)]
    with subprocess.Popen(
        command, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=ENV
    ) as process:
        try:
            assert process.stderr is not None
            started = GatewayProcess(process)
            started.read_until_ready(process.stderr)
            yield started
        finally:
            process.terminate()
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
