"""Where a captured graph comes from: what whoever keeps a program beyond this process must see again to trust it."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from types import CodeType

from torch import nn
from torch.fx import GraphModule, Node

from moefx import _torch_compat as compat
from moefx._torch_compat import OpOverload
from moefx.ir.names import called

_OPS = ("aten", "prim", "prims", "moefx", "_c10d_functional")  # ops whose code comes with torch or moefx
_HOMES = ("torch", "_operator", "builtins", "math", "moefx")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]+")


@dataclass(frozen=True)
class Origin:
    """code: of every function that the capture went through; None: this torch does not say. reads, hooks: expressions,
    see `compat.python_reads`; names: local variables of the forward that are the model. sets: paths of what the forward
    changes. prints: the lines that print or log, which the graph leaves out. foreign: an op or a function of others in
    the graph, whose code nobody saw.
    """

    code: frozenset[CodeType] | None
    reads: tuple[str, ...]
    hooks: tuple[str, ...]
    names: tuple[str, ...]
    sets: tuple[str, ...]
    prints: tuple[str, ...]
    foreign: str | None

    @classmethod
    def of(cls, gm: GraphModule, model: nn.Module) -> Origin:
        """gm: as dynamo left it."""
        reads, hooks, found = compat.python_reads(gm)
        names = tuple(name for name, value in found["L"].items() if value is model)
        sets, prints = (tuple(gm.meta.get(key, ())) for key in ("changed", "printed"))
        return cls(compat.traced_code(gm), tuple(reads), tuple(hooks), names, sets, prints, _foreign(gm))

    @property
    def variables(self) -> frozenset[str] | None:
        """Names of environment variables that the code may have read; None: they are no constants in it."""
        found: set[str] = set()
        for code in self.code or ():
            if {"environ", "getenv"} & {*code.co_names} and not code.co_filename.startswith("<frozen"):
                mine = {each for each in code.co_consts if isinstance(each, str) and _VARIABLE.fullmatch(each)}
                if not mine:
                    return None
                found |= mine
        return frozenset(found)


def _foreign(gm: GraphModule) -> str | None:
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    nodes = (node for graph in graphs for node in graph.nodes if node.op == "call_function")
    return next((called(node) for node in nodes if not _is_known(node)), None)


def _is_known(node: Node) -> bool:
    if isinstance(node.target, OpOverload):
        return node.target.namespace in _OPS
    return _is_in(_HOMES, getattr(node.target, "__module__", None) or "builtins")


def _is_in(homes: Collection[str], module: str) -> bool:
    return module.partition(".")[0] in homes
