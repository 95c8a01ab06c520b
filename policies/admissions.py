"""Admissions by name: what a configuration may say, and the typed parameters that go with it.

A new admission is a struct with `build()` beside its rule and one line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from policies.admission import Admission, AdmissionPreset, Cap, Open
from policies.dual import Priced
from policies.published.early_rejection import EarlyRejection
from policies.published.saturation import GieSaturation, Probabilistic
from policies.published.session_pause import SessionPause
from policies.registry import PolicyConfigError, checked, near


class OpenPreset(AdmissionPreset, frozen=True):
    """Everybody enters while anybody serves."""

    def build(self) -> Admission:
        return Open()


class CapPreset(AdmissionPreset, frozen=True):
    """Concurrency caps and the waiting room."""

    def build(self) -> Admission:
        return Cap()


_KNOWN: Mapping[str, type[AdmissionPreset]] = MappingProxyType(
    {
        "none": OpenPreset,
        "cap": CapPreset,
        "priced": Priced,
        "early_rejection": EarlyRejection,
        "gie_saturation": GieSaturation,
        "probabilistic": Probabilistic,
        "session_pause": SessionPause,
    }
)

DEFAULT = "cap"
"""Of a pool that names none."""


def names() -> tuple[str, ...]:
    """Every admission name that a configuration may use."""
    return tuple(_KNOWN)


def params_type(name: str) -> type[AdmissionPreset]:
    """The msgspec.Struct of an admission's parameters. Raises PolicyConfigError for an unknown name."""
    if name not in _KNOWN:
        raise PolicyConfigError(f"unknown admission {name!r}{near(name, names())}; known: {', '.join(names())}")
    return _KNOWN[name]


def build_admission(name: str, params: Mapping[str, object]) -> Admission:
    """A new live admission from plain parameters, for one pool. Raises PolicyConfigError naming what is wrong."""
    return checked(name, params_type(name), params).build()
