"""The names of the routing policies of pools and commands that name none.

It is a module of its own, so that commands that only print their help import nothing else.
"""

from __future__ import annotations

DEFAULT_POLICY = "priced"

SPLIT_POLICY = "prefix_aware"
"""The policy of a pool some of whose endpoints only prefill or only decode.

With it, the length of the uncached prompt decides which requests are split, as operators of such
engines expect. With `priced`, few are split while whole requests cost less.
"""
