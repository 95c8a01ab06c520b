"""Tests that stored responses can be read by identifier through any gateway, but by one tenant
only.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from openai import OpenAI, RateLimitError

from mockgpu.mock_tokenizer import expected_text
from tests.e2e.processes import gateway_process, mock_fleet

TEXT, NEXT = "How deep is the reservoir behind the dam?", "And how wide?"
ACME, ZETA, LIMITED = "sk-acme-secret", "sk-zeta-secret", "sk-acme-limited"
BUSY = "sk-busy-secret"
CONFIG = """
models:
  - {{name: demo-8b, pool: main{2}}}
  - {{name: renamed, served_model: demo-8b, pool: main{2}}}
pools: {{main: {{policy: {{name: round_robin}}, endpoints: [{{url: '{0}'}}, {{url: '{1}'}}]}}}}
tenants:
  - {{name: acme, key: '${{ACME}}', scoped_keys: [{{key: '${{LIMITED}}', models: [renamed]}}]}}
  - {{name: zeta, key: '${{ZETA}}'}}
  - {{name: busy, key: '${{BUSY}}', limits: {{concurrent_requests: 1}}}}
"""


class Fleet(NamedTuple):
    urls: list[str]
    engines: list[str]

    def sdk(self, gateway: int = 0, key: str = ACME) -> OpenAI:
        return OpenAI(base_url=f"{self.urls[gateway]}/v1", api_key=key, max_retries=0, timeout=20)

    def asked(
        self, path: str, body: dict[str, Any] | None = None, key: str = ACME, method: str = "POST"
    ) -> tuple[int, dict[str, Any]]:
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.urls[0] + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


def fleet(folder: Any, *options: str, more: str = "") -> Iterator[Fleet]:
    # Start engines with `options`, and gateways with `more` members of their models.
    keys = {"ACME": ACME, "ZETA": ZETA, "LIMITED": LIMITED, "BUSY": BUSY}
    with mock_fleet(*options) as engines:
        text = CONFIG.format(*engines, more)
        (folder / "a").mkdir()
        (folder / "b").mkdir()
        with (
            gateway_process(folder / "a", text, **keys) as first,
            gateway_process(folder / "b", text, **keys) as second,
        ):
            yield Fleet([first.url, second.url], list(engines))
            for running in (first, second):
                assert "Traceback" not in running.stderr_text, running.stderr_text


RESUMED = ", resume: {}"


@pytest.fixture(scope="module", params=["", RESUMED], ids=["plain", "resume"])
def keeping(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("keeping")
    yield from fleet(folder, "--responses-store", more=request.param)


@pytest.fixture(scope="module")
def forgetting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    yield from fleet(tmp_path_factory.mktemp("forgetting"))


@pytest.fixture(scope="module")
def resuming(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Yield a fleet whose engines store no responses, so that the gateway sends whole chats."""
    yield from fleet(tmp_path_factory.mktemp("resuming"), more=RESUMED)


BODY: dict[str, Any] = {"model": "demo-8b", "input": TEXT, "max_output_tokens": 8}


def test_the_next_turn_reaches_the_engine_that_keeps_the_last_one_through_any_gateway(
    keeping: Fleet,
) -> None:
    for stream in (False, True):
        for turn in range(4):
            with keeping.sdk(turn % 2) as sdk:
                first = sdk.responses.create(**BODY)
                said = [{"role": "user", "content": TEXT}]
                said += [{"role": "assistant", "content": first.output_text}]
                said += [{"role": "user", "content": NEXT}]
            with keeping.sdk((turn + 1) % 2) as sdk:
                more = {**BODY, "input": NEXT, "previous_response_id": first.id}
                if stream:
                    with sdk.responses.stream(**more) as events:
                        second = list(events)[-1].response
                else:
                    second = sdk.responses.create(**more)
            assert second.output_text == expected_text({"messages": said}, 8)
            assert second.previous_response_id == first.id


def test_a_response_can_be_read_and_deleted_under_the_name_it_was_asked_for(
    keeping: Fleet,
) -> None:
    with keeping.sdk() as first, keeping.sdk(1) as second:
        for name in ("demo-8b", "renamed"):
            response = first.responses.create(**{**BODY, "model": name})
            read = second.responses.retrieve(response.id)
            assert (read.id, read.model, read.output_text) == (
                response.id,
                name,
                response.output_text,
            )
            status, error = keeping.asked(f"/v1/responses/{response.id}/cancel")
            assert (status, error["error"]["type"]) == (400, "invalid_request_error")
            status, _ = keeping.asked(f"/v1/responses/{response.id}", method="DELETE")
            assert status == 200
            assert keeping.asked(f"/v1/responses/{response.id}", method="GET")[0] == 404


