"""Tests of the admin server's access rules: host names, origins, keys, client addresses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.unit.gateway.reload.running import ENV, Running, running

KEYED = "admin: {key: '${ADMIN_KEY}', hosts: [ops.example]}\n"


async def reload(running_gateway: Running, **headers: str) -> int:
    status, _, _ = await running_gateway.asked(
        "POST", "/config/reload", headers={k.replace("_", "-"): v for k, v in headers.items()}
    )
    return status


async def test_requests_with_another_host_name_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as running_gateway:
        for host in ("evil.example", "evil.example:8081", "127.0.0.1.evil.example", "[::1", ""):
            for path in ("/config", "/endpoints", "/metrics", "/nothing"):
                async with running_gateway.http.get(
                    running_gateway.app.admin_url + path, headers={"Host": host}
                ) as response:
                    assert response.status in (400, 403), (host, path)
        for host in ("localhost", "localhost:1", "127.0.0.1", "10.1.2.3:8081", "[::1]:8081"):
            status, _, _ = await running_gateway.asked("GET", "/config", headers={"Host": host})
            assert status == 200, host
        async with running_gateway.http.get(
            running_gateway.app.admin_url + "/healthz", headers={"Host": "kubelet.example"}
        ) as response:
            assert response.status == 200


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
async def test_cross_site_and_proxied_requests_cannot_change_anything(
    tmp_path: Path, headers: Mapping[str, str]
) -> None:
    async with running(tmp_path) as running_gateway:
        for method, path in (
            ("POST", "/config/reload"),
            ("POST", "/config/rollback"),
            ("PUT", "/config"),
        ):
            status, _, reply = await running_gateway.asked(
                method, path, headers=headers, data=running_gateway.text().encode()
            )
            assert (status, reply["result"]) == (403, "refused"), (method, path)
        assert (running_gateway.app.reloader.version.number, running_gateway.said) == (1, [])


async def test_without_a_key_local_requests_can_change_things(tmp_path: Path) -> None:
    async with running(tmp_path) as running_gateway:
        assert await reload(running_gateway) == 200
        assert await reload(running_gateway, Origin=running_gateway.app.admin_url) == 200


async def test_a_key_is_required_for_changes_and_not_for_reading(tmp_path: Path) -> None:
    async with running(tmp_path, more=KEYED) as running_gateway:
        assert await reload(running_gateway) == 401
        assert await reload(running_gateway, Authorization="Bearer wrong") == 401
        assert await reload(running_gateway, Authorization=f"Basic {ENV['ADMIN_KEY']}") == 401
        assert await reload(running_gateway, Authorization=f"Bearer {ENV['ADMIN_KEY']}") == 200
        assert (
            await reload(
                running_gateway,
                Authorization=f"Bearer {ENV['ADMIN_KEY']}",
                Origin="http://evil.example",
            )
            == 403
        )
        assert (
            await running_gateway.asked("GET", "/config", headers={"Host": "ops.example:8081"})
        )[0] == 200


async def test_a_configuration_that_is_too_large_is_refused(tmp_path: Path) -> None:
    async with (
        running(tmp_path) as running_gateway,
        running_gateway.http.put(
            running_gateway.app.admin_url + "/config", data=b"#" * (1 << 21)
        ) as response,
    ):
        assert response.status == 413
