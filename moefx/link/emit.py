"""A linked graph as Python source, and the source as a function.

def forward(session, step, inputs):
    tokens, embed_weight, ... = inputs
    inputs.clear()                       # the caller's list; so every value dies at its last use

    # model.embed_tokens
    x = aten.embedding.default(embed_weight, tokens); del embed_weight        # f32[s0, s1, 64]  modeling.py:436
    ...
    return [loss, ...]
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Callable

from torch import fx
from torch.fx import GraphModule, Node

from moefx.ir.describe import Symbols, module_path, source_line
from moefx.ir.op import value
from moefx.ir.text import _Printer
from moefx.link.instrument import Marker, Marks
from moefx.link.lower import free_points

_COLUMN = 100
_RUNTIME = "moefx.runtime."


class _Code(_Printer):
    """Statements with short names of functions: aten.mm.default, kernels.route."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(graph)
        self.runtime: set[str] = set()
        self.aten = False

    def spell(self, path: str) -> str:
        if path.startswith(_RUNTIME):
            short = path.removeprefix(_RUNTIME)
            module = short.split(".")[0]
            if module not in self.taken:
                self.runtime.add(module)
                return short
        if path.startswith("ops.aten.") and "aten" not in self.taken:
            self.aten = True
            return path.removeprefix("ops.")
        return super().spell(path)

    def header(self) -> str:
        lines = self.imports()
        if self.aten and "import torch" not in lines:
            lines.insert(0, "import torch")
        if self.runtime:
            lines.append(f"from moefx.runtime import {', '.join(sorted(self.runtime))}")
        return "\n".join(lines + (["", "aten = torch.ops.aten"] if self.aten else []))


def emit(gm: GraphModule, name: str, marks: Marks | None = None, symbols: Symbols | None = None) -> str:
    """The source of one function. Deterministic: equal on all ranks that hold the same graph. marks: for a copy that
    reports its tasks to `session.profiler`. symbols: names of sizes, which other functions have, too."""
    code = _Code(gm.graph)
    symbols = code.symbols = symbols or code.symbols
    marker = None if marks is None else Marker(marks, _unused("run", code.taken))
    placeholders = [n for n in gm.graph.find_nodes(op="placeholder") if n.name not in ("session", "step")]
    lines = [f"def {name}(session, step, inputs):"]
    if placeholders:
        lines.append("    (")
        lines += [_comment(f"        {p.name},", _type(p, symbols)) for p in placeholders]
        lines.append("    ) = inputs")
    lines.append("    inputs.clear()  # every value dies at its last use below")
    frees = free_points(gm)
    unused = [p.name for p in placeholders if not p.users]
    if unused:
        lines.append(f"    del {', '.join(unused)}")
    if marker is not None:
        lines.append(marker.begin(name))
    heading = None
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            continue
        place = _heading(node)
        if place is not None and place != heading:
            lines += ["", f"    # {place}"]
            heading = place
        lines += [] if marker is None else marker.before(node)
        if node.op == "output":
            lines += ["", f"    return [{', '.join(code.literal(a) for a in node.args[0])}]"]
            continue
        gone = [v.name for v in frees.get(node, []) if v.name not in ("session", "step")]
        if not node.users:
            gone.append(node.name)
        statement = "    " + code.statement(node) + (f"; del {', '.join(gone)}" if gone else "")
        lines.append(_comment(statement, "  ".join(filter(None, (_type(node, symbols), source_line(node))))))
        lines += [] if marker is None else marker.after(node)
    return f"{code.header()}\n\n\n" + "\n".join(lines) + "\n"


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _heading(node: Node) -> str | None:
    """The module that a node belongs to; None: nobody knows, as of a sum of gradients."""
    known = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return (module_path(node) or "the model itself") if known else None


def _type(node: Node, symbols: Symbols) -> str:
    found = value(node)
    return "" if found is None else symbols.type_text(found)


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
