"""Tests of requests with images through a real gateway.

Their long base64 text causes no refusal and no delay. A repeated image is found in the cache.
"""

from __future__ import annotations

import base64
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any, cast

import pytest
from openai import OpenAI

from tests.duration_limits import Stopwatch, once_within, pace
from tests.e2e.processes import gateway_process, mock_fleet
from tests.e2e.raw_connection import RawConnection, post
from tests.e2e.recording_engine import recording_engine

CONFIG = """
models: [{{name: demo, pool: main, context_tokens: 65536}}]
pools:
  main: {{endpoints: [{{url: '{url}', context_tokens: 65536}}]}}
"""


@pytest.mark.parametrize("context_tokens", [65536, 512])
@pytest.mark.parametrize("size", [200_000, 3_000_000])
def test_large_images_on_an_idle_gateway_are_answered_at_once(
    tmp_path: Path, size: int, context_tokens: int
) -> None:
    config = CONFIG.replace("65536", str(context_tokens))
    bodies = []
    for seed in range(4):
        image = base64.b64encode(Random(seed).randbytes(size * 3 // 4)).decode()
        part = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{image}"}}
        message = {"role": "user", "content": [part]}
        bodies.append({"model": "demo", "messages": [message], "max_tokens": 16})

    def took_s() -> float:
        # If other processes use the CPU's caches, parsing takes longer, and the client of a costly
        # body has to wait. Each attempt uses a new gateway, which knows of no earlier body.
        folder = Path(mkdtemp(dir=tmp_path))
        with (
            recording_engine() as engine,
            gateway_process(folder, config.format(url=engine.url)) as running,
        ):
            took = Stopwatch(running.pid)
            with RawConnection(running.port) as connection:
                connection.socket.settimeout(60)
                for body in bodies:
                    connection.send(post(body))
                    assert connection.answer().status == 200
                    assert engine.requests[-1].json == body
            return took.fair_s

    once_within(2 * pace(), took_s)


POOL = """
models: [{{name: demo-8b, pool: main}}]
pools: {{main: {{endpoints: [{{url: '{0}'}}, {{url: '{1}'}}]}}}}
"""


def base64_image(seed: int) -> str:
    return base64.b64encode(Random(seed).randbytes(300_000)).decode()


def test_the_second_request_with_an_image_hits_its_cache(tmp_path: Path) -> None:
    with (
        mock_fleet() as engines,
        gateway_process(tmp_path, POOL.format(*engines)) as running,
        OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as chat,
    ):

        def ask_chat(seed: int, question: str) -> int:
            url = f"data:image/png;base64,{base64_image(seed)}"
            part = {"type": "image_url", "image_url": {"url": url}}
            content = [part, {"type": "text", "text": question}]
            message: Any = {"role": "user", "content": content}
            answer = chat.chat.completions.create(model="demo-8b", max_tokens=4, messages=[message])
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            return answer.usage.prompt_tokens_details.cached_tokens or 0

        def ask_messages(seed: int, question: str) -> int:
            source = {"type": "base64", "media_type": "image/png", "data": base64_image(seed)}
            content = [{"type": "image", "source": source}, {"type": "text", "text": question}]
            message: Any = {"role": "user", "content": content}
            body = {"model": "demo-8b", "max_tokens": 4, "messages": [message]}
            answer = chat.post("/messages", cast_to=object, body=body)
            used: int = cast(Any, answer)["usage"]["cache_read_input_tokens"]
            return used

        for ask, seeds in ((ask_chat, range(4)), (ask_messages, range(4, 8))):
            assert [ask(seed, "What is it?") for seed in seeds] == [0] * 4
            assert all(ask(seed, "And where?") >= 850 for seed in seeds)
