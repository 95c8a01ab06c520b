"""The operator's log: every line has a time and a level, and quoted text cannot break lines."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from gateway.config import OperatorLog
from gateway.operator_log import JsonFormatter, TextFormatter, configure

HOSTILE = "endpoint a: said \x1b[2J\nERROR forged"


def record(
    message: str, level: int = logging.WARNING, *, failed: bool = False
) -> logging.LogRecord:
    try:
        raise RuntimeError("no luck")
    except RuntimeError:
        log_record = logging.LogRecord(
            "penstock", level, "", 1, message, None, sys.exc_info() if failed else None
        )
    log_record.created = 1_700_000_000.25
    return log_record


def test_a_text_line_has_time_level_and_worker_number() -> None:
    assert (
        TextFormatter().format(record("drain begins"))
        == "2023-11-14T22:13:20.250Z WARNING drain begins"
    )
    assert TextFormatter(3).format(record("x")).endswith("WARNING worker 3: x")


def test_quoted_text_cannot_forge_lines_or_control_the_terminal() -> None:
    text = TextFormatter().format(record(HOSTILE))
    assert "\n" not in text
    assert "\x1b" not in text
    assert r"said \x1b[2J\nERROR forged" in text


def test_a_json_line_contains_the_original_message() -> None:
    line = JsonFormatter(2).format(record(HOSTILE))
    fields = json.loads(line)
    assert (fields["message"], fields["level"], fields["worker"]) == (HOSTILE, "warning", 2)
    assert fields["time"] == "2023-11-14T22:13:20.250Z"
    assert line.isprintable()


def test_an_internal_error_is_logged_with_its_traceback() -> None:
    assert "RuntimeError: no luck" in TextFormatter().format(record("failed", failed=True))
    assert (
        "RuntimeError: no luck"
        in json.loads(JsonFormatter().format(record("failed", failed=True)))["traceback"]
    )


@pytest.mark.parametrize(("level", "written"), [("info", True), ("warning", False)])
def test_the_configured_level_filters_records(
    level: str, written: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    root, ours = logging.getLogger(), logging.getLogger("penstock")
    before = root.handlers[:], root.level, ours.level
    try:
        configure(OperatorLog.model_validate({"level": level, "format": "json"}))
        ours.info("SIGTERM")
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
        ours.setLevel(before[2])
    assert ("SIGTERM" in capsys.readouterr().err) is written
