"""Write options.md: every option with its default and what it says, from the declarations in moefx/options.

    python docs/make_options.py
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from moefx.options import Options

PAGE = Path(__file__).parent / "options.md"
_HEAD = """# Options

Every option is a keyword of `moefx.compile`. (`python docs/make_options.py` writes this page.)

```python
moefx.compile(model, mesh, chunks=4, ep=8)
moefx.compile(model, mesh, moefx.Options(chunks=4, parallel=moefx.Parallel(ep=8)))     # the same
```

A group also takes a value for its first field: `placement="auto"` is `placement=moefx.Placement(policy="auto")`.
`moefx.Options.preset(name)` makes the choices of a published system: see [the papers](features/papers.md).
"""


def page() -> str:
    lines = [_HEAD, *_table([each for each in fields(Options) if "group" not in each.metadata])]
    for each in fields(Options):
        if "group" in each.metadata:
            kind = each.metadata["group"]
            about = kind.__doc__.split(f"\n\n{fields(kind)[0].name}: ")[0]
            lines += ["", f"## {each.name}: {kind.__name__}", "", " ".join(about.split()), "", *_table(fields(kind))]
    return "\n".join(lines) + "\n"


def _table(some) -> list[str]:
    rows = [f"| `{each.name}` | `{each.default!r}` | {' '.join(each.metadata['says'].split())} |" for each in some]
    return ["| option | default | |", "|---|---|---|", *rows]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
