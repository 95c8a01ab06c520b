"""Tests the error response to a request that an injected fault affects."""

from __future__ import annotations

import pytest

from mockgpu.fault_grammar import FaultKind, InjectedFault
from mockgpu.http.fault_answers import raise_injected
from mockgpu.request_parser import ApiError


@pytest.mark.parametrize(
    ("fault", "headers"),
    [
        (InjectedFault(FaultKind.ERROR, status=503), {}),
        (InjectedFault(FaultKind.ERROR, status=429, retry_after_s=7), {"Retry-After": "7"}),
    ],
)
def test_an_error_has_the_status_and_the_time_of_its_fault(
    fault: InjectedFault, headers: dict[str, str]
) -> None:
    with pytest.raises(ApiError, match="Injected fault") as raised:
        raise_injected(fault)
    assert (raised.value.status, raised.value.headers) == (fault.status, headers)


def test_of_all_kinds_of_faults_only_one_is_an_error_response() -> None:
    raised = set[FaultKind]()
    raise_injected(None)
    for kind in FaultKind:
        try:
            raise_injected(InjectedFault(kind))
        except ApiError:
            raised.add(kind)
    assert raised == {FaultKind.ERROR}
