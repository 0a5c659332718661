"""What the compiler knows of a dialect op, in one record per op.

The meaning is a body in plain torch (it runs on one rank, or on several through `ir.world`), with the type of its
result and its gradient (`ir.meaning`). Here stand the facts that passes, the verifier, the cost model, the linker and
pictures ask for. Nobody else knows an op by its name, except for who makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from moefx._torch_compat import OpOverload
from moefx.errors import MoefxError
from moefx.ir.level import Level
from moefx.ir.runtime_call import RuntimeCall

if TYPE_CHECKING:
    from moefx.ir.factors import Factors
    from moefx.ir.fates import Operand

COLLECTIVES = ("all_to_all", "all_gather", "all_reduce", "reduce_scatter")  # those that a machine has times of
_OF_INPUTS = ("param", "inputs", "index")  # arguments that are numbers of the program's inputs


@dataclass(frozen=True)
class Volume:
    """Symbolic amounts of one execution on one rank.

    flops: multiply and add counted apart. hbm_bytes: read plus written. wire_bytes and messages: sent to *other*
    ranks, by axis name. Skewed routing: `wire_bytes` is the mean over ranks (rows times the share that leaves).
    """

    flops: sympy.Expr | int = 0
    hbm_bytes: sympy.Expr | int = 0
    wire_bytes: dict[str, sympy.Expr] = field(default_factory=dict)
    messages: dict[str, sympy.Expr] = field(default_factory=dict)


@dataclass(frozen=True)
class Gemm:
    """`batch` products of [m, k] by [k, n]. In a grouped one the rows are those of the mean group."""

    m: sympy.Expr
    n: sympy.Expr
    k: sympy.Expr
    batch: sympy.Expr
    dtype: str
    beside: sympy.Expr = sympy.S.Zero  # bytes that the op reads and writes before and behind its product


@dataclass(frozen=True)
class Sent:
    """Bytes that go over one link, "intra" or "inter", in so many messages. aligned: only ranks of equal place on their
    nodes talk to each other."""

    link: str
    messages: int
    nbytes: sympy.Expr
    aligned: bool = False


class Stage(Enum):
    """The part of an MoE layer that an op belongs to. It says in which queue an exchange stands."""

    OUT = "out"  # rows on their way to the experts
    BACK = "back"
    COMPRESS = "compress"  # makes of rows what travels
    DECOMPRESS = "decompress"
    COUNTS = "counts"  # sizes, which the host waits for
    GRADIENT = "gradient"  # its sum over ranks, which nobody reads before the end of the graph
    STATISTIC = "statistic"  # the same of a buffer
    WEIGHTS = "weights"  # parameters on the way to their use
    COPIES = "copies"  # gradients of copies of experts on the way home
    SHARDS = "shards"  # gradients on the way to the ranks that have these rows
    DENSE = "dense"  # everything else


BACKGROUND = (Stage.GRADIENT, Stage.STATISTIC, Stage.COPIES, Stage.SHARDS)  # nobody computes with it in the graph
VALUES = {"perm", "counts", "traffic", "host", "received", "sent", "held", "slots", "capacities", "capacity sum",
          "quota", "table", "ends", "moves", "added"}  # fmt: skip
"""What a value may be to a routing; ops of rooms add to it. Every other word names an order of rows: an op may bring an
order of its own."""


@dataclass(frozen=True)
class Tokens:
    """What an op does to a routing and to the rows that it moves. The verifier (`ir.rules_moe`) holds it to that.

    takes: {argument: what it must be}, first the value that says which routing: one of `VALUES`, or the order in which
        rows must stand. "slots" with "slot" are the experts' counts and rows, whichever they are at a level.
    gives: what the result is, of a tuple one word each, "" for what is neither. An op with an argument `reverse` that
        is true takes rows as it gives them otherwise, and gives them as it takes them.
    rule: the rule of `ir.rules_moe` or `ir.rules_transport` that says what these cannot: "routing", "step", ..;
        or one of a room, called with the View and the Call, which gives the Role of the result or None.
    moves: it does nothing but move rows, so somebody must want them.
    coded: rows may be encoded, and stay it.
    or_blocks: where the first argument is None, it takes static blocks, of no routing.
    chosen: the argument that shows who was chosen, on the way out: ids of experts, or blocks of rows for them.
    """

    takes: Mapping[str, str] = field(default_factory=dict)
    gives: str | tuple[str, ...] = ""
    rule: str | Callable[[Any, Any], Any] = ""
    moves: bool = False
    coded: bool = False
    or_blocks: bool = False
    chosen: str = ""

    @property
    def routing(self) -> str:
        """The argument that says which routing."""
        return next(iter(self.takes))

    @property
    def orders(self) -> frozenset[str]:
        """The orders of rows that it takes and gives."""
        gives = {self.gives} if isinstance(self.gives, str) else {*self.gives}
        return frozenset({*self.takes.values(), *gives} - VALUES - {""})

    @property
    def begins(self) -> bool:
        """Whether rows come into the order of their routing."""
        return self.moves and "perm" in self.takes.values()

    @property
    def ends(self) -> bool:
        """Whether rows leave that order."""
        return "perm" in self.takes.values() and not self.gives and bool(self.orders)


@dataclass(frozen=True)
class Along:
    """What an op does to the type of a tensor (see `ir.types`) along the dims of its argument `axis` or `axes`.

    takes and gives: I, R, V or P. What takes R gives its operand a partial gradient, what takes I a whole one. of: the
        argument that is the tensor, "" for the first. dim: where it gives V, the dim that is cut, or the argument that
        says which; None: what other ranks do not have at all.
    """

    takes: str
    gives: str
    of: str = ""
    dim: int | str | None = 0


MOVED = Along("V", "V", dim=None)  # rows that go to other ranks


def moves(node: Node) -> Volume:
    """Every tensor that it reads and writes, once."""
    return Volume(hbm_bytes=sum((nbytes(a) for a in node.all_input_nodes if is_tensors(a)), start=nbytes(node)))


def copied(node: Node) -> Volume:
    """As much read as is written."""
    return Volume(hbm_bytes=2 * nbytes(node))


def free(node: Node) -> Volume:
    """Of an op that computes nothing worth a price."""
    return Volume()


_EVERYWHERE = frozenset({Level.MOE, Level.PLACED, Level.SCHEDULED})


@dataclass(frozen=True)
class OpDef:
    """One dialect op. The fields that are functions get the call, or, for `stage` and `link`, what is like it: of a
    started op the call without `start`.

    factors: what it does to the dims of its tensors, as a line (`ir.factors`), by default that of its `@meaning`. dims:
        the same as a function, where no line can say it. None, both: nobody knows.
    volume: how much it computes and moves; by default it reads its arguments and writes its result. check: a complaint
        about its arguments or None (its list of constraints).
    stage: the part of a layer that it belongs to.
    levels: where it may stand; by default from level moe on, and what is started at level placed alone.
    tokens: what it does to a routing and its rows. along: what it makes along its axis of what ranks have in common,
        None if it treats all axes alike.
    again: whether the backward may compute it again: not choices and sizes. lean: as readily as elementwise ops.
    of_user: it stands for a user's op. rounds: what it is without rounding: an op, or True, its first argument.
    drawn: the kind of its box in pictures, one of `COLORS` in docs/draw.py. gemm: the shape of its product.
    axes_of: the mesh axes that a collective runs over, by default those of its argument `axis` or `axes`, collective:
        its kind, one of `COLLECTIVES`; payload: the argument that is the buffer, "" for the result, or its bytes where
        neither is. sent: what goes over which link, where the op itself says it. link: "comm" if it keeps all links
        busy, "intra" or "inter" for one.
    waited_by_host: a copy of numbers that the host reads. copies: it moves a tensor to the host's memory ("d2h")
        or back ("h2d"), beside all other work.
    runtime: the call that it becomes; of what is started the result has a method `wait`. None: it is gone by then.
    space: the memory that its result lies in, "device" or "host". workspace: bytes that it needs beside arguments and
        result while it runs; of what is started, while it starts, and, unless `at_wait` says otherwise, while it is
        waited for. under_way: the same from its start to its wait. is_view: whether its result lies in the memory of
        its first argument.
    fresh: its result is memory of its own, and it is done with its arguments when it returns. overwrites: except for
        this one, if given, whose memory the result takes.
    """

    name: str
    target: Any
    volume: Callable[[Node], Volume] = moves
    factors: Factors | None = None
    check: Callable[[Node], str | None] = lambda node: None
    stage: Stage | Callable[[Any], Stage] = Stage.DENSE
    levels: frozenset[Level] = _EVERYWHERE
    tokens: Tokens | None = None
    dims: Callable[[Node], list[Operand]] | None = None
    along: Along | None = None
    again: bool = True
    lean: bool = False
    of_user: bool = False
    rounds: Any = False
    drawn: str = "compute"
    gemm: Callable[[Node], Gemm] | None = None
    axes_of: Callable[[Node], str] | None = None
    collective: str = ""
    payload: str | Callable[[Node], sympy.Expr] = ""
    sent: Callable[[Node], tuple[Sent, ...]] | None = None
    link: Callable[[Any], str] = lambda call: "comm"
    waited_by_host: bool = False
    copies: str = ""
    runtime: RuntimeCall | None = None
    space: str = "device"
    workspace: Callable[[Node], sympy.Expr] = lambda node: sympy.S.Zero
    at_wait: Callable[[Node], sympy.Expr] | None = None
    under_way: Callable[[Node], sympy.Expr] = lambda node: sympy.S.Zero
    is_view: Callable[[Any], bool] = lambda call: False
    fresh: bool = False
    overwrites: str = ""

    @property
    def is_collective(self) -> bool:
        return self.axes_of is not None

    @property
    def per_token(self) -> tuple[str, ...]:
        """The arguments that have one entry per token."""
        return self.factors.per_token if self.factors is not None else ()

    @property
    def is_started(self) -> bool:
        """Whether it becomes a start and a wait."""
        return self.is_collective or self.waited_by_host or bool(self.copies)

    def stage_of(self, call: Any) -> Stage:
        return self.stage if isinstance(self.stage, Stage) else self.stage(call)

    def queue_of(self, call: Any) -> str:
        """In which queue it stands once it is started: those of one queue run one after the other."""
        stage = self.stage_of(call)
        if self.copies or self.waited_by_host:
            return self.copies or "host"
        if stage in (Stage.OUT, Stage.BACK):
            return self.link(call)
        return Stage.GRADIENT.value if stage is Stage.STATISTIC else stage.value


REGISTRY: dict[Any, OpDef] = {}
LINES: dict[str, Factors] = {}  # what `@meaning` was given, by the name of the op


def define(target: Any, *, runtime: str | None = None, **known: Any) -> OpDef:
    """Register what is known of `target`, an OpOverload of namespace moefx or a traced-through function. `known` are
    fields of `OpDef`; runtime is the text of a `RuntimeCall`.

    Raises MoefxError for what is defined twice or by halves, and for names of arguments that the op does not have.
    """
    is_op = isinstance(target, OpOverload)
    name = target.name().split("::")[1] if is_op else target.__name__
    arguments = [a.name for a in target._schema.arguments] if is_op else target.__code__.co_varnames
    over = next((axes for axes in ("axis", "axes") if axes in arguments and known.get("collective")), None)
    known = {"factors": LINES.get(name), "axes_of": over and (lambda node: argument(node, over))} | known
    found = OpDef(name, target, runtime=runtime and RuntimeCall.parse(runtime, name, arguments), **known)
    if found.is_started:
        found = replace(found, **{"levels": frozenset({Level.PLACED}), "drawn": "collective"} | known)
    complaint = "is defined twice" if target in REGISTRY else _half_said(found, arguments)
    if complaint:
        raise MoefxError(f"the dialect op {name} {complaint}")
    REGISTRY[target] = found
    return found


def _half_said(op: OpDef, arguments: Collection[str]) -> str | None:
    if op.is_collective and op.collective not in COLLECTIVES:
        return f"is a collective of kind '{op.collective}', not one of {', '.join(COLLECTIVES)}"
    if op.collective and not op.is_collective:
        return f"is '{op.collective}', but no axes_of says over which ranks"
    tokens = op.tokens or Tokens()
    along = op.along.of if op.along else ""
    payload = op.payload if isinstance(op.payload, str) else ""
    line = op.factors.names if op.factors else ()
    named = {*tokens.takes, tokens.chosen, *line, along, payload, op.overwrites} - {""}
    unknown = sorted(named - set(arguments))
    if unknown:
        return f"has no argument {unknown[0]}, only {', '.join(arguments)}"
    declared = op.target._schema.arguments if line and isinstance(op.target, OpOverload) else ()
    silent = next((a.name for a in declared if "Tensor" in str(a.type) and a.name not in line), None)
    return f"says nothing of the dims of {silent}" if silent else None


def lookup(node: Node) -> OpDef | None:
    """The record of the dialect op that `node` calls; None for every other node."""
    return REGISTRY.get(node.target) if node.op == "call_function" else None


NUMBERS = (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat)  # that values on the host may be


def value(node: Any) -> Any:
    """The fake value of a node (or the constant itself)."""
    if not isinstance(node, Node):
        return node
    return node.meta["val"] if "val" in node.meta else node.meta.get("example_value")


def run(node: Node, args: Any, kwargs: Any) -> Any:
    """What a node calls, called with these arguments."""
    function = getattr(args[0], node.target) if node.op == "call_method" else node.target
    return function(*(args[1:] if node.op == "call_method" else args), **kwargs)


def expr(size: Any) -> sympy.Expr:
    """A number, perhaps a symbolic one, as a sympy expression; a plain one is whole."""
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat)) else sympy.Integer(int(size))


def decide_same(a: Any, b: Any) -> bool | None:
    """Whether two sizes are equal; None: only data can tell. Of sizes of inputs, that they are becomes a condition of
    the program."""
    if expr(a) == expr(b):
        return True
    return None if free_unbacked_symbols([a, b]) else bool(a == b)


def known_same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for all inputs that the program's conditions so far allow."""
    if expr(a) == expr(b):
        return True
    sized = next((size for size in (a, b) if isinstance(size, torch.SymInt)), None)
    if sized is None or free_unbacked_symbols([a, b]):
        return False
    # Of what is not true, statically_known_true remembers what it said before a condition was added.
    env, wanted = sized.node.shape_env, _up_to_a_factor(expr(a) - expr(b))
    equal = (env.replace(guard.expr) for guard in env.guards if isinstance(guard.expr, sympy.Eq))
    if any(isinstance(e, sympy.Eq) and _up_to_a_factor(e.lhs - e.rhs) in (wanted, -wanted) for e in equal):
        return True
    bounds = env.bound_sympy(sympy.expand(expr(a) - expr(b)))  # of s // 2 - s // 4, say, where s is 2 or 3
    return bounds.lower == bounds.upper == 0 or statically_known_true(a == b)


