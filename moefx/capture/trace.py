"""Trace a module into one graph at torch level whose only leaves are placeholders.

Parameters are stood in for by fake tensors of their full size during the trace, whatever part of them this rank holds,
so a model can be traced again after its experts were sharded, and one that no rank could hold can be traced at all.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moefx import _torch_compat as compat
from moefx.capture import (
    buffers,
    foreach,
    numbers,
    outputs,
    refusals,
    regions,
    small_sizes,
    substitutes,
    transformers_support,
)
from moefx.capture.arguments import write_back, write_to_copies
from moefx.capture.inputs import Fixed, ShapeGuard, sizes_of, symbolic_dims
from moefx.capture.no_trace import kept
from moefx.capture.numbers import Key, Numbers
from moefx.capture.origin import Origin
from moefx.capture.placeholders import describe
from moefx.capture.python_state import PythonState, check_writes
from moefx.capture.reasons import explain
from moefx.errors import CaptureError, UnsupportedUse
from moefx.ir import edit
from moefx.ir import ops as _dialect  # noqa: F401  registers torch.ops.moefx
from moefx.ir.names import called
from moefx.ir.op import expr, value
from moefx.layout import Layout
from moefx.options import by_kinds


@dataclass(frozen=True)
class Source:
    """Where a placeholder's value comes from: kind is `param`, `buffer`, `input` or `constant`.

    key: the fully qualified name (the first, if tied), the index of the flattened argument, or the tensor itself.
    layout: of the whole value, what the program takes on each rank. room: of experts' parameters, how many rows the
    program takes on every rank: those of its experts, and then whatever is there. None: as many as the layout says.
    spare: rows of memory behind these, for copies of other ranks' experts.
    """

    kind: str
    key: Any
    layout: Layout = Layout()  # noqa: RUF009  it is frozen
    room: int | None = None
    spare: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.key if self.kind != 'constant' else tuple(self.key.shape)}"


@dataclass
class Captured:
    """A traced module. Every placeholder of `gm` has its Source in meta["moefx"]."""

    gm: torch.fx.GraphModule
    fake_mode: Any
    fakes: list[Any]  # the fake of every tensor argument that the graph reads, else None
    pack_outputs: Any  # (flat outputs, flat user arguments) -> what the user's forward returns; sets what that sets
    sizes: dict[str, int]  # of the symbols of the arguments; the graph was traced with 2 for a batch of 1
    state: PythonState  # what the forward read besides tensors
    idle: tuple[Trusting, ...] | None  # captured with tokens for all experts, and in other ways to compare
    recording: small_sizes.Recording
    written: dict[int, str]  # arguments that the forward writes to, by index, with the names of their placeholders
    numbers: Numbers  # that are inputs
    examples: dict[int, int]  # of what follows from numbers, by the index of the input
    origin: Origin

    def guard(self, with_ones: Callable[[list[Any]], small_sizes.Verdict]) -> ShapeGuard:
        """What sizes the graph, and all that was derived from it until now, is right for."""
        return ShapeGuard(small_sizes.shapes_of(self.fakes), self.fake_mode.shape_env, with_ones,
                          self.numbers.symbols.values())  # fmt: skip


def trace(root: nn.Module, model: nn.Module, leaves: list[Any], spec: Any, device: torch.device, *, sizes: Any = None,
          fixed: Fixed = "", free: frozenset[Key] = frozenset()) -> Captured | frozenset[Key]:  # fmt: skip
    """Capture `model`, which is `root` or a module in it, called with the flattened arguments `leaves`.

    device: where parameters and buffers that are on the meta device now will be. sizes: trace with these sizes of the
        tensor arguments instead of their own (see `inputs.sizes_of`), so that all ranks may trace alike. fixed: keep
        these sizes as they are. By default a batch of one is traced as a batch of two. free: numbers of Python that are
        inputs; if some of them do more than to decide sizes, those that do not are returned, and nothing else.
    Raises CaptureError with the user's source line.
    """
    with compat.fake_cache(enabled=fixed == "all"):
        mode = compat.FakeTensorMode(shape_env=compat.ShapeEnv(), allow_non_fake_inputs=True)
    fake_leaves = _fake_leaves(mode, leaves, sizes or sizes_of(leaves), fixed)
    args, kwargs = torch.utils._pytree.tree_unflatten(fake_leaves, spec)
    reads = numbers.Reads(free, model, args, kwargs)
    with (compat.fake_cache(enabled=fixed == "all"), transformers_support.prepared(root),
          substitutes.in_place(), _full_tensors(model, mode, device) as names, compat.free_numbers(reads.is_free)):
        once = regions.captured(model, args, kwargs) if by_kinds() and not free else None
        gm = _captured(model, args, kwargs) if once is None else once
        compat.allow_builtins(gm)
        compat.remember_bytecode(gm)
        sources = _sources(gm, model, names, fake_leaves, args, kwargs, reads)
    state, origin = PythonState(model, *compat.python_reads(gm)), Origin.of(gm, model)
    flatten = gm._dynamo_bytecode_flatten
    flatten.input_processor.root, flatten.gm_inputs = model, None  # whose attributes the forward sets
    unflatten = gm._dynamo_bytecode_unflatten

    def pack_outputs(flat: list[Any], user_args: tuple, user_kwargs: dict) -> Any:
        with buffers.kept(model, written):
            return unflatten(write_back(flat, changed, user_args, user_kwargs), (*user_args, *user_kwargs.values()))

    found, written, changed = [_kept(n) for n in gm.graph.output_node().args[0]], [], {}
    replaced = check_writes(model, gm, state, gm.meta.pop("changed"), lambda: pack_outputs(found, args, kwargs))
    fake_mode = _mode_of(gm)
    plain = _inlined(gm)  # dynamo's own graph stays behind `unflatten`
    foreach.one_by_one(plain.graph)
    refusals.check_ops(plain.graph)
    _read_sizes_from_tensors(plain.graph, sources)
    written += buffers.write(plain.graph, replaced, buffers.first_names(model),
                             functools.partial(_buffer, plain.graph, sources, fake_mode, device))  # fmt: skip
    placeholders = plain.graph.find_nodes(op="placeholder")
    buffers.plain_data(plain.graph, {p for p, s in zip(placeholders, sources) if s.kind == "buffer"})
    describe(placeholders, sources, model)
    idle = gm.meta.pop("idle", None)
    for node, source in zip(idle[0].gm.graph.find_nodes(op="placeholder"), sources) if idle else ():
        node.meta["moefx"] = source
    changed |= write_to_copies(plain.graph, fake_mode, leaves)
    outputs.set_apart(plain.graph)
    by_leaf = {s.key: p for s, p in zip(sources, placeholders) if s.kind == "input"}
    fakes = [by_leaf[i].meta["example_value"] if i in by_leaf else None for i in range(len(leaves))]
    sizes = sizes or sizes_of(leaves)
    known = _cut(plain, free, fakes, leaves, sizes, state)
    return known if isinstance(known, frozenset) else Captured(
        plain, fake_mode, fakes, pack_outputs, _of_symbols(fakes, sizes), state, idle,
        small_sizes.record(plain, fakes), changed, *known, origin)  # fmt: skip


def _kept(output: torch.fx.Node) -> Any:
    """A value that is packed: dynamo's code reads a float that the forward sets off a tensor."""
    return torch.zeros((), dtype=torch.float64) if output.target is torch.scalar_tensor else value(output)


