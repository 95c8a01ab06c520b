"""Tests of the configuration of state exchange between gateways."""

from __future__ import annotations

import pytest

from gateway.config import ConfigError, load_text
from gateway.config.diff import display

POOLS = "version: 1\npools: {main: {endpoints: [{url: 'http://a:1'}]}}\n"
ENV = {"KEY": "marmot-key-of-the-fleet", "PASSWORD": "marmot-password"}


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_text((POOLS + text).encode(), "g.yaml", ENV)
    return "\n".join(map(str, caught.value.problems))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://a:6379", "the form redis://host:6379"),
        ("redis://me:secret@a", "must not contain a user or a password"),
        ("redis://a/x", "must have only a scheme, a host, a port and a database"),
        ("redis://a:99999", "have a valid port"),
    ],
)
def test_a_url_that_is_not_redis_or_contains_a_secret_is_rejected(url: str, why: str) -> None:
    frames = refused(f"shared: {{redis: {{url: '{url}'}}, key: '${{KEY}}'}}\n")
    assert why in frames
    assert "g.yaml:3:" in frames


def test_a_short_or_missing_key_is_rejected() -> None:
    assert "least 16 characters" in refused(
        "shared: {redis: {url: 'redis://a'}, key: '${SHORT:-abc}'}\n"
    )
    assert "key" in refused("shared: {redis: {url: 'redis://a'}}\n")


def test_a_second_key_that_is_short_or_the_same_is_rejected() -> None:
    shared = "shared: {redis: {url: 'redis://a'}, key: '${KEY}', other_key: '%s'}\n"
    assert "at least 16 characters" in refused(shared % "${SHORT:-abc}")
    assert "must not be equal to `key`" in refused(shared % "${KEY}")


def test_a_second_key_in_the_text_counts_as_a_secret_and_is_not_shown() -> None:
    secret = "a second marmot of sixteen"
    keys = f"key: '${{KEY}}', other_key: '{secret}'"
    text = POOLS + f"shared: {{redis: {{url: 'redis://a'}}, {keys}}}\n"
    loaded = load_text(text.encode(), "g.yaml", ENV)
    assert loaded.has_secret_in_text
    assert "marmot" not in f"{loaded.config!r} {display(loaded)}"


def test_neither_key_nor_password_is_shown() -> None:
    text = POOLS + "shared: {redis: {url: 'redis://a', password: '${PASSWORD}'}, key: '${KEY}'}\n"
    loaded = load_text(text.encode(), "g.yaml", ENV)
    assert loaded.config.shared is not None
    assert loaded.config.shared.redis.url == "redis://a:6379/0"
    assert "marmot" not in f"{loaded.config!r} {display(loaded)}"
    assert not loaded.has_secret_in_text
