"""Parses YAML files of other programs to plain data, with limits and without custom objects."""

from __future__ import annotations

from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from gateway.migrate.config_draft import MigrationError

MAX_CHARS = 1 << 20
_MOST_ALIASES = 1000


def load_documents(text: str) -> list[Any]:
    """Return the YAML documents in a text as plain data. Raises MigrationError if it is invalid."""
    if len(text) > MAX_CHARS:
        raise MigrationError(f"the file is longer than {MAX_CHARS} characters")
    if text.count("*") > _MOST_ALIASES and text.count("&") > _MOST_ALIASES:
        raise MigrationError(f"the file has more than {_MOST_ALIASES} YAML anchors and aliases")
    try:
        return list(YAML(typ="safe", pure=True).load_all(text))
    except (YAMLError, ValueError, RecursionError) as error:
        detail = str(error).strip().splitlines()
        raise MigrationError(
            f"the file is not valid YAML: {detail[0] if detail else error}"
        ) from None
