"""Error responses of the API listener: an unknown URL or method (404, 405), in the client's format.

For a wrong base URL, the response names the path that was probably meant.
"""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

from gateway.protocol.api_table import API_PATHS, MESSAGES
from gateway.protocol.error_formats import ANTHROPIC, OPENAI
from gateway.protocol.errors import Failure, GatewayError, new_request_id, retry_headers
from gateway.protocol.model_cards import wants_anthropic

SERVER_NAME = "penstock"  # replaces aiohttp's own name and version
_KNOWN_PATHS = frozenset(API_PATHS) | {"/v1/models"}


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert GatewayError and aiohttp's 404 and 405 to error responses of the client's API."""
    try:
        return await handler(request)
    except GatewayError as error:
        return _error(request, error)
    except web.HTTPMethodNotAllowed as problem:
        return _error(request, _method_not_allowed(request, sorted(problem.allowed_methods)))
    except web.HTTPNotFound:
        if request.rel_url.raw_path in API_PATHS:
            return _error(request, _method_not_allowed(request, ["POST"]))
        path = request.path[:64].encode("ascii", "backslashreplace").decode()
        message = f"Unknown request URL: {request.method} {path}.{_hint(request.rel_url.raw_path)}"
        return _error(request, GatewayError(Failure.NOT_FOUND, message))


def _hint(path: str) -> str:
    # Return the known path that was probably meant, as a sentence.
    #
    # The base URL of some clients ends with /v1, that of others must not. A final slash is doubled.
    meant = "/" + "/".join(part for part in path.split("/") if part)
    while meant.startswith("/v1/v1/"):
        meant = meant.removeprefix("/v1")
    likely = (meant, f"/v1{meant}", meant.removeprefix("/v1"))
    known = next((name for name in likely if name in _KNOWN_PATHS), None)
    return "" if known is None else f" Did you mean {known}? Check the client's base URL."


def _method_not_allowed(request: web.Request, allowed: list[str]) -> GatewayError:
    names = ", ".join(allowed)
    message = f"The method {request.method} is not allowed here. Allowed: {names}."
    return GatewayError(Failure.METHOD_NOT_ALLOWED, message, headers=(("allow", names),))


def _error(request: web.Request, error: GatewayError) -> web.Response:
    # Return the response for an error, in the format of the client's API (OpenAI or Anthropic).
    request_id = new_request_id()
    path = request.rel_url.raw_path
    shape = API_PATHS[path].errors if path in API_PATHS else OPENAI
    if path.startswith(f"{MESSAGES.path}/") or wants_anthropic(request.headers):
        shape = ANTHROPIC
    return web.Response(
        status=error.status,
        body=shape.body(error, request_id),
        content_type="application/json",
        headers=[("server", SERVER_NAME), *shape.id_headers(request_id), *retry_headers(error)],
    )
