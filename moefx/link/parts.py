"""Functions of their own that an emitted function calls, and that stand in front of it in its text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Interpreter


@dataclass(frozen=True, eq=False)
class Part:
    """What a node of a graph that is linked next has as its target. Its arguments are the inputs of `graph`, and it
    gives the one output, or the tuple of several.

    made_by: the path of the decorator that makes of the written function what runs; of a room's runtime. types: what it
    is told of the inputs. sizes: examples of the symbols in these. device: the type of all tensors.
    """

    name: str
    graph: Graph
    made_by: str
    types: tuple[str, ...]
    sizes: Mapping[str, int]
    device: str

    @property
    def __name__(self) -> str:  # as a function has one, for those who print graphs
        return self.name

    def __str__(self) -> str:
        return self.name

    def __call__(self, *args: Any) -> Any:
        """What it means: its ops, one by one."""
        found = Interpreter(GraphModule(nn.Module(), self.graph)).run(*args)
        return found[0] if len(found) == 1 else found


def parts_of(gm: GraphModule) -> Iterator[Part]:
    """Those that a graph calls, each once, in order."""
    yield from dict.fromkeys(node.target for node in gm.graph.nodes if isinstance(node.target, Part))
