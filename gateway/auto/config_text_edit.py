"""Changes a pool's policy in a configuration text; keeps its comments, order and references."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from ruamel.yaml import YAML

from gateway.config.auto_section import AUTO
from policies.auto.replay_messages import PolicyMember

LONGEST_LINE = 1 << 20  # line length of the YAML writer, so large that it folds no line


def with_policy(text: bytes, pool: str, member: PolicyMember) -> bytes:
    """Return a copy of a configuration text in which one pool has another routing policy.

    text    the YAML text; its comments and layout are kept
    pool    name of the pool
    member  the new value of the pool's `policy`
    """
    yaml, tree = _read(text)
    section = tree["pools"][pool]
    # `policy: auto` also stood for this section.
    if section.get(AUTO) is None:
        section[AUTO] = {}
    section["policy"] = (
        {"name": member.policy, "parameters": dict(member.parameters)}
        if member.parameters
        else member.policy
    )
    return _write(yaml, tree)


def with_pin(text: bytes, pool: str, *, is_pinned: bool) -> bytes:
    """Return a copy of a configuration text in which the pool's policy is pinned or unpinned."""
    yaml, tree = _read(text)
    section = tree["pools"][pool]
    if section.get(AUTO) is None:
        section[AUTO] = {}
    section[AUTO]["pinned"] = is_pinned
    return _write(yaml, tree)


def _read(text: bytes) -> tuple[YAML, Any]:
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = LONGEST_LINE
    return yaml, yaml.load(text)


def _write(yaml: YAML, tree: Any) -> bytes:
    out = BytesIO()
    yaml.dump(tree, out)
    return out.getvalue()
