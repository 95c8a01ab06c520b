"""Tests of building wheels (tools/compile/wheel.py), as far as no compiler is needed."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tools.compile.wheel import copy_tracked_files


def test_an_sdist_is_made_of_the_tracked_files_also_where_a_link_leads_to_their_folder(
    tmp_path: Path,
) -> None:
    checkout, target = tmp_path / "checkout", tmp_path / "target"
    (checkout / "deploy" / "rules").mkdir(parents=True)
    (checkout / "deploy" / "rules" / "a.yml").write_text("groups: []\n")
    (checkout / "deploy" / "chart").mkdir()
    (checkout / "deploy" / "chart" / "rules").symlink_to("../rules")
    (checkout / "deploy" / "rules" / "untracked").write_text("")
    subprocess.run(["git", "init", "-q", checkout], check=True)
    tracked = ["deploy/rules/a.yml", "deploy/chart/rules"]
    subprocess.run(["git", "-C", checkout, "add", *tracked], check=True)
    copy_tracked_files(checkout, target)
    copied = {path.relative_to(target) for path in target.rglob("*") if not path.is_dir()}
    assert copied == {Path("deploy/rules/a.yml"), Path("deploy/chart/rules/a.yml")}
    assert not any(path.is_symlink() for path in target.rglob("*"))
