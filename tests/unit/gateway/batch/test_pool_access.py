"""Tests of which batches may still run after a reload, and of the headers of their requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gateway.batch.file_and_batch_objects import BatchRecord
from gateway.batch.pool_access import batch_class, line_headers, refusal, scope_digest
from gateway.config import BatchApi, Config
from gateway.protocol.request.service_level_headers import MAX_PRIORITY, ServiceClasses

KEY = b"digest of a key"
POOLS = {"main": {"endpoints": [{"url": "http://127.0.0.1:9000"}]}}
RECORD = BatchRecord("batch_1", "acme", "", "/v1/x", "file-1", "24h", 0, 1, model="chat")
SCOPED = BatchRecord(
    "batch_1", "acme", scope_digest(KEY), "/v1/x", "file-1", "24h", 0, 1, model="chat"
)


def snapshot(tenant: str = "acme", models: dict[str, object] | None = None) -> Any:
    # Return what refusal() reads of a snapshot; `models` are those of the limited key.
    scopes = {} if models is None else {KEY: SimpleNamespace(routes=models)}
    return SimpleNamespace(tenants={KEY: tenant}, scopes=scopes)


def running(config: Config) -> Any:
    return SimpleNamespace(config=config, service_classes=ServiceClasses(config))


def status(snapshot: Any, record: BatchRecord) -> int | None:
    error = refusal(snapshot, record)
    return None if error is None else error.status


def test_a_tenant_that_exists_may_run_its_batch_and_a_removed_one_may_not() -> None:
    assert status(snapshot(), RECORD) is None
    assert status(snapshot("other"), RECORD) == 401


def test_a_limited_key_must_still_exist_and_permit_the_model() -> None:
    assert status(snapshot(models={"chat": object()}), SCOPED) is None
    assert status(snapshot(models={"other": object()}), SCOPED) == 404
    assert status(snapshot(), SCOPED) == 401


def test_what_is_stored_of_a_key_does_not_contain_it() -> None:
    assert KEY.hex() not in scope_digest(KEY)
    assert scope_digest(KEY) != scope_digest(KEY + b"x")


def test_requests_have_the_class_of_least_weight_unless_one_is_named() -> None:
    config = Config.model_validate({"version": 1, "pools": POOLS})
    assert batch_class(BatchApi(dir="x"), config) == "batch"
    headers = line_headers(BatchApi(dir="x", slo="standard"), running(config), is_reserved=False)
    assert dict(headers) == {"x-slo-class": "standard", "x-priority": "-8"}


def test_only_a_request_with_a_reserved_place_enters_before_all_that_wait() -> None:
    current = running(Config.model_validate({"version": 1, "pools": POOLS}))
    for is_reserved in (True, False):
        headers = line_headers(BatchApi(dir="x"), current, is_reserved=is_reserved)
        read = current.service_classes.read_preferences(headers, "acme")
        assert (read.is_batch, read.skips_queue) == (True, is_reserved)
        assert (read.effective_priority(0), read.slo and read.slo.name) == (-MAX_PRIORITY, "batch")
