"""What the verifier's rules see of a graph.

A rule is a function of a `View` that raises VerifyError through `View.fail`. Split and unsplit collectives look alike
to it: a `Call` has the dialect op, its arguments by name, the node that begins it and the node that has its result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NoReturn

from torch.fx import GraphModule, Node

from moefx import _torch_compat as compat
from moefx.axes import MeshSpec
from moefx.errors import VerifyError
from moefx.ir import edit
from moefx.ir.level import Level
from moefx.ir.op import REGISTRY, VALUES, OpDef, Stage
from moefx.ir.ops.order import start, wait
from moefx.ir.ways import Way

WHOLE, FORWARD, BACKWARD = "whole", "forward", "backward"


@dataclass(frozen=True)
class Role:
    """What a value is to the routing of number `route`, counted in the order of the forward graph.

    kind: one of `op.VALUES`, or, for rows, the order in which they stand: `sorted` by expert, `inside` the markers, by
    `source` rank, by `slot`, `2dh(4)/intra` within an all-to-all of several steps, or what an op brings. Rows of static
    blocks belong to route -1, -2, .., tables to the region of that number. within: of the perm of a nested routing,
    what its choices are to the other one.
    """

    kind: str
    route: int
    k: int = 0  # choices per token, for a perm
    codec: str = ""  # of rows that are encoded
    within: Role | None = None

    @property
    def is_order(self) -> bool:
        """Whether it is an order of rows."""
        return self.kind not in VALUES


@dataclass(frozen=True)
class Facts:
    """What the rules know beside the graph.

    graph: which one this is. sources: the Source of every program input. grad_inputs: which program input each output
    of a backward graph is the gradient of. saved: the roles of a backward graph's inputs, None where an input has none
    (`verify.saved_roles` tells them from the forward graph). types: {root dim: type} of each of these, where ranks read
    the same data (`verify.saved_types`). spaces: the memory in which each lies (`verify.saved_spaces`).
    given: which program input each of these is, None where it is none.
    outputs: the values that the user outputs had before the pass, None if nobody knows. first_output: how many outputs
    stand before the user's. ways: how the rows of every region travel, by its number. written: which program input each
    of these is the new value of. summed: the buffers that are summed over the ranks, None if nobody knows. uncut: by
    the number of a region, that of the one that it is a chunk of, or its own.
    """

    mesh: MeshSpec
    graph: str = WHOLE
    sources: tuple[Any, ...] = ()
    grad_inputs: tuple[int, ...] = ()
    saved: tuple[Role | None, ...] = ()
    types: tuple[Mapping[str, Any], ...] = ()
    spaces: tuple[str, ...] = ()
    given: tuple[int | None, ...] = ()
    outputs: tuple[Any, ...] | None = None
    first_output: int = 0
    ways: Mapping[int | None, Way] = field(default_factory=dict)
    written: tuple[int, ...] = ()
    uncut: Mapping[int | None, int] = field(default_factory=dict)
    summed: frozenset[str] | None = None


@dataclass(frozen=True, eq=False)
class Call:
    """One dialect op. At level scheduled `node` is the start and `result` its wait (None if it has none)."""

    op: OpDef
    args: Mapping[str, Any]
    node: Node
    result: Node | None

    @property
    def name(self) -> str:
        return self.op.name

    @property
    def unsplit(self) -> SimpleNamespace:
        """The call as a node that is not split."""
        args = tuple(self.args[declared.name] for declared in self.op.target._schema.arguments)
        return SimpleNamespace(target=self.op.target, args=args, kwargs={}, meta=self.node.meta)

    @property
    def stage(self) -> Stage:
        return self.op.stage if isinstance(self.op.stage, Stage) else self.op.stage(self.unsplit)


@dataclass
class View:
    """One graph, read once for all rules."""

    gm: GraphModule
    level: Level
    facts: Facts
    nodes: list[Node] = field(init=False)
    calls: dict[str, list[Call]] = field(init=False, default_factory=dict)
    call_of: dict[Node, Call] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = list(self.gm.graph.nodes)
        for node in self.nodes:
            call = _call(node)
            if call is not None:
                self.calls.setdefault(call.name, []).append(call)
                self.call_of[node] = call
                if call.result is not None:
                    self.call_of[call.result] = call

    def fail(self, node: Node, what: str, hint: str | None = None) -> NoReturn:
        place = edit.place(node)
        raise VerifyError(what, where=node.name if place == node.name else f"{node.name} ({place})", hint=hint)

    def of_stage(self, stage: Stage) -> list[Call]:
        """The calls of collectives of this stage, in order."""
        return [c for c in dict.fromkeys(self.call_of.values()) if c.op.is_collective and c.stage is stage]

    @property
    def returned(self) -> tuple[Any, ...]:
        found = self.gm.graph.output_node().args[0]
        return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def _call(node: Node) -> Call | None:
    if node.op != "call_function":
        return None
    target, args, result = node.target, node.args, node
    if target is start:
        target, args = node.args[0], node.args[1:]
        result = next((user for user in node.users if user.target is wait), None)
    op = REGISTRY.get(target)
    if op is None or target is wait:
        return None
    if isinstance(target, compat.OpOverload):
        declared = target._schema.arguments
        given = {a.name: value for a, value in zip(declared, args)} | node.kwargs
        named = {a.name: given.get(a.name, a.default_value) for a in declared}
    else:
        code = target.__code__
        named = dict(zip(code.co_varnames[: code.co_argcount], args)) | node.kwargs
    return Call(op, named, node, result)


@dataclass(frozen=True)
class Rule:
    """`check(view)` for graphs of these levels and kinds."""

    check: Callable[[View], None]
    levels: frozenset[Level]
    graphs: frozenset[str]


def rule(*levels: Level, graphs: tuple[str, ...] = (WHOLE, FORWARD, BACKWARD)) -> Callable[..., Rule]:
    """Make a function a rule for graphs of these levels (all of them by default) and kinds."""
    return lambda check: Rule(check, frozenset(levels or Level), frozenset(graphs))
