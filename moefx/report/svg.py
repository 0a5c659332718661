"""What the pictures of reports share: text, a legend, round ticks, the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

_FONT = "DejaVu Sans, Helvetica, Arial, sans-serif"


def text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def legend(x: float, y: float, fills: Iterable[tuple[str, str]]) -> Iterator[str]:
    """(words, color) side by side, from x on; y: the top of the boxes."""
    for words, color in fills:
        yield f'<rect x="{x}" y="{y}" width="12" height="12" fill="{color}"/>'
        yield text(x + 16, y + 10, words)
        x += 34 + 7 * len(words)


def ticks(longest: float, most: int = 10) -> Sequence[float]:
    """From 0 to at most `longest`, at multiples of 1, 2 or 5 times a power of ten: `most` steps at most."""
    if not longest > 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(longest / most))
    step = next(power * m for m in (1, 2, 5, 10, 20) if longest / (power * m) <= most)
    return [i * step for i in range(int(longest / step * (1 + 1e-9)) + 1)]


def write(path: str | Path, width: float, height: float, parts: Iterable[str]) -> Path:
    """The page with these parts, on white."""
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" font-family="{_FONT}" '
            'font-size="12">')  # fmt: skip
    target = Path(path)
    target.write_text("\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"]),
                      encoding="utf-8")  # fmt: skip
    return target
