"""The interface through which the admin server's pages use the running gateway.

It is a Protocol, so that the pages do not import the application.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gateway.auto.auto_controller import AutoPolicyController
    from gateway.drift.drift_monitor import DriftMonitor
    from gateway.metrics.catalogue import Metrics
    from gateway.reload.dry_run_and_swap import Swap
    from gateway.reload.reloader import Reloader
    from gateway.routes_and_snapshot import Gateway


class GatewayInterface(Protocol):
    """One running gateway process, as the admin server needs it. `gateway/app.py` implements it."""

    is_draining: bool

    @property
    def gateway(self) -> Gateway: ...

    @property
    def metrics(self) -> Metrics: ...

    @property
    def reloader(self) -> Reloader: ...

    @property
    def swap(self) -> Swap: ...

    @property
    def auto(self) -> AutoPolicyController | None:
        """Return the controller of automatic policy selection; None in a worker process."""

    @property
    def drift(self) -> DriftMonitor | None:
        """Return the monitor of workload drift, or None in a worker process."""

    def shared_state(self) -> dict[str, object] | None:
        """Return the status of state sharing with other gateways, or None if there is none."""
