"""What numbers a parameter may be: a configuration that says another is refused, with the parameter's name and place.

Types for the parameters' structs. Not a number and infinity fall outside of all of them.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

LEAST, MOST = 1e-9, 1e9
"""Wide enough for every use, and what is made of two of them is still a number."""

Amount = Annotated[float, Meta(ge=0, le=MOST)]
"""A weight, or a quantity that may be none: seconds, tokens, requests."""

Positive = Annotated[float, Meta(ge=LEAST, le=MOST)]
"""A quantity that others are counted in."""

Share = Annotated[float, Meta(ge=0, le=1)]
"""A part of a whole."""

Exponent = Annotated[float, Meta(ge=0, le=100)]
"""A power, or how steep an exponential is: a hundred is a cliff already, and more overflows."""

Factor = Annotated[float, Meta(ge=1, le=1e3)]
"""So many times as much, never less."""

Count = Annotated[int, Meta(ge=0, le=1 << 31)]
"""How many, and none will do."""

Number = Annotated[int, Meta(ge=1, le=1 << 31)]
"""How many, at least one."""
