"""Tests of the Batch API with the official OpenAI SDK: files, batches, isolation of tenants."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from openai import OpenAI
from openai.types import Batch

from tests.e2e.processes import GatewayProcess, gateway_process, mock_fleet
from tests.ports import free_port

MODEL = "demo-8b"
WITHIN_S = 180.0
CONFIG = """
models: [{{name: demo-8b, pool: main, resume: {{}}}}]
pools: {{main: {{endpoints: [{{url: '{0}'}}, {{url: '{1}'}}]}}}}
batch: {{dir: '{2}', files: 40, file_size: 1MiB, storage: 2MiB}}
tenants:
  - {{name: acme, key: '${{ACME_KEY}}'}}
  - {{name: rival, key: '${{RIVAL_KEY}}'}}
"""
KEYS = {"ACME_KEY": "sk-acme", "RIVAL_KEY": "sk-rival"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


class Setup(NamedTuple):
    gateway: GatewayProcess
    sdk: OpenAI
    rival: OpenAI
    engine: OpenAI
    folder: Path


def client(url: str, key: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder = tmp_path_factory.mktemp("batch")
    with (
        mock_fleet() as engines,
        gateway_process(folder, CONFIG.format(*engines, folder / "store"), **KEYS) as running,
        client(running.url, "sk-acme") as sdk,
        client(running.url, "sk-rival") as rival,
        client(engines[0], "none") as engine,
    ):
        yield Setup(running, sdk, rival, engine, folder / "store")
        assert running.is_alive
        assert "Traceback" not in running.stderr_text, running.stderr_text


def chat(custom_id: str, text: str, **members: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 12}
    url = "/v1/chat/completions"
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body | members}


def upload(sdk: OpenAI, lines: list[dict[str, Any]]) -> str:
    content = "\n".join(map(json.dumps, lines)).encode()
    return sdk.files.create(file=("input.jsonl", content), purpose="batch").id


def create(sdk: OpenAI, file_id: str, endpoint: str = "/v1/chat/completions") -> Batch:
    options: Any = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
    return sdk.batches.create(**options, metadata={"job": "test"})


def wait(sdk: OpenAI, batch_id: str) -> Batch:
    ends = time.monotonic() + WITHIN_S
    while time.monotonic() < ends:
        batch = sdk.batches.retrieve(batch_id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        time.sleep(0.05)
    raise AssertionError(f"the batch did not end within the time limit: {batch}")


def until(condition: Callable[[], bool], within_s: float = WITHIN_S) -> None:
    ends = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends, "the condition was not met in time"
        time.sleep(0.02)


def post(setup: Setup, path: str, body: bytes, content_type: str) -> tuple[int, Any]:
    # Send a body as it is; return the status and the decoded JSON of the answer.
    connection = HTTPConnection("127.0.0.1", setup.gateway.port, timeout=WITHIN_S)
    headers = {"authorization": "Bearer sk-acme", "content-type": content_type}
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def results(sdk: OpenAI, file_id: str | None) -> dict[str, Any]:
    # Return the lines of a results file by their custom_id, of which each must occur once.
    if file_id is None:
        return {}
    lines = [json.loads(line) for line in sdk.files.content(file_id).text.splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def test_a_file_is_uploaded_listed_read_and_deleted(setup: Setup) -> None:
    file = setup.sdk.files.create(file=("a.jsonl", b'{"a": 1}\n'), purpose="batch")
    assert (file.filename, file.bytes, file.purpose) == ("a.jsonl", 9, "batch")
    assert file.id in [listed.id for listed in setup.sdk.files.list(purpose="batch")]
    assert setup.sdk.files.retrieve(file.id).bytes == 9
    assert setup.sdk.files.content(file.id).content == b'{"a": 1}\n'
    assert setup.sdk.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        setup.sdk.files.retrieve(file.id)


def test_a_batch_answers_each_line_as_the_engine_does(setup: Setup) -> None:
    lines = [chat(f"line-{number}", f"Question {number}?") for number in range(20)]
    lines.append(chat("tools", "Weather?", tools=[TOOL]))
    lines.append(chat("two", "Twice?", n=2))
    lines.append(chat("bad", "Too hot?", temperature="hot"))
    batch = create(setup.sdk, upload(setup.sdk, lines))
    assert batch.status in ("validating", "in_progress")
    assert batch.metadata == {"job": "test"}
    ended = wait(setup.sdk, batch.id)
    assert ended.status == "completed"
    assert ended.request_counts is not None
    counts = ended.request_counts
    assert (counts.total, counts.completed, counts.failed) == (23, 22, 1)
    assert None not in (ended.in_progress_at, ended.finalizing_at, ended.completed_at)
    assert ended.model == MODEL
    good = results(setup.sdk, ended.output_file_id)
    for line in lines[:-1]:
        answer = good[line["custom_id"]]["response"]
        assert answer["status_code"] == 200
        direct = setup.engine.chat.completions.create(**line["body"]).to_dict()
        body = answer["body"]
        for choice, expected in zip(body["choices"], direct["choices"], strict=True):
            assert choice["message"]["content"] == expected["message"]["content"]
            assert choice["finish_reason"] == expected["finish_reason"]
        assert body["object"] == direct["object"]
        assert body["usage"]["completion_tokens"] == direct["usage"]["completion_tokens"]
    used = [good[line["custom_id"]]["response"]["body"]["usage"] for line in lines[:-1]]
    assert ended.usage is not None
    assert ended.usage.input_tokens == sum(usage["prompt_tokens"] for usage in used) > 0
    assert ended.usage.output_tokens == sum(usage["completion_tokens"] for usage in used) > 0
    assert ended.usage.total_tokens == ended.usage.input_tokens + ended.usage.output_tokens
    bad = results(setup.sdk, ended.error_file_id)
    assert list(bad) == ["bad"]
    assert bad["bad"]["response"]["status_code"] == 400
    assert bad["bad"]["response"]["body"]["error"]["type"]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "Once upon", "max_tokens": 7}),
        ("/v1/embeddings", {"input": "a text"}),
    ],
)
def test_other_apis_run_in_a_batch(setup: Setup, endpoint: str, body: dict[str, Any]) -> None:
    line = {"custom_id": "one", "method": "POST", "url": endpoint, "body": {"model": MODEL} | body}
    batch = create(setup.sdk, upload(setup.sdk, [line]), endpoint)
    ended = wait(setup.sdk, batch.id)
    answer = results(setup.sdk, ended.output_file_id)["one"]["response"]
    assert answer["status_code"] == 200
    assert answer["body"]["usage"]["prompt_tokens"] > 0


def responses_lines() -> list[dict[str, Any]]:
    bodies: list[dict[str, Any]] = [
        {"input": f"Question {number}?", "max_output_tokens": 9} for number in range(4)
    ]
    bodies[1]["instructions"] = "Be brief."
    bodies[2]["store"] = True
    bodies[3]["max_output_tokens"] = -1
    return [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/responses",
            "body": {"model": MODEL} | body,
        }
        for number, body in enumerate(bodies)
    ]


def check_responses(sdk: OpenAI, engine: OpenAI) -> Batch:
    # Run a batch of responses through `sdk`, and compare its results with answers of `engine`.
    lines = responses_lines()
    ended = wait(sdk, create(sdk, upload(sdk, lines), "/v1/responses").id)
    assert (ended.status, ended.endpoint) == ("completed", "/v1/responses")
    good = results(sdk, ended.output_file_id)
    assert sorted(good) == ["line-0", "line-1", "line-2"]
    for line in lines[:3]:
        body = good[line["custom_id"]]["response"]["body"]
        own = engine.responses.create(**line["body"]).to_dict()
        assert body["output"][0]["content"] == own["output"][0]["content"]  # type: ignore[index]
        for name in ("object", "status", "incomplete_details"):
            assert body[name] == own[name]
        assert body["usage"]["output_tokens"] == 9
        assert body["model"] == MODEL
    assert list(results(sdk, ended.error_file_id)) == ["line-3"]
    return ended


def test_a_batch_of_responses_has_the_engine_s_answers_in_their_own_form(setup: Setup) -> None:
    ended = check_responses(setup.sdk, setup.engine)
    assert ended.usage is not None
    assert ended.usage.output_tokens == 27
    assert ended.usage.input_tokens > 0


def test_a_batch_of_responses_runs_before_an_engine_that_lacks_them(
    setup: Setup, tmp_path: Path
) -> None:
    with mock_fleet("--lacks", "responses") as engines:
        config = CONFIG.format(*engines, tmp_path / "store")
        with gateway_process(tmp_path, config, **KEYS) as gateway:
            check_responses(client(gateway.url, "sk-acme"), setup.engine)


def test_the_files_of_results_expire_when_the_client_asks(setup: Setup) -> None:
    options: Any = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    options["input_file_id"] = upload(setup.sdk, [chat("good", "x"), chat("bad", "x", n=-1)])
    policy: Any = {"anchor": "created_at", "seconds": 7200}
    batch_id = setup.sdk.batches.create(**options, output_expires_after=policy).id
    ended = wait(setup.sdk, batch_id)
    for file_id in (ended.output_file_id, ended.error_file_id):
        assert file_id is not None
        file = setup.sdk.files.retrieve(file_id)
        assert file.expires_at == file.created_at + 7200
    for wrong in ({"anchor": "created_at", "seconds": 60}, {"anchor": "x", "seconds": 7200}):
        with pytest.raises(openai.BadRequestError, match=r"seconds|anchor"):
            setup.sdk.batches.create(**options, output_expires_after=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([], "empty_file"),
        ([chat("a", "x"), chat("a", "y")], "duplicate_custom_id"),
        ([chat("a", "x") | {"url": "/v1/completions"}], "mismatched_endpoint"),
        ([chat("a", "x"), chat("b", "y", model="other")], "mismatched_model"),
        ([chat("a", "x", stream=True)], "invalid_body"),
        ([chat("a", "x", background=True)], "invalid_body"),
        ([{"custom_id": "a"}], "invalid_json_line"),
        ([chat("", "x")], "invalid_custom_id"),
    ],
)
def test_an_invalid_input_file_fails_with_code_and_line(
    setup: Setup, lines: list[dict[str, Any]], code: str
) -> None:
    failed = wait(setup.sdk, create(setup.sdk, upload(setup.sdk, lines)).id)
    assert failed.status == "failed"
    assert failed.failed_at
    assert failed.errors is not None
    assert failed.errors.data
    assert (failed.errors.data[0].code, failed.errors.data[0].line) == (code, len(lines) or None)


def test_another_tenants_ids_are_the_same_404_as_unknown_ones(setup: Setup) -> None:
    file_id = upload(setup.sdk, [chat("a", "x")])
    batch_id = create(setup.sdk, file_id).id
    assert batch_id not in [batch.id for batch in setup.rival.batches.list()]
    assert file_id not in [file.id for file in setup.rival.files.list()]
    for call, known, unknown in (
        (setup.rival.files.retrieve, file_id, "file-" + "0" * 32),
        (setup.rival.files.content, file_id, "file-" + "0" * 32),
        (setup.rival.files.delete, file_id, "file-" + "0" * 32),
        (setup.rival.batches.retrieve, batch_id, "batch_" + "0" * 32),
        (setup.rival.batches.cancel, batch_id, "batch_" + "0" * 32),
    ):
        messages = []
        for name in (known, unknown):
            with pytest.raises(openai.NotFoundError) as caught:
                call(name)
            messages.append(str(caught.value.body).replace(name, ""))
        assert messages[0] == messages[1]
    with pytest.raises(openai.NotFoundError):
        create(setup.rival, file_id)
    assert wait(setup.sdk, batch_id).status == "completed"


def test_a_wrong_key_and_bad_requests_get_clear_errors(setup: Setup) -> None:
    with client(setup.gateway.url, "sk-wrong") as stranger:
        with pytest.raises(openai.AuthenticationError):
            stranger.files.list()
        with pytest.raises(openai.AuthenticationError):
            stranger.files.create(file=b"x", purpose="batch")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        setup.sdk.files.create(file=b"x", purpose="nonsense")  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError, match="No such File object: \\.\\./x"):
        create(setup.sdk, "../x")
    file_id = upload(setup.sdk, [chat("a", "x")])
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        create(setup.sdk, file_id, "/v1/audio/transcriptions")
    other = setup.sdk.files.create(file=b"x", purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="purpose must be 'batch'"):
        create(setup.sdk, other.id)


FORM = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", FORM),
        ("multipart/form-data; boundary=b", b""),
        ("multipart/form-data; boundary=b", b"no form"),
        ("multipart/form-data; boundary=b", FORM + b"--b--\r\n"),
        ("multipart/form-data; boundary=b", FORM + FILE + b"never ends"),
        ("multipart/form-data; boundary=b", FORM * 20 + b"--b--\r\n"),
        (
            "multipart/mixed; boundary=b",
            b"--b\r\ncontent-type: multipart/mixed; boundary=c\r\n\r\n",
        ),
    ],
)
def test_a_malformed_upload_is_a_400_and_leaves_no_file(
    setup: Setup, content_type: str, body: bytes
) -> None:
    before = len(list(setup.sdk.files.list()))
    status, answer = post(setup, "/v1/files", body, content_type)
    assert status == 400, answer
    assert answer["error"]["type"] == "invalid_request_error"
    assert len(list(setup.sdk.files.list())) == before


def test_an_upload_that_breaks_off_leaves_no_part(setup: Setup) -> None:
    head = (
        "POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-acme\r\n"
        "content-type: multipart/form-data; boundary=b\r\ncontent-length: 100000\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", setup.gateway.port)) as connection:
        connection.sendall(head.encode() + FORM + FILE + b"x" * 1000)
        until(lambda: list(setup.folder.glob("files/*/*.part")) != [])
    until(lambda: list(setup.folder.glob("files/*/*.part")) == [])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"input_file_id": 3, "endpoint": "/v1/completions", "completion_window": "24h"}',
        b'{"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "soon"}',
        b'{"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "99d"}',
    ],
)
def test_a_malformed_batch_request_is_a_400(setup: Setup, body: bytes) -> None:
    status, answer = post(setup, "/v1/batches", body, "application/json")
    assert status == 400, answer


def test_lists_have_pages(setup: Setup) -> None:
    ids = {upload(setup.sdk, [chat("a", "x")]) for _ in range(3)}
    listed = [file.id for file in setup.sdk.files.list(limit=1)]  # the SDK follows the pages
    assert ids <= set(listed)
    assert len(set(listed)) == len(listed)
    with pytest.raises(openai.BadRequestError):
        setup.sdk.files.list(limit=0)
    with pytest.raises(openai.BadRequestError):
        setup.sdk.batches.list(after="batch_unknown")


def test_quotas_of_one_tenant_do_not_touch_another(setup: Setup) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        setup.rival.files.create(file=b"x" * (1 << 20) + b"x", purpose="batch")
    assert caught.value.status_code == 413
    setup.rival.files.create(file=b"x" * 900_000, purpose="batch")
    setup.rival.files.create(file=b"x" * 900_000, purpose="batch")
    with pytest.raises(openai.APIStatusError) as caught:
        setup.rival.files.create(file=b"x" * 900_000, purpose="batch")
    assert caught.value.code == "storage_quota_exceeded"
    assert upload(setup.sdk, [chat("a", "x")])


def test_the_folder_shows_no_tenant_name_and_no_key(setup: Setup) -> None:
    upload(setup.sdk, [chat("a", "x")])
    paths = [path for path in setup.folder.rglob("*") if path.is_file()]
    assert paths
    assert not [path for path in paths if "acme" in str(path.relative_to(setup.folder))]
    for path in paths:
        with suppress(FileNotFoundError):  # the gateway has deleted it by now
            assert b"sk-acme" not in path.read_bytes()


LIMITED = """
models: [{{name: demo-8b, pool: main}}]
pools: {{main: {{endpoints: [{{url: '{0}'}}]}}}}
batch: {{dir: '{1}', batches: 1, lines: 2}}
limits: {{body: 64KiB}}
"""


def test_a_tenant_has_few_unfinished_batches_and_a_batch_few_requests_of_some_size(
    tmp_path: Path,
) -> None:
    config = LIMITED.format(f"http://127.0.0.1:{free_port()}", tmp_path / "store")  # no engine
    with gateway_process(tmp_path, config) as running, client(running.url, "none") as sdk:
        lines = [chat("a", "x"), chat("b", "y")]
        for asked, code in (
            ([*lines, chat("c", "z")], "too_many_tasks"),
            ([chat("a", "x" * 90_000)], "body_too_large"),
        ):
            failed = wait(sdk, create(sdk, upload(sdk, asked)).id)
            assert failed.status == "failed"
            assert failed.errors is not None
            assert failed.errors.data
            assert failed.errors.data[0].code == code
        batch = create(sdk, upload(sdk, lines))
        with pytest.raises(openai.RateLimitError, match="1 unfinished batches"):
            create(sdk, upload(sdk, lines))
        sdk.batches.cancel(batch.id)
        cancelled = wait(sdk, batch.id)
        assert (cancelled.status, cancelled.output_file_id) == ("cancelled", None)
        assert results(sdk, cancelled.error_file_id).keys() == {"a", "b"}
        assert sdk.batches.cancel(create(sdk, upload(sdk, lines)).id).id
