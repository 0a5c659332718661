"""Numbers in words, as a plan says them."""

from __future__ import annotations


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


def unit_of(most: float) -> tuple[float, str]:
    """What to count bytes in, and its name."""
    return next((scale, unit) for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))
                if most >= scale or scale == 1)  # fmt: skip


def size(nbytes: float) -> str:
    scale, unit = unit_of(nbytes)
    return f"{nbytes / scale:.4g} {unit}"


def rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f} tokens/s"


def percent(share: float) -> str:
    return f"{share:.0%}"
