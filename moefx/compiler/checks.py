"""Checks that the pipeline makes after every pass: what the verifier needs to know of a program, and who is told off.

verify 1: the rules of `ir.verify`, for every graph that is another one than after the pass before. verify 2: for all,
and runs the graphs, see `analysis.compare`, and the emitted code, see `link.rehearsal`.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx import GraphModule

from moefx.analysis.checking.compare import Comparison, Runs
from moefx.analysis.checking.same import difference
from moefx.analysis.statistics.summed_buffers import summed_buffers
from moefx.context.pass_types import PassContext
from moefx.context.step_graphs import StepGraphs
from moefx.errors import MoefxError, VerifyError
from moefx.ir import edit
from moefx.ir.level import Level
from moefx.ir.op import value
from moefx.ir.ops.layers import is_folded
from moefx.ir.verify import (
    BACKWARD,
    FORWARD,
    WHOLE,
    Facts,
    saved_inputs,
    saved_roles,
    saved_spaces,
    saved_types,
    verify,
)
from moefx.ir.writes import users_of_memory
from moefx.options import Options


def chosen_level(options: Options) -> int:
    """0, 1 or 2: the option, else MOEFX_VERIFY, else 1. Raises MoefxError for anything else."""
    found = options.debug.verify
    text = os.environ.get("MOEFX_VERIFY", "1") if found is None else str(found)
    if text not in ("0", "1", "2"):
        raise MoefxError(f"verify is {text}", hint="0: nothing; 1: structure and meaning; 2: also run and compare")
    return int(text)


class Checks:
    """The checks of one run of the pipeline over the captured graph `gm`."""

    def __init__(self, gm: GraphModule, ctx: PassContext) -> None:
        self.ctx, self.gm = ctx, gm
        self.strength = chosen_level(ctx.options)
        self.outputs = tuple(value(node) for node in gm.graph.output_node().args[0])
        self.comparison = Comparison(gm, ctx) if self.strength >= 2 else None
        self.folded: Comparison | None = None
        self.written = _written_buffers(gm) if self.strength else set()
        self.summed: frozenset[str] | None = None  # the buffers that are to be summed over the ranks, once it is known
        self.right: dict[str, tuple[Level, Facts, list[Any]]] = {}  # by graph: what was verified last
        self.saved: dict[str, Any] = {}  # what the backward's rules know of the forward

    def whole(self, name: str, level: Level, *, exact: bool = False) -> None:
        """Check the one graph after the pass `name`. exact: it must compute the same bits as before."""
        if not self.strength:
            return
        with _named(name):
            if self._verify(self.gm, level, self._facts(WHOLE)):
                for buffer in sorted(self.written - _written_buffers(self.gm)):
                    what = f"what the model writes to its buffer {buffer} is gone"
                    raise VerifyError(what, hint="keep ops that write to an input, also where nothing reads them")
            runs = self._of_folded() if is_folded(self.gm) else self.runs
            if runs is not None:
                runs.whole(self.gm, placed=level is Level.PLACED, exact=exact, summed=self.summed)
            if level is Level.PLACED and self.summed is None:  # experts stand out now, and nothing is summed yet
                self.summed = frozenset(node.meta["moefx"].key for node in summed_buffers(self.gm))

    def _of_folded(self) -> Comparison | None:
        """Where one layer stands for others, the graph computes something else than the one that was captured."""
        if self.comparison is not None and self.folded is None:
            self.folded = Comparison(self.gm, self.ctx)
        return self.folded

    @property
    def runs(self) -> Comparison | None:
        """None where the program drops other tokens than the captured graph."""
        return None if self.ctx.decisions.batches else self.comparison

    def step(self, name: str, level: Level, step: StepGraphs, *, exact: bool = False) -> None:
        """Check forward and backward after the pass `name`."""
        if not self.strength:
            return
        first = len(step.mutated_inputs)
        facts = self._facts(FORWARD, first_output=first, written=tuple(step.mutated_inputs))
        with _named(name, "forward"):
            is_new = self._verify(step.forward, level, facts)
        if step.backward is not None:
            saved = step.forward, level, facts, first + step.num_user_outputs + step.num_statistics
            if is_new or not self.saved:
                self.saved = {"saved": saved_roles(*saved), "types": saved_types(*saved),
                              "spaces": saved_spaces(*saved),
                              "given": saved_inputs(step.forward, saved[-1])}  # fmt: skip
            facts = self._facts(BACKWARD, grad_inputs=tuple(step.grad_inputs), **self.saved)
            with _named(name, "backward"):
                self._verify(step.backward, level, facts)
        if self.runs is not None:
            with _named(name):
                self.runs.step(step, exact=exact, summed=self.summed)

    def same(self, name: str, step: StepGraphs, whole: Callable[[], StepGraphs]) -> None:
        """Check that `step`, whose equal layers were compiled once, computes what every layer by itself does."""
        if self.strength < 2:
            return
        with _named(name):
            for complaint in filter(None, [difference(step, whole())]):
                raise VerifyError(f"equal layers that are compiled once compute something else: {complaint}",
                                  hint="compile every layer by itself: set MOEFX_LAYERS=0")  # fmt: skip

    def emitted(self, step: StepGraphs, run: Runs) -> None:
        """Check what the graphs of `step` became in the end: code, which `run` runs."""
        if self.runs is not None:
            with _named("emit"):
                self.runs.step(step, exact=False, summed=self.summed, run=run)

    def _verify(self, gm: GraphModule, level: Level, facts: Facts) -> bool:
        """Verify a graph, unless it is the one that was verified last, with the same facts: most passes find nothing to
        do. Whether it was another one."""
        now, before = (level, facts, _contents(gm)), self.right.pop(facts.graph, None)
        is_new = self.strength >= 2 or before is None or before[:2] != now[:2] or not _same(before[2], now[2])
        if is_new:
            verify(gm, level, facts)
        self.right[facts.graph] = now
        return is_new

    def _facts(self, graph: str, **more: Any) -> Facts:
        mesh = self.ctx.mesh
        sources = tuple(node.meta["moefx"] for node in self.gm.graph.find_nodes(op="placeholder"))
        summed = self.summed if mesh.size("data") > 1 else frozenset()  # one rank has all there is
        regions = self.ctx.decisions.regions
        ways, uncut = ({n: getattr(each, name) for n, each in regions.items()} for name in ("way", "of"))
        return Facts(mesh, graph, sources, outputs=self.outputs, summed=summed, ways=ways, uncut=uncut, **more)


def _contents(gm: GraphModule) -> list[Any]:
    """The objects that a graph consists of. Edits replace them: arguments and what meta holds are never written to."""
    found: list[Any] = []
    for node in gm.graph.nodes:
        if edit.body_of(node) is not None:
            return [object()]  # its edits are not seen here
        found += (node, node.op, node.target, node.args, node.kwargs, node.name, *node.meta, *node.meta.values())
    return found


def _same(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(map(operator.is_, before, after))


def _written_buffers(gm: GraphModule) -> set[str]:
    sources = ((node, node.meta.get("moefx")) for node in gm.graph.find_nodes(op="placeholder"))
    buffers = [(node, source.key) for node, source in sources if source is not None and source.kind == "buffer"]
    return {key for node, key in buffers if any(users_of_memory(node).values())}


@contextmanager
def _named(name: str, graph: str = "") -> Iterator[None]:
    """Complaints say after which pass, and in which graph."""
    try:
        yield
    except VerifyError as error:
        where = f"the {graph} graph after {name}" if graph else f"after {name}"
        raise VerifyError(f"{where}: {error.what}", where=error.where, hint=error.hint) from error
