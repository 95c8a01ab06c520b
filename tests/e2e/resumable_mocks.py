"""A gateway and two mock engines, each in its own process. The gateway resumes a stream of one
engine on the other.

The engine that a test kills stalls after some tokens, so that the kill comes in the middle of its
streams on any machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.request import Request, urlopen

from tests.chaos.fleet_processes import MockProcess

CONFIG = """
models: [{{name: chat, served_model: demo-8b, pool: main, resume: {{}}}}]
pools:
  main:
    policy: round_robin
    endpoints: [{{url: '{0}', max_concurrency: 400}}, {{url: '{1}', max_concurrency: 400}}]
retries: {{hedge: 0}}
"""


def stall(engine: MockProcess, after: int) -> None:
    # Let all streams of an engine stop after so many tokens, with their connections open.
    body = json.dumps({"spec": f"stall:after={after}"}).encode()
    urlopen(Request(f"{engine.url}/mock/fault", body, {"content-type": "application/json"})).close()


def config_of(mocks: Sequence[MockProcess]) -> str:
    return CONFIG.format(*(mock.url for mock in mocks))


@contextmanager
def resumable_mocks() -> Iterator[list[MockProcess]]:
    processes = [MockProcess(1.0) for _ in range(2)]
    try:
        for mock in processes:
            mock.wait_until_ready()
        yield processes
    finally:
        for mock in processes:
            mock.end()
