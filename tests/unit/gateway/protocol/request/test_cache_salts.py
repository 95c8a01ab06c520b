"""Tests of cache salts, texts that keep tenants' cached prompts apart: what engines receive."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import Config, load_with_warnings
from gateway.fleet.prefix_cache_view import PrefixCacheView
from gateway.protocol import api_table
from gateway.protocol.errors import Failure, GatewayError
from gateway.protocol.request.api_call import Call
from gateway.protocol.request.cache_salts import MAX_CLIENT_SALT, CacheSalts, new_cache_salts
from gateway.protocol.request.request_body import CallContext, parse_call
from gateway.protocol.request.service_level_headers import NO_PREFERENCES
from tests.unit.gateway.disagg.scripted_engines import (
    MODEL,
    OBJECT,
    EngineRequest,
    Reply,
    Script,
    SplitGateway,
    decodes,
    prefills,
    refuses,
    split_gateway,
)
from tests.unit.gateway.protocol.request.test_request_body import CHAT, Model

HEX = re.compile("[0-9a-f]{64}")
SECRET = {"secret": "sixteen-characters-or-more"}
A, B, C = ({"name": name, "key": f"sk-{name}"} for name in "abc")
SHARED = {"redis": {"url": "redis://127.0.0.1:6379"}, "key": "what-the-fleet-has-in-common"}
POOLS = {"main": {"endpoints": [{"url": "http://127.0.0.1:9000"}]}}


def salts(*tenants: Mapping[str, Any], **sections: Any) -> CacheSalts:
    return new_cache_salts(
        Config.model_validate({"version": 1, "pools": POOLS, "tenants": tenants} | sections)
    )


def call(body: Mapping[str, Any], result: CacheSalts | None, tenant: str = "a") -> Call:
    caller = CallContext("req_1", tenant, NO_PREFERENCES, 0.0, None, result)
    return parse_call(json.dumps(body).encode(), api_table.CHAT, {"demo": Model()}, caller)

    # Requests with equal salts


@pytest.mark.parametrize("secret", [{"cache": SECRET}, {"shared": SHARED}, {}])
def test_every_tenant_has_a_salt_that_is_equal_on_all_gateways(secret: dict[str, Any]) -> None:
    usual = salts(A, B, **secret).defaults
    assert usual == salts(B, A, **secret).defaults
    assert len(set(usual.values())) == 2
    assert all(HEX.fullmatch(salt.decode()) for salt in usual.values()), (
        "vLLM takes 128 characters, none of @ / \\ NUL"
    )
    assert salts(A, B, C, **secret).defaults["a"] == usual["a"], (
        "a new tenant does not empty the cache of another"
    )


def test_different_secrets_give_different_salts() -> None:
    requests = [
        salts(A, **more).defaults["a"] for more in ({}, {"shared": SHARED}, {"cache": SECRET})
    ]
    requests.append(salts(A, cache={"secret": "another-secret-of-theirs"}).defaults["a"])
    assert len(set(requests)) == 4


def test_a_configured_secret_keeps_salts_when_a_tenants_key_changes() -> None:
    renewed = A | {"key": "sk-new"}
    assert salts(renewed, cache=SECRET).defaults == salts(A, cache=SECRET).defaults
    assert salts(renewed).defaults != salts(A).defaults
    assert salts(A | {"keys": ["sk-new"]}).defaults == salts(A).defaults, (
        "a further key does not change the salt"
    )


@pytest.mark.parametrize("secret", [{"cache": SECRET}, {}])
def test_tenants_of_one_group_share_a_salt_and_names_are_not_groups(secret: dict[str, Any]) -> None:
    usual = salts(A | {"cache_group": "c"}, B | {"cache_group": "c"}, C, **secret).defaults
    assert usual["a"] == usual["b"] != usual["c"]


def test_without_isolation_tenants_get_no_salt() -> None:
    off = salts(A, B, cache={"isolate": "off"})
    assert off.defaults == {}
    assert call(CHAT, off).salt == b""
    assert off.client_salt("a", b"x") == off.client_salt("b", b"x"), (
        "a client's own salt still applies, equally for all tenants"
    )


@given(st.binary(max_size=64), st.binary(max_size=64))
def test_a_clients_salt_divides_its_own_cache_and_cannot_reach_another(
    one: bytes, other: bytes
) -> None:
    result = salts(A, B, cache=SECRET)
    mine = result.client_salt("a", one)
    assert (mine == result.client_salt("a", other)) == (one == other)
    assert mine not in (
        result.client_salt("b", one),
        result.client_salt("b", other),
        result.defaults["b"],
        result.client_salt("", one),
    )


def test_the_prefix_index_shares_exactly_what_engines_share() -> None:
    result, prefixes = (
        salts(A, B, C | {"cache_group": "g"}, cache=SECRET),
        PrefixCacheView(b"0" * 16, 1 << 20, 64),
    )
    body = CHAT | {"messages": [{"role": "user", "content": "word " * 200}]}

    def keys(model: str = "demo", tenant: str = "a", **members: str) -> frozenset[int]:
        return frozenset(prefixes.fingerprint(call(body | members, result, tenant), model).keys)

    requests = [
        keys(),
        keys(model="other"),
        keys(tenant="b"),
        keys(tenant="c"),
        keys(cache_salt="x"),
        keys(extra_key="x"),
    ]
    assert len(frozenset().union(*requests)) == sum(map(len, requests)) > 0
    assert keys() == requests[0]


def test_an_engine_that_takes_no_salt_is_named_with_the_consequence(tmp_path: Path) -> None:
    def warned(of_engine: str, cache: str = "", tenants: str = "{name: a}, {name: b}") -> list[str]:
        keyed = re.sub(r"name: (\w)", r"name: \1, key: sk-\1", tenants)
        file = tmp_path / "gateway.yaml"
        file.write_text(
            f"version: 1\ntenants: [{keyed}]\ncache: {{secret: sixteen-characters{cache}}}\n"
            f"pools:\n  main:\n    endpoints:\n      - {{url: 'http://h:1', {of_engine}}}\n"
        )
        messages = [problem.message for problem in load_with_warnings(file, {}).warnings]
        return [message for message in messages if "cache salt" in message]

    (message,) = warned("engine: trtllm")
    assert message.startswith("h:1 takes no cache salt, so tenants share its cached prompts")
    assert len(warned("cache_salt: false")) == 1
    assert warned("engine: vllm") == warned("engine: sglang") == []
    assert warned("engine: trtllm, tenants: [a]") == []
    assert warned("engine: trtllm", ", isolate: 'off'") == []
    group = "{name: a, cache_group: g}, {name: b, cache_group: g}"
    assert warned("engine: trtllm", tenants=group) == []


# Salts of clients


@pytest.mark.parametrize("name", ["cache_salt", "extra_key"])
@pytest.mark.parametrize("value", ["", "x" * (MAX_CLIENT_SALT + 1), 1, ["a"], {"a": 1}, True])
def test_a_salt_must_be_text_of_limited_length(name: str, value: object) -> None:
    with pytest.raises(GatewayError) as refused:
        call(CHAT | {name: value}, salts(A))
    assert (refused.value.failure, refused.value.param) == (Failure.BAD_REQUEST, name)


def test_a_clients_salt_is_never_sent_unchanged() -> None:
    result = salts(A, cache=SECRET)
    hostile = result.defaults["a"].decode()
    requests = [
        call(CHAT | more, result, "") for more in ({"cache_salt": hostile}, {"extra_key": hostile})
    ]
    requests += [call(CHAT | {"cache_salt": "@/\\\0"}, result, "")]
    for request in requests:
        assert hostile.encode() not in request.body
        assert HEX.fullmatch(request.salt.decode())
        assert request.salt != result.defaults["a"]
    assert len({request.salt for request in requests}) == 3


def test_without_tenants_and_salts_a_request_passes_unchanged() -> None:
    raw = json.dumps(CHAT).encode()
    sent = parse_call(
        raw,
        api_table.CHAT,
        {"demo": Model()},
        CallContext("req_1", "", NO_PREFERENCES, 0.0, None, salts()),
    )
    assert sent.body is raw
    assert sent.salt == b""
    assert call(CHAT | {"cache_salt": None}, salts(), "").salt == b""

    # What engines receive


def house(
    prefill: Sequence[Script], decode: Sequence[Script], **options: Any
) -> AbstractAsyncContextManager[SplitGateway]:
    dialect = options.pop("dialect", "vllm_nixl")
    return split_gateway(
        dialect, list(prefill), list(decode), **{"tenants": [A, B], "cache": SECRET, **options}
    )


def whole(*engines: Script, **options: Any) -> AbstractAsyncContextManager[SplitGateway]:
    models = [{"name": MODEL, "pool": "main"}]
    return house([], engines, **{"models": models, "decode_role": "both", **options})


async def ask(f: SplitGateway, key: str = "sk-a", words: int = 400, **members: Any) -> Reply:
    body = {
        "model": MODEL,
        "max_tokens": 8,
        "messages": [{"role": "user", "content": "word " * words}],
        **members,
    }
    sent = json.dumps(body).encode() + b"\n "  # blanks may follow an object
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    async with f.http.post(
        f"{f.app.url}/v1/chat/completions", data=sent, headers=headers
    ) as answer:
        return Reply(answer.status, answer.headers, await answer.read())


@pytest.mark.parametrize(
    ("engine", "member"), [("vllm", "cache_salt"), ("sglang", "extra_key"), ("trtllm", None)]
)
async def test_an_engine_gets_the_tenants_salt_in_the_member_it_supports(
    engine: str, member: str | None
) -> None:
    async with whole(decodes, engine=engine) as f:
        for key, more in (
            ("sk-a", {}),
            ("sk-b", {}),
            ("sk-a", {"cache_salt": "x"}),
            ("sk-a", {"cache_salt": "x"}),
        ):
            assert (await ask(f, key, **more)).status == 200
        bodies = [item.json for item in f.decode[0].requests]
        matches = [
            body.pop(name)
            for body in bodies
            for name in ("cache_salt", "extra_key")
            if name in body
        ]
        assert all(body.keys() == {"model", "max_tokens", "messages"} for body in bodies)
        usual = f.app.gateway.snapshot.salts
        assert usual is not None
        mine = usual.client_salt("a", b'["x",null]').decode()
        assert matches == (
            [usual.defaults["a"].decode(), usual.defaults["b"].decode(), mine, mine]
            if member
            else []
        )
        assert not member or all(member.encode() in item.body for item in f.decode[0].requests)


async def test_a_retry_sends_the_same_salt() -> None:
    async with whole(refuses(503), refuses(503), decodes) as f:
        assert (await ask(f)).status == 200
        assert len({item.json["cache_salt"] for half in f.decode for item in half.requests}) == 1
        assert sum(len(half.requests) for half in f.decode) >= 1


async def test_a_resumed_response_keeps_its_salt() -> None:
    shown, came = asyncio.Event(), list[EngineRequest]()

    async def breaks_first(request: EngineRequest) -> None:
        # Break the first answer after one token with its ids; complete all later ones. This is a
        # script of a test engine.
        came.append(request)
        if len(came) > 1:
            await decodes(request)
            return
        usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
        choice = {"index": 0, "delta": {"content": "first "}, "token_ids": [7]}
        request.open_stream()
        request.event(
            {"model": MODEL, "prompt_token_ids": [1, 2], "choices": [choice], "usage": usage}
        )
        await shown.wait()
        request.writer.close()

    models = [{"name": MODEL, "pool": "main", "resume": {}}]
    async with whole(breaks_first, breaks_first, models=models) as f:
        message = {"role": "user", "content": "word " * 400}
        body = {
            "model": MODEL,
            "max_tokens": 8,
            "messages": [message],
            "stream": True,
            "cache_salt": "mine",
        }
        headers = {"authorization": "Bearer sk-a"}
        async with f.http.post(
            f"{f.app.url}/v1/chat/completions", json=body, headers=headers
        ) as answer:
            assert b"first " in await answer.content.readuntil(b"\n\n")
            shown.set()
            assert b"[DONE]" in await answer.content.read()
        began, rest = came
        assert rest.json["prompt"] == [1, 2, 7]
        assert rest.json["cache_salt"] == began.json["cache_salt"]
        assert HEX.fullmatch(rest.json["cache_salt"])


async def test_both_legs_of_a_split_request_have_the_same_salt() -> None:
    async with house([prefills()], [decodes]) as f:
        f.assume_fast_pairs()
        assert (await ask(f, cache_salt="mine")).status == 200
        assert (await ask(f, "sk-b", cache_salt="mine")).status == 200
        legs = [[item.json for item in half.requests] for half in (*f.prefill, *f.decode)]
        for prefill, decode in zip(*legs, strict=True):
            assert prefill["cache_salt"] == decode["cache_salt"]
            assert decode["kv_transfer_params"] == OBJECT
        assert len({leg["cache_salt"] for leg in legs[0]}) == 2
        await f.at_rest()


async def test_both_sglang_engines_of_a_pair_get_the_same_extra_key() -> None:
    async with house(
        [decodes], [decodes], dialect="sglang", engine="sglang", bootstrap="10.0.0.7:8998"
    ) as f:
        assert (await ask(f)).status == 200
        (one,), (other,) = f.prefill[0].requests, f.decode[0].requests
        assert one.json["extra_key"] == other.json["extra_key"]
        assert "cache_salt" not in one.json


async def test_all_keys_of_a_tenant_have_the_same_salt() -> None:
    renewing = A | {"keys": ["sk-new"]}
    async with whole(decodes, tenants=[renewing, B]) as f:
        assert [(await ask(f, key)).status for key in ("sk-a", "sk-new", "sk-newer")] == [
            200,
            200,
            401,
        ]
        assert len({item.json["cache_salt"] for item in f.decode[0].requests}) == 1

        # Engines reserved for tenants


async def test_a_reserved_engine_serves_only_its_tenants() -> None:
    async with whole(decodes, decodes, reserved=[["a"], ["b"]], policy="round_robin") as f:
        for key in ("sk-a", "sk-b", "sk-a", "sk-a"):
            assert (await ask(f, key)).status == 200
        assert [len(half.requests) for half in f.decode] == [3, 1]


async def test_a_tenant_without_an_engine_gets_an_error() -> None:
    async with whole(decodes, reserved=[["a"]]) as f:
        reply = await ask(f, "sk-b")
        assert (reply.status, reply.json["error"]["code"]) == (503, "no_capacity")
        assert "serves this tenant" in reply.json["error"]["message"]
        assert (await ask(f)).status == 200


async def test_a_tenant_waits_for_its_reserved_engine_when_that_is_full() -> None:
    async with whole(decodes, decodes, reserved=[["a"], ["b"]], max_concurrency=1) as f:
        load = f.app.gateway.endpoints.all()[0].load
        load.in_flight += 1
        assert (await ask(f)).status == 200
        load.in_flight -= 1
        await f.at_rest()
