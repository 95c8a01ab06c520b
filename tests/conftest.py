"""What all tests share: hypothesis judges behaviour, not how fast a loaded machine shows it or
makes its examples.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")
