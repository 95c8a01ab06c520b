"""Tests that a real gateway serves every request at the time that the simulator computes.

The gateway, mock engines and a client run on virtual time, in their own process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from bench.load.planned_fleets import LiveFleet, replay_sent, send_live
from gateway.cli.main import config_in_text
from planner.bench import BenchSlo
from planner.plan import Assumptions, cases
from planner.traces import TraceRequest
from tests.ports import free_run

MODEL, KV_TOKENS = "llama-3.1-8b", 24_000


def gateway_yaml(policy: str, ports: Sequence[int]) -> str:
    endpoints = "".join(
        f"      - {{url: 'http://127.0.0.1:{port}', labels: {{gpu: h100}}, max_concurrency: 6, "
        f"kv_tokens: {KV_TOKENS}}}\n"
        for port in ports
    )
    return f"""
version: 1
models: [{{name: {MODEL}, pool: main}}]
pools:
  main:
    policy: {policy}
    endpoints:
{endpoints}"""


def requests_of(count: int, rate: float) -> list[TraceRequest]:
    # Return requests whose prompts begin with one of three texts of 1,024 tokens.
    #
    # The caches do not hold all texts, and for some time requests arrive faster than they can be
    # served.
    rng, at_s = Random(7), 0.0
    requests = []
    for number in range(count):
        at_s += rng.expovariate(rate)
        first, own = 2 * rng.randrange(3), rng.randint(40, 1500)
        blocks = (first, first + 1, *(1000 + 10 * number + place for place in range(3)))
        requests.append(TraceRequest(at_s, 1024 + own, rng.randint(2, 150), blocks))
    return requests


@pytest.mark.parametrize(
    # Only these policies never choose between equal endpoints by chance.
    ("policy", "groups"),
    [("round_robin", 2), ("prefix_aware", 1), ("priced", 1)],
)
def test_a_live_gateway_serves_every_request_when_its_replay_does(
    tmp_path: Path, policy: str, groups: int
) -> None:
    requests, first = requests_of(40 * groups, 12.0 * groups), free_run(groups)
    gateway = gateway_yaml(policy, range(first, first + groups))
    mock = (
        f"penstock mock --groups {groups} --port {first} --model {MODEL} --gpu h100 "
        f"--kv-tokens {KV_TOKENS}"
    )
    fleet = LiveFleet(gateway, mock, BenchSlo(1.0, 0.02))
    live = send_live(fleet, requests, tmp_path, is_virtual=True).records
    twins = replay_sent(
        cases(config_in_text(gateway), Assumptions(MODEL))["main"], requests
    ).records
    began_s = live[0].due_s - requests[0].arrival_s
    assert max(twin.entered_s - twin.arrived_s for twin in twins if twin.entered_s) > 0.2
    assert len({twin.cached_tokens for twin in twins}) > 1
    for record, twin in zip(live, twins, strict=True):
        assert record.error is None
        assert twin.first_s is not None
        assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (
            *(twin.prompt_tokens, twin.output_tokens),
            twin.cached_tokens,
        )
        assert record.first_s == pytest.approx(began_s + twin.first_s, abs=1e-3)
        assert record.last_s == pytest.approx(began_s + (twin.done_s or 0.0), abs=1e-3)
