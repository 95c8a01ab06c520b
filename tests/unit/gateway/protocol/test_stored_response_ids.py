"""Tests of the identifiers of stored responses: who can read them, and what they reveal."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.config import Config
from gateway.protocol.stored_response_ids import (
    KeptResponse,
    ResponseIds,
    conversation_of,
    new_response_ids,
)

ENDPOINTS = ["10.0.0.1:8000", "10.0.0.2:8000", "engine-c"]
IDS = ResponseIds({"acme": b"a" * 32, "zeta": b"z" * 32}, b"o" * 32)
TENANTS = st.sampled_from(["acme", "zeta", ""])
NAMES = st.text(max_size=40)  # at most 160 bytes


@given(TENANTS, st.sampled_from(ENDPOINTS), NAMES)
def test_an_id_leads_its_tenant_back_to_the_endpoint_and_the_model(
    tenant: str, endpoint: str, model: str
) -> None:
    response_id = IDS.new(tenant, endpoint, model)
    assert re.fullmatch(r"resp_[A-Za-z0-9_-]{38,251}", response_id)
    assert IDS.find(response_id, tenant, ENDPOINTS) == KeptResponse(endpoint, model)


@given(st.sampled_from(ENDPOINTS), NAMES)
def test_another_tenant_finds_nothing(endpoint: str, model: str) -> None:
    response_id = IDS.new("acme", endpoint, model)
    assert IDS.find(response_id, "zeta", ENDPOINTS) is None
    assert IDS.find(response_id, "", ENDPOINTS) is None


@given(st.text(max_size=300), st.data())
def test_invented_and_altered_ids_find_nothing(text: str, data: st.DataObject) -> None:
    assert IDS.find(text, "acme", ENDPOINTS) is None
    assert IDS.find("resp_" + text, "acme", ENDPOINTS) is None
    response_id = IDS.new("acme", ENDPOINTS[0], "m")
    index = data.draw(st.integers(5, len(response_id) - 1))
    # The id is random, so draw an index instead of a character: drawing must not depend on the id.
    others = [char for char in "AZaz09_-" if char != response_id[index]]
    other = others[data.draw(st.integers(0, 6))]
    assert (
        IDS.find(response_id[:index] + other + response_id[index + 1 :], "acme", ENDPOINTS) is None
    )


def test_an_id_contains_no_name_that_is_too_long_and_leads_to_the_endpoint_all_the_same() -> None:
    response_id = IDS.new("acme", "engine-c", "m" * 161)
    assert IDS.find(response_id, "acme", ENDPOINTS) == KeptResponse("engine-c", "")
    longest = IDS.new("acme", "engine-c", "m" * 160)
    assert IDS.find(longest, "acme", ENDPOINTS) == KeptResponse("engine-c", "m" * 160)


def test_an_endpoint_that_was_removed_is_not_found() -> None:
    assert IDS.find(IDS.new("acme", "engine-c", "m"), "acme", ENDPOINTS[:2]) is None


def test_ids_differ_and_show_neither_the_endpoint_nor_the_model() -> None:
    ids = {IDS.new("acme", "engine-c", "secret-model") for _ in range(100)}
    assert len(ids) == 100
    assert not any("engine" in response_id or "secret" in response_id for response_id in ids)


@given(TENANTS, st.lists(st.sampled_from(ENDPOINTS), min_size=1, max_size=8))
def test_the_responses_of_a_conversation_have_a_common_name_and_different_ids(
    tenant: str, endpoints: list[str]
) -> None:
    ids = [IDS.new(tenant, endpoints[0], "m")]
    for endpoint in endpoints:
        ids.append(IDS.new(tenant, endpoint, "m", ids[-1]))
        assert IDS.find(ids[-1], tenant, ENDPOINTS) == KeptResponse(endpoint, "m")
    assert len(set(ids)) == len(ids)
    assert len({conversation_of(each) for each in ids}) == 1
    assert conversation_of(IDS.new(tenant, endpoints[0], "m")) != conversation_of(ids[0])


@given(st.text(max_size=60))
def test_a_text_that_is_no_id_has_no_conversation_and_starts_one(text: str) -> None:
    assert conversation_of(text) == ""
    assert conversation_of(IDS.new("acme", ENDPOINTS[0], "m", text)) != ""


POOLS = {"main": {"endpoints": [{"url": "http://127.0.0.1:9000"}]}}
A, B = ({"name": name, "key": f"sk-{name}"} for name in "ab")


def configured(*tenants: dict[str, str], **sections: Any) -> ResponseIds:
    raw = {"version": 1, "pools": POOLS, "tenants": tenants, **sections}
    return new_response_ids(Config.model_validate(raw))


def test_gateways_with_one_configuration_read_each_other_s_ids() -> None:
    for sections in ({}, {"cache": {"secret": "sixteen-characters-or-more"}}):
        response_id = configured(A, **sections).new("a", ENDPOINTS[0], "m")
        assert configured(B, A, **sections).find(response_id, "a", ENDPOINTS) is not None
        assert configured(A, B, **sections).find(response_id, "b", ENDPOINTS) is None
    assert configured().find(configured().new("", ENDPOINTS[0], "m"), "", ENDPOINTS) is not None


def test_another_secret_reads_nothing() -> None:
    first, second = ({"secret": f"sixteen-characters-{digit}"} for digit in "12")
    response_id = configured(A, cache=first).new("a", ENDPOINTS[0], "m")
    assert configured(A, cache=second).find(response_id, "a", ENDPOINTS) is None


def shared_by_gateways(
    key: str, other: str | None = None, secret: str | None = None
) -> ResponseIds:
    pools = {"main": {"endpoints": [{"url": "http://a"}]}}
    shared = {"redis": {"url": "redis://a"}, "key": key, "other_key": other}
    tenants = [{"name": "acme", "key": "a key of acme"}]
    return new_response_ids(
        Config.model_validate(
            {
                "version": 1,
                "pools": pools,
                "shared": shared,
                "tenants": tenants,
                "cache": {"secret": secret},
            }
        )
    )


def test_ids_under_the_other_key_of_the_gateways_are_found() -> None:
    old, new = "an old key of the gateways", "a new key of the gateways"
    response_id = shared_by_gateways(old).new("acme", "engine-c", "m")
    found = KeptResponse("engine-c", "m")
    assert shared_by_gateways(new, old).find(response_id, "acme", ENDPOINTS) == found
    assert shared_by_gateways(new, old).find(response_id, "", ENDPOINTS) is None
    assert shared_by_gateways(new).find(response_id, "acme", ENDPOINTS) is None
    # A gateway that still has the old key finds ids made with the new one.
    newer_id = shared_by_gateways(new, old).new("acme", "engine-c", "m")
    assert shared_by_gateways(old, new).find(newer_id, "acme", ENDPOINTS) == found


def test_ids_under_a_cache_secret_do_not_change_with_the_key_of_the_gateways() -> None:
    before = shared_by_gateways("an old key of the gateways", secret="a secret of the caches")
    after = shared_by_gateways("a new key of the gateways", secret="a secret of the caches")
    response_id = before.new("acme", "engine-c", "m")
    assert after.find(response_id, "acme", ENDPOINTS) == KeptResponse("engine-c", "m")
