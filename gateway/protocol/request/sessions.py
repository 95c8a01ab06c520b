"""Finds the session of a request: the headers and body members in which clients name it.

It also reads hints about the session's future. A session that the client does not name is
recognised by its growing prompt (policies/prefix/growing_prefix.py). Ids of single requests, such
as x-client-request-id, do not name a session.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gateway.protocol.stored_response_ids import conversation_of
from policies.routing_types import Request, SessionHints

SESSION_HEADER = "x-session-id"
SESSION_HEADERS: Mapping[str, str] = {
    "x-claude-code-session-id": "x-claude-code-agent-id",  # Claude Code
    "session-id": "thread-id",  # Codex
    "session_id": "",  # Codex before it renamed the header
    "x-opencode-session": "",  # OpenCode
    "x-session-affinity": "",  # OpenCode and other clients, for providers that they do not know
    "x-litellm-session-id": "",  # litellm, OpenHands
    "x-dynamo-session-id": "",  # clients configured for Dynamo
    SESSION_HEADER: "",
}
"""Headers that name a session, each with the header that names one agent within the session.

The first header that is present is used. A subagent has a session of its own, because it has its
own context.
"""
FINAL_HEADERS = ("x-session-final", "x-dynamo-session-final")
"""Headers whose value "true" marks the last request of a session."""
SESSION_HEADER_NAMES = frozenset(
    (*SESSION_HEADERS, *filter(None, SESSION_HEADERS.values()), *FINAL_HEADERS)
)

MAX_SESSION_CHARS = 256  # maximum length of a session id
MAX_HINT_BYTES = 16 * 1024  # bytes of a member that may name a session; a longer one is not read
MAX_KEEP_S = 86_400.0

_LEGACY_USER_ID = re.compile(r"user_[^/\s]{0,200}_session_([0-9A-Fa-f-]{8,64})")
_TTL = re.compile(r"([0-9]{1,6})([smh]?)")
_UNIT_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class HeaderSession(msgspec.Struct, frozen=True):
    """The session that a request's headers name; its texts are empty if they name none.

    name     name of the session as the client sent it, with the name of the agent if there is one
    source   name of the header
    is_last  whether the headers mark the last request of the session
    """

    name: str = ""
    source: str = ""
    is_last: bool = False


def read_header_session(headers: Mapping[str, str]) -> HeaderSession:
    """Return the session that a request's headers name; `headers` has lower-case names.

    A name that is empty or too long is ignored and not an error, because agents send these headers
    automatically.
    """
    is_last = any(headers.get(name, "").lower() == "true" for name in FINAL_HEADERS)
    for header, agent_header in SESSION_HEADERS.items():
        name = headers.get(header, "")
        if 0 < len(name) <= MAX_SESSION_CHARS:
            agent = headers.get(agent_header, "")
            has_agent = agent != name and 0 < len(agent) <= MAX_SESSION_CHARS
            return HeaderSession(f"{name}/{agent}" if has_agent else name, header, is_last)
    return HeaderSession(is_last=is_last)


def session_key(tenant: str, name: str) -> str:
    """Return a session's key from tenant and name, so that two tenants' sessions never collide."""
    return f"{tenant}\0{name}" if name and tenant else name


def with_body_session(request: Request, members: Mapping[str, msgspec.Raw]) -> Request:
    """Return the request with the session and the hints that its body contains.

    A session that was named in a header takes precedence; the request has it already.
    """
    name, source = ("", "") if request.session else _body_session(members)
    hints = _body_hints(members, request.session_hints)
    if not name and hints is request.session_hints:
        return request
    return msgspec.structs.replace(
        request,
        session=session_key(request.tenant, name) if name else request.session,
        session_source=source or request.session_source,
        session_hints=hints,
    )


def _body_session(members: Mapping[str, msgspec.Raw]) -> tuple[str, str]:
    # Return the session's name and the body member that gives it, or two empty strings.
    for member, read in _BODY_SESSIONS.items():
        if member in members:
            name = read(members[member])
            if isinstance(name, str) and 0 < len(name) <= MAX_SESSION_CHARS:
                return name, member
    return "", ""


def _body_hints(
    members: Mapping[str, msgspec.Raw], known: SessionHints | None
) -> SessionHints | None:
    # Return the hints in the body about the session's future, or `known` if it has none.
    is_last, keep_s = False, None
    for member, read in _BODY_HINTS.items():
        if member in members:
            hints = read(_read_object(members[member]))
            is_last, keep_s = is_last or hints.is_last, hints.keep_s or keep_s
    if not is_last and keep_s is None:
        return known
    return SessionHints(is_last or (known is not None and known.is_last), keep_s)


def _read_object(raw: msgspec.Raw) -> Mapping[str, Any]:
    # Decode a JSON object; return an empty one for any other, malformed or large value.
    value = _read(raw)
    return value if isinstance(value, dict) else {}


def _read(raw: msgspec.Raw) -> Any:
    if len(raw) > MAX_HINT_BYTES:
        return None
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None


def _path(value: object, *names: str) -> Any:
    # Return the value at a path of keys in nested objects, or None if a key is absent.
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _metadata_session(raw: msgspec.Raw) -> str | None:
    # Return the session in Anthropic's `metadata.user_id` as Claude Code fills it, or None.
    #
    # The value is a JSON object in a string, or in older versions `user_..._session_<UUID>`. Any
    # other value identifies a person, who may have many sessions.
    user_id = _read_object(raw).get("user_id")
    if not isinstance(user_id, str) or len(user_id) > MAX_HINT_BYTES:
        return None
    if user_id.startswith("{"):
        name = _read_object(msgspec.Raw(user_id.encode("utf-8", "replace"))).get("session_id")
        return name if isinstance(name, str) else None
    match = _LEGACY_USER_ID.fullmatch(user_id)
    return None if match is None else match[1]


def _conversation(raw: msgspec.Raw) -> Any:
    # Return the conversation of a Responses request, which is an id or an object with an id.
    value = _read(raw)
    return value.get("id") if isinstance(value, dict) else value


def _previous_session(raw: msgspec.Raw) -> Any:
    # Return the name of the conversation that a previous response belongs to.
    #
    # If the response's id does not show it, the id itself is returned.
    value = _read(raw)
    return (conversation_of(value) or value) if isinstance(value, str) else value


def _agentic_context_session(raw: msgspec.Raw) -> Any:
    context = _path(_read_object(raw), "agentic_context")
    return _path(context, "program_id") or _path(context, "session_id")


def _nvext_session(raw: msgspec.Raw) -> Any:
    value = _read_object(raw)
    return _path(value, "agent_context", "session_id") or _path(
        value, "session_control", "session_id"
    )


def _agent_hint_session(raw: msgspec.Raw) -> Any:
    return _read_object(raw).get("session_id")


_BODY_SESSIONS: Mapping[str, Callable[[msgspec.Raw], Any]] = {
    "metadata": _metadata_session,
    "conversation": _conversation,
    "prompt_cache_key": _read,
    "previous_response_id": _previous_session,
    "vllm_xargs": _agentic_context_session,
    "nvext": _nvext_session,
    "agent_hint": _agent_hint_session,
}
"""Members of the body that name a session; the first one that is present is used."""


def _agentic_context_hints(value: Mapping[str, Any]) -> SessionHints:
    return SessionHints(_path(value, "agentic_context", "expected_resume") is False)


def _nvext_hints(value: Mapping[str, Any]) -> SessionHints:
    is_final = _path(value, "agent_context", "session_final") is True
    is_closed = _path(value, "session_control", "action") == "close"
    return SessionHints(is_final or is_closed, _keep_s(_path(value, "cache_control", "ttl")))


def _agent_hint_hints(value: Mapping[str, Any]) -> SessionHints:
    return SessionHints(keep_s=_keep_s(_path(value, "cache_control", "ttl")))


def _keep_s(ttl: object) -> float | None:
    # Return for how many seconds to keep a context, from a number or a text such as "5m".
    #
    # The result is None if the value is invalid.
    if isinstance(ttl, str) and (match := _TTL.fullmatch(ttl)) is not None:
        return min(MAX_KEEP_S, float(match[1]) * _UNIT_S[match[2]])
    if isinstance(ttl, int | float) and not isinstance(ttl, bool) and ttl > 0:
        return min(MAX_KEEP_S, float(ttl))
    return None


_BODY_HINTS: Mapping[str, Callable[[Mapping[str, Any]], SessionHints]] = {
    "vllm_xargs": _agentic_context_hints,
    "nvext": _nvext_hints,
    "agent_hint": _agent_hint_hints,
}
SESSION_MEMBERS = frozenset(_BODY_SESSIONS)
"""Members of the body that may name a session or give hints about it."""
