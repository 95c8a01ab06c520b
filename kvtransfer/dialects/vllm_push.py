"""vLLM's NixlPushConnector: both legs at once, matched by their X-Request-Id (engines.md B.3, vLLM 0.24 and later).

The decode request must say who will write to it. That is learnt from the first answer of each prefill endpoint, so its
first handoff is sequential, and forgotten when a leg fails there: engine ids change with a restart.
"""

from __future__ import annotations

import msgspec

from kvtransfer.dialects import vllm_nixl
from kvtransfer.dialects.contract import (
    Answer,
    Dialect,
    Edits,
    Handover,
    Identity,
    Needs,
    Order,
    Terms,
    Unusable,
    is_null,
    json_of,
    members,
    read_answer,
)
from kvtransfer.dialects.vllm_nixl import Name, Port, Size


class _Told(msgspec.Struct, frozen=True):
    """What P's answer says about P. Its blocks are its own business here."""

    remote_engine_id: Name
    remote_host: Name
    remote_port: Port
    tp_size: Size
    pp_size: Size = 1
    transfer_mode: str | None = None


_told = msgspec.json.Decoder(_Told).decode


def decode(terms: Terms, answer: Answer | None) -> Handover | Unusable:
    """The client's request, and who will write to it under which name."""
    who = terms.identity
    if who is None and answer is not None:
        who = next(iter(_identities(answer)), None)
    if who is None or who.host is None:
        return Unusable("the prefill engine did not say who it is")
    host = terms.prefill_host if vllm_nixl.is_loopback(who.host) else who.host
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": who.engine_id,
        "remote_host": host,
        "remote_port": who.port,
        "tp_size": who.tp_size,
        "pp_size": who.pp_size,
        "remote_request_id": terms.request_id,
    }
    return Handover(
        Edits(members({"kv_transfer_params": json_of(params)})), reports_own_cache=False
    )


def identify(body: bytes) -> tuple[Identity, ...]:
    """Who P is, from its answer; empty when it does not say or is in pull mode."""
    answer = read_answer(body)
    return () if isinstance(answer, Unusable) else _identities(answer)


def _identities(answer: Answer) -> tuple[Identity, ...]:
    if is_null(answer.handoff):
        return ()
    try:
        told = _told(answer.handoff)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ()
    if told.transfer_mode not in (None, "push"):
        return ()
    return (
        Identity(
            told.remote_engine_id, told.remote_host, told.remote_port, told.tp_size, told.pp_size
        ),
    )


def check(answer: Answer) -> Unusable | None:
    """P writes only if it says so: an answer without its object means that nothing will come."""
    return None if _identities(answer) else Unusable("the prefill answer promises no transfer")


VLLM_PUSH = Dialect(
    "vllm_push",
    "vllm",
    Order.CONCURRENT,
    vllm_nixl.prefill,
    decode,
    needs=Needs.FIRST_ANSWER,
    identify=identify,
    check=check,
)
