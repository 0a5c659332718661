"""A graph printed once for all uses, and again after every pass: rows in which nothing changed are kept."""

from __future__ import annotations

import difflib
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import sympy
from torch import fx

from moefx.ir.describe import op_name
from moefx.ir.op import REGISTRY, value
from moefx.ir.text import Printer, Row, graph_of


@dataclass(frozen=True)
class Printed:
    """A graph as text: its first lines, a row for each node, its imports, and the sizes of the symbols of its inputs in
    the call that was traced. Texts are joined when asked for."""

    head: Sequence[str]
    rows: Sequence[Row]
    imports: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def plain(self) -> str:
        """With types."""
        return "\n".join([*self.head, *(row.plain for row in self.rows)]) + "\n"

    @cached_property
    def full(self) -> str:
        """With types and places."""
        return "\n".join([*self.head, *(row.full for row in self.rows)]) + "\n"

    def file(self, *, title: str, notes: Sequence[str] = ()) -> str:
        """A Python file with the graph; `title` and `notes` are its docstring.

        Run as a script, it hands itself to `moefx.opt`. `moefx.ir.read.read` takes the whole file.
        """
        lines = "\n".join([title, "", *notes] if notes else [title])
        docstring = lines.replace("\\", "\\\\").replace('"""', "'''")
        return (
            f'"""{docstring}\n"""\n\n{self.imports}\n\n\n{self.full}\n\n'
            'if __name__ == "__main__":\n    from moefx.opt import main\n\n    main([__file__])\n'
        )


def printed(graph: fx.GraphModule | fx.Graph, known: Known | None = None) -> Printed:
    """The graph in all its text forms. known: of a print before, which this one follows. Raises what `text` raises."""
    printer = Printer(graph_of(graph))
    head = tuple(printer.signature(printer.graph.find_nodes(op="placeholder"), True))
    rows = tuple(printer.rows() if known is None else known.rows(printer))
    return Printed(head, rows, "\n".join(printer.imports()), dict(printer.symbols.sizes))


_SAID = ("takes", "stack_trace", "nn_module_stack", "fwd_nn_module_stack")  # of meta, in a row


@dataclass
class _Seen:
    """A row, and what it was made from: objects, which are the same if nothing changed, names, and sizes with what they
    were called. paths, modules: what it names, for the imports."""

    objects: tuple
    names: tuple[str, ...]
    sizes: dict[sympy.Expr, str]
    paths: set[str]
    modules: set[str]
    row: Row


@dataclass
class Known:
    """Rows of the nodes of one graph, which a pass changes few of."""

    seen: dict[fx.Node, _Seen] = field(default_factory=dict)
    heads: set[str] = field(default_factory=set)  # words that paths begin with
    hidden: set[str] = field(default_factory=set)  # those that names of nodes hide

    def rows(self, printer: Printer) -> Iterator[Row]:
        before = self.seen if self.heads & printer.taken == self.hidden else {}
        now: dict[fx.Node, _Seen] = {}
        for node in printer.graph.nodes:
            if node.op == "placeholder":
                continue
            objects = (node.target, node.args, node.kwargs, value(node), *map(node.meta.get, _SAID))
            names = (node.name, *(each.name for each in node.all_input_nodes))
            seen = before.get(node)
            if (seen is None or seen.names != names or not all(map(operator.is_, seen.objects, objects))
                    or not printer.symbols.call_so(seen.sizes)):  # fmt: skip
                seen = _made(printer, node, objects, names)
            now[node] = seen
            printer.paths |= seen.paths
            printer.modules |= seen.modules
            yield seen.row
        self.seen = now  # only now: a graph may turn out to have no text
        self.heads = {path.partition(".")[0] for path in printer.paths}
        self.hidden = self.heads & printer.taken


def _made(printer: Printer, node: fx.Node, objects: tuple, names: tuple[str, ...]) -> _Seen:
    paths, modules = printer.paths, printer.modules
    printer.paths, printer.modules, printer.symbols.called = set(), set(), {}
    row = printer.row(node)
    seen = _Seen(objects, names, printer.symbols.called, printer.paths, printer.modules, row)
    printer.paths, printer.modules = paths, modules
    return seen


def diff(before: str, after: str) -> str:
    """The unified diff of two texts with two lines of context; "" if they are equal."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", n=2, lineterm="")
    return "".join(f"{line}\n" for line in lines)


def op_counts(graph: fx.GraphModule | fx.Graph) -> Counter[str]:
    """How often every op stands in the graph, by its bare name."""
    return Counter(map(op_name, graph_of(graph).nodes))


def op_count_diff(before: Counter[str], after: Counter[str]) -> list[str]:
    """Lines like `all_to_all: 0 -> 4 (+4)`: first all nodes, then, by name, each op whose number changed, those of the
    dialect first."""
    rows = [("nodes", before.total(), after.total())]
    dialect = {op.name for op in REGISTRY.values()}
    names = sorted(before | after, key=lambda name: (name not in dialect, name))
    rows += [(name, before[name], after[name]) for name in names]
    return [f"{name}: {old} -> {new} ({new - old:+})" for name, old, new in rows if old != new]
