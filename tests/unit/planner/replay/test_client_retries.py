"""Tests when simulated clients return after a refusal."""

from __future__ import annotations

from random import Random

import pytest

from planner.replay import ClientBehaviour
from planner.replay.client_retries import return_delay
from policies.admission.admission_policy import Shed

FULL = Shed("queue_full", 3.0)
UNMEASURED = Shed("queue_full", None)
HOPELESS = Shed("too_long", None, may_return=False)


def test_an_obedient_client_waits_for_retry_after() -> None:
    assert return_delay(ClientBehaviour(retries=1), 1, FULL, Random(1)) == 3.0


@pytest.mark.parametrize(
    ("clients", "refusal"),
    [(ClientBehaviour(9), UNMEASURED), (ClientBehaviour(9, obeys_retry_after=False), FULL)],
)
def test_without_a_time_to_obey_the_back_off_doubles_up_to_eight_seconds(
    clients: ClientBehaviour, refusal: Shed
) -> None:
    delays = [return_delay(clients, count, refusal, Random(count)) for count in range(1, 8)]
    for delay, longest in zip(delays, (0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0), strict=True):
        assert delay is not None
        assert 0.75 * longest < delay <= longest


def test_a_client_gives_up_after_its_retries() -> None:
    clients = ClientBehaviour(retries=2)
    assert return_delay(clients, 2, FULL, Random(1)) == 3.0
    assert return_delay(clients, 3, FULL, Random(1)) is None


def test_only_a_client_that_ignores_the_answer_retries_in_vain() -> None:
    assert return_delay(ClientBehaviour(2), 1, HOPELESS, Random(1)) is None
    assert return_delay(ClientBehaviour(2, False), 1, HOPELESS, Random(1)) is not None
