"""What identifies a program variant, and which sizes of the inputs stay symbolic.

A call's arguments are flattened with pytree. Tensor leaves are described by dtype, rank, device and whether they
require a gradient; other leaves by their value. Sizes are symbolic wherever the model allows it, so ranks with unequal
batches run the same program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import sympy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from moefx.capture.small_sizes import Shapes, Verdict
from moefx.errors import UnsupportedUse

Fixed = Literal["", "ones", "all"]  # which sizes a capture takes for constant


@dataclass(frozen=True)
class CallKey:
    """Everything a program depends on except the sizes of its inputs."""

    structure: str
    leaves: tuple
    training: bool
    train_flags: int
    grad: bool
    autocast: tuple
    default_dtype: torch.dtype
    requires_grad: tuple[bool, ...]

    @property
    def but_for_numbers(self) -> CallKey:
        """The same for all values of arguments that are plain numbers."""
        return replace(self, leaves=tuple(("number",) if leaf[0] in ("int", "float") else leaf for leaf in self.leaves))

    def freed(self, places: Collection[int]) -> CallKey:
        """The same for all values of the numbers at these places."""
        leaves = tuple(leaf[:1] if i in places else leaf for i, leaf in enumerate(self.leaves))
        return replace(self, leaves=leaves) if places else self

    @property
    def mode(self) -> str:
        """In words, for messages."""
        return f"{'training' if self.training else 'evaluation'} with{'' if self.grad else 'out'} gradients"


def tokens_in(leaves: Iterable[Any]) -> int:
    """Tokens of a call: places of its first tensor of two dims or more, without the last dim if its numbers are
    floating; 0 without such a tensor."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.dim() > 1:
            return leaf.numel() // (leaf.shape[-1] or 1) if leaf.is_floating_point() else leaf.numel()
    return 0


def flatten_call(args: tuple, kwargs: dict) -> tuple[list[Any], Any]:
    return pytree.tree_flatten((args, kwargs))


def autocast_state() -> tuple:
    """The ambient autocast of both device types, as a comparable value."""
    return tuple(
        (device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    )


def call_key(modules: list[nn.Module], leaves: list[Any], spec: Any, params: list[nn.Parameter]) -> CallKey:
    """modules: all of the model, itself first."""
    flags = tuple([m.training for m in modules])
    return CallKey(
        structure=str(spec),
        leaves=tuple(_leaf_key(leaf) for leaf in leaves),
        training=modules[0].training,
        train_flags=hash(flags),
        grad=torch.is_grad_enabled(),
        autocast=autocast_state(),
        default_dtype=torch.get_default_dtype(),
        requires_grad=tuple(p.requires_grad for p in params),
    )


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (leaf.dtype, leaf.dim(), leaf.device.type, leaf.requires_grad)
    if leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device)):
        return (type(leaf).__name__, leaf)
    raise UnsupportedUse(
        f"an argument of type {type(leaf).__name__} reached the compiled model",
        hint="pass tensors, numbers, strings, None, or containers of them; KV caches are for inference: "
        "call the uncompiled model for `generate`",
    )


def sizes_of(leaves: list[Any]) -> tuple[tuple[int, ...] | None, ...]:
    """The sizes of every tensor argument; None for the others."""
    return tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves)


def tokens_of(leaves: list[Any]) -> int:
    """Of a call's flattened arguments: entries of the first tensor, or rows, where these are no whole numbers. For
    buckets of about one size, and nothing else; 0 where there is no tensor."""
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
    return 0 if first is None else math.prod(_token_dims(tuple(first.shape), first.dtype))


def _token_dims(shape: tuple, dtype: torch.dtype) -> tuple:
    return shape[:-1] if len(shape) > 1 and (dtype.is_floating_point or dtype.is_complex) else shape


def with_tokens(shapes: Shapes, leaves: tuple, sizes: Mapping[str, int], tokens: int) -> dict[str, int]:
    """sizes, by symbol, of a call with so many tokens, as nearly as one other size of its first tensor allows. shapes
    and leaves (of a `CallKey`): of what the program is given."""
    first = next((i for i, shape in enumerate(shapes) if shape is not None), None)
    dims = () if first is None else _token_dims(shapes[first], leaves[first][0])
    symbols = sorted({str(s) for dim in dims for s in dim.free_symbols} & sizes.keys(), key=sizes.__getitem__)
    if not symbols:
        return dict(sizes)
    now = math.prod(int(dim.subs({s: sizes.get(str(s), 1) for s in dim.free_symbols})) for dim in dims)
    return {**sizes, symbols[-1]: max(1, round(sizes[symbols[-1]] * tokens / max(now, 1)))}


