"""Tests that the values in docs/deploying.md are those of the Helm chart.

Other names in that page are checked by tests/unit/docs.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ruamel.yaml import YAML

from gateway.config import load_with_warnings

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "deploying.md").read_text()


def test_its_values_are_the_charts_and_their_configuration_passes_the_check(tmp_path: Path) -> None:
    blocks = map(YAML(typ="safe").load, re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL))
    (values,) = [block for block in blocks if "image" in block]
    known = YAML(typ="safe").load((ROOT / "deploy/helm/penstock/values.yaml").read_text())
    assert values.keys() <= known.keys()
    (tmp_path / "secrets").mkdir()
    for item in values["secrets"]["files"]:
        (tmp_path / "secrets" / item["file"]).write_text(f"a-secret-of-{item['file']}-long-enough")
    with (tmp_path / "gateway.yaml").open("w") as file:
        YAML(typ="safe").dump({"version": 1, **values["config"]}, file)
    assert load_with_warnings(tmp_path / "gateway.yaml", os.environ).warnings == ()