def _of_symbols(fakes: list[Any], sizes: Any) -> dict[str, int]:
    return {
        str(expr(size)): number
        for fake, own in zip(fakes, sizes) if fake is not None
        for size, number in zip(fake.shape, own) if expr(size).is_Symbol
    }  # fmt: skip


def _cut(gm: torch.fx.GraphModule, free: frozenset[Key], fakes: list[Any], leaves: list[Any], sizes: Any,
         state: PythonState) -> tuple[Numbers, dict[int, int]] | frozenset[Key]:  # fmt: skip
    """Numbers, and what is computed of them, leave the graph: `Captured.numbers` and `.examples`."""
    if not free:
        return Numbers(), {}
    placed = {node: node.meta["moefx"] for node in gm.graph.find_nodes(op="placeholder")}
    keys = {node: source.key for node, source in placed.items() if source.kind == "number"}
    cut = numbers.Cut(gm, keys, fakes)
    if cut.useful != free:
        return cut.useful
    known, added = cut.run(leaves, sizes, state.value)
    for i, (node, example) in enumerate(added.items(), len(leaves)):
        node.meta |= {"moefx": Source("input", i), "held": torch.tensor(example)}
    return known, dict(enumerate(added.values(), len(leaves)))


def _buffer(graph: torch.fx.Graph, sources: list[Source], mode: Any, device: torch.device, name: str,
            buffer: Tensor) -> torch.fx.Node:  # fmt: skip
    """The placeholder of a buffer; that of one which is set without being read is new."""
    placeholders = graph.find_nodes(op="placeholder")
    found = dict(zip(sources, placeholders)).get(Source("buffer", name))
    if found is None:
        with edit.at(placeholders[-1], after=True):
            found = graph.placeholder(name)
        found.meta["example_value"] = compat.fake_like(mode, buffer, device=device if buffer.is_meta else None)
        sources.append(Source("buffer", name))
    return found


