"""Who may talk to the admin server: names, pages of other sites, keys, and where one comes from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.unit.gateway.reload.running import ENV, Running, running

KEYED = "admin: {key: '${ADMIN_KEY}', hosts: [ops.example]}\n"


async def reload(made: Running, **headers: str) -> int:
    status, _, _ = await made.asked(
        "POST", "/config/reload", headers={k.replace("_", "-"): v for k, v in headers.items()}
    )
    return status


async def test_a_page_under_a_name_of_its_own_reads_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        for host in ("evil.example", "evil.example:8081", "127.0.0.1.evil.example", "[::1", ""):
            for path in ("/config", "/endpoints", "/metrics", "/nothing"):
                async with made.http.get(made.app.admin_url + path, headers={"Host": host}) as answer:
                    assert answer.status in (400, 403), (host, path)
        for host in ("localhost", "localhost:1", "127.0.0.1", "10.1.2.3:8081", "[::1]:8081"):
            status, _, _ = await made.asked("GET", "/config", headers={"Host": host})
            assert status == 200, host
        async with made.http.get(made.app.admin_url + "/healthz", headers={"Host": "kubelet.example"}) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Via": "1.1 front"},
        {"X-Forwarded-Proto": "https"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"X-Forwarded-For": "10.0.0.9"},
        {"Forwarded": "for=10.0.0.9"},
    ],
    ids=str,
)
async def test_another_sites_page_and_whoever_comes_through_a_proxy_change_nothing(
    tmp_path: Path, headers: Mapping[str, str]
) -> None:
    async with running(tmp_path) as made:
        for method, path in (("POST", "/config/reload"), ("POST", "/config/rollback"), ("PUT", "/config")):
            status, _, told = await made.asked(method, path, headers=headers, data=made.text().encode())
            assert (status, told["result"]) == (403, "refused"), (method, path)
        assert (made.app.reloader.version.number, made.said) == (1, [])


async def test_without_a_key_this_machine_may_change_things(tmp_path: Path) -> None:
    async with running(tmp_path) as made:
        assert await reload(made) == 200
        assert await reload(made, Origin=made.app.admin_url) == 200


async def test_with_a_key_nothing_changes_without_it_and_reading_needs_none(tmp_path: Path) -> None:
    async with running(tmp_path, more=KEYED) as made:
        assert await reload(made) == 401
        assert await reload(made, Authorization="Bearer wrong") == 401
        assert await reload(made, Authorization=f"Basic {ENV['ADMIN_KEY']}") == 401
        assert await reload(made, Authorization=f"Bearer {ENV['ADMIN_KEY']}") == 200
        assert await reload(made, Authorization=f"Bearer {ENV['ADMIN_KEY']}", Origin="http://evil.example") == 403
        assert (await made.asked("GET", "/config", headers={"Host": "ops.example:8081"}))[0] == 200


async def test_a_text_longer_than_a_configuration_may_be_is_not_read(tmp_path: Path) -> None:
    async with (
        running(tmp_path) as made,
        made.http.put(made.app.admin_url + "/config", data=b"#" * (1 << 21)) as answer,
    ):
        assert answer.status == 413
