"""Settings of Hypothesis for all tests: no time limits, because test machines can be busy."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("penstock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("penstock")
