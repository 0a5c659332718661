"""What capturing a model needs of dynamo, of fake tensors and of symbolic sizes."""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import re
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import sympy
import torch
import torch.fx.experimental._config as fx_config
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import config as dynamo_config
from torch._dynamo import functional_export, symbolic_convert
from torch._dynamo.exc import unimplemented
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.builder import wrap_fx_proxy_cls
from torch._ops import OpOverload
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._sympy.functions import Min
from torch.utils._sympy.symbol import SymT, symbol_is_type

from moefx._torch_compat import branches, printing
from moefx._torch_compat.regions import Renamed, without_region


def capture_graph(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> torch.fx.GraphModule:
    """Dynamo's whole-graph capture at torch level. Every size keeps a symbol of its own (no duck shaping), since equal
    example sizes say nothing about other batches; data-dependent sizes become unbacked symbols."""
    with (
        fx_config.patch(use_duck_shape=False),
        dynamo_config.patch(
            capture_dynamic_output_shape_ops=True,
            capture_scalar_outputs=True,
            specialize_int=True,
            specialize_float=True,
            assume_static_by_default=True,
            automatic_dynamic_shapes=False,
        ),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(record=True) as said,
        printing.left_out() as printed,
        branches.checks_taken(printed),
        _fakes({torch.ops.aten.bincount.default: _fake_bincount, torch.ops.aten._grouped_mm.default: _fake_grouped_mm}),
    ):
        warnings.simplefilter("always")
        with _with_effects(), _bound_forward(model), _lists_of_rows(), _no_new_leaves(), _plain_log():
            gm = dynamo_graph_capture_for_export(model)(*args, **kwargs)
    if any(node.meta.get("new_leaf") for node in gm.graph.output_node().all_input_nodes):
        unimplemented(gb_type="the forward lets out a tensor that requires_grad_() was called on", context="",
                      explanation="It would have no gradient.", hints=[])  # fmt: skip
    code = gm._dynamo_bytecode_flatten.out.graph_capture_output.bytecode
    if any("gen_rand_values" in str(each.argval) for each in dis.get_instructions(code)):
        unimplemented(gb_type="random numbers of Python", context="", hints=[],
                      explanation="They would be the same in every call.")  # fmt: skip
    gm.meta["changed"], gm.meta["printed"] = [], [*dict.fromkeys(printed)]
    for warning in said:
        if "certain side effects" in str(warning.message):
            listed = re.search(r"\[.*\]", str(warning.message))
            gm.meta["changed"] += ast.literal_eval(listed.group())
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return gm


@contextlib.contextmanager
def _bound_forward(model: nn.Module) -> Iterator[None]:
    """Of a forward that is set on the model itself and is no method of it: dynamo's code would pass `self`."""
    own = model.__dict__
    function = own.get("forward")
    if function is None or getattr(function, "__self__", None) is model:
        yield
        return

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    own["forward"] = types.MethodType(forward, model)
    try:
        yield
    finally:
        own["forward"] = function


@contextlib.contextmanager
def _with_effects() -> Iterator[None]:
    """Dynamo's capture for export leaves out what the forward sets in Python; this is written into its code, too."""
    original = functional_export.fullgraph_capture

    def capture(*args: Any, **kwargs: Any) -> Any:
        with dynamo_config.patch(replay_side_effects=True):
            return original(*args, **kwargs)

    with mock.patch.object(functional_export, "fullgraph_capture", capture):
        yield


def _plain_log() -> contextlib.AbstractContextManager:
    """For a line of its debug log, whether anybody reads it or not, dynamo takes every source file that it comes by
    apart into tokens, once in every process: a second for those of torch.nn and of a transformer."""
    return mock.patch.object(symbolic_convert, "get_funcname", return_value=None)


@contextlib.contextmanager
def _no_new_leaves() -> Iterator[None]:
    """`x.requires_grad_()` of what a forward made, which needs no gradient: where nobody outside can read that of x, it
    changes nothing but what eager checkpoints keep. transformers does so with frozen embeddings in front of these."""
    original = TensorVariable.method_requires_grad_

    def requires_grad_(self: TensorVariable, tx: Any, requires_grad: Any = True) -> Any:
        wanted = requires_grad is True or requires_grad.as_python_constant()
        if not wanted or self.source:
            return original(self, tx, requires_grad)
        self.as_proxy().node.meta["new_leaf"] = not self.as_proxy().node.meta["example_value"].requires_grad
        return self

    with mock.patch.object(TensorVariable, "method_requires_grad_", requires_grad_):
        yield


class _ListedVariable(TensorVariable):
    """Dynamo's stand-in for a list of unknown length: a tensor that cannot do what a list would do in another way."""

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in ("__len__", "size"):
            return super().call_method(tx, name, args, kwargs)
        return self._unknown(name)

    def richcompare_impl(self, tx: Any, other: Any, op: str) -> Any:
        return self._unknown(op)

    def python_type(self) -> type:
        return list

    def _unknown(self, what: str) -> None:
        unimplemented(gb_type="a list whose length depends on data", context=what, hints=[],
                      explanation=f"tensors may be indexed by it, but {what} is not known")  # fmt: skip


@contextlib.contextmanager
def _lists_of_rows() -> Iterator[None]:
    """x.tolist() of as many integers as data, or a batch, decide becomes torch.ops.moefx.listed(x): there is no list of
    unknown length. Whoever captures sees to it that only what is the same for a tensor comes of it. Torch 2.11 compares
    variables elsewhere, and goes without."""
    original = TensorVariable.method_tolist

    def method_tolist(self: TensorVariable, tx: Any) -> Any:
        found = self.as_proxy().node.meta["example_value"]
        if found.dim() != 1 or found.is_floating_point() or not isinstance(found.shape[0], torch.SymInt):
            return original(self, tx)
        proxy = tx.output.create_proxy("call_function", torch.ops.moefx.listed.default, (self.as_proxy(),), {})
        return wrap_fx_proxy_cls(_ListedVariable, tx, proxy)

    has_lists = hasattr(TensorVariable, "richcompare_impl")
    with mock.patch.object(TensorVariable, "method_tolist", method_tolist if has_lists else original):
        yield


_CONSTANTS = ("CONSTANT_MATCH", "EQUALS_MATCH", "NONE_MATCH", "BOOL_MATCH", "ID_MATCH", "TENSOR_MATCH",
              "CONSTANT_SUBCLASS_MATCH")  # fmt: skip
_FUNCTIONS = ("BUILTIN_MATCH", "FUNCTION_MATCH", "CLOSURE_MATCH", "CLASS_MATCH")
_OF_SEVERAL = {"SEQUENCE_LENGTH": "len", "DICT_KEYS_MATCH": "tuple", "MAPPING_KEYS_CHECK": "tuple"}


def python_reads(gm: torch.fx.GraphModule) -> tuple[list[str], list[str], dict[str, Any]]:
    """What a capture took for constant, as expressions of the local variables L of the forward and the global ones G;
    which dicts of hooks it found empty; and these variables. What it read for a layer, it would have read for those
that it took that layer's graph for, too."""
    output = gm._dynamo_bytecode_flatten.out.graph_capture_output.output_graph
    reads, hooks = set(), set()
    copies = Renamed(gm.meta.get("reused", ()))
    scope = {"L": dict(output.local_scope), "G": output.global_scope}
    regions = gm.meta.get("regions", ())
    guards = ((guard.create_fn_name(), path, getattr(guard.create_fn, "keywords", {}))
              for guard in output.guards for path in copies.of(guard.name))  # fmt: skip
    for kind, path, given in guards:
        path = re.sub(r"___from_numpy\((.*)\)", r"\1", path)  # of an array, or a number of numpy
        path = without_region(path, regions, scope) if regions else path
        if kind in _CONSTANTS or kind in _FUNCTIONS:
            reads.add(path)
        elif kind in _OF_SEVERAL:
            reads.add(f"{_OF_SEVERAL[kind]}({path})")
        elif kind.endswith("_CONTAINS"):
            if isinstance(given["key"], (str, int)) and "__dict__" not in path and "_hooks" not in path:
                reads.add(f"{given['key']!r} in {path}")
        elif kind == "HASATTR":
            owner, attribute = (path, given["attr"]) if "attr" in given else path.rsplit(".", 1)
            reads.add(f"hasattr({owner}, {attribute!r})")
        elif kind == "NOT_PRESENT_IN_GENERIC_DICT":
            reads.add(f"{given['attr']!r} in {path}.__dict__")
        elif kind == "EMPTY_NN_MODULE_HOOKS_DICT":
            hooks.add(path)
    return sorted(reads), sorted(hooks), scope


def global_written(gm: torch.fx.GraphModule) -> str | None:
    """A global variable that the code of a capture sets."""
    code = gm._dynamo_bytecode_flatten.out.graph_capture_output.bytecode
    return next((each.argval for each in dis.get_instructions(code) if each.opname == "STORE_GLOBAL"), None)


def fake_cache(enabled: bool) -> contextlib.AbstractContextManager:
    """Whether fake modes made inside remember what ops gave; with symbolic sizes, a hit costs more than most ops do."""
    return dynamo_config.patch(fake_tensor_cache_enabled=enabled)


@contextlib.contextmanager
def _fakes(functions: dict[OpOverload, Callable]) -> Iterator[None]:
    """Other rules for what ops make of fake tensors; NotImplemented stands for torch's own."""
    table = fake_impls.op_implementations_dict
    before = {op: table.get(op) for op in functions}
    table.update({op: functools.partial(function, before[op]) for op, function in functions.items()})
    try:
        yield
    finally:
        for op, function in before.items():
            table.pop(op) if function is None else table.update({op: function})


def _fake_bincount(own: Callable, mode: FakeTensorMode, op: OpOverload, ids: Tensor, weights: Any = None,
                   minlength: int = 0) -> Tensor:  # fmt: skip
    """Ids are taken to be smaller than `minlength`, which the op that stands for it then checks when it runs."""
    if weights is None and isinstance(minlength, int) and minlength > 1:
        return ids.new_empty(minlength, dtype=torch.int64)
    return own(mode, op, ids, weights, minlength)


def _fake_grouped_mm(own: None, mode: FakeTensorMode, op: OpOverload, rows: Tensor, weight: Tensor,
                     offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None) -> Any:  # fmt: skip
    """Torch has it in single precision, too, but its rule for fakes refuses that."""
    if (rows.dim(), weight.dim()) != (2, 3) or rows.dtype is not torch.float32 or bias is not None:
        return NotImplemented
    with mode:
        return rows.new_empty((rows.shape[0], weight.shape[2]), dtype=out_dtype or rows.dtype)


@contextlib.contextmanager
def faking(mode: FakeTensorMode) -> Iterator[None]:
    """Run ops on fake tensors without fixing their symbolic sizes: composite ops of C++ read sizes as integers unless
    the Python dispatcher takes them apart. Unbacked symbols that come up belong to nobody's graph."""
    grouped = _fakes({torch.ops.aten._grouped_mm.default: _fake_grouped_mm})
    with mode, enable_python_dispatcher(), mode.shape_env.ignore_fresh_unbacked_symbols(), grouped:
        yield


def is_of_functorch(target: Any) -> bool:
    """Whether a node enters or leaves torch.vmap, torch.func.grad and the like."""
    return callable(target) and "functorch" in (getattr(target, "__module__", None) or "")


def is_collective(target: Any) -> bool:
    """Whether an op of a captured graph communicates: dynamo writes such as functional collectives."""
    home = str(getattr(target, "__module__", ""))
    return home.startswith(("torch.distributed", "torch._ops._c10d", "torch._ops.c10d"))


def is_data_dependent(error: Exception) -> bool:
    """Whether a capture failed at a branch on a size that only data decide."""
    return "data-dependent" in str(error)


EVERY = -1


@dataclass
class Trust:
    """Conditions on data-dependent sizes that were decided, in their order. sizes: what was said not to be zero, or not
    to be equal; cuts: sizes that were said to be above bounds; slices: the symbols in conditions that are only about
    rows if these count rows. zero, short: which of the sizes, and of the cuts, were said to be zero, and not above
    their bounds, after all: EVERY one, or those with an even number (0) or an odd one (1)."""

    zero: int | None = None
    short: int | None = None
    sizes: dict[frozenset[sympy.Symbol], tuple[sympy.Expr, sympy.Expr]] = field(default_factory=dict)
    cuts: dict[tuple[sympy.Expr, sympy.Expr], None] = field(default_factory=dict)
    slices: list[set[sympy.Symbol]] = field(default_factory=list)

    def decide(self, asked: Any) -> Any:
        """The answer to a condition, None where it is of another kind."""
        if not isinstance(asked, sympy.core.relational.Relational):
            return None
        if not _is_of_data(asked.lhs) and _is_of_data(asked.rhs):
            asked = asked.reversed
        (factor, number), bound = asked.lhs.as_coeff_Mul(), asked.rhs
        if factor <= 0:
            return None
        is_size = factor == 1 and number.is_Symbol and _is_of_data(number)
        if is_size and bound != 0 and type(asked) in _ABOVE and not _is_of_data(bound):
            self.slices.append({number})
            place = _place(self.cuts, (number, bound), None)
            return sympy.Not(_ABOVE[type(asked)]) if _is_among(place, self.short) else _ABOVE[type(asked)]
        number = _cut_number(number)
        if not (number.is_Symbol or (bound == 0 and _is_sum(number))) or not (bound == 0 or bound.is_Symbol):
            return None
        if type(asked) in _ABOVE:
            if bound != 0:
                return None
            self.slices.append(set(number.free_symbols))
        elif bound != 0:
            self.slices.append({number, bound})
        place = _place(self.sizes, frozenset(number.free_symbols | bound.free_symbols), (number, bound))
        return (_EMPTY if _is_among(place, self.zero) else _NOT_EMPTY)[type(asked)]

    def zeros(self, which: int | None) -> list[tuple[sympy.Expr, sympy.Expr]]:
        """What was compared, of those of the sizes."""
        return [pair for number, pair in enumerate(self.sizes.values()) if _is_among(number, which)]

    def uncut(self, which: int | None) -> dict[tuple[sympy.Expr, sympy.Expr], sympy.Expr]:
        """(size, bound) -> the smaller one, of those of the cuts."""
        return {pair: Min(*pair) for number, pair in enumerate(self.cuts) if _is_among(number, which)}


def _is_among(number: int, which: int | None) -> bool:
    return which == EVERY or number % 2 == which


def _place(table: dict, key: Any, what: Any) -> int:
    table.setdefault(key, what)
    return list(table).index(key)


@contextlib.contextmanager
def trusting(trust: Trust) -> Iterator[None]:
    """While capturing, a branch on "this data-dependent size is zero" takes the other side. So does one on "this number
    is not above zero" and "these two are equal", by which slices may be said to be empty; the caller has to know that
    these count rows. One on "this size is above that bound" is taken, as for `x[:bound] if len(x) > bound else x`.
    Nothing else is decided: a wider rule would silently take wrong branches. What is captured so must be compared with
    what is captured with other answers."""
    original = ShapeEnv.evaluate_expr

    def evaluate(self: ShapeEnv, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, orig_expr, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            answer = trust.decide(orig_expr)
            if answer is None:
                raise
            return answer

    with mock.patch.object(ShapeEnv, "evaluate_expr", evaluate):
        yield


def _is_of_data(number: sympy.Expr) -> bool:
    return any(symbol_is_type(each, SymT.UNBACKED_INT) for each in number.free_symbols)


def _cut_number(number: sympy.Expr) -> sympy.Expr:
    """u for min(u, n), by which u rows are cut to n: it is zero if u is."""
    if number.func is not Min:
        return number
    data = [each for each in number.args if each.is_Symbol and symbol_is_type(each, SymT.UNBACKED_INT)]
    return data[0] if len(data) == 1 else number


def _is_sum(number: sympy.Expr) -> bool:
    """Whether it is n * u0 + n * u1 + ..: zero if and only if all of these sizes are."""
    terms = [term.as_coeff_Mul() for term in number.args] if number.is_Add else []
    return bool(terms) and all(n > 0 and u.is_Symbol and symbol_is_type(u, SymT.UNBACKED_INT) for n, u in terms)


_NOT_EMPTY = {sympy.Eq: sympy.false, sympy.Ne: sympy.true, sympy.Gt: sympy.true, sympy.Le: sympy.false,
              sympy.Ge: sympy.true, sympy.Lt: sympy.false}  # fmt: skip
_EMPTY = {sympy.Eq: sympy.true, sympy.Ne: sympy.false, sympy.Gt: sympy.false, sympy.Le: sympy.true,
          sympy.Ge: sympy.true, sympy.Lt: sympy.false}  # fmt: skip
_ABOVE = {sympy.Gt: sympy.true, sympy.Ge: sympy.true, sympy.Le: sympy.false, sympy.Lt: sympy.false}
