"""Numbers in words, as a plan says them."""

from __future__ import annotations


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


def rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f} tokens/s"


def percent(share: float) -> str:
    return f"{share:.0%}"