def _up_to_a_factor(difference: sympy.Expr) -> sympy.Expr:
    return sympy.expand(difference).as_content_primitive()[1]


def numel(node: Any) -> sympy.Expr:
    return sympy.prod([expr(s) for s in value(node).shape])


def is_tensors(node: Any) -> bool:
    """Whether a value is a tensor, or several."""
    found = value(node)
    return isinstance(found[0] if isinstance(found, (list, tuple)) and found else found, torch.Tensor)


def nbytes(node: Any) -> sympy.Expr:
    """Of a tensor, or of all tensors of a list."""
    found = value(node)
    return sympy.Add(*map(nbytes, found)) if isinstance(found, (list, tuple)) else numel(found) * found.element_size()


def argument(node: Node, name: str) -> Any:
    """The argument `name` of a call to an OpOverload, wherever it stands, default included."""
    for position, declared in enumerate(node.target._schema.arguments):
        if declared.name == name:
            if name in node.kwargs:
                return node.kwargs[name]
            return node.args[position] if position < len(node.args) else declared.default_value
    raise KeyError(f"{node.target} has no argument {name}")


def input_numbers(node: Node) -> dict[int, tuple[int, ...]]:
    """The numbers of the program's inputs that a dialect op has among its arguments: {position: numbers}."""
    op = lookup(node)
    if op is None:
        return {}
    is_op = isinstance(node.target, OpOverload)
    names = [each.name for each in node.target._schema.arguments] if is_op else node.target.__code__.co_varnames
    places = [names.index(name) for name in _OF_INPUTS if name in names[: len(node.args)]]
    found = {place: node.args[place] for place in places if isinstance(node.args[place], (int, list, tuple))}
    return {place: (given,) if isinstance(given, int) else tuple(given) for place, given in found.items()}
