"""What all tests share: hypothesis judges behaviour, not how fast a loaded machine shows it."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("house", deadline=None)
settings.load_profile("house")
