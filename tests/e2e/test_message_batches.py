"""Tests of Anthropic's Message Batches: creation, results, lists, cancellation, isolation."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from mockgpu.mock_tokenizer import expected_text
from tests.e2e.processes import gateway_process, mock_fleet

CONFIG = """
models: [{{name: demo-8b, aliases: [claude-*], pool: main}}]
pools: {{main: {{endpoints: [{{url: '{0}'}}, {{url: '{1}'}}]}}}}
batch: {{dir: '{2}', lines: 40, file_size: 1MiB}}
tenants: [{{name: acme, key: '${{ACME_KEY}}'}}, {{name: rival, key: '${{RIVAL_KEY}}'}}]
"""
ACME, RIVAL = "sk-acme-of-messages", "sk-rival-of-messages"
PATH = "/v1/messages/batches"
WITHIN_S = 180.0


@pytest.fixture(scope="module", params=["native", "translated"])
def url(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("messages")
    lacks = () if request.param == "native" else ("--lacks", "messages")
    with mock_fleet(*lacks) as engines:
        text = CONFIG.format(*engines, folder / "store")
        with gateway_process(folder, text, ACME_KEY=ACME, RIVAL_KEY=RIVAL) as running:
            yield running.url
            assert running.is_alive
            assert "Traceback" not in running.stderr_text, running.stderr_text


def call(
    url: str, path: str, body: object = None, key: str = ACME, method: str = ""
) -> tuple[int, bytes]:
    headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
    data = None if body is None else json.dumps(body, indent=1).encode()
    request = urllib.request.Request(url + path, data, headers | {"x-api-key": key})
    request.method = method or ("GET" if body is None else "POST")
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def ok(url: str, path: str, body: object = None, method: str = "") -> dict[str, Any]:
    status, answer = call(url, path, body, method=method)
    assert status == 200, answer
    return dict(json.loads(answer))


def item(custom_id: str, text: str, **members: Any) -> dict[str, Any]:
    params = {"model": "claude-9", "max_tokens": 8, "messages": [{"role": "user", "content": text}]}
    return {"custom_id": custom_id, "params": params | members}


def ended(url: str, name: str) -> dict[str, Any]:
    ends = time.monotonic() + WITHIN_S
    while time.monotonic() < ends:
        batch = ok(url, f"{PATH}/{name}")
        if batch["processing_status"] == "ended":
            return batch
        time.sleep(0.05)
    raise AssertionError(f"the batch did not end within the time limit: {batch}")


def test_every_request_of_a_batch_has_one_result_in_anthropics_form(url: str) -> None:
    good = [item(f"r{number}", f"How deep is dam {number}?") for number in range(5)]
    bad = item("bad", "x", max_tokens="many")
    begun = ok(url, PATH, {"requests": [*good, bad]})
    assert begun["type"] == "message_batch"
    assert begun["id"].startswith("msgbatch_")
    assert (begun["processing_status"], begun["results_url"]) == ("in_progress", None)
    assert begun["request_counts"]["processing"] == 6
    batch = ended(url, begun["id"])
    assert batch["request_counts"] == {
        "processing": 0,
        "succeeded": 5,
        "errored": 1,
        "canceled": 0,
        "expired": 0,
    }
    assert batch["created_at"] <= batch["ended_at"] <= batch["expires_at"]
    status, text = call(url, batch["results_url"])
    assert status == 200
    results = {line["custom_id"]: line["result"] for line in map(json.loads, text.splitlines())}
    assert sorted(results) == ["bad", "r0", "r1", "r2", "r3", "r4"]
    assert results["bad"]["type"] == "errored"
    assert results["bad"]["error"]["error"]["type"] == "invalid_request_error"
    for request in good:
        message = results[request["custom_id"]]["message"]
        assert message["content"][0]["text"] == expected_text(request["params"], 8)
        assert (message["type"], message["model"]) == ("message", "claude-9")


@pytest.mark.parametrize(
    ("requests", "param"),
    [
        ([], "requests"),
        ([item("a", "x"), item("a", "y")], "requests[1].custom_id"),
        ([item("", "x")], "requests[0].custom_id"),
        ([item("a", "x"), item("b", "x", model="demo-8b")], "requests[1].params.model"),
        ([item("a", "x", stream=True)], "requests[0].params.stream"),
        ([item(str(number), "x") for number in range(41)], ""),
        ("x", ""),
    ],
)
def test_a_batch_that_cannot_run_is_refused_with_its_first_problem(
    url: str, requests: object, param: str
) -> None:
    status, answer = call(url, PATH, {"requests": requests})
    error = json.loads(answer)
    assert (status, error["type"], error["error"]["type"]) == (
        400,
        "error",
        "invalid_request_error",
    )
    assert param.partition(".")[0].removesuffix("s") in error["error"]["message"] or not param


def test_batches_are_listed_newest_first_and_belong_to_their_tenant(url: str) -> None:
    names = [ok(url, PATH, {"requests": [item("a", "x")]})["id"] for _ in range(3)]
    for name in names:
        ended(url, name)
    listed = ok(url, f"{PATH}?limit=2")
    shown = [batch["id"] for batch in listed["data"]]
    assert (len(shown), listed["has_more"]) == (2, True)
    assert (listed["first_id"], listed["last_id"]) == (shown[0], shown[1])
    rest = ok(url, f"{PATH}?after_id={shown[1]}&limit=1000")
    assert {*names} <= {*shown, *(batch["id"] for batch in rest["data"])}
    assert not rest["has_more"]
    before = ok(url, f"{PATH}?before_id={rest['first_id']}")
    assert [batch["id"] for batch in before["data"]] == shown
    assert call(url, f"{PATH}?after_id=msgbatch_x")[0] == 400
    assert json.loads(call(url, PATH, key=RIVAL)[1])["data"] == []
    for path in (names[0], f"{names[0]}/results"):
        assert call(url, f"{PATH}/{path}", key=RIVAL)[0] == 404
    unknown = json.loads(call(url, f"{PATH}/msgbatch_{'0' * 32}")[1])
    assert unknown["error"]["type"] == "not_found_error"
    assert call(url, f"{PATH}/{names[0].replace('msgbatch_', 'batch_')}")[0] == 404


def test_a_batch_that_has_ended_cannot_be_cancelled(url: str) -> None:
    name = ok(url, PATH, {"requests": [item("a", "x")]})["id"]
    ended(url, name)
    status, answer = call(url, f"{PATH}/{name}/cancel", {})
    assert (status, json.loads(answer)["type"]) == (409, "error")


def test_requests_without_an_answer_are_cancelled_with_their_batch(
    tmp_path: Any,
) -> None:
    with mock_fleet("--speed", "0.02") as engines:
        text = CONFIG.format(*engines, tmp_path / "store")
        with gateway_process(tmp_path, text, ACME_KEY=ACME, RIVAL_KEY=RIVAL) as running:
            requests = [item(str(number), "x", max_tokens=4000) for number in range(4)]
            name = ok(running.url, PATH, {"requests": requests})["id"]
            assert call(running.url, f"{PATH}/{name}/results")[0] == 404
            cancelled = ok(running.url, f"{PATH}/{name}/cancel", {})
            assert cancelled["processing_status"] in ("canceling", "ended")
            batch = ended(running.url, name)
            assert batch["request_counts"]["canceled"] == 4
            assert batch["cancel_initiated_at"] is not None
            lines = call(running.url, batch["results_url"])[1].splitlines()
            assert [json.loads(line)["result"] for line in lines] == [{"type": "canceled"}] * 4
