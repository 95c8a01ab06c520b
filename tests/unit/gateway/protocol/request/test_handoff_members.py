"""Tests of edits of a client's JSON body: no member occurs twice, and other members do not
change.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.protocol.request.api_call import ENGINE_INTERNAL
from gateway.protocol.request.handoff_members import Members, edited, shows_usage
from kvtransfer import dialects
from kvtransfer.dialects import (
    BootstrapAddress,
    DecodeRequest,
    HandoffTerms,
    PrefillIdentity,
    PrefillResponse,
    RequestEdits,
    parse_response,
)

NUMBER = 2**41
WHO = PrefillIdentity("engine-p", "10.0.0.7", 5600, 1, 1, 0, "card")
OBJECT = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1]],
    "remote_engine_id": "engine-p",
    "remote_request_id": "r",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 1,
}
CONTEXT = {"ctx_request_id": 9, "disagg_request_id": NUMBER}


def body_of(result: dict[str, Any]) -> tuple[bytes, Members]:
    body = json.dumps(result).encode()
    return body, msgspec.json.decode(body, type=dict[str, msgspec.Raw])


def read_once(body: bytes) -> dict[str, Any]:
    # Parse a JSON object. Raises ValueError if a member occurs twice.
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError(
                f"the object has a member twice; its members: {[name for name, _ in pairs]}"
            )
        return result

    read: dict[str, Any] = json.loads(body, object_pairs_hook=once)
    return read


def prefill_answer() -> PrefillResponse:
    choice = {"index": 0, "text": "a", "finish_reason": "length", "disaggregated_params": CONTEXT}
    result = parse_response(
        json.dumps(
            {"choices": [choice], "kv_transfer_params": OBJECT, "prompt_token_ids": [1, 2]}
        ).encode()
    )
    assert isinstance(result, PrefillResponse)
    return result


def both_legs(name: str, *, chat: bool) -> list[RequestEdits]:
    dialect = dialects.get_dialect(name)
    terms = HandoffTerms("req_1", NUMBER, chat, "10.0.0.7", BootstrapAddress("10.0.0.7", 8998), WHO)
    handover = dialect.decode(terms, prefill_answer())
    assert isinstance(handover, DecodeRequest), handover
    return [dialect.prefill(terms), handover.edits]


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("name", sorted(dialects.DIALECTS))
def test_whatever_a_client_sends_no_member_stands_twice_in_what_an_engine_gets(
    name: str, chat: bool
) -> None:
    legs = both_legs(name, chat=chat)
    put = {member for edits in legs for member in json.loads(b"{" + edits.put[1:] + b"}")}
    known = dialects.known_members("trtllm", chat=chat) or frozenset()
    body = dict.fromkeys((put | known) - ENGINE_INTERNAL, 7) | {"model": "demo", 'an "odd" näme': 1}
    for edits in legs:
        sent = read_once(edited(*body_of(body), edits, None))
        assert sent.items() >= json.loads(b"{" + edits.put[1:] + b"}").items()
        assert not sent.keys() & (edits.drop - put)


def test_values_pass_as_they_came_and_only_the_models_name_is_another() -> None:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": 'a\u2028b \\ "'}],
        "temperature": 1e-7,
    }
    changed = edited(
        *body_of(body),
        RequestEdits(b',"kv_transfer_params":{}', frozenset({"stream"})),
        'an "engine\'s"',
    )
    assert read_once(changed) == {**body, "model": 'an "engine\'s"', "kv_transfer_params": {}}


def test_what_is_only_added_is_spliced_in_behind_the_clients_own_bytes() -> None:
    body, members = body_of({"model": "demo", "prompt": "x"})
    assert (
        edited(body, members, RequestEdits(b',"bootstrap_room":1'), None)
        == body[:-1] + b',"bootstrap_room":1}'
    )
    assert edited(body, members, RequestEdits(), None) == body


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({}, True),
        ({"stream": False}, True),
        ({"stream": True}, False),
        ({"stream": True, "stream_options": {"include_usage": True}}, True),
        ({"stream": True, "stream_options": {"include_usage": False}}, False),
        ({"stream": True, "stream_options": None}, False),
    ],
)
def test_token_counts_are_shown_but_in_streams_that_do_not_ask_for_them(
    given: dict[str, Any], shown: bool
) -> None:
    assert shows_usage(body_of(given)[1]) == shown
