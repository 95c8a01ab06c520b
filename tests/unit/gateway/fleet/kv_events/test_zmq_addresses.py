"""Tests of the addresses at which engines publish KV events, reports of cached blocks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.config.kv_event_sections import KvEvents
from gateway.fleet.kv_events.zmq_addresses import (
    SourceAddress,
    SourceError,
    configured_addresses,
    described_by_sglang,
    described_by_vllm,
)

URL = "http://engine.example:8000/base"


def vllm(**ranks: Any) -> list[SourceAddress]:
    body = {rank.removeprefix("rank"): source for rank, source in ranks.items()}
    return described_by_vllm(200, json.dumps(body).encode(), URL)


def test_a_configured_port_is_on_the_endpoints_own_host_and_ranks_follow() -> None:
    spec = KvEvents(publisher=":5557", replay="other:6000", topic="kv")
    assert configured_addresses(spec, URL, 2) == [
        SourceAddress("tcp://engine.example:5557", "tcp://other:6000", "kv"),
        SourceAddress("tcp://engine.example:5558", "tcp://other:6001", "kv"),
    ]


def test_an_ipv6_host_is_bracketed() -> None:
    (address,) = configured_addresses(KvEvents(publisher=":5557"), "http://[fd00::1]:8000", 1)
    assert address == SourceAddress("tcp://[fd00::1]:5557", "", "")


def test_vllm_names_each_rank_and_wildcards_stand_for_its_host() -> None:
    source = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557", "topic": "kv"}
    second = source | {"endpoint": "tcp://*:5558", "replay_endpoint": "tcp://0.0.0.0:5600"}
    assert vllm(rank0=source, rank1=second) == [
        SourceAddress("tcp://engine.example:5557", "", "kv"),
        SourceAddress("tcp://engine.example:5558", "tcp://engine.example:5600", "kv"),
    ]


def test_sglang_names_the_first_port_and_the_number_of_ranks() -> None:
    events = {"endpoint_host": "*", "endpoint_port_base": 5557, "dp_size": 2}
    body = json.dumps({"kv_events": events | {"replay_endpoint_port_base": 5600}}).encode()
    assert [address.replay for address in described_by_sglang(200, body, URL)] == [
        "tcp://engine.example:5600",
        "tcp://engine.example:5601",
    ]


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (404, b"{}", "set kv_events.publisher instead"),
        (200, b"[]", "is not a JSON object"),
        (200, b"{}", "publishes no KV events"),
        (200, b'{"0": {"enable_kv_cache_events": false}}', "publishes no KV events"),
        (
            200,
            b'{"0": {"enable_kv_cache_events": true, "endpoint": "ipc:///tmp/x"}}',
            "does not start with tcp://",
        ),
    ],
)
def test_a_description_without_a_usable_source_is_explained(
    status: int, body: bytes, expected: str
) -> None:
    with pytest.raises(SourceError, match=expected):
        described_by_vllm(status, body, URL)


def test_replay_without_a_publisher_is_refused() -> None:
    with pytest.raises(ValueError, match="require publisher"):
        KvEvents(replay=":5558")


def test_without_pyzmq_the_configuration_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.config.kv_event_sections.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"penstock\[events\]"):
        KvEvents()
