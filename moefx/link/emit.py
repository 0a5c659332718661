"""A linked graph as Python source, and the source as a function.

def forward(session, step, inputs):
    tokens, embed_weight, ... = inputs
    inputs.clear()                       # the caller's list; so every value dies at its last use

    # model.embed_tokens
    x = aten.embedding.default(embed_weight, tokens); del embed_weight        # f32[s0, s1, 64]  modeling.py:436
    ...
    return [loss, ...]

Equal layers may be a loop, see `rolled.py`.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import logging
from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx import GraphModule, Node

from moefx.errors import MoefxError, VerifyError
from moefx.ir.describe import Symbols, module_path, source_line
from moefx.ir.op import value
from moefx.ir.text import Printer
from moefx.link.instrument import Marker, Marks
from moefx.link.lower import free_points
from moefx.link.parts import Part, parts_of
from moefx.link.rolled import roll
from moefx.link.statements import Function, Statement, commented, flat, marked, renamed
from moefx.link.unrolled import BRACES, check_unrolled

log = logging.getLogger("moefx.link")

_RUNTIME = "moefx.runtime."
_ROOMS = "moefx.features."  # each of which may have a `runtime`
_OWN_NAMES = frozenset({"session", "step", "inputs", "aten", "torch", "deque", "layers"})


class _Code(Printer):
    """Statements with short names of functions: aten.mm.default, kernels.route."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(graph)
        self.runtime: set[str] = set()
        self.rooms: set[str] = set()
        self.aten = False

    def spell(self, path: str) -> str:
        if path.startswith(_RUNTIME):
            short = path.removeprefix(_RUNTIME)
            module = short.split(".")[0]
            if module not in self.taken:
                self.runtime.add(module)
                return short
        if path.startswith(_ROOMS):
            room, _, function = path.removeprefix(_ROOMS).partition(".runtime.")
            if room not in self.taken | self.runtime:
                self.rooms.add(room)
                return f"{room}.{function}"
        if path.startswith("ops.aten.") and "aten" not in self.taken:
            self.aten = True
            return path.removeprefix("ops.")
        return super().spell(path)

    def call(self, node: Node) -> str:
        if isinstance(node.target, Part):
            return f"{node.target.name}({self.arguments(node.args, node.kwargs)})"
        return super().call(node)

    def name(self, node: Node) -> str:
        return marked(node.name) if node.name not in ("session", "step") else node.name

    def hidden(self) -> set[str]:
        """Names that no value may get any more."""
        return self.taken | self.runtime | self.rooms | _OWN_NAMES | {path.split(".")[0] for path in self.paths}

    def header(self, text: str = "") -> str:
        """text: of a function with loops."""
        if "layers.take(" in text:
            self.runtime.add("layers")
        lines = self.imports() + (["from collections import deque"] if " = deque(" in text else [])
        if self.aten and "import torch" not in lines:
            lines.insert(0, "import torch")
        if self.runtime:
            lines.append(f"from moefx.runtime import {', '.join(sorted(self.runtime))}")
        lines += [f"from moefx.features.{room} import runtime as {room}" for room in sorted(self.rooms)]
        return "\n".join(lines + (["", "aten = torch.ops.aten"] if self.aten else []))


def emit(gm: GraphModule, name: str, marks: Marks | None = None, symbols: Symbols | None = None, *,
         loops: bool = False, verify: int = 1) -> str:  # fmt: skip
    """The source of one function. Deterministic: equal on all ranks that hold the same graph. marks: for a copy that
    reports its tasks to `session.profiler`. symbols: names of sizes, which other functions have, too. loops: equal
    layers are a loop. verify: at 1 a loop that does not do the same is not used, at 2 it raises VerifyError."""
    code = _Code(gm.graph)
    code.symbols = symbols or code.symbols
    function = _function(gm, name, code, marks)
    parts = "".join(f"{_part(each, code)}\n\n\n" for each in parts_of(gm))
    hidden = code.hidden() | {each.name for each in parts_of(gm)}
    text = roll(function, hidden) if loops else None
    if text is not None and verify:
        try:
            check_unrolled(text, function)
        except VerifyError as error:
            if verify > 1:
                raise
            log.warning("%s is printed layer by layer: %s", name, error)
            text = None
    if text is None:
        return f"{code.header()}\n\n\n{parts}{flat(function)}"
    return f"{code.header(text)}\n\n\n{parts}{text}"


