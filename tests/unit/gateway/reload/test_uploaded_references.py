"""Tests that a configuration sent over HTTP cannot read environment variables or files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from gateway.admin.config_pages import _certificates
from gateway.config import load_text
from gateway.config.diff import diff
from gateway.config.uploaded_references import unresolvable
from tests.certificate_authority import Authority
from tests.unit.gateway.reload import running as setting
from tests.unit.gateway.reload.running import Running, running
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

CANARY = "Canary-7d1f.example"
SECRET = "sk-Canary-7d1f-secret"
ENV = {
    "HOST": CANARY,
    "SECRET": SECRET,
    "OTHER": f"other-{CANARY}",
    "ADMIN_KEY": "sk-admin-of-the-test",
    "PIN": "4711",
}
BASE = """\
version: 1
models:
  - {name: "${HOST}", pool: chat}
pools:
  chat:
    endpoints:
      - {url: "http://${HOST}:8000", api_key: "${SECRET}", labels: {zone: "${HOST}"}}
      - {name: "${HOST}-b", url: "http://h:2"}
tenants: [{name: "${HOST}", key: "${SECRET}"}]
"""


@asynccontextmanager
async def reached(tmp_path: Path, more: str = "") -> AsyncIterator[Running]:
    with patch.dict(setting.ENV, ENV):
        async with running(tmp_path, more=more) as harness:
            yield harness


def assert_silent(*seen: object) -> None:
    text = json.dumps(seen, default=str).lower()
    assert not any(value.lower() in text for value in (CANARY, SECRET))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('url: "http://h:2"', 'url: "http://h:3"'),
        ("zone:", "rack:"),
        ('"http://${HOST}:8000"', '"http://${HOST}:8001"'),
        ('{name: "${HOST}", pool: chat}', '{name: "${HOST}", pool: chat, context_tokens: 100}'),
        ('tenants: [{name: "${HOST}"', 'tenants: [{name: "${HOST}", weight: 2'),
        ('tenants: [{name: "${HOST}"', 'tenants: [{name: "${HOST}-2"'),
        ("endpoints:", 'shadow: ["${POLICY}"]\n    endpoints:'),
        ("endpoints:", 'shadow: [{name: "${POLICY}", parameters: {fresh_s: 2.0}}]\n    endpoints:'),
        ("endpoints:", 'policy: "${POLICY}"\n    endpoints:'),
    ],
)
def test_a_difference_shows_references_as_they_are_written(old: str, new: str) -> None:
    env = ENV | {"POLICY": "least_loaded"}
    assert BASE.count(old) == 1
    before, after = (
        load_text(BASE.encode(), "g", env),
        load_text(BASE.replace(old, new).encode(), "g", env),
    )
    for found in (diff(before, after), diff(after, before)):
        assert found
        assert_silent([str(each) for each in found], found)
        if "POLICY" in new:
            assert "least_loaded" not in str(found)


BAD = [
    'listeners: {api: {port: 0}, admin: {port: 0, tls: {certificate: "${HOST}", key: "${HOST}"}}}',
    'timeouts: {stall: "${HOST}"}',
    'timeouts: {stall: "${PIN}"}',
    'limits: {body: "${PIN}"}',
    'slo: {default: "${HOST}"}',
    'tenants: [{name: "${HOST}", key: "${SECRET}"}, {name: "${HOST}", key: "${SECRET}"}]',
    'models: [{name: "${HOST}", pool: "${HOST}"}]',
    'pools: {chat: {policy: "${HOST}", endpoints: [{url: "http://h:1"}]}}',
    'pools: {chat: {endpoints: [{url: "${HOST}"}]}}',
    'pools: {chat: {endpoints: [{url: "http://h:1", engine: "${HOST}"}]}}',
    'pools: {chat: {endpoints: [{url: "http://h:1", tls: {ca: "${HOST}"}}]}}',
    'pools: {chat: {endpoints: [{url: "http://h:1", role: "${HOST}"}]}}',
    'pools: {chat: {endpoints: [{url: "http://h:1", max_concurrency: "${HOST}"}]}}',
    'observability: {traces: {endpoint: "${HOST}"}}',
]


@pytest.mark.parametrize("text", BAD)
def test_no_error_message_shows_the_value_of_a_reference(text: str) -> None:
    with pytest.raises(Exception, match=r"g:\d+:\d+") as refused:
        load_text(f"version: 1\n{text}\n".encode(), "g", ENV)
    assert_silent(str(refused.value))
    assert "4711" not in str(refused.value)


STRANGE = [
    ("name: group-0", "name: '${OTHER}'"),
    ("name: group-0", "name: group-0, labels: {x: '${OTHER}'}"),
    ("name: group-0", "name: group-0, api_key: '${OTHER}'"),
    ("name: group-0", "name: group-0, api_key: '${OTHER:-none}'"),
    ("name: group-0", "name: group-0, api_key: '${file:key}'"),
    ("name: group-0", "name: group-0, tls: {ca: '${OTHER}'}"),
    ("policy: prefix_aware", "policy: '${OTHER}'"),
    ("timeouts: {connect: 10s", "timeouts: {connect: '${OTHER}'"),
    ("name: demo-8b", "name: '${OTHER}'"),
]


@pytest.mark.parametrize("admin_key", ["", "admin: {key: '${ADMIN_KEY}'}\n"])
@pytest.mark.parametrize(("old", "new"), STRANGE)
async def test_a_reference_at_a_new_place_is_refused_and_not_resolved(
    tmp_path: Path, old: str, new: str, admin_key: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "key").write_text(f"file-{CANARY}")
    more = admin_key + "tenants: [{name: t, key: '${SECRET}'}]\n"
    headers = {"authorization": f"Bearer {ENV['ADMIN_KEY']}"} if admin_key else {}
    async with reached(tmp_path, more=more) as harness:
        sent = (harness.text(0) + more).replace(old, new, 1)
        seen: list[Any] = []
        for params in ({"dry_run": "1"}, {}):
            status, told = await harness.put(sent, params=params, headers=headers)
            assert (status, told["result"]) == (400, "rejected"), told
            (problem, *_) = told["problems"]
            assert "was sent over HTTP" in problem["message"]
            assert problem["line"] > 1
            assert problem["col"] > 1
            seen.append(told)
        pages = ("/config", "/config/versions", "/endpoints", "/live")
        seen += [await harness.asked("GET", path) for path in pages]
        assert_silent(seen, harness.said, caplog.text)


async def test_a_key_is_not_sent_to_another_address_without_the_admin_key(tmp_path: Path) -> None:
    heard: list[bytes] = []

    async def spy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    server = await asyncio.start_server(spy, "127.0.0.1", 0)
    async with server, reached(tmp_path) as harness:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        own = harness.text(0).replace("name: group-0", "name: group-0, api_key: '${SECRET}'")
        harness.write(own)
        await harness.hears("v2")
        moved = own.replace(harness.members[0].url, url)
        for params in ({"dry_run": "1"}, {}, {"force": "1"}):
            status, told = await harness.put(moved, params=params)
            assert (
                status,
                "the address to which a key is sent" in told["problems"][0]["message"],
            ) == (
                400,
                True,
            )
        in_url = own.replace(harness.members[0].url, url + "/${SECRET}")
        assert (await harness.put(in_url))[0] == 400
        status, told = await harness.put(own.replace("prefix_aware", "least_loaded"))
        assert (status, told["result"]) == (200, "applied")  # the same key at the same address
        assert (await harness.ask()) == "ok"
        assert not heard


async def test_with_the_admin_key_known_references_may_move_but_new_ones_are_refused(
    tmp_path: Path,
) -> None:
    more = "admin: {key: '${ADMIN_KEY}'}\n"
    headers = {"authorization": f"Bearer {ENV['ADMIN_KEY']}"}
    async with reached(tmp_path, more=more) as harness:
        keyed = "name: group-0, api_key: '${SECRET}'"
        harness.write(harness.text(0).replace("name: group-0", keyed) + more)
        await harness.hears("v2")
        both = harness.text().replace("name: group-0", keyed) + more
        status, told = await harness.put(
            both.replace("name: group-1", "name: group-1, api_key: '${SECRET}'"), headers=headers
        )
        assert (status, told["result"]) == (200, "applied")
        assert_silent(told)
        status, told = await harness.put(
            both.replace("name: group-1", "name: group-1, api_key: '${OTHER}'"), headers=headers
        )
        assert status == 400


async def test_a_rollback_resolves_the_references_of_its_version(tmp_path: Path) -> None:
    async with reached(tmp_path, more="tenants: [{name: t, key: '${SECRET}'}]\n") as harness:
        harness.write(harness.text())
        await harness.hears("v2")
        status, _, told = await harness.asked("POST", "/config/rollback")
        assert (status, told["result"]) == (200, "applied")
        assert_silent(told)


async def test_pages_about_certificates_show_the_reference(tmp_path: Path) -> None:
    folder = tmp_path / CANARY
    folder.mkdir()
    pair = Authority(folder).issue("gateway")
    text = (
        'listeners: {admin: {tls: {certificate: "${CERTIFICATE}", key: "${KEY}"}}}\n'
        "pools: {p: {endpoints: [{url: 'http://h:1'}]}}\n"
    )
    env = {"CERTIFICATE": str(pair.certificate), "KEY": str(pair.key)}
    loaded = load_text(f"version: 1\n{text}".encode(), "g", env)
    (shown,) = _certificates(loaded)
    assert shown["file"] == "${CERTIFICATE}"
    (tmp_path / CANARY / "gone").mkdir()
    with pytest.raises(Exception, match="certificate") as refused:
        load_text(f"version: 1\n{text}".encode(), "g", env | {"CERTIFICATE": str(folder / "gone")})
    assert_silent(str(refused.value))


def test_places_differ_by_meaning_and_not_by_index_or_name() -> None:
    known = (
        b"pools: {a: {endpoints: [{url: 'http://h:1', api_key: '${K}'}]}}\nadmin: {key: '${A}'}\n"
    )
    moved = (
        b"pools: {b: {endpoints: [{url: 'http://x:1'}, {url: 'http://h:1', api_key: '${K}'}]}}\n"
    )
    assert not unresolvable(moved, "g", [known], with_key=False)
    crossed = (
        b"pools: {a: {endpoints: [{url: 'http://h:1', api_key: '${A}'}]}}\nadmin: {key: '$${K}'}\n"
    )
    for with_key in (False, True):
        assert list(unresolvable(crossed, "g", [known], with_key=with_key)) == [
            ("pools", "a", "endpoints", 0, "api_key")
        ]
    insecure = (
        b"pools: {a: {endpoints: [{url: 'http://h:1', api_key: '${K}', tls: {verify: false}}]}}\n"
    )
    assert unresolvable(insecure, "g", [known], with_key=False)
    found = b"pools: {a: {discover: {dns: {name: %b, port: 80}, endpoint: {api_key: '${K}'}}}}\n"
    assert unresolvable(found % b"evil", "g", [found % b"ours"], with_key=False)
    assert not unresolvable(found % b"evil", "g", [found % b"ours"], with_key=True)
    redis = b"shared: {redis: {url: 'redis://%b:6379', password: '${K}'}}\n"
    assert unresolvable(redis % b"evil", "g", [redis % b"ours"], with_key=False)
    s3 = b"batch: {s3: {bucket: b, endpoint_url: 'https://%b', access_key_id: i, %b: '${K}'}}\n"
    for key in (b"secret_access_key", b"session_token"):
        assert unresolvable(s3 % (b"evil", key), "g", [s3 % (b"ours", key)], with_key=False)
        assert not unresolvable(s3 % (b"ours", key), "g", [s3 % (b"ours", key)], with_key=False)
    traces = b"observability: {traces: {endpoint: 'http://%b/v1/traces', key: '${K}'}}\n"
    assert unresolvable(traces % b"evil", "g", [traces % b"ours"], with_key=False)