def symbolic_dims(sizes: tuple[tuple[int, ...] | None, ...], fixed: Fixed = "") -> list[dict[int, int]]:
    """Per argument: {dim: size to trace with} of the dims to keep symbolic.

    A size of one usually means "broadcast" and stays fixed, except a leading one that all inputs share: a batch of one
    is traced as a batch of two, since torch would specialise on the one; so is an empty one. fixed: what is not
    symbolic: sizes of one, or all.
    """
    if fixed:
        return [{d: n or 2 for d, n in enumerate(shape or ()) if n != 1 and fixed == "ones"} for shape in sizes]
    shapes = [shape for shape in sizes if shape]
    batch_of_one = all(shape[0] == 1 for shape in shapes)
    dims: list[dict[int, int]] = []
    for shape in sizes:
        found: dict[int, int] = {}
        for dim, size in enumerate(shape or ()):
            if size > 1:
                found[dim] = size
            elif size == 0 or (dim == 0 and size == 1 and batch_of_one):
                found[dim] = 2
        dims.append(found)
    return dims


class ShapeGuard:
    """Decides whether a program fits given input sizes; what was once decided is remembered."""

    def __init__(self, shapes: Shapes, shape_env: Any, with_ones: Callable[[list[Any]], Verdict],
                 others: Collection[Any] = ()) -> None:  # fmt: skip
        """with_ones: whether a call fits in which symbolic sizes are one. others: symbols of what is no size."""
        self._shapes, self._with_ones = shapes, with_ones
        # Without symbols that turned out to be others, which no shape has.
        self._guards = [shape_env.replace(g.expr) for g in shape_env.guards
                        if _matters(g) and g.expr.free_symbols.isdisjoint(others)]  # fmt: skip
        self._known: dict[tuple, str | None] = {}
        self._of_ones: list[tuple[tuple, Verdict]] = []

    @classmethod
    def of(cls, shapes: Shapes, conditions: Collection[sympy.Basic], with_ones: Callable[[list[Any]], Verdict],
           fits: tuple) -> ShapeGuard:  # fmt: skip
        """One that was taken apart. conditions: that sizes must meet. fits: sizes that are known to."""
        guard = cls.__new__(cls)
        guard._shapes, guard._guards, guard._with_ones = shapes, list(conditions), with_ones
        guard._known, guard._of_ones = {fits: None}, []
        return guard

    @property
    def conditions(self) -> list[sympy.Basic]:
        """What symbols must meet beside the shapes."""
        return list(self._guards)

    def complaint(self, leaves: list[Any]) -> str | None:
        """None if the sizes of a call's flattened arguments fit; else what does not."""
        sizes = sizes_of(leaves)
        if sizes not in self._known:
            self._known[sizes] = self._decide(sizes) or self._decide_ones(sizes, leaves)
        return self._known[sizes]

    def _decide_ones(self, sizes: tuple, leaves: list[Any]) -> str | None:
        given = [(i, d, want, n) for i, (mine, have) in enumerate(zip(self._shapes, sizes)) if mine is not None
                 for d, (want, n) in enumerate(zip(mine, have))]  # fmt: skip
        ones = tuple((i, d) for i, d, want, n in given if n == 1 and isinstance(want, sympy.Symbol))
        if not ones:
            return None
        for others, verdict in self._of_ones:
            if others == ones and (verdict.guard is None or verdict.guard._decide(sizes) is None):
                return verdict.complaint
        verdict = self._with_ones(leaves)
        if verdict.for_all_sizes:
            self._of_ones.append((ones, verdict))
        return verdict.complaint

    def _decide(self, sizes: tuple) -> str | None:
        values: dict[sympy.Symbol, int] = {}
        wanted = [(e, s) for mine, have in zip(self._shapes, sizes) if mine is not None for e, s in zip(mine, have)]
        for want, size in wanted:
            if isinstance(want, sympy.Symbol) and values.setdefault(want, size) != size:
                return f"two sizes must be equal but are {values[want]} and {size}"
        for want, size in wanted:
            if not isinstance(want, sympy.Symbol) and want.subs(values) != size:
                return f"a size must be {want.subs(values)} but is {size}"
        for guard in self._guards:
            try:
                holds = guard.subs(values) != sympy.false
            except ZeroDivisionError:  # of an empty batch, whose entries may be laid out in any way
                continue
            if not holds:
                return f"the sizes break {guard}"
        return None

    @property
    def shapes(self) -> Shapes:
        """Of the arguments, in symbols."""
        return self._shapes

    @property
    def fixed(self) -> list[tuple[int, int, int]]:
        """(input, dim, size) of every size that the model fixed."""
        return [
            (i, d, int(e))
            for i, shape in enumerate(self._shapes)
            if shape is not None
            for d, e in enumerate(shape)
            if e.is_Integer
        ]


def _matters(guard: Any) -> bool:
    """Equalities, and whatever the user's own control flow asked. The rest are inequalities by which torch chose
    strides and views of fake tensors: the ops of the program are right on both sides of them."""
    return isinstance(guard.expr, sympy.Eq) or is_asked(guard)


def is_asked(guard: Any) -> bool:
    """Whether the user's own control flow asked."""
    asked_by = str(guard.sloc.framework_loc)
    return "_dynamo" in asked_by or "_torch_compat" in asked_by


def copies(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Arguments for a run of a forward that may write to them; a tensor that is passed twice is one tensor again."""
    made: dict[int, Tensor] = {}

    def copied(leaf: Any) -> Any:
        return made.setdefault(id(leaf), leaf.clone()) if isinstance(leaf, Tensor) else leaf

    return torch.utils._pytree.tree_map(copied, (args, kwargs))