def test_unknown_lost_and_foreign_ids_are_the_same_404(keeping: Fleet) -> None:
    lost = keeping.asked("/v1/responses", BODY)[1]["id"]
    assert keeping.asked(f"/v1/responses/{lost}", method="DELETE")[0] == 200
    foreign = keeping.asked("/v1/responses", BODY, ZETA)[1]["id"]
    answers = []
    for name in (lost, foreign, "resp_" + "A" * 38, "resp_1", "x"):
        for method, path in (
            ("GET", f"/v1/responses/{name}"),
            ("DELETE", f"/v1/responses/{name}"),
            ("POST", f"/v1/responses/{name}/cancel"),
        ):
            status, answer = keeping.asked(path, method=method)
            answers.append((status, json.dumps(answer).replace(name, "ID")))
        more = {**BODY, "previous_response_id": name}
        status, answer = keeping.asked("/v1/responses", more)
        answers.append((status, json.dumps(answer).replace(name, "ID")))
    assert len(set(answers)) == 1
    assert answers[0][0] == 404
    assert json.loads(answers[0][1])["error"]["code"] == "response_not_found"
    assert keeping.asked(f"/v1/responses/{foreign}", key=ZETA, method="GET")[0] == 200


def test_a_key_for_some_models_finds_no_response_of_the_tenant_s_other_models(
    keeping: Fleet,
) -> None:
    own = keeping.asked("/v1/responses", {**BODY, "model": "renamed"})[1]["id"]
    other = keeping.asked("/v1/responses", BODY)[1]["id"]
    unknown = keeping.asked("/v1/responses/resp_1", key=LIMITED, method="GET")
    for method, path in (
        ("GET", f"/v1/responses/{other}"),
        ("DELETE", f"/v1/responses/{other}"),
        ("POST", f"/v1/responses/{other}/cancel"),
    ):
        status, answer = keeping.asked(path, key=LIMITED, method=method)
        assert (status, json.dumps(answer).replace(other, "resp_1")) == (
            404,
            json.dumps(unknown[1]),
        )
    more = {**BODY, "model": "renamed", "input": NEXT}
    continued = {**more, "previous_response_id": other}
    assert keeping.asked("/v1/responses", continued, LIMITED)[0] == 404
    assert keeping.asked("/v1/responses", {**more, "previous_response_id": own}, LIMITED)[0] == 200
    assert keeping.asked(f"/v1/responses/{own}", key=LIMITED, method="GET")[0] == 200
    assert keeping.asked(f"/v1/responses/{other}", method="GET")[0] == 200


def test_where_engines_keep_nothing_a_previous_response_is_refused_with_the_reason(
    forgetting: Fleet,
) -> None:
    first = forgetting.asked("/v1/responses", BODY)[1]["id"]
    status, answer = forgetting.asked("/v1/responses", {**BODY, "previous_response_id": first})
    error = answer["error"]
    assert (status, error["param"]) == (400, "previous_response_id")
    assert "VLLM_ENABLE_RESPONSES_API_STORE" in error["message"]
    assert forgetting.asked(f"/v1/responses/{first}", method="GET")[0] == 404
    unknown = {**BODY, "previous_response_id": "resp_1"}
    assert forgetting.asked("/v1/responses", unknown)[0] == 404


def test_where_chats_serve_responses_a_previous_one_is_refused_with_the_reason(
    resuming: Fleet,
) -> None:
    with resuming.sdk() as sdk, sdk.responses.stream(**BODY) as stream:
        streamed = list(stream)[-1].response
    whole = resuming.asked("/v1/responses", BODY)[1]["id"]
    for previous in (streamed.id, whole, "resp_1"):
        more = {**BODY, "previous_response_id": previous}
        status, answer = resuming.asked("/v1/responses", more)
        assert (status, answer["error"]["param"]) == (400, "previous_response_id")
        assert "VLLM_ENABLE_RESPONSES_API_STORE" in answer["error"]["message"]
        assert resuming.asked(f"/v1/responses/{previous}", method="GET")[0] == 404


def test_a_client_cannot_choose_the_id_of_its_response(keeping: Fleet) -> None:
    answer = keeping.asked("/v1/responses", {**BODY, "request_id": "resp_mine"})[1]
    assert answer["id"] != "resp_mine"
    assert keeping.asked("/v1/responses", {**BODY, "previous_response_id": 7})[0] == 400


def test_other_methods_and_paths_below_responses_are_refused(keeping: Fleet) -> None:
    assert keeping.asked("/v1/responses/resp_1", {}, method="PUT")[0] in (404, 405)
    status, answer = keeping.asked("/v1/responses/resp_1/input_items", method="GET")
    assert (status, answer["error"]["type"]) == (404, "invalid_request_error")
    assert "GET /v1/responses/resp_1/input_items" in answer["error"]["message"]
    assert keeping.asked("/v1/responses/resp_1", key="sk-wrong", method="GET")[0] == 401


RUNNING = ("queued", "in_progress")


