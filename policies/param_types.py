"""Numeric types for policy parameters; a value outside its range is refused with the parameter's
name.

NaN and infinity are outside every range.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

# Wide enough for every use, and products of two such numbers stay finite.
LEAST, MOST = 1e-9, 1e9

NonNegative = Annotated[float, Meta(ge=0, le=MOST)]
"""A weight, or a quantity that may be zero: seconds, tokens, requests."""

Positive = Annotated[float, Meta(ge=LEAST, le=MOST)]
"""A quantity above zero."""

Fraction = Annotated[float, Meta(ge=0, le=1)]
"""A fraction of a whole, 0 to 1."""

Exponent = Annotated[float, Meta(ge=0, le=100)]
"""An exponent. 100 is steep enough to act as a step, and larger ones overflow."""

Factor = Annotated[float, Meta(ge=1, le=1e3)]
"""A multiple of at least 1."""

NonNegativeCount = Annotated[int, Meta(ge=0, le=1 << 31)]
"""A count that may be zero."""

PositiveCount = Annotated[int, Meta(ge=1, le=1 << 31)]
"""A count of at least one."""
