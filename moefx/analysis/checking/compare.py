"""Run the graphs of a program before and after a pass on random inputs, and compare: verification level 2.

The reference is the captured graph on one device. As soon as experts are placed, every rank of the mesh runs in a
thread on inputs of its own (of unequal batch sizes where the model allows it), and is compared with the captured graph
on the same inputs: outputs rank by rank, gradients of parameters averaged over the ranks. A pass that changes no
arithmetic must give the same bits as the graphs before it. Graphs that round (half precision, codecs, fp8) are compared
with few digits, and once more, with as many as any others, without the rounding.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from moefx.analysis.checking import failures, unrounded
from moefx.analysis.checking.random_inputs import STYLES, Draft, Sizes, draw, layout_of, rank_sizes, value_of
from moefx.context.pass_types import PassContext
from moefx.context.step_graphs import StepGraphs
from moefx.errors import MoefxError, VerifyError
from moefx.ir import edit, world
from moefx.ir.op import value
from moefx.ir.randomness import first_draw
from moefx.layout import Layout

log = logging.getLogger("moefx.verify")

BUDGET_BYTES = 2**30
_MORE_ROWS = (1, 2, 4, 8, 16, 32)  # than the example, while more rows reach more experts
_RTOL = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE = 0.125  # of what was rounded: bf16 gradients of three layers differed by 0.06; see also `unrounded`
# What is as good as zero; of gradients, times the largest: one may be the difference of large ones.
_ZERO, _ZERO_ROUNDED = 1e-6, 2.0**-8
Runs = Callable[[str, list[Any]], tuple[Any, ...]]  # of "forward" or "backward", on one rank


@dataclass
class Result:
    """What one rank computed: {name: tensor} for outputs, changed inputs and gradients, in order; layouts of these."""

    values: dict[str, Tensor] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)


class Comparison:
    """Runs graphs of the program that was captured as `gm`. Every method raises VerifyError naming the first value that
    differs; the first run raises MoefxError where the captured graph itself fails. What cannot be compared (too large,
    random, not on CPU) is logged once and then skipped. rounds: run graphs with the rounding that they ask for."""

    def __init__(self, gm: GraphModule, ctx: PassContext, *, rounds: bool = True) -> None:
        self.ctx, self.rounds = ctx, rounds
        self.captured = edit.copy_of(gm)
        self.halves = bool(ctx.autocast or unrounded.has_halves(gm))  # any value may have gone through few digits
        self.coarse = rounds  # whether what was rounded is compared with few digits
        self.reason = self._why_not(gm)
        self.seen: Any = None  # what the whole graph of the last comparison was, where text says all of it
        if self.reason is None:
            self._start()
        if self.reason is not None:
            log.warning("verification by running is skipped: %s", self.reason)

    def _why_not(self, gm: GraphModule) -> str | None:
        fakes = [value(n) for n in gm.graph.find_nodes(op="placeholder")]
        tensors = [f for f in fakes if isinstance(f, Tensor)]
        total = sum(
            f.numel() * f.element_size()
            for f, n in zip(fakes, gm.graph.find_nodes(op="placeholder"))
            if n.meta["moefx"].kind != "input"
        )
        if total > BUDGET_BYTES:
            return f"the parameters take {total / 2**30:.1f} GiB"
        if any(t.device.type != "cpu" for t in tensors):
            return "the model is not on the CPU"
        drawing = first_draw(gm.graph.nodes)
        return None if drawing is None else f"{drawing.name} draws random numbers"

    def _start(self) -> None:
        """Draw inputs, as many rows as give every expert some where that helps, and run the captured graph."""
        self.guards = len(self.ctx.fake_mode.shape_env.guards)
        self.sizes = []
        idle: float = math.inf
        for factor in _MORE_ROWS:
            sizes = rank_sizes(self.captured, self.ctx, factor)
            drafts, reference = self._drawn(sizes) if sizes != self.sizes else ([], [])
            if not drafts or (left := self._idle(reference)) >= idle:
                break
            self.sizes, self.drafts, self.reference, self.factor, idle = sizes, drafts, reference, factor, left
            if not idle:
                break
        self.seen = None
        if not any(t.isfinite().any() for r in self.reference for t in r.values.values()):
            self.reason = "the captured graph gives no finite values on random inputs"
        self.last = self.reference
        self.placed = False

    def _idle(self, reference: list[Result]) -> int:
        """How many parameters, or parts of a stack of them, no rank's rows reach: experts that nobody chose."""
        found = 0
        for node in self.captured.graph.find_nodes(op="placeholder"):
            name = _name(node, "gradient")
            grads = [r.values[name] for r in reference if name in r.values]
            if grads and node.meta["moefx"].kind == "param":
                whole = torch.stack(grads).abs().sum(0)
                parts = whole.flatten(1).sum(1) if whole.dim() > 2 else whole.sum()
                found += int((parts == 0).sum())
        return found

    def _drawn(self, sizes: list[Sizes]) -> tuple[list[Draft], list[Result]]:
        """Inputs in the first style on which the captured graph computes nothing that is no number, or in the one on
        which the least is, and what it computes."""
        tried: list[tuple[float, list[Draft], list[Result]]] = []
        inputs = [n for n in self.captured.graph.find_nodes(op="placeholder") if n.meta["moefx"].kind == "input"]
        styles = STYLES if any(not value(n).is_floating_point() for n in inputs) else STYLES[:1]
        for style in styles:
            drafts = [draw(self.captured, each, rank, style) for rank, each in enumerate(sizes)]
            try:
                with failures.of_model(self.captured):
                    results = [self._whole(self.captured, draft, {}) for draft in drafts]
            except MoefxError:
                if style is styles[-1] and not tried:
                    raise
                continue
            lost = sum(t.isnan().double().mean().item() for r in results for t in r.values.values() if t.numel())
            tried.append((lost, drafts, results))
            if not lost:
                break
        _, drafts, results = min(tried, key=lambda each: each[0])
        return drafts, results

    def _settle(self) -> bool:
        """Whether there is something to compare with. Later guards may rule out the sizes that were drawn."""
        if self.reason is None and len(self.ctx.fake_mode.shape_env.guards) != self.guards:
            self.guards = len(self.ctx.fake_mode.shape_env.guards)
            if rank_sizes(self.captured, self.ctx, self.factor) != self.sizes:
                self._start()
        return self.reason is None

    def whole(self, gm: GraphModule, *, placed: bool, exact: bool, summed: frozenset[str] | None = None) -> None:
        """Compare one graph at torch level, with autograd's gradients. These are never asked to be exact: the order in
        which it adds up what comes from several uses of a tensor depends on the graph. summed: the buffers that are
        summed over the ranks; None: nobody knows, and each may be. What was compared last is not run again."""
        if self._settle() and (seen := _as_it_runs(gm, placed, summed)) != self.seen:
            with failures.of_pass():
                if not placed:
                    found = [self._whole(gm, draft, {}) for draft in self.drafts]
                else:
                    places = self.ctx.mesh.coordinates
                    found = self._on_ranks(lambda rank: self._whole(gm, self.drafts[self._data(rank)], places(rank)))
            self._compare(found, placed, exact, summed, self.halves, by_autograd=True)
            self.seen = seen
        if self.halves and self.exactly is not None:
            self.exactly.whole(gm, placed=placed, exact=exact, summed=summed)

    def step(self, step: StepGraphs, *, exact: bool, summed: frozenset[str] | None = None,
             run: Runs | None = None) -> None:  # fmt: skip
        """Compare a forward and a backward graph, or what was made of them and `run` runs."""
        rounded = self.halves or any(map(unrounded.encodes, step.graphs.values()))
        if self._settle():
            runs = run or (lambda name, inputs: self._run(step.graphs[name], inputs))
            with failures.of_pass("graph" if run is None else "code"):
                found = self._on_ranks(lambda rank: self._step(step, rank, runs))
            self._compare(found, True, exact, summed, rounded)
        if rounded and run is None and self.exactly is not None:
            self.exactly.step(step, exact=exact, summed=summed)

    @cached_property
    def exactly(self) -> Comparison | None:
        """Compares without the rounding."""
        is_possible = self.reason is None and self.rounds and unrounded.is_possible(self.captured)
        return Comparison(self.captured, self.ctx, rounds=False) if is_possible else None

    # ---- running

    def _data(self, rank: int) -> int:
        """Which of the drafts a rank reads."""
        return self.ctx.mesh.place("data", self.ctx.mesh.coordinates(rank))

    def _on_ranks(self, run: Callable[[int], Result]) -> list[Result]:
        return world.ThreadWorld(self.ctx.mesh.root).run(run)

    def _inputs(self, nodes: list[Node], draft: Draft, place: dict[str, int]) -> list[Any]:
        found = [value_of(n.meta["moefx"], value(n), draft, self.ctx, place).clone() for n in nodes]
        return found if self.rounds else [unrounded.widened(tensor) for tensor in found]

    def _run(self, gm: GraphModule, inputs: list[Any]) -> tuple[Any, ...]:
        if self.rounds:
            return run(gm, inputs)
        return tuple(unrounded.Unrounded(gm).run(*inputs, enable_io_processing=False))

    def _whole(self, gm: GraphModule, draft: Draft, place: dict[str, int]) -> Result:
        nodes = gm.graph.find_nodes(op="placeholder")
        inputs = self._inputs(nodes, draft, place)
        wanting = [value(n).requires_grad and self.ctx.grad for n in nodes]
        inputs = [t.requires_grad_() if wants else t for t, wants in zip(inputs, wanting)]
        given = [t.clone() if wants else t for t, wants in zip(inputs, wanting)]  # a leaf may not be written to
        with self._modes():
            outputs = self._run(gm, given)[: len(self.captured.graph.output_node().args[0])]
            result = Result()
            for node, tensor in zip(nodes, given):
                if node.meta["moefx"].kind == "buffer":
                    result.values[_name(node, "value")] = tensor.detach()
            tensors = {i: t for i, t in enumerate(outputs) if isinstance(t, Tensor)}
            result.values.update({f"output {i}": t.detach() for i, t in tensors.items()})
            ends = {i: t for i, t in tensors.items() if t.requires_grad}
            leaves = {n: t for n, t, wants in zip(nodes, inputs, wanting) if wants}
            if ends and leaves:
                grads = torch.autograd.grad(
                    list(ends.values()),
                    list(leaves.values()),
                    [draft.cotangent(i, t) for i, t in ends.items()],
                    allow_unused=True,
                )
                self._add_gradients(result, {n: g for n, g in zip(leaves, grads) if g is not None})
        return result

    def _step(self, step: StepGraphs, rank: int, run: Runs) -> Result:
        draft = self.drafts[self._data(rank)]
        nodes = step.forward.graph.find_nodes(op="placeholder")
        inputs = self._inputs(nodes, draft, self.ctx.mesh.coordinates(rank))
        result = Result()
        with torch.no_grad():
            outputs = run("forward", inputs)
            first = len(step.mutated_inputs)
            changed = dict(zip(step.mutated_inputs, outputs))
            for index, node in enumerate(nodes):
                if node.meta["moefx"].kind == "buffer":
                    result.values[_name(node, "value")] = changed.get(index, inputs[index])
            users = outputs[first : first + step.num_user_outputs]
            result.values.update({f"output {i}": t for i, t in enumerate(users) if isinstance(t, Tensor)})
            if step.backward is not None:
                saved = outputs[first + step.num_user_outputs + step.num_statistics :]
                tangents = [draft.cotangent(i, users[i]) for i in step.tangent_outputs]
                grads = run("backward", [*saved, *tangents])
                self._add_gradients(result, {nodes[i]: g for i, g in zip(step.grad_inputs, grads) if g is not None})
        return result

    def _add_gradients(self, result: Result, grads: dict[Node, Tensor]) -> None:
        for node, grad in grads.items():
            source = node.meta["moefx"]
            if source.kind == "stack" and not source.layout.cuts:
                found = {f"the gradient of {k}": g for k, g in zip(source.key, grad)}
            else:
                found = {_name(node, "gradient"): grad}
                result.layouts[_name(node, "gradient")] = layout_of(source, self.ctx)
            for name, each in found.items():  # experts of a module that is called twice are an input twice
                result.values[name] = result.values[name] + each if name in result.values else each

    @contextlib.contextmanager
    def _modes(self):
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.ctx.grad))
            stack.enter_context(torch.autocast("cpu", enabled=False))  # of the user, around the compilation
            for device, dtype in self.ctx.autocast if self.rounds else ():
                stack.enter_context(torch.autocast(device, dtype=dtype))
            yield

    # ---- comparing

    def _compare(self, found: list[Result], placed: bool, exact: bool, summed: frozenset[str] | None, rounded: bool,
                 by_autograd: bool = False) -> None:  # fmt: skip
        self.tolerance = {} if rounded and self.coarse else _RTOL
        if exact and placed == self.placed:
            for rank, (before, after) in enumerate(zip(self.last, found)):
                self._same(rank, before.values, after.values, exact=True, by_autograd=by_autograd)
        else:
            for rank, after in enumerate(found):
                wanted = self._wanted(rank, after, summed) if placed else self.reference[rank].values
                self._same(rank, wanted, after.values, exact=exact, by_autograd=by_autograd)
        self.last, self.placed = found, placed

    def _wanted(self, rank: int, after: Result, summed: frozenset[str] | None) -> dict[str, Tensor]:
        """What rank `rank` must compute, by the captured graph on every rank's inputs."""
        own = self.reference[self._data(rank)].values
        each = [r.values for r in self.reference]
        wanted = {n: t for n, t in own.items() if not n.startswith("the gradient of ") or _is_input(n)}
        for name, found in after.values.items():
            if name.startswith("the value of ") and found.dtype is not torch.bool:  # nothing is added to truths
                key = name.removeprefix("the value of ")
                start = self.drafts[self._data(rank)].named[key].to(own[name].dtype)
                total = start + sum(values[name] - start for values in each)
                is_sum = self._close(found, total) if summed is None else key in summed
                wanted[name] = total if is_sum else own[name]
        grads = [n for n in own if n.startswith("the gradient of ") and not _is_input(n)]
        mean = {n: sum(v[n] for v in each if n in v) / len(each) for n in grads}
        return wanted | self._sharded(mean, after, rank)

    def _sharded(self, mean: dict[str, Tensor], after: Result, rank: int) -> dict[str, Tensor]:
        """Gradients of full parameters in the form that the rank has them: its experts' share, or a stack's."""
        sizes, place = self.ctx.mesh.root, self.ctx.mesh.coordinates(rank)
        drawn = self.drafts[self._data(rank)].named
        wanted = {}
        for name, found in after.values.items():
            keys = name.removeprefix("the gradient of ").split(" & ")
            if len(keys) > 1:
                zeros = [torch.zeros_like(drawn[k], dtype=found.dtype) for k in keys]
                full = torch.stack([mean.pop(f"the gradient of {k}", zero) for k, zero in zip(keys, zeros)])
            elif name in mean:
                full = mean.pop(name)
            else:
                continue
            part = after.layouts.get(name, Layout()).take(full, sizes, place)
            rest = found.shape[0] - part.shape[0] if found.dim() else 0  # behind its own experts is anything
            wanted[name] = torch.cat([part, found[-rest:]]) if rest > 0 else part
        return wanted | mean

    def _close(self, found: Tensor, wanted: Tensor, zero: float = _ZERO) -> bool:
        """Within the tolerance of the dtype, measured by the largest value, and what is as good as zero. Infinities
        must be the same. What should be no number may be anything: a weight of zero may be left out, though it stood
        before one."""
        if not wanted.is_floating_point():
            return torch.equal(found, wanted)
        infinite, finite = wanted.isinf(), wanted.isfinite()
        if not torch.equal(found[infinite], wanted[infinite]):
            return False
        found, wanted = found[finite], wanted[finite]
        if not wanted.numel():
            return True
        rtol = self.tolerance.get(wanted.dtype, _COARSE)
        return bool((found - wanted).abs().max() <= rtol * wanted.abs().max() + zero)

    def _same(self, rank: int, before: dict[str, Tensor], after: dict[str, Tensor], *, exact: bool,
              by_autograd: bool) -> None:  # fmt: skip
        where = f"rank {rank}" if self.ctx.mesh.size(self.ctx.mesh.everyone) > 1 else None
        gradients = [t[t.isfinite()].abs() for name, t in before.items() if _is_gradient(name)]
        zero = _ZERO if self.tolerance else _ZERO_ROUNDED
        zero *= max([1.0, *(float(t.max()) for t in gradients if t.numel())])
        for name, wanted in before.items():
            found = after.get(name)
            if found is None:
                if wanted.any():
                    raise VerifyError(f"{name} is gone", where=where)
                continue
            if wanted.shape != found.shape or wanted.dtype != found.dtype:
                raise VerifyError(f"{name} was {_type(wanted)} and is {_type(found)}", where=where)
            to_the_bit = exact and not (by_autograd and _is_gradient(name))
            close = self._close(found, wanted, zero if _is_gradient(name) else _ZERO)
            if not (_identical(wanted, found) if to_the_bit else close):
                raise VerifyError(
                    f"{name} differs: {_distance(wanted, found)}", where=where, hint="the pass changed what is computed"
                )
        extra = [n for n in after if n not in before and after[n].any()]
        if extra:
            raise VerifyError(f"{extra[0]} is new", where=where)


