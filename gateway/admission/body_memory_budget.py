"""The memory budget for request bodies: all bodies together use at most `limits.body_budget`."""

from __future__ import annotations

from gateway.http.large_body_parsing import LARGE_BODY, LargeBodies
from gateway.protocol.errors import Failure, GatewayError


class BodyBudget:
    """Limits the memory for the bodies of running requests, and parses large bodies one at a time.

    limit_bytes   maximum number of bytes of all bodies together
    used_bytes    number of bytes that running requests have reserved
    large_bodies  joins the pieces of large bodies and lets them be parsed one after another
    """

    __slots__ = ("large_bodies", "limit_bytes", "used_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.used_bytes = limit_bytes, 0
        self.large_bodies = LargeBodies()

    def reserve_body(self, body_bytes: int) -> int:
        """Reserve memory for a request body, and return the number of bytes to release later.

        Raises GatewayError if the memory budget for request bodies is used up.
        """
        if self.used_bytes + body_bytes > self.limit_bytes:
            raise GatewayError(
                Failure.OVERLOADED,
                f"The bodies of running requests already use {self.used_bytes} of the "
                f"{self.limit_bytes} bytes reserved for them.",
                retry_after_s=1.0,
                reason="body_budget",
            )
        self.used_bytes += body_bytes
        return body_bytes

    def release_body(self, body_bytes: int) -> None:
        self.used_bytes -= body_bytes
        if body_bytes >= LARGE_BODY:
            self.large_bodies.memory.check_soon()
