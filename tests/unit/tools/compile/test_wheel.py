"""Tests of tools/compile/wheel.py that compile nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tools.compile.wheel import copy_tracked_files


def test_an_sdist_is_made_of_the_tracked_files_and_links_to_folders_stay_links(
    tmp_path: Path,
) -> None:
    checkout, target = tmp_path / "checkout", tmp_path / "target"
    (checkout / "deploy" / "rules").mkdir(parents=True)
    (checkout / "deploy" / "rules" / "a.yml").write_text("groups: []\n")
    (checkout / "deploy" / "chart").mkdir()
    (checkout / "deploy" / "chart" / "rules").symlink_to("../rules")
    (checkout / "untracked").write_text("")
    subprocess.run(["git", "init", "-q", checkout], check=True)
    subprocess.run(["git", "-C", checkout, "add", "deploy"], check=True)
    copy_tracked_files(checkout, target)
    assert (target / "deploy" / "chart" / "rules").is_symlink()
    assert (target / "deploy" / "chart" / "rules" / "a.yml").read_text() == "groups: []\n"
    assert not (target / "untracked").exists()
