"""A linked graph as Python source, and the source as a function.

def forward(session, step, inputs):
    tokens, embed_weight, ... = inputs
    inputs.clear()                       # the caller's list; so every value dies at its last use
    x = aten.embedding.default(embed_weight, tokens)          # f32[s0, s1, 64]  model.embed_tokens
    ...
    return [loss, ...]
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Callable

from torch.fx import GraphModule, Node

from moefx.ir.describe import Symbols, module_path, source_line
from moefx.ir.text import _Printer
from moefx.link.instrument import Marker, Marks
from moefx.link.lower import free_points

_COLUMN = 100


def emit(gm: GraphModule, name: str, marks: Marks | None = None, symbols: Symbols | None = None) -> str:
    """The source of one function. Deterministic: equal on all ranks that hold the same graph. marks: for a copy that
    reports its tasks to `session.profiler`. symbols: names of sizes, which other functions have, too."""
    printer = _Printer(gm.graph)
    symbols = printer.symbols = symbols or printer.symbols
    marker = None if marks is None else Marker(marks, _unused("run", printer.taken))
    placeholders = [n for n in gm.graph.find_nodes(op="placeholder") if n.name not in ("session", "step")]
    lines = [f"def {name}(session, step, inputs):"]
    if placeholders:
        lines.append("    (")
        lines += [_comment(f"        {p.name},", _describe(p, symbols)) for p in placeholders]
        lines.append("    ) = inputs")
    lines.append("    inputs.clear()  # every value dies at its last use below")
    frees = free_points(gm)
    unused = [p.name for p in placeholders if not p.users]
    if unused:
        lines.append(f"    del {', '.join(unused)}")
    if marker is not None:
        lines.append(marker.begin(name))
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            continue
        lines += [] if marker is None else marker.before(node)
        if node.op == "output":
            lines.append(f"    return [{', '.join(printer.literal(a) for a in node.args[0])}]")
            continue
        lines.append(_comment("    " + printer.statement(node), _describe(node, symbols)))
        lines += [] if marker is None else marker.after(node)
        gone = [v.name for v in frees.get(node, []) if v.name not in ("session", "step")]
        if not node.users:
            gone.append(node.name)
        if gone:
            lines.append(f"    del {', '.join(gone)}")
    header = "\n".join(printer.imports())
    return f"{header}\n\n\n" + "\n".join(lines) + "\n"


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _describe(node: Node, symbols: Symbols) -> str:
    value = node.meta.get("val", node.meta.get("example_value"))
    parts = [symbols.type_text(value) if value is not None else "", module_path(node), source_line(node)]
    return "  ".join(p for p in parts if p)


def _comment(line: str, comment: str) -> str:
    if not comment:
        return line
    return f"{line:<{_COLUMN}}# {comment}" if len(line) < _COLUMN else f"{line}  # {comment}"


def load(source: str, name: str) -> Callable:
    """The function of that name in `source`. Tracebacks show its lines."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    filename = f"<moefx {name} {digest}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope: dict[str, object] = {"__name__": f"moefx_program_{digest}"}
    exec(compile(source, filename, "exec"), scope)
    return scope[name]


def digest(*sources: str) -> int:
    """A 63-bit number that tells programs apart."""
    text = "\0".join(sources).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") & (2**63 - 1)