def _part(part: Part, caller: _Code) -> str:
    """The text of a function that another one calls, whose header is that of both."""
    code = _Code(part.graph)
    code.paths, code.modules, code.runtime, code.rooms = caller.paths, caller.modules, caller.runtime, caller.rooms
    *nodes, output = part.graph.nodes
    inputs = [node.name for node in nodes if node.op == "placeholder"]
    lines = [f"@{code.spell(part.made_by)}({', '.join(map(repr, part.types))}, device={part.device!r}, "
             f"sizes={dict(part.sizes)!r})", f"def {part.name}({', '.join(inputs)}):"]  # fmt: skip
    lines += [commented(renamed(f"    {code.statement(node)}", {}), source_line(node))
              for node in nodes if node.op != "placeholder"]  # fmt: skip
    lines.append(f"    return {', '.join(renamed(code.literal(each), {}) for each in output.args[0])}")
    caller.aten |= code.aten
    return "\n".join(lines)


def _function(gm: GraphModule, name: str, code: _Code, marks: Marks | None) -> Function:
    marker = None if marks is None else Marker(marks, _unused("run", code.taken))
    placeholders = [n for n in gm.graph.find_nodes(op="placeholder") if n.name not in ("session", "step")]
    function = Function(name, [(p.name, _type(p, code.symbols)) for p in placeholders],
                        [p.name for p in placeholders if not p.users])  # fmt: skip
    if marker is not None:
        function.begin.append(marker.begin(name))
    frees = free_points(gm)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            continue
        before = [] if marker is None else marker.before(node)
        if node.op == "output":
            function.outputs, function.end = [code.literal(each) for each in node.args[0]], before
            continue
        gone = [v.name for v in frees.get(node, []) if v.name not in ("session", "step")]
        comment = "  ".join(filter(None, (_type(node, code.symbols), source_line(node))))
        function.statements.append(Statement(
            node.name, code.statement(node), (*gone, *([] if node.users else [node.name])), comment, _heading(node),
            tuple(before), tuple([] if marker is None else marker.after(node))))  # fmt: skip
    return function


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


def load(source: str, name: str) -> Callable:
    """The function of that name in `source`. Tracebacks show its lines; what is raised in a loop over layers says in
    which layer."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    filename = f"<moefx {name} {digest}>"
    lines = source.splitlines(keepends=True)
    linecache.cache[filename] = (len(source), None, lines, filename)
    scope: dict[str, object] = {"__name__": f"moefx_program_{digest}"}
    exec(compile(source, filename, "exec"), scope)
    function = scope[name]
    if not any(line.startswith("    for ") for line in lines):
        return function

    @functools.wraps(function)
    def telling(session: Any, step: Any, inputs: list[Any]) -> list[Any]:
        try:
            return function(session, step, inputs)
        except Exception as error:
            if not isinstance(error, MoefxError) and hasattr(error, "add_note"):
                error.add_note(place_in_loop(error, filename, lines))
            raise

    return telling


def place_in_loop(error: Exception, filename: str, lines: list[str]) -> str:
    """The module of the layer in which a function of emitted code raised; "" outside of loops."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != filename:
        trace = trace.tb_next
    if trace is None or not lines[trace.tb_lineno - 1].startswith(" " * 8):
        return ""
    for line in reversed(lines[: trace.tb_lineno]):
        if line.startswith("    for "):
            break
        if line.startswith("        # "):
            heading = line.strip().removeprefix("# ")
            return "in " + BRACES.sub(lambda m: str(eval(m[1], {}, trace.tb_frame.f_locals)), heading)
    return ""


def digest(*sources: str) -> int:
    """A 63-bit number that tells programs apart."""
    text = "\0".join(sources).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") & (2**63 - 1)
