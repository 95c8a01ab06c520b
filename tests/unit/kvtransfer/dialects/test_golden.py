"""Tests that requests of a KV handoff equal recorded ones byte by byte, for each engine."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvtransfer import dialects
from kvtransfer.dialects import (
    BootstrapAddress,
    DecodeRequest,
    FinishedResponse,
    HandoffTerms,
    LegOrder,
    PrefillIdentity,
    PrefillResponse,
    RequestEdits,
    UnusableResponse,
    as_events,
    parse_response,
    vllm_nixl,
)

ROOM = 6917529027641081856
TERMS = HandoffTerms(
    "req_1",
    ROOM,
    True,
    "10.0.0.7",
    BootstrapAddress("10.0.0.7", 8998),
    PrefillIdentity("engine-p", rank=0),
)
OBJECT = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "engine-p",
    "remote_request_id": "chatcmpl-req_1-0a1b2c3d",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 4,
    "remote_num_tokens": 40,
    "transfer_mode": "pull",
    "a_field_of_tomorrow": {"kept": [1.5, None]},
}


def answer(**members: Any) -> PrefillResponse:
    body = {"id": "x", "choices": [{"index": 0, "text": "a", "finish_reason": "length"}], **members}
    result = parse_response(json.dumps(body).encode())
    assert isinstance(result, PrefillResponse)
    return result


def words(edits: RequestEdits) -> dict[str, Any]:
    members: dict[str, Any] = json.loads(b"{" + edits.put[1:] + b"}")
    assert edits.put[:1] == b","
    return members


def test_a_pulling_prefill_asks_for_one_token_and_keeps_its_kv() -> None:
    edits = dialects.get_dialect("vllm_nixl").prefill(TERMS)
    assert words(edits) == {
        "max_tokens": 1,
        "min_tokens": 1,
        "stream": False,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }
    for_decode = {"stream_options", "max_completion_tokens", "logprobs", "top_logprobs"}
    assert edits.drop == {"max_tokens", "min_tokens", "stream"} | for_decode
    assert edits.headers == ()


def test_a_pulling_decoder_gets_the_object_as_it_came() -> None:
    handover = dialects.get_dialect("vllm_nixl").decode(TERMS, answer(kv_transfer_params=OBJECT))
    assert isinstance(handover, DecodeRequest)
    assert handover.edits == RequestEdits(b',"kv_transfer_params":' + json.dumps(OBJECT).encode())
    assert not handover.reports_own_cache


def test_a_decoder_of_033_reports_what_the_prefiller_had_cached() -> None:
    edits = dialects.get_dialect("vllm_nixl").decode(
        TERMS, answer(kv_transfer_params=OBJECT | {"remote_prefill_cached_tokens": 16})
    )
    assert isinstance(edits, DecodeRequest)
    assert edits.reports_own_cache


@pytest.mark.parametrize(
    ("told", "prefill_host", "given"),
    [
        ("localhost", "10.0.0.7", "10.0.0.7"),
        ("127.0.0.1", "10.0.0.7", "10.0.0.7"),
        ("::1", "fd00::7", "fd00::7"),
        ("localhost", "127.0.0.1", "localhost"),
        ("10.0.0.9", "10.0.0.7", "10.0.0.9"),
    ],
)
def test_a_loopback_address_becomes_the_host_of_the_prefill_url_where_that_is_none(
    told: str, prefill_host: str, given: str
) -> None:
    terms = msgspec.structs.replace(TERMS, prefill_host=prefill_host)
    edits = dialects.get_dialect("vllm_nixl").decode(
        terms, answer(kv_transfer_params=OBJECT | {"remote_host": told})
    )
    assert isinstance(edits, DecodeRequest)
    assert words(edits.edits)["kv_transfer_params"] == OBJECT | {"remote_host": given}


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_block_ids": []},
        {"remote_block_ids": [[]]},
        {"remote_block_ids": [[], []]},
        {"remote_block_ids": None},
        {"remote_block_ids": "1,2"},
        {"remote_block_ids": [[-1]]},
        {"remote_block_ids": [1, [2]]},
        {"remote_block_ids": [[2], 1]},
        {"remote_block_ids": [True]},
        {"remote_engine_id": None},
        {"remote_engine_id": ""},
        {"remote_request_id": None},
        {"remote_request_id": 7},
        {"remote_host": ""},
        {"remote_port": 0},
        {"remote_port": 65536},
        {"remote_port": "5600"},
        {"tp_size": 0},
        {"do_remote_prefill": False},
        {"do_remote_prefill": "true"},
        {"do_remote_decode": True},
        {"transfer_mode": "push"},
        {"transfer_mode": 1},
    ],
    ids=str,
)
def test_an_object_that_would_hurt_a_decoder_never_reaches_one(changes: dict[str, Any]) -> None:
    assert isinstance(
        dialects.get_dialect("vllm_nixl").decode(
            TERMS, answer(kv_transfer_params=OBJECT | changes)
        ),
        UnusableResponse,
    )


@pytest.mark.parametrize(
    "name",
    ["remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port"],
)
def test_an_object_without_a_required_member_never_reaches_a_decoder(name: str) -> None:
    less = {key: value for key, value in OBJECT.items() if key != name}
    assert isinstance(
        dialects.get_dialect("vllm_nixl").decode(TERMS, answer(kv_transfer_params=less)),
        UnusableResponse,
    )


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b'"text"', b'{"choices":[]}', b'{"choices":[{},{}]}', b"[" * 9999],
)
def test_what_is_no_answer_is_unusable(raw: bytes) -> None:
    assert isinstance(parse_response(raw), UnusableResponse)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"choices":[{}],"kv_transfer_params":{"unread":"\xff"}}',
        b'{"choices":[{"finish_reason":"stop","text":"\xff"}]}',
        b'{"choices":[{}],"usage":{"prompt_tokens":-1}}',
        b'{"choices":[{}],"usage":{"prompt_tokens_details":{"cached_tokens":-7}}}',
        b'{"choices":[{}],"usage":{"prompt_tokens_details":{"cached_tokens":1%b}}}' % (b"0" * 400),
        b'{"choices":[{}],"usage":{"prompt_tokens_details":{"cached_tokens":1e300}}}',
    ],
)
def test_an_answer_with_invalid_text_or_counts_is_unusable(raw: bytes) -> None:
    # Its content would go into the decode request, into metrics and to the client.
    assert isinstance(parse_response(raw), UnusableResponse)


def test_an_answer_without_counts_is_an_answer() -> None:
    edits = parse_response(b'{"choices":[{}],"usage":null}')
    assert isinstance(edits, PrefillResponse)
    assert (edits.prompt_tokens, edits.cached_tokens) == (None, None)


@pytest.mark.parametrize(
    "unread", [[0] * (vllm_nixl.MOST_OBJECT_BYTES // 2), "deep"], ids=["long", "deep"]
)
def test_an_object_that_is_too_large_or_too_deep_never_reaches_a_decoder(unread: object) -> None:
    raw = (
        json.dumps(OBJECT | {"unread": unread})
        .encode()
        .replace(b'"deep"', b"[" * 9999 + b"]" * 9999)
    )
    assert isinstance(vllm_nixl.validate(raw), UnusableResponse)


def test_block_ids_of_engines_before_018_are_a_flat_list() -> None:
    edits = dialects.get_dialect("vllm_nixl").decode(
        TERMS, answer(kv_transfer_params=OBJECT | {"remote_block_ids": [0]})
    )
    assert isinstance(edits, DecodeRequest)


def test_a_push_pair_uses_the_identity_in_the_first_response() -> None:
    push = dialects.get_dialect("vllm_push")
    report = {
        "remote_engine_id": "e",
        "remote_host": "localhost",
        "remote_port": 5600,
        "tp_size": 2,
        "pp_size": 1,
    }
    body = {
        "choices": [{"finish_reason": "length"}],
        "kv_transfer_params": report | {"transfer_mode": "push"},
    }
    (identity,) = push.identify(json.dumps(body).encode())
    assert identity == PrefillIdentity("e", "localhost", 5600, 2, 1)
    edits = push.decode(msgspec.structs.replace(TERMS, identity=identity), None)
    assert isinstance(edits, DecodeRequest)
    assert words(edits.edits) == {
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "e",
            "remote_host": "10.0.0.7",
            "remote_port": 5600,
            "tp_size": 2,
            "pp_size": 1,
            "remote_request_id": "req_1",
        }
    }
    assert push.prefill(TERMS) == dialects.get_dialect("vllm_nixl").prefill(TERMS)


@pytest.mark.parametrize(
    "told", [None, {}, {"remote_engine_id": "e"}, {**OBJECT, "transfer_mode": "pull"}]
)
def test_a_push_pair_needs_the_identity_of_the_prefill_engine(told: object) -> None:
    push, unknown = dialects.get_dialect("vllm_push"), msgspec.structs.replace(TERMS, identity=None)
    assert isinstance(push.decode(unknown, None), UnusableResponse)
    assert isinstance(push.decode(unknown, answer(kv_transfer_params=told)), UnusableResponse)
    assert push.check(answer(kv_transfer_params=told)) is not None


def test_a_penstock_pair_shares_a_transfer_id_and_uses_the_card_in_the_first_response() -> None:
    penstock = dialects.get_dialect("penstock")
    transfer = f"{ROOM:x}-req_1"
    assert words(penstock.prefill(TERMS)) == {
        "max_tokens": 1,
        "min_tokens": 1,
        "stream": False,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "kv_transfer": transfer,
        },
    }
    report = {"remote_engine_id": "e", "tp_size": 2, "kv_engine": "c2lnbmVk"}
    body = {"choices": [{"finish_reason": "length"}], "kv_transfer_params": report}
    (identity,) = penstock.identify(json.dumps(body).encode())
    assert identity == PrefillIdentity("e", tp_size=2, card="c2lnbmVk")
    edits = penstock.decode(msgspec.structs.replace(TERMS, identity=identity), None)
    first = penstock.decode(
        msgspec.structs.replace(TERMS, identity=None), answer(kv_transfer_params=report)
    )
    for decode in (edits, first):
        assert isinstance(decode, DecodeRequest)
        assert words(decode.edits) == {
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "kv_transfer": transfer,
                "kv_engine": "c2lnbmVk",
            }
        }
    assert penstock.check(answer(kv_transfer_params=report)) is None


@pytest.mark.parametrize("told", [None, {}, {"remote_engine_id": "e"}, OBJECT, {"kv_engine": 7}])
def test_a_penstock_pair_needs_the_card_of_the_prefill_engine(told: object) -> None:
    penstock = dialects.get_dialect("penstock")
    assert isinstance(penstock.decode(TERMS, None), UnusableResponse)
    unknown = msgspec.structs.replace(TERMS, identity=None)
    assert isinstance(penstock.decode(unknown, answer(kv_transfer_params=told)), UnusableResponse)
    assert penstock.check(answer(kv_transfer_params=told)) is not None


def test_mooncake_legs_share_a_transfer_id() -> None:
    mooncake = dialects.get_dialect("mooncake")
    assert words(mooncake.prefill(TERMS)) == {
        "max_tokens": 1,
        "min_tokens": 1,
        "stream": False,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": "xfer-req_1",
        },
    }
    assert mooncake.prefill(TERMS).headers == (("x-data-parallel-rank", "0"),)
    edits = mooncake.decode(TERMS, None)
    assert isinstance(edits, DecodeRequest)
    assert words(edits.edits) == {
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_bootstrap_addr": "http://10.0.0.7:8998",
            "remote_engine_id": "engine-p",
            "transfer_id": "xfer-req_1",
        }
    }


def test_mooncake_bootstrap_addresses_of_ipv6_stand_in_brackets() -> None:
    terms = msgspec.structs.replace(TERMS, bootstrap=BootstrapAddress("fd00::7", 8998))
    edits = dialects.get_dialect("mooncake").decode(terms, None)
    assert isinstance(edits, DecodeRequest)
    assert (
        words(edits.edits)["kv_transfer_params"]["remote_bootstrap_addr"] == "http://[fd00::7]:8998"
    )


def test_mooncake_ranks_are_read_from_the_bootstrap_page_in_order() -> None:
    page = {
        "1": {"engine_id": "b", "worker_addr": {}},
        "0": {"engine_id": "a", "worker_addr": {"0": {"0": "x"}}},
    }
    identify = dialects.get_dialect("mooncake").identify
    assert identify(json.dumps(page).encode()) == (
        PrefillIdentity("a", rank=0),
        PrefillIdentity("b", rank=1),
    )
    assert identify(b"{}") == identify(b"<html>") == identify(b'{"x":{"engine_id":"a"}}') == ()


def test_a_mooncake_prefill_that_was_not_cut_off_by_length_sends_nothing() -> None:
    check = dialects.get_dialect("mooncake").check
    assert check(answer()) is None
    assert check(answer(choices=[{"finish_reason": "stop"}])) is not None


def test_sglang_sends_the_same_to_both_and_names_a_room() -> None:
    sglang = dialects.get_dialect("sglang")
    expected = {"bootstrap_host": "10.0.0.7", "bootstrap_port": 8998, "bootstrap_room": ROOM}
    edits = sglang.decode(TERMS, None)
    assert isinstance(edits, DecodeRequest)
    assert words(sglang.prefill(TERMS)) == words(edits.edits) == expected
    assert edits.edits.drop == frozenset()
    assert edits.edits.keep is None


CONTEXT = {
    "request_type": "context_only",
    "disagg_request_id": ROOM,
    "ctx_request_id": 9,
    "first_gen_tokens": [5],
}
USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}


def context(**changes: Any) -> PrefillResponse:
    choice = {"index": 0, "text": "a", "finish_reason": "length", "disaggregated_params": CONTEXT}
    return answer(**{"choices": [choice], "prompt_token_ids": [1, 2, 3], "usage": USAGE} | changes)


def test_trtllm_computes_the_context_of_what_it_knows_of_the_request() -> None:
    edits = dialects.get_dialect("trtllm").prefill(TERMS)
    assert words(edits) == {
        "stream": False,
        "disaggregated_params": {"request_type": "context_only", "disagg_request_id": ROOM},
    }
    assert edits.drop == {"stream", "stream_options"}
    assert edits.keep is not None
    assert {"messages", "max_tokens", "tools"} <= edits.keep
    assert not {"metadata", "store", "vllm_xargs"} & edits.keep


@pytest.mark.parametrize("chat", [True, False])
def test_no_client_chooses_trtllms_tokens_its_logits_or_its_files(chat: bool) -> None:
    dialect, terms = dialects.get_dialect("trtllm"), msgspec.structs.replace(TERMS, chat=chat)
    generation = dialect.decode(terms, context())
    assert isinstance(generation, DecodeRequest)
    forbidden = {
        "prompt_token_ids",
        "return_context_logits",
        "return_generation_logits",
        "lora_request",
    }
    for keep in (
        dialect.prefill(terms).keep,
        generation.edits.keep,
        dialects.known_members("trtllm", chat=chat),
    ):
        assert keep is not None
        assert not forbidden & keep


def test_only_an_engine_that_refuses_what_it_does_not_know_has_its_requests_cut_down() -> None:
    assert (
        dialects.known_members("vllm", chat=True)
        is dialects.known_members("sglang", chat=False)
        is None
    )


@pytest.mark.parametrize(("chat", "prompt"), [(True, "prompt_token_ids"), (False, "prompt")])
def test_trtllm_generation_goes_on_from_the_context_servers_tokens(chat: bool, prompt: str) -> None:
    edits = dialects.get_dialect("trtllm").decode(
        msgspec.structs.replace(TERMS, chat=chat), context()
    )
    assert isinstance(edits, DecodeRequest)
    assert words(edits.edits) == {
        prompt: [1, 2, 3],
        "disaggregated_params": CONTEXT | {"request_type": "generation_only", "ctx_usage": USAGE},
    }


def test_trtllm_context_that_ended_is_the_answer() -> None:
    choice = {"index": 0, "text": "a", "finish_reason": "stop", "disaggregated_params": CONTEXT}
    edits = dialects.get_dialect("trtllm").decode(TERMS, context(choices=[choice]))
    assert isinstance(edits, FinishedResponse)
    assert json.loads(edits.body) == {
        "id": "x",
        "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}],
        "usage": USAGE,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": None},
        {"prompt_token_ids": []},
        {"prompt_token_ids": [-1]},
        {"choices": [{"finish_reason": "length"}]},
        {"choices": [{"finish_reason": None, "disaggregated_params": CONTEXT}]},
        {"choices": [{"finish_reason": "length", "disaggregated_params": {"ctx_request_id": 9}}]},
        {
            "choices": [
                {
                    "finish_reason": "length",
                    "disaggregated_params": CONTEXT | {"disagg_request_id": 8},
                }
            ]
        },
    ],
    ids=str,
)
def test_a_context_answer_that_cannot_be_trusted_is_unusable(changes: dict[str, Any]) -> None:
    assert isinstance(
        dialects.get_dialect("trtllm").decode(TERMS, context(**changes)), UnusableResponse
    )


def test_trtllm_whole_answers_become_streams_if_requested() -> None:
    message = {"role": "assistant", "content": "yes"}
    whole = {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": USAGE,
    }
    events = as_events(json.dumps(whole).encode(), usage=True).split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    text, ended, usage = (json.loads(event[6:]) for event in events[:-2])
    assert text["object"] == "chat.completion.chunk"
    assert text["choices"][0]["delta"] == message
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert usage["usage"] == USAGE
    assert b"usage" not in as_events(json.dumps(whole).encode(), usage=False)


def test_tool_calls_of_a_whole_answer_are_numbered_in_its_stream() -> None:
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        for n in range(2)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    whole = {
        "id": "x",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
    }
    reply = json.loads(as_events(json.dumps(whole).encode(), usage=False).split(b"\n\n")[0][6:])
    assert reply["choices"][0]["delta"] == message | {
        "tool_calls": [{"index": n, **call} for n, call in enumerate(calls)]
    }


def test_every_dialect_is_found_by_its_name() -> None:
    assert [dialects.get_dialect(name).name for name in dialects.DIALECTS] == list(
        dialects.DIALECTS
    )


# Pulls of a prompt's beginning


def test_only_penstock_hands_over_a_beginning_one_request_after_the_other() -> None:
    known = dialects.DIALECTS
    pulling = [name for name in known if dialects.get_dialect(name).pulls is not None]
    assert pulling == ["penstock"]
    pulls = dialects.get_dialect("penstock").pulls
    assert pulls is not None
    assert pulls.order is LegOrder.SEQUENTIAL
    request = words(pulls.prefill(TERMS))
    assert request["kv_transfer_params"]["do_remote_decode"] is True
    assert "kv_transfer" not in request["kv_transfer_params"]
    assert json.loads(b"{" + pulls.truncate(1536)[1:] + b"}") == {
        "truncate_prompt_tokens": 1536,
        "truncation_side": "right",
    }


def test_a_beginning_is_fetched_only_from_an_engine_with_penstocks_connector() -> None:
    pulls = dialects.get_dialect("penstock").pulls
    assert pulls is not None
    params = OBJECT | {"kv_handoff": "sealed"}
    request = pulls.decode(TERMS, answer(kv_transfer_params=params))
    assert isinstance(request, DecodeRequest)
    assert not request.reports_own_cache
    assert words(request.edits) == {"kv_transfer_params": params}
    for response in (answer(kv_transfer_params=OBJECT), answer(), None):
        assert isinstance(pulls.decode(TERMS, response), UnusableResponse)
