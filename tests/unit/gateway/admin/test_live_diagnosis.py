"""Tests of the problems that the live page lists: the most severe first, each with its subject."""

from __future__ import annotations

from typing import Any

from gateway.admin.live_diagnosis import (
    MAX_FINDINGS,
    MinuteCounts,
    diagnose,
    duration_text,
    shorten,
)


def endpoint(name: str, **changes: Any) -> dict[str, Any]:
    state = {
        "name": name,
        "pool": "chat",
        "role": "both",
        "state": "up",
        "cause": None,
        "since_s": None,
    }
    numbers = {"available": True, "silence_s": 0.0, "tpot_p50_s": 0.01, "ttft_p50_s": 0.1}
    return state | numbers | changes


def diagnosed(*endpoints: dict[str, Any], **changes: Any) -> list[tuple[str, str]]:
    return [
        (line.grade, line.text)
        for line in shorten(diagnose(MinuteCounts(endpoints, 60.0, **changes)))
    ]


def test_a_healthy_fleet_has_no_findings() -> None:
    assert (
        diagnosed(
            endpoint("a"), endpoint("b"), computed_tokens={"never_seen": 900.0, "spread": 10.0}
        )
        == []
    )


def test_an_endpoint_out_of_rotation_has_its_cause_and_duration() -> None:
    dead = endpoint("g-2", state="dead", cause="engine_dead", since_s=14.2, available=False)
    assert diagnosed(endpoint("g-1"), dead) == [
        ("bad", "g-2 is out of rotation for 14 s: its engine is dead or stalled.")
    ]
    overridden = endpoint(
        "g-3", state="ejected", cause="connect_failed", since_s=1.24, available=True
    )
    assert "still receives requests" in diagnosed(overridden)[0][1]
    new = endpoint("g-4", state="ejected", cause=None, since_s=0.1, available=False)
    assert diagnosed(new) == [("bad", "g-4 is out of rotation for 0.1 s: not probed yet.")]


def test_an_endpoint_is_compared_with_peers_of_the_same_role() -> None:
    fleet = [endpoint(name) for name in "abc"] + [endpoint("d", tpot_p50_s=0.041)]
    assert diagnosed(*fleet) == [
        ("warn", "d is 4.1 times as slow as its peers per token: 41 ms, they 10 ms.")
    ]
    fleet[3]["role"] = "decode"
    assert diagnosed(*fleet) == []
    # Of two endpoints, it is unknown which one is slow.
    assert diagnosed(endpoint("a"), endpoint("d", tpot_p50_s=0.041)) == []


def test_findings_are_sorted_by_grade() -> None:
    findings_ = diagnosed(
        endpoint("a"),
        shed={"too_slow": 3.0, "waiting_room_full": 12.0},
        retries={"connect_failed": 1.0},
        missed={"met": 90.0, "ttft_missed": 10.0},
        slo_requests=100.0,
        computed_tokens={"never_seen": 50.0, "spread": 50.0},
        whole_reasons={"short": 80.0},
        split_count=20.0,
        waiting={"chat": 4, "code": 0},
        config_problem="gateway.yaml:3:1 nothing fits",
    )
    assert [grade for grade, _ in findings_] == ["bad", "bad", *["warn"] * 4, *["note"] * 2]
    assert [text for _, text in findings_] == [
        "12 requests rejected: the wait queue was full.",
        "3 requests rejected: they would have missed their SLO.",
        "The last configuration was rejected: gateway.yaml:3:1 nothing fits",
        "4 requests waiting in pool chat: its endpoints are at capacity.",
        "10 of 100 requests missed their SLO: the first token came late.",
        "1 request retried: the connection failed.",
        "50% of the computed prompt tokens were avoidable: another endpoint had them cached.",
        "80% of the requests were not split: their prompts are short.",
    ]


def test_many_findings_are_shortened() -> None:
    fleet = [
        endpoint(f"g-{number}", state="dead", cause="probe_failed", since_s=9.0, available=False)
        for number in range(40)
    ]
    findings_ = diagnosed(*fleet, shed={"too_slow": 3.0})
    assert len(findings_) == MAX_FINDINGS
    assert findings_[-2] == ("bad", "3 requests rejected: they would have missed their SLO.")
    assert findings_[-1][0] == "bad"
    assert findings_[-1][1].startswith("34 more: g-6, g-7, ")
    assert findings_[-1][1].endswith(", g-39.")


def test_an_endpoint_reported_as_slow_is_reported_once() -> None:
    fleet = [endpoint(name) for name in "abc"]
    slow = endpoint("d", tpot_p50_s=0.041, slow="4.1 times as slow as its peers per token")
    assert len(diagnosed(*fleet, slow)) == 1
    assert len(diagnosed(*fleet, slow | {"state": "ejected", "cause": "slow"})) == 1


def test_durations_as_text() -> None:
    assert [duration_text(seconds) for seconds in (0.44, 14.4, 200.0, 9000.0)] == [
        "0.4 s",
        "14 s",
        "3 min",
        "2 h",
    ]
