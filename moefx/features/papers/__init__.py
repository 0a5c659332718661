"""What published systems do, as options: names that `moefx.Options.preset` knows.

Each name stands for the choices of one paper, on top of expert parallelism. Where a paper chooses by a performance
model or by trying, so does the preset: it needs a `machine`, as `Options(machine=..)` says.
tests/features/papers/test_presets.py holds the graph of every preset against what is said here.
"""

from __future__ import annotations

from inspect import cleandoc

from moefx.features.papers.presets import PRESETS

__doc__ = f"{__doc__}\n" + "".join(f'"{name}": {cleandoc(each.says)}\n\n' for name, each in PRESETS.items())
