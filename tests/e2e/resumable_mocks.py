"""A gateway and two mock engines, each in its own process. The gateway resumes a stream of one
engine on the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.chaos.fleet_processes import MockProcess

CONFIG = """
models: [{{name: chat, served_model: demo-8b, pool: main, resume: {{}}}}]
pools:
  main:
    policy: least_loaded
    endpoints: [{{url: '{0}', max_concurrency: 400}}, {{url: '{1}', max_concurrency: 400}}]
"""


def config_of(mocks: Sequence[MockProcess]) -> str:
    return CONFIG.format(*(mock.url for mock in mocks))


@contextmanager
def resumable_mocks() -> Iterator[list[MockProcess]]:
    processes = [MockProcess(0.05) for _ in range(2)]  # slow, so that the clients keep up
    try:
        for mock in processes:
            mock.wait_until_ready()
        yield processes
    finally:
        for mock in processes:
            mock.end()
