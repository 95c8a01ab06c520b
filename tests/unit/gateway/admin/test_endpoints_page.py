"""Tests of the admin pages of endpoints: their state, and how an operator drains one."""

from __future__ import annotations

from tests.chaos.gateway_fleet import gateway_fleet


async def test_the_endpoints_page_has_load_and_health() -> None:
    async with (
        gateway_fleet(2) as fleet,
        fleet.http.get(fleet.app.admin_url + "/endpoints") as response,
    ):
        rows = (await response.json())["endpoints"]
        assert [row["available"] for row in rows] == [True, True]
        assert {row["state"] for row in rows} == {"up"}
        assert all(row["in_flight"] == 0 and row["running"] == 0 for row in rows)


async def test_a_drained_endpoint_receives_no_requests_until_undrain() -> None:
    async with gateway_fleet(2) as fleet:
        names = [row.endpoint.name for row in fleet.app.gateway.endpoints.all()]
        post = fleet.http.post
        async with post(f"{fleet.app.admin_url}/endpoints/{names[0]}/drain") as response:
            assert await response.json() == {
                "result": "applied",
                "endpoint": names[0],
                "drained": True,
                "in_flight": 0,
            }
        for _ in range(4):
            assert (await fleet.ask()).headers["x-penstock-endpoint"] == names[1]
        async with fleet.http.get(f"{fleet.app.admin_url}/live") as response:
            view = (await response.json())["endpoints"]
        assert [(row["state"], row["severity"]) for row in view] == [("drained", 2), ("up", 0)]
        async with post(f"{fleet.app.admin_url}/endpoints/{names[0]}/undrain") as response:
            assert response.status == 200
        assert {(await fleet.ask()).headers["x-penstock-endpoint"] for _ in range(4)} == set(names)
        async with post(f"{fleet.app.admin_url}/endpoints/unknown/drain") as response:
            assert response.status == 404


async def test_draining_requires_the_admin_key_and_the_same_origin() -> None:
    async with gateway_fleet(1, admin={"key": "an-admin-key"}) as fleet:
        name = fleet.app.gateway.endpoints.all()[0].endpoint.name
        path = f"{fleet.app.admin_url}/endpoints/{name}/drain"
        key = {"Authorization": "Bearer an-admin-key"}
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            (key | {"Origin": "http://evil.example"}, 403),
            (key, 200),
        ):
            async with fleet.http.post(path, headers=headers) as response:
                assert response.status == status
