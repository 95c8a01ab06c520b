"""Computes an identity of an engine's weights, which becomes part of the keys of stored KV."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.json")


def identify_weights(model: str, facts: Sequence[object]) -> str:
    """Return a hash of 16 hex digits that is different for engines with different weights.

    model  name of a model, or path of its folder or file. For local files, their names, sizes and
           modification times are hashed, so that changed weights get another hash
    facts  whatever else determines the weights, such as a revision
    """
    path = Path(model)
    files = [path] if path.is_file() else [f for each in _PATTERNS for f in path.rglob(each)]
    found = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(files)]
    text = repr((str(model), list(facts), found))
    return hashlib.blake2b(text.encode(), digest_size=8, person=b"kv-weights").hexdigest()
