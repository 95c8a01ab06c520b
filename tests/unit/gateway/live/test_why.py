"""The sentences of the live view: the gravest first, each naming what it speaks of."""

from __future__ import annotations

from typing import Any

from gateway.live.why import MAX_FINDINGS, Minute, findings, shortened, span


def endpoint(name: str, **more: Any) -> dict[str, Any]:
    usual = {"name": name, "pool": "chat", "role": "both", "state": "up", "cause": None, "since_s": None}
    numbers = {"available": True, "silence_s": 0.0, "tpot_p50_s": 0.01, "ttft_p50_s": 0.1}
    return usual | numbers | more


def said(*endpoints: dict[str, Any], **more: Any) -> list[tuple[str, str]]:
    return [(each.grade, each.text) for each in shortened(findings(Minute(endpoints, 60.0, **more)))]


def test_nothing_is_said_while_all_is_well() -> None:
    assert said(endpoint("a"), endpoint("b"), computed={"never_seen": 900.0, "spread": 10.0}) == []


def test_who_is_out_is_told_with_its_cause_and_since_when() -> None:
    dead = endpoint("g-2", state="dead", cause="engine_dead", since_s=14.2, available=False)
    assert said(endpoint("g-1"), dead) == [("bad", "g-2 is out of rotation for 14 s: its engine is dead or stalled.")]
    kept = endpoint("g-3", state="ejected", cause="connect_failed", since_s=1.24, available=True)
    assert "still receives requests" in said(kept)[0][1]
    new = endpoint("g-4", state="ejected", cause=None, since_s=0.1, available=False)
    assert said(new) == [("bad", "g-4 is out of rotation for 0.1 s: not probed yet.")]


def test_one_far_slower_than_its_peers_is_named_and_other_roles_are_no_peers() -> None:
    fleet = [endpoint(name) for name in "abc"] + [endpoint("d", tpot_p50_s=0.041)]
    assert said(*fleet) == [("warn", "d is 4.1 times as slow as its peers per token: 41 ms, they 10 ms.")]
    fleet[3]["role"] = "decode"
    assert said(*fleet) == []
    assert said(endpoint("a"), endpoint("d", tpot_p50_s=0.041)) == []  # of two nobody knows who is the slow one


def test_refusals_come_before_retries_and_notes() -> None:
    told = said(
        endpoint("a"),
        shed={"too_slow": 3.0, "waiting_room_full": 12.0},
        retries={"connect_failed": 1.0},
        missed={"met": 90.0, "ttft_missed": 10.0},
        promised=100.0,
        computed={"never_seen": 50.0, "spread": 50.0},
        whole={"short": 80.0},
        split=20.0,
        waiting={"chat": 4, "code": 0},
        refused="gateway.yaml:3:1 nothing fits",
    )
    assert [grade for grade, _ in told] == ["bad", "bad", *["warn"] * 4, *["note"] * 2]
    assert [text for _, text in told] == [
        "12 requests rejected: the wait queue was full.",
        "3 requests rejected: they would have missed their SLO.",
        "The last configuration was rejected: gateway.yaml:3:1 nothing fits",
        "4 requests waiting in pool chat: its endpoints are at capacity.",
        "10 of 100 requests missed their SLO: the first token came late.",
        "1 request retried: the connection failed.",
        "50% of the computed prompt tokens were avoidable: another endpoint had them cached.",
        "80% of the requests were not split: their prompts are short.",
    ]


def test_a_fleet_on_fire_is_told_in_a_few_lines() -> None:
    fleet = [endpoint(f"g-{at}", state="dead", cause="probe_failed", since_s=9.0, available=False) for at in range(40)]
    told = said(*fleet, shed={"too_slow": 3.0})
    assert len(told) == MAX_FINDINGS
    assert told[-2] == ("bad", "3 requests rejected: they would have missed their SLO.")
    assert told[-1][0] == "bad"
    assert told[-1][1].startswith("34 more: g-6, g-7, ")
    assert told[-1][1].endswith(", g-39.")


def test_one_that_is_said_to_be_slow_already_is_not_compared_again() -> None:
    fleet = [endpoint(name) for name in "abc"]
    slow = endpoint("d", tpot_p50_s=0.041, slow="4.1 times as slow as its peers per token")
    assert len(said(*fleet, slow)) == 1
    assert len(said(*fleet, slow | {"state": "ejected", "cause": "slow"})) == 1


def test_lengths_of_time_read_as_one_says_them() -> None:
    assert [span(each) for each in (0.44, 14.4, 200.0, 9000.0)] == ["0.4 s", "14 s", "3 min", "2 h"]
