"""Converts numbers to texts with units, and texts with units to numbers."""

from __future__ import annotations


def ms(seconds: float) -> str:
    """Return a duration in seconds as text in milliseconds, such as "350 ms"."""
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"


def gb(size: float) -> str:
    """Return a number of bytes as text in GB (10^9 bytes)."""
    return f"{size / 1e9:.1f} GB"


def usd(amount: float | None) -> str:
    """Return an amount of dollars as text, such as $2.50; a dash for None."""
    return "-" if amount is None else f"${amount:,.2f}" if amount >= 0.1 else f"${amount:.4f}"


def parse_tokens(text: str) -> int:
    """Return the number of tokens in a text such as 8192, 8k (8 x 1024) or 1m.

    Raises ValueError for other texts.
    """
    factors = {"k": 1 << 10, "m": 1 << 20}
    number, factor = (text[:-1], factors[text[-1:]]) if text[-1:] in factors else (text, 1)
    try:
        tokens = float(number) * factor
    except ValueError:
        tokens = -1.0
    if not 1 <= tokens <= 1 << 32 or tokens != int(tokens):
        raise ValueError(f"{text!r} is not a number of tokens; valid forms: 8192, 8k, 1m")
    return int(tokens)


def parse_seconds(text: str) -> float:
    """Return the number of seconds in a text such as 1.2s, 40ms or 2m.

    Raises ValueError for other texts.
    """
    for unit, factor in (("ms", 1e-3), ("s", 1.0), ("m", 60.0)):
        if text.endswith(unit):
            try:
                seconds = float(text.removesuffix(unit)) * factor
            except ValueError:
                break
            if 0 < seconds < 1e6:
                return seconds
            break
    raise ValueError(f"{text!r} is not a time above zero; valid forms: 1.2s, 40ms, 2m")