def test_a_response_in_the_background_is_read_and_continued_through_any_gateway(
    keeping: Fleet,
) -> None:
    with keeping.sdk() as first, keeping.sdk(1) as second:
        begun = first.responses.create(**BODY, background=True)
        assert begun.status in RUNNING
        read = begun
        while read.status in RUNNING:
            read = second.responses.retrieve(begun.id)
        assert (read.id, read.status, read.background) == (begun.id, "incomplete", True)
        said = [{"role": "user", "content": TEXT}]
        assert read.output_text == expected_text({"messages": said}, 8)
        said += [{"role": "assistant", "content": read.output_text}]
        said += [{"role": "user", "content": NEXT}]
        more = {**BODY, "input": NEXT, "previous_response_id": begun.id}
        assert second.responses.create(**more).output_text == expected_text({"messages": said}, 8)
        assert keeping.asked(f"/v1/responses/{begun.id}", key=ZETA, method="GET")[0] == 404


def test_the_stream_of_a_response_in_the_background_is_followed_from_any_event(
    keeping: Fleet,
) -> None:
    with keeping.sdk() as first, keeping.sdk(1) as second:
        events = list(first.responses.create(**BODY, background=True, stream=True))
        assert events[-1].type == "response.incomplete"
        name = events[-1].response.id
        rest = list(second.responses.retrieve(name, stream=True, starting_after=3))
        assert [event.sequence_number for event in rest] == list(range(4, len(events)))
        assert rest[-1].type == "response.incomplete"
        assert rest[-1].response.output_text == events[-1].response.output_text != ""


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    yield from fleet(tmp_path_factory.mktemp("slow"), "--responses-store", "--speed", "0.1")


def test_a_response_in_the_background_is_cancelled_through_any_gateway(slow: Fleet) -> None:
    with slow.sdk() as first, slow.sdk(1) as second:
        begun = first.responses.create(**{**BODY, "max_output_tokens": 4000}, background=True)
        assert slow.asked(f"/v1/responses/{begun.id}/cancel", key=ZETA)[0] == 404
        assert second.responses.cancel(begun.id).status == "cancelled"
        assert first.responses.retrieve(begun.id).status == "cancelled"
        status, answer = slow.asked(f"/v1/responses/{begun.id}/cancel")
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


def begin(fleet: Fleet, **members: Any) -> tuple[int, dict[str, Any]]:
    # Begin a response in the background for the tenant that may have one request in progress.
    body = {**BODY, "max_output_tokens": 4000, "background": True} | members
    return fleet.asked("/v1/responses", body, BUSY)


def begin_patiently(fleet: Fleet, **members: Any) -> str:
    # Begin such a response as soon as the tenant's place is free.
    ends = time.monotonic() + 30.0
    while time.monotonic() < ends:
        status, answer = begin(fleet, **members)
        if status == 200:
            return str(answer["id"])
        assert answer["error"]["code"] == "tenant_concurrency_limited"
        time.sleep(0.1)
    raise AssertionError("the place of the response was not given back within the time limit")


def test_a_response_in_the_background_counts_as_in_progress_until_it_is_cancelled(
    slow: Fleet,
) -> None:
    with slow.sdk(key=BUSY) as sdk:
        name = begin_patiently(slow)
        for _ in range(10):  # the gateway asks the engine meanwhile
            assert begin(slow)[0] == 429
            assert sdk.responses.retrieve(name).status in RUNNING
            time.sleep(0.1)
        assert slow.asked("/v1/responses", {**BODY, "background": True}, ZETA)[0] == 200
        sdk.responses.cancel(name)
        sdk.responses.cancel(begin_patiently(slow))


def test_a_response_in_the_background_that_nobody_reads_gives_its_place_back_at_its_end(
    slow: Fleet,
) -> None:
    with slow.sdk(key=BUSY) as sdk:
        name = begin_patiently(slow, max_output_tokens=4)
        assert begin(slow)[0] == 429
        following = begin_patiently(slow)
        assert sdk.responses.retrieve(name).status not in RUNNING
        sdk.responses.cancel(following)


def test_a_response_in_the_background_counts_when_its_client_has_left_the_stream(
    slow: Fleet,
) -> None:
    with slow.sdk(key=BUSY) as sdk:
        sdk.responses.cancel(begin_patiently(slow))
        body = {**BODY, "max_output_tokens": 4000, "background": True, "stream": True}
        while True:
            try:
                stream = sdk.responses.create(**body)
                break
            except RateLimitError:
                time.sleep(0.1)
        name = next(event.response.id for event in stream if event.type == "response.created")
        stream.close()
        for _ in range(10):
            assert begin(slow)[0] == 429
            time.sleep(0.1)
        sdk.responses.cancel(name)
        sdk.responses.cancel(begin_patiently(slow))


def test_where_engines_keep_nothing_the_background_is_refused_with_the_reason(
    forgetting: Fleet, resuming: Fleet
) -> None:
    status, answer = forgetting.asked("/v1/responses", {**BODY, "background": True})
    assert status == 400
    assert "VLLM_ENABLE_RESPONSES_API_STORE" in answer["error"]["message"]
    assert resuming.asked("/v1/responses", {**BODY, "background": True})[0] == 400
    both = {**BODY, "background": True, "store": False}
    assert forgetting.asked("/v1/responses", both)[0] == 400
