"""A parsed API request (Call), and its body for an engine, without members for engine internals.

Unknown members are passed on. The body is encoded again only if it changes.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gateway.protocol.api_table import Api
from gateway.protocol.request.json_members import (
    MAX_MEMBERS,
    TooManyMembersError,
    bad_request,
    decode_object,
    join_members,
)
from gateway.protocol.request.media import NO_MEDIA, MediaSize
from gateway.protocol.request.multipart import edit_form
from policies.routing_types import Request

# Members that make an engine read, write or wait for another request's KV cache, or that pin its
# scheduling. Engines trust them, and a malformed one can end vLLM's process, so a client may not
# send them.
ENGINE_INTERNAL = frozenset(
    {
        "kv_transfer_params",
        "ec_transfer_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "bootstrap_pair_key",
        "disaggregated_params",
        "disagg_request_id",
        "routed_dp_rank",
        "data_parallel_rank",
        "disagg_prefill_dp_rank",
        "priority",
        "cache_salt",
        "extra_key",
        "rid",
        "request_id",
    }
)
# vLLM merges it into its extra arguments, so it can contain the same names.
EXTRA_ARGS = "vllm_xargs"


class Call(msgspec.Struct):
    """A parsed request: what routing policies need to know, and the bytes that go to the engine.

    requested_model   the model name that the client used; responses contain it even if engines use
                      another
    body              the JSON to send; empty after release(), as are `prompt` and `members`
    prompt            the raw values of the prompt in the order in which the engine renders them,
                      with placeholders for media
    members           all members of the body as raw values, by name
    salt              cache salt (hex); requests share cached prompts only if their salts are equal.
                      b"": no salt
    estimated_tokens  prompt tokens as estimated from the number of bytes; 0 if they were counted
    media_size        number and estimated tokens of the images, recordings and files in the prompt
    """

    api: Api
    request: Request
    requested_model: str
    body: bytes
    prompt: tuple[msgspec.Raw, ...]
    members: Mapping[str, msgspec.Raw] = {}
    salt: bytes = b""
    estimated_tokens: int = 0
    media_size: MediaSize = NO_MEDIA

    def salt_member(self, name: str) -> bytes:
        """Return the JSON text that adds the cache salt to a body, as a member called `name`.

        Returns b"" if the call has no salt, or if `name` is "" because the engine accepts no salt.
        """
        return b',"%b":"%b"' % (name.encode(), self.salt) if name and self.salt else b""

    def with_member(self, member: bytes) -> Call:
        """Return a copy of the request with `member` added at the end of its body's JSON object.

        A call whose body is a form is returned unchanged.
        """
        body = self.body
        if self.api.is_form:  # engines read no such member from a form
            return self
        end = body.rindex(b"}")
        return msgspec.structs.replace(self, body=b"".join((memoryview(body)[:end], member, b"}")))

    def adapted_to(self, model: str, known: frozenset[str] | None) -> Call:
        """Return this request for an engine that uses another model name or accepts fewer members.

        `known` has the members that the engine accepts; None means all. If nothing changes, this
        object itself is returned.
        """
        members = self.members
        if self.api.is_form:
            return msgspec.structs.replace(self, body=edit_form(self.body, model))
        accepted = {
            name: value for name, value in members.items() if known is None or name in known
        }
        if model == self.request.model and len(accepted) == len(members):
            return self
        accepted["model"] = msgspec.Raw(msgspec.json.encode(model))
        return msgspec.structs.replace(self, body=join_members(accepted), members=accepted)

    def release(self) -> None:
        """Free the request's body after the first token, because no retry is possible any more."""
        self.body, self.prompt, self.members = b"", (), {}


def engine_body(
    body: bytes,
    members: dict[str, msgspec.Raw],
    internal: frozenset[str],
    requested: str,
    served: str,
    is_form: bool,
) -> tuple[bytes, dict[str, msgspec.Raw]]:
    """Return the body to send to an engine, and its members.

    The engine-internal members `internal` are removed, and the model name is the one that engines
    use.
    """
    xargs = _without_internal(members[EXTRA_ARGS]) if EXTRA_ARGS in members else None
    if not internal and requested == served and xargs is None:
        return body, members
    outbound: dict[str, msgspec.Raw] = {
        name: value for name, value in members.items() if name not in internal
    }
    outbound["model"] = msgspec.Raw(msgspec.json.encode(served))
    if is_form:
        return edit_form(body, served, internal), outbound
    if xargs is not None:
        outbound[EXTRA_ARGS] = xargs
    return join_members(outbound), outbound


def _without_internal(value: msgspec.Raw) -> msgspec.Raw | None:
    # Return an object without its engine-internal members.
    #
    # The result is None if there is nothing to remove, or if `value` is not an object.
    try:
        members = decode_object(value)
    except TooManyMembersError:
        raise bad_request(
            f"The member '{EXTRA_ARGS}' has too many members; at most {MAX_MEMBERS} are accepted.",
            EXTRA_ARGS,
        ) from None
    except msgspec.ValidationError:
        return None
    if ENGINE_INTERNAL.isdisjoint(members):
        return None
    return msgspec.Raw(
        join_members(
            {name: value for name, value in members.items() if name not in ENGINE_INTERNAL}
        )
    )
