"""Hypothesis settings of all tests: no time limits, because test machines may be busy."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("penstock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("penstock")
