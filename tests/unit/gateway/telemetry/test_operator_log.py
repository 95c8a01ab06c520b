"""Tests that each record of the operator's log is one line, with a time and a level."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from gateway.config import OperatorLog
from gateway.telemetry.operator_log import JsonFormatter, TextFormatter, configure_log

HOSTILE = "endpoint a: said \x1b[2J\nERROR forged"


def record(
    message: str, level: int = logging.WARNING, *, failed: bool = False
) -> logging.LogRecord:
    try:
        raise RuntimeError("the test's request failed")
    except RuntimeError:
        log_record = logging.LogRecord(
            "penstock", level, "", 1, message, None, sys.exc_info() if failed else None
        )
    log_record.created = 1_700_000_000.25
    return log_record


def test_a_line_of_text_has_time_level_and_the_number_of_the_worker() -> None:
    assert (
        TextFormatter().format(record("drain begins"))
        == "2023-11-14T22:13:20.250Z WARNING drain begins"
    )
    assert TextFormatter(3).format(record("x")).endswith("WARNING worker 3: x")


def test_text_of_an_engine_can_neither_forge_a_line_nor_control_a_terminal() -> None:
    text = TextFormatter().format(record(HOSTILE))
    assert "\n" not in text
    assert "\x1b" not in text
    assert r"said \x1b[2J\nERROR forged" in text


def test_a_line_of_json_holds_the_message_as_it_was() -> None:
    line = JsonFormatter(2).format(record(HOSTILE))
    entry = json.loads(line)
    assert (entry["message"], entry["level"], entry["worker"]) == (HOSTILE, "warning", 2)
    assert entry["time"] == "2023-11-14T22:13:20.250Z"
    assert line.isprintable()


def test_a_defect_is_logged_with_its_traceback_in_either_form() -> None:
    assert "RuntimeError: the test's request failed" in TextFormatter().format(
        record("failed", failed=True)
    )
    assert (
        "RuntimeError: the test's request failed"
        in json.loads(JsonFormatter().format(record("failed", failed=True)))["traceback"]
    )


@pytest.mark.parametrize(("level", "written"), [("info", True), ("warning", False)])
def test_the_configured_level_decides_what_is_written(
    level: str, written: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    root, ours = logging.getLogger(), logging.getLogger("penstock")
    before = root.handlers[:], root.level, ours.level
    try:
        configure_log(OperatorLog.model_validate({"level": level, "format": "json"}))
        ours.info("SIGTERM")
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
        ours.setLevel(before[2])
    assert ("SIGTERM" in capsys.readouterr().err) is written
