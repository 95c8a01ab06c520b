"""Numeric types for policy parameters; a value out of range is an error that names the parameter.

NaN and infinity are outside every range.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

# Wide enough for every use, and products of two such numbers stay finite.
LEAST, MOST = 1e-9, 1e9

NonNegative = Annotated[float, Meta(ge=0, le=MOST)]
"""A parameter type: a weight or quantity that may be zero, such as seconds, tokens or requests."""

Positive = Annotated[float, Meta(ge=LEAST, le=MOST)]
"""A parameter type: a number greater than zero."""

Fraction = Annotated[float, Meta(ge=0, le=1)]
"""A parameter type: a fraction of a whole, 0 to 1."""

Exponent = Annotated[float, Meta(ge=0, le=100)]
"""A parameter type: an exponent up to 100, which acts like a step already; larger ones overflow."""

Factor = Annotated[float, Meta(ge=1, le=1e3)]
"""A parameter type: a multiple of at least 1."""

NonNegativeCount = Annotated[int, Meta(ge=0, le=1 << 31)]
"""A parameter type: an integer of at least 0."""

PositiveCount = Annotated[int, Meta(ge=1, le=1 << 31)]
"""A parameter type: an integer of at least 1."""
