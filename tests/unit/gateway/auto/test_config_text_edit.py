"""Tests that a change of a pool's policy keeps the rest of a configuration file's text."""

from __future__ import annotations

from gateway.auto.config_text_edit import with_pin, with_policy
from gateway.config import load_text
from gateway.config.diff import diff
from policies.auto.replay_messages import PolicyMember

TEXT = b"""version: 1
observability: {access_log: /tmp/access.jsonl}   # for auto
tenants: [{name: a, key: "${KEY:-0123456789abcdef0123}"}]
pools:
  chat:      # the only pool
    policy: auto
    endpoints:
    - url: "http://127.0.0.1:9001"
      labels: {gpu: h100}
"""


def test_a_policy_replaces_auto_and_comments_and_references_stay() -> None:
    changed = with_policy(TEXT, "chat", PolicyMember("lmetric"))
    assert b"policy: lmetric\n" in changed
    assert b"# for auto" in changed
    assert b"# the only pool" in changed
    assert b"${KEY:-0123456789abcdef0123}" in changed
    before, after = load_text(TEXT, "f", {}), load_text(changed, "f", {})
    assert [str(change) for change in diff(before, after)] == ["pools.chat.policy: auto -> lmetric"]
    assert after.config.pools["chat"].auto == before.config.pools["chat"].auto


def test_a_policy_with_parameters_becomes_a_mapping() -> None:
    member = PolicyMember("least_loaded", {"fresh_s": 2.0})
    loaded = load_text(with_policy(TEXT, "chat", member), "f", {})
    policy = loaded.config.pools["chat"].policy
    assert (policy.name, dict(policy.params)) == ("least_loaded", {"fresh_s": 2.0})


def test_a_pin_is_a_setting_of_the_pool() -> None:
    pinned = with_pin(TEXT, "chat", is_pinned=True)
    before, after = load_text(TEXT, "f", {}), load_text(pinned, "f", {})
    assert [str(change) for change in diff(before, after)] == [
        "pools.chat.auto.pinned: false -> true"
    ]
    again = load_text(with_pin(pinned, "chat", is_pinned=False), "f", {})
    assert again.config == before.config


def test_text_in_json_is_changed_too() -> None:
    text = (
        b'{"version": 1, "observability": {"access_log": "/tmp/a"}, "pools": {"chat": '
        b'{"policy": "auto", "endpoints": [{"url": "http://127.0.0.1:9001"}]}}}'
    )
    loaded = load_text(with_policy(text, "chat", PolicyMember("priced")), "f", {})
    assert loaded.config.pools["chat"].policy.name == "priced"
