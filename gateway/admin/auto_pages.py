"""The admin pages for automatic policy selection: show its state, pin a policy, and unpin it."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from gateway.auto.auto_controller import AutoPolicyController, UnknownPoolError

STATUS = {"applied": 200, "unchanged": 200, "rejected": 400, "nothing": 409, "conflict": 412}


def add_auto(routes: web.UrlDispatcher, find: Callable[[], AutoPolicyController | None]) -> None:
    """Add the pages below /auto to the admin server's `routes`.

    `find` returns this process's AutoPolicyController, which selects the policies; None if there is
    none.
    """

    async def read(_: web.Request) -> web.Response:
        controller = find()
        return web.json_response({"pools": []} if controller is None else controller.as_json())

    async def change(request: web.Request) -> web.Response:
        controller, pool = find(), request.match_info["pool"]
        try:
            if controller is None:
                raise UnknownPoolError(
                    "no pool of this process has the section auto, so no policy is selected "
                    "automatically"
                )
            outcome = await controller.set_pin(pool, is_pinned=request.match_info["what"] == "pin")
        except UnknownPoolError as error:
            return web.json_response({"result": "nothing", "message": str(error)}, status=404)
        reply = {"result": outcome.result, "message": outcome.message, "version": outcome.version}
        return web.json_response(reply, status=STATUS.get(outcome.result, 503))

    routes.add_get("/auto", read)
    routes.add_post("/auto/{pool}/{what:pin|unpin}", change)
