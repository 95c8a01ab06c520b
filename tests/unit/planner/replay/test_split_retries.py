"""Tests of replayed split requests whose decode half fails, or whose client leaves."""

from __future__ import annotations

import msgspec

from planner.replay import (
    ClientBehaviour,
    FleetSpec,
    GroupFault,
    GroupFaultKind,
    GroupKind,
    ReplayOptions,
    RequestEnd,
    traffic,
)
from planner.replay.block_chain import keys_of
from planner.replay.fleet_sim import Fleet
from planner.traces import TraceRequest
from policies import policy_registry
from policies.prefix.fingerprint import Fingerprint
from policies.routing_types import Request, Role

PREFILL, DECODE, BOTH = 0, 1, 2  # slots of the groups
KNOWN = 7680  # whole blocks of the prefix index
SENT = TraceRequest(0.0, 8000, 5, tuple(range(1, 501)))
IS_AWAY = GroupFault(0.0, BOTH, GroupFaultKind.DRAIN, duration_s=1.5)


def split_fleet(*faults: GroupFault, patience_s: float | None = None) -> Fleet:
    # At first, only the prefill and the decode group serve. Their link takes seconds for a prompt.
    slow = GroupKind("llama-3.1-70b-fp8", "h100", 4, kv_tokens=100_000, link_gb_s=0.5)
    roles = (Role.PREFILL, Role.DECODE, Role.BOTH)
    spec = FleetSpec("pd", tuple(msgspec.structs.replace(slow, role=role) for role in roles))
    clients = ClientBehaviour(patience_s=patience_s)
    options = ReplayOptions(faults=(IS_AWAY, *faults), clients=clients)
    policy = policy_registry.build("prefix_aware", {})
    return Fleet(spec, traffic([SENT]), policy, None, options)


def prompt_of(fleet: Fleet) -> Fingerprint:
    request = Request("r", "m", "", prompt_tokens=SENT.input_tokens, output_tokens=5)
    keys = keys_of(SENT, fleet.groups[PREFILL].block_tokens)
    prompt = fleet.gateway.fingerprint(request, SENT, keys)
    assert prompt is not None
    return prompt


def cached_tokens(fleet: Fleet, slot: int) -> int:
    # Return the prompt tokens that the group in a slot is believed to have cached.
    found = fleet.gateway.index.match(prompt_of(fleet), SENT.input_tokens)
    return found[slot] if slot < len(found) else 0


def test_a_decode_group_learns_a_prompt_with_its_first_token() -> None:
    fleet = split_fleet()
    (record,) = fleet.run().records
    assert (record.end, record.prefilled_by, record.group) == (RequestEnd.SERVED, "tp0", "tp1")
    assert cached_tokens(fleet, DECODE) >= KNOWN


def test_a_request_that_is_served_whole_after_its_split_failed_is_no_split_request() -> None:
    # Both groups fail during the transfer. The decode group returns later.
    fleet = split_fleet(GroupFault(1.9, PREFILL), GroupFault(2.0, DECODE, duration_s=1.0))
    (record,) = fleet.run().records
    assert (record.end, record.retries, record.group) == (RequestEnd.SERVED, 1, "tp2")
    assert record.prefilled_by == ""
    assert fleet.groups[BOTH].speed.waiting == 0, "its first token has been recorded"
    assert cached_tokens(fleet, DECODE) == 0, "the KV never arrived there"


def test_a_client_that_leaves_during_the_transfer_leaves_what_others_have_taught() -> None:
    fleet = split_fleet(patience_s=2.5)
    prompt = prompt_of(fleet)
    fleet.schedule(1.0, lambda *_: fleet.gateway.index.insert(prompt, DECODE, SENT.input_tokens))
    assert [record.end for record in fleet.run().records] == [RequestEnd.LEFT]
    assert cached_tokens(fleet, DECODE) >= KNOWN
