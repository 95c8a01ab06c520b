"""The admission policies by name, with the types of their parameters.

An admission policy decides which requests enter a pool, wait, or are refused. To add one, write a
parameter struct with `build()` in its module, and one line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from policies.admission.admission_policy import Admission, AdmissionParams
from policies.admission.cap_admission import CapParams, UncappedAdmission
from policies.admission.priced_admission import PricedAdmissionParams
from policies.policy_registry import PolicyConfigError, did_you_mean, parse_params
from policies.published.dynamo_session_pause import SessionPause
from policies.published.llmd_saturation import GieSaturation, Probabilistic
from policies.published.mooncake_early_rejection import EarlyRejection


class UncappedParams(AdmissionParams, frozen=True):
    """The (empty) parameters of the admission policy `none`.

    The policy admits every request as long as an endpoint is available.
    """

    def build(self) -> Admission:
        return UncappedAdmission()


_ADMISSIONS: Mapping[str, type[AdmissionParams]] = MappingProxyType(
    {
        "none": UncappedParams,
        "cap": CapParams,
        "priced": PricedAdmissionParams,
        "early_rejection": EarlyRejection,
        "gie_saturation": GieSaturation,
        "probabilistic": Probabilistic,
        "session_pause": SessionPause,
    }
)

DEFAULT = "cap"
"""The admission policy of a pool whose configuration names none."""


def names() -> tuple[str, ...]:
    return tuple(_ADMISSIONS)


def params_type(name: str) -> type[AdmissionParams]:
    """Return the type of an admission policy's parameters.

    Raises PolicyConfigError for an unknown name.
    """
    if name not in _ADMISSIONS:
        raise PolicyConfigError(
            f"unknown admission policy {name!r}{did_you_mean(name, names())}; known: "
            f"{', '.join(names())}"
        )
    return _ADMISSIONS[name]


def build_admission(name: str, params: Mapping[str, object]) -> Admission:
    """Build the admission policy of one pool from its name and a mapping of parameters.

    Raises PolicyConfigError for an unknown name or an invalid parameter.
    """
    return parse_params(name, params_type(name), params).build()
