"""The identity of an engine's weights, for names of stored KV that outlive the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.json")


def identify_weights(model: str, facts: Sequence[object]) -> str:
    """Return a hash of 16 hex digits that is different for different weights.

    model  name of a model, or path of its folder or file. Of local files, names, sizes and
           modification times are hashed, so a model that is trained further gets another identity
    facts  everything else that determines the weights, such as a revision, or how they are made
    """
    path = Path(model)
    files = [path] if path.is_file() else [f for each in _PATTERNS for f in path.rglob(each)]
    found = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(files)]
    text = repr((str(model), list(facts), found))
    return hashlib.blake2b(text.encode(), digest_size=8, person=b"kv-weights").hexdigest()