def _identical(wanted: Tensor, found: Tensor) -> bool:
    return bool(((wanted == found) | (wanted.isnan() & found.isnan())).all())


def run(gm: GraphModule, inputs: list[Any]) -> tuple[Any, ...]:
    """Execute a graph as it stands."""
    return tuple(torch.fx.Interpreter(gm).run(*inputs, enable_io_processing=False))


def _as_it_runs(gm: GraphModule, *more: Any) -> Any:
    """Graphs for which it is equal compute the same. One with tensors of its own equals none, not even itself."""
    inputs = [(n.meta["moefx"], value(n)) for n in gm.graph.find_nodes(op="placeholder")]
    if any(n.op in ("get_attr", "call_module") for n in gm.graph.nodes) or any(s.kind == "constant" for s, _ in inputs):
        return object()
    types = [(s, repr(v), getattr(v, "requires_grad", None)) for s, v in inputs]
    return [(n.name, n.op, n.target, repr(n.args), repr(n.kwargs)) for n in gm.graph.nodes], types, more


def _name(node: Node, what: str) -> str:
    source = node.meta["moefx"]
    key = " & ".join(source.key) if source.kind == "stack" else source.key
    return f"the {what} of {'input ' if source.kind == 'input' else ''}{key}"


def _is_gradient(name: str) -> bool:
    return name.startswith("the gradient of ")


def _is_input(name: str) -> bool:
    return name.startswith("the gradient of input ")


def _type(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


def _distance(wanted: Tensor, found: Tensor) -> str:
    gap = (found.double() - wanted.double()).abs()
    index = tuple(int(i) for i in torch.unravel_index(gap.argmax(), gap.shape)) if gap.dim() else ()
    return (
        f"by up to {gap.max().item():.3g} of {wanted.double().abs().max().item():.3g}, "
        f"at {list(index)} {found[index].item():.6g} instead of {wanted[index].item():.6g}"
    )
