"""Tests of images through a real gateway, whose large base64 text must cause no refusal or wait."""

from __future__ import annotations

import base64
from pathlib import Path
from random import Random

import pytest

from tests.e2e.processes import gateway_process
from tests.e2e.raw_connection import RawConnection, post
from tests.e2e.recording_engine import recording_engine
from tests.fair_time import Stopwatch, pace

CONFIG = """
models: [{{name: demo, pool: main, context_tokens: 65536}}]
pools:
  main: {{endpoints: [{{url: '{url}', context_tokens: 65536}}]}}
"""


@pytest.mark.parametrize("context_tokens", [65536, 512])
@pytest.mark.parametrize("size", [200_000, 3_000_000])
def test_a_large_image_on_an_idle_gateway_is_answered_at_once(
    tmp_path: Path, size: int, context_tokens: int
) -> None:
    config = CONFIG.replace("65536", str(context_tokens))
    image = base64.b64encode(Random(size).randbytes(size * 3 // 4)).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{image}"}}
    body = {"model": "demo", "messages": [{"role": "user", "content": [part]}], "max_tokens": 16}
    with (
        recording_engine() as engine,
        gateway_process(tmp_path, config.format(url=engine.url)) as running,
    ):
        took = Stopwatch(running.pid)
        with RawConnection(running.port) as connection:
            connection.socket.settimeout(60)
            connection.send(post(body))
            answer = connection.answer()
        print(answer.status, answer.body[:200], took.fair_s)
        assert answer.status == 200
        assert took.fair_s < 2 * pace()
        assert engine.requests[-1].json == body