def _mode_of(gm: torch.fx.GraphModule) -> Any:
    """That of the values: dynamo may begin again with another one, of the same symbols, and note yet another."""
    modes = (getattr(value(node), "fake_mode", None) for node in gm.graph.nodes)
    return next((mode for mode in modes if mode is not None), gm.meta["fake_mode"])


def _captured(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> torch.fx.GraphModule:
    """Dynamo's graph. Branches that skip an expert without tokens are captured as if it had some."""
    try:
        with kept(model):
            return compat.capture_graph(model, args, kwargs)
    except Exception as error:
        if "requires_grad=True" in str(error) and torch.zeros is substitutes.ZEROS:
            with substitutes.fresh_tensors_need_no_gradient():
                return _captured(model, args, kwargs)
        if not compat.is_data_dependent(error):
            raise explain(error) from error
        gm, full = _trusting(model, args, kwargs, error, compat.Trust())
        zeros, shorts = (range(min(len(found), 2)) for found in (full.trust.sizes, full.trust.cuts))
        others = [(None, short) for short in shorts] + [(zero, compat.EVERY if shorts else None) for zero in zeros]
        parts = [_trusting(model, args, kwargs, error, compat.Trust(*other))[1] for other in others]
        gm.meta["idle"] = full, *parts
        return gm


@dataclass(frozen=True)
class Trusting:
    """A graph for which conditions on numbers of tokens were decided; with the bodies of checkpoints in line."""

    gm: torch.fx.GraphModule
    trust: compat.Trust


def _trusting(model: nn.Module, args: tuple, kwargs: dict[str, Any], error: Exception,
              trust: compat.Trust) -> tuple[torch.fx.GraphModule, Trusting]:  # fmt: skip
    """The graph, and what it is compared by."""
    with compat.trusting(trust):
        try:
            gm = compat.capture_graph(model, args, kwargs)
        except Exception as later:
            raise explain(later) from later
    inlined = _inlined(gm)
    lists = [{expr(size) for size in node.meta["example_value"]} for node in _lists(inlined.graph)]
    lists += [{size} for size in _sizes_of_tensors(inlined.graph)]
    if not all(any(symbols <= numbers for numbers in lists) for symbols in trust.slices):
        raise explain(error) from error
    return gm, Trusting(inlined, trust)


def _inlined(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy, with the bodies of checkpoints in line, and calls that dynamo takes apart as they were."""
    copy = edit.copy_of(gm)
    edit.inline_checkpoints(copy)
    _restore_calls(copy.graph)
    return copy


def _sizes_of_tensors(graph: torch.fx.Graph) -> set[Any]:
    values = [node.meta.get("example_value") for node in graph.nodes]
    return {expr(size) for value in values if isinstance(value, Tensor) for size in value.shape}


def _lists(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if node.op == "call_method" and node.target == "tolist"]


def _restore_calls(graph: torch.fx.Graph) -> None:
    """Dynamo takes x.tolist() apart into `x[0].item()`, `x[1].item()`, .. and says nothing of x[0], or, if x has any
    number of elements, keeps x. And the counts of a bincount are put as the op that keeps their number."""
    substitutes.drop_moves(graph)
    lists: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is torch.ops.moefx.listed.default:
            _take_as_indices(graph, node)
            continue
        source, found = node.args[0] if node.args else None, node.meta.get("example_value")
        if getattr(node.target, "__name__", node.target) == "bincount" and isinstance(found.shape[0], int):
            with edit.at(node):
                count = edit.call(graph, torch.ops.moefx.bincount.default, source, found.shape[0])
            count.meta["example_value"] = found
            node.replace_all_uses_with(count)
            graph.erase_node(node)
        readers = [user for user in node.users if user.op == "call_method" and user.target == "item"]
        if found is not None or node.target is not operator.getitem or len(readers) != 1 or len(node.users) != 1:
            continue
        if source not in lists or node.args[1] == 0:
            with edit.at(node):
                lists[source] = graph.call_method("tolist", (source,))
            lists[source].meta["example_value"] = []
        lists[source].meta["example_value"].append(readers[0].meta["example_value"])
        readers[0].op, readers[0].target = "call_function", operator.getitem
        readers[0].args = (lists[source], node.args[1])
        graph.erase_node(node)


def _take_as_indices(graph: torch.fx.Graph, listed: torch.fx.Node) -> None:
    """Index by a tensor instead of the list of its numbers."""
    for user in listed.users:
        indexes = user.target in (operator.getitem, operator.setitem)
        if listed in (user.args[0], *user.args[2:]) if indexes else not isinstance(value(user), torch.SymInt):
            raise CaptureError(f"a list whose length depends on data is read by {called(user)}",
                               where=edit.place(user), hint="use the tensor itself, without `.tolist()`")  # fmt: skip
    listed.replace_all_uses_with(listed.args[0])
    graph.erase_node(listed)


def _fake_leaves(mode: Any, leaves: list[Any], sizes: Any, fixed: Fixed) -> list[Any]:
    """Every tensor argument gets a fake of its own, also where the user passed one tensor twice: the next call may
    pass two."""
    out = []
    for leaf, own, dims in zip(leaves, sizes, symbolic_dims(sizes, fixed)):
        if isinstance(leaf, Tensor):
            shape = tuple(dims.get(d, s) for d, s in enumerate(own))
            fake = compat.fake_like(mode, leaf, shape).requires_grad_(leaf.requires_grad)
            if leaf.requires_grad and not leaf.is_leaf:  # a forward may write to it
                with mode, torch.enable_grad():
                    fake = fake.clone()
            for dim in dims:
                compat.mark_dynamic(fake, dim)
            out.append(fake)
        else:
            out.append(leaf)
    return out


@contextlib.contextmanager
def _full_tensors(model: nn.Module, mode: Any, device: torch.device) -> Iterator[dict[int, Source]]:
    """Put full-size fakes in place of all parameters, and of buffers on the meta device; yields what every fake is."""
    fakes: dict[int, Tensor] = {}
    names: dict[int, Source] = {}
    placed: list[tuple[dict[str, Tensor | None], str, Tensor]] = []

    def put(kind: str, table: dict[str, Tensor | None], prefix: str, name: str, tensor: Tensor) -> None:
        fake = fakes.get(id(tensor))
        if fake is None:
            fake = compat.fake_like(mode, tensor, device=device if tensor.is_meta else None)
            if kind == "param":
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            fakes[id(tensor)] = fake
            names[id(fake)] = Source(kind, f"{prefix}.{name}" if prefix else name)
        placed.append((table, name, tensor))
        table[name] = fake

    try:
        for prefix, module in model.named_modules():
            for name, param in list(module._parameters.items()):
                if param is not None:
                    put("param", module._parameters, prefix, name, param)
            for name, buffer in list(module._buffers.items()):
                if buffer is not None and buffer.is_meta:
                    put("buffer", module._buffers, prefix, name, buffer)
        yield names
    finally:
        for table, name, tensor in placed:
            table[name] = tensor


def _sources(gm, model: nn.Module, names: dict[int, Source], leaves: list[Any], args: tuple,
             kwargs: dict, reads: numbers.Reads) -> list[Source]:  # fmt: skip
    """Say for every placeholder what it is, by identity: names are never parsed."""
    flat = gm._dynamo_bytecode_flatten(*args, *kwargs.values())
    buffers = {id(b): n for n, b in model.named_buffers()}
    inputs = {id(leaf): i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    sources = []
    for node, tensor in zip(gm.graph.find_nodes(op="placeholder"), flat):
        if isinstance(node.meta.get("example_value"), torch.SymInt):
            sources.append(Source("size", node.name))
            continue
        if not isinstance(tensor, Tensor):
            raise CaptureError(
                f"the graph takes {node.name}, a {type(tensor).__name__}, as an input",
                hint="pass numbers as constants or tensors",
            )
        if id(tensor) in names:
            sources.append(names[id(tensor)])
        elif id(tensor) in inputs:
            sources.append(Source("input", inputs[id(tensor)]))
        elif id(tensor) in buffers:
            sources.append(Source("buffer", buffers[id(tensor)]))
        elif isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            raise UnsupportedUse(
                f"the forward reads a trained parameter of shape {tuple(tensor.shape)} that no module of the model has",
                hint="read it as an attribute of its module: a list or closure that was made before the model was "
                "compiled holds what the parameter was then")  # fmt: skip
        else:
            sources.append(Source("constant", tensor.detach()))
    for place, key in reads.places(gm, _mode_of(gm)).items():
        sources[place] = Source("number", key)
    return sources


def _read_sizes_from_tensors(graph: torch.fx.Graph, sources: list[Source]) -> None:
    """Some versions of dynamo pass symbolic sizes as inputs: they are read off the tensors that have them instead."""
    placeholders = graph.find_nodes(op="placeholder")
    tensors = [p for p, s in zip(placeholders, sources) if s.kind == "input"]
    for node, source in list(zip(placeholders, sources)):
        if source.kind != "size":
            continue
        wanted = node.meta["example_value"].node.expr
        tensor, dim = next(
            (p, d)
            for p in tensors
            for d, s in enumerate(p.meta["example_value"].shape)
            if isinstance(s, torch.SymInt) and s.node.expr == wanted
        )
        with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
            size = graph.call_method("size", (tensor, dim))
        size.meta["example_value"] = node.meta["example_value"]
        node.replace_all_uses_with(size)
        graph.erase_node(node)
        sources.remove(source)
