"""From a call to a program: capture, passes, link, and the ranks' agreement on the result."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_unflatten

from moefx import _torch_compat as compat
from moefx import progress
from moefx.analysis import autocast
from moefx.analysis.checking import idle_experts
from moefx.axes import MeshSpec
from moefx.capture import expert_modules, loops_tried, small_sizes
from moefx.capture.inputs import CallKey, Fixed, sizes_of, symbolic_dims, tokens_in
from moefx.capture.numbers import Key
from moefx.capture.trace import Captured, Source, trace
from moefx.capture.with_numbers import trace_with_numbers
from moefx.compiler import records
from moefx.compiler.cache.shelf import Shelf
from moefx.compiler.checks import chosen_level
from moefx.compiler.choosing import Attempt, Chooser
from moefx.compiler.pipeline import OptionalPassFailed, Pipeline
from moefx.compiler.records import Record
from moefx.compiler.relinking import link, relink, warnings_of
from moefx.compiler.variant import LOCK, Call, Making, Variant
from moefx.context.decisions import Decisions
from moefx.context.left_out import LeftOut
from moefx.context.pass_types import PassContext
from moefx.costmodel.machine import Machine
from moefx.errors import CaptureError, DivergenceError, MoefxError, UnsupportedUse, warn
from moefx.ir import edit, randomness
from moefx.ir.describe import Symbols
from moefx.link import implementations, rehearsal
from moefx.link.emit import digest, emit, load
from moefx.link.program import Code, Home, Program, input_name
from moefx.options import Arm, Options, by_kinds
from moefx.planning.limits import check_memory
from moefx.planning.placing import costs_of
from moefx.planning.planner import Caches, Decision
from moefx.planning.pricing import Prices
from moefx.runtime import parameters
from moefx.runtime.agreement import check_same_values, gather

log = logging.getLogger("moefx")

_YOUNG = 100_000  # objects that are made before Python looks for garbage among them


@dataclass(frozen=True)
class Outcome:
    """What one rank tells the others of its attempt to compile."""

    digest: int = 0
    complaint: str | None = None  # the program does not fit this rank's sizes
    error: str | None = None
    where: str | None = None  # of the error
    captured: bool = True  # no CaptureError
    failed: frozenset[str] = frozenset()  # optional passes that failed
    refused: bool = False  # they did not, but without them another one may not refuse the model


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Compiling makes millions of objects that live until it is done: Python's collector would walk them every few
    hundred that are new, for a fifth of the time."""
    young, *older = gc.get_threshold()
    gc.set_threshold(max(young, _YOUNG) if young else 0, *older)  # 0: whoever turned it off wants it off
    try:
        yield
    finally:
        gc.set_threshold(young, *older)


class Builder:
    """Compiles variants of the model `root`, or of its block at `path`, together with the other ranks of the mesh."""

    def __init__(
        self, root: nn.Module, path: str, spec: MeshSpec, options: Options, machine: Machine | None,
        home: Home, forwards: loops_tried.Forwards, refold: Callable[[MeshSpec], None] | None = None,
    ) -> None:  # fmt: skip
        """refold: gives the ranks other dims, as long as no parameter has its place; None: nobody may."""
        self.refold = refold
        self.forwards = forwards  # of modules that are not captured as they are written
        self.root, self.path, self.model = root, path, root.get_submodule(path)
        self.spec, self.home = spec, home
        self.given = self.options = options  # by the user, and with the choices of the arm that is compiled for
        self.machine = machine
        self.built = 0
        self.last: Variant | None = None  # that was built
        self.shelf = Shelf()
        self.free: frozenset[Key] = frozenset()  # numbers of Python that are to be inputs, if they can be

    def build(self, leaves: list[Any], tree: Any, key: CallKey, changed: str | None = None,
              arm: Arm = (), free: frozenset[Key] = frozenset()) -> Variant:  # fmt: skip
        """Compile for calls like this one; all ranks trace with the same sizes, so that they make one program.
        changed: the value of Python for which there is no program yet. arm: choices in place of those of the options.
        free: numbers that are to be inputs.

        Raises the compile error of this rank, or DivergenceError if another rank failed or differs, be it in weights.
        """
        if not self.built and not self.path:
            self._check_weights()
        self.options, self.free = self.given.changed(**dict(arm)), free
        all_sizes = self._sizes_of_all(leaves, tree, key, changed)
        different = list(dict.fromkeys(all_sizes))
        if len(different) > 1 and not self.options.debug.dynamic:
            lines = [f"rank {r} of the mesh: sizes {s}" for r, s in enumerate(all_sizes)]
            raise DivergenceError(
                "ranks were given inputs of different sizes, which dynamic=False does not allow:\n    "
                + "\n    ".join(lines),
                hint="give every rank a batch of the same sizes, or leave dynamic=True",
            )
        kinds: tuple[Fixed, ...] = ("", "ones") if self.options.debug.dynamic else ()
        candidates = [(sizes, fixed) for fixed in kinds for sizes in different
                      if not fixed or symbolic_dims(sizes) != symbolic_dims(sizes, fixed)]  # fmt: skip
        if len(different) == 1:
            candidates.append((different[0], "all"))
        skip: frozenset[str] = frozenset()
        complaints = []
        for sizes, fixed in candidates:
            variant, outcomes = self._attempt(leaves, tree, key, sizes, fixed, skip)
            while failed := frozenset().union(*(o.failed for o in outcomes)):
                if not all(o.refused for o in outcomes if o.failed):
                    self.home.session.tell(f"passes {sorted(failed)} failed on some rank and are left out on all")
                skip |= failed
                variant, outcomes = self._attempt(leaves, tree, key, sizes, fixed, skip)
            if all(o.complaint is None for o in outcomes):
                self._settle(variant)
                return variant
            complaints.append([outcome.complaint or "fits" for outcome in outcomes])
        lines = [f"rank {r}: sizes {s}: {why}" for r, (s, why) in enumerate(zip(all_sizes, complaints[0]))]
        raise DivergenceError(
            "no single program fits the input sizes of all ranks:\n    " + "\n    ".join(lines),
            hint="give every rank a batch of the same sizes",
        )

    def _settle(self, variant: Variant) -> None:
        """The program that all ranks have: the model is as it wants it from now on."""
        if variant.mesh != self.spec:
            self.refold(variant.mesh)
            self.spec = self.home.spec = variant.mesh
        self._share_buffers(variant.expert_buffers)
        self._shard(variant)
        is_first = self.home.session.index(self.spec.everyone) == 0
        if is_first and records.dump_folder(self.options) is not None:
            self._dump(variant.records, variant.program.code)
        for words in variant.said if not self.built else ():
            self.home.session.tell(words)
        self.built += 1
        self.last = variant
        self.shelf.keep(self, variant)

    @property
    def caches(self) -> Caches:
        """What the planner learned of batch sizes: what all ranks have the same of."""
        plan = None if self.machine is None or self.last is None else self.last.context.decisions.plan
        return {} if plan is None else plan.caches

    def _shard(self, variant: Variant) -> None:
        """Raises UnsupportedUse on all ranks where the program wants parameters elsewhere than another one."""
        try:
            self.home.shard(variant.program.sources)
            self.home.left_out |= dict.fromkeys(variant.program.left_out)
        except UnsupportedUse as error:
            error.together = True
            raise

    def _sizes_of_all(self, leaves: list[Any], tree: Any, key: CallKey,
                      changed: str | None) -> list[tuple[tuple[int, ...] | None, ...]]:  # fmt: skip
        """Of every rank's inputs. Raises DivergenceError if they differ in more than sizes, or if options do:
        these say which programs are tried."""
        sizes = sizes_of(leaves)
        args, kwargs = tree_unflatten(sizes, tree)
        shown = ", ".join([*map(str, args), *(f"{name}={each}" for name, each in kwargs.items())])
        form = str(tree), tuple(each and len(each) for each in sizes)
        mine = form, sizes, shown, self.shelf.begins(self), self.options.told()
        why = f", since `{changed}` has changed" if changed else ""
        found = gather(self.home.session, self.spec.everyone, mine, f"compiling for {key.mode}", why)
        for rank, (*_, told) in enumerate(found):
            other = [name for name in told if told[name] != found[0][-1][name]]
            if other:
                raise DivergenceError(
                    f"{other[0]} is {found[0][-1][other[0]]} on rank 0 of the mesh but {told[other[0]]} on rank {rank}",
                    where="moefx.Options",
                    hint="give every rank the same options",
                )
        if any(other != form for other, *_ in found):
            lines = [f"\n    rank {r} of the mesh: {each[2]}" for r, each in enumerate(found)]
            raise DivergenceError(
                f"ranks were given different arguments, or different numbers of dims. Their sizes:{''.join(lines)}",
                where=self.path or None,
                hint="call the model in the same way on every rank; only sizes may differ",
            )
        self.shelf.is_open = all(each[3] for each in found)
        return [each[1] for each in found]

    def _share_buffers(self, sources: dict[str, Source]) -> None:
        """Note, and compare, buffers that must be the same on all ranks from now on."""
        self.home.expert_buffers |= {str(s.key) if s.kind == "buffer" else name: s for name, s in sources.items()}
        if sources:
            check_same_values(self.home.session, self.spec.everyone, self.home.shared_buffers())

    def _check_weights(self) -> None:
        """Every rank must begin with the same weights; on the meta device there are none yet."""
        check_same_values(self.home.session, self.spec.everyone, *parameters.held(self.root))

    def _attempt(self, leaves, tree, key, sizes, fixed, skip) -> tuple[Variant | None, list[Outcome]]:
        call = Call(leaves, tree, key, sizes, fixed, skip)
        if self.shelf.is_open:
            with LOCK:
                variant = self.shelf.find(self, call)
            kept = Outcome() if variant is None else Outcome(variant.program.digest, variant.guard.complaint(leaves))
            outcomes = gather(self.home.session, self.spec.everyone, kept, "looking for a program")
            if variant is not None and len({o.digest for o in outcomes}) == 1:
                return variant, outcomes
        variant, error = None, None
        try:
            with LOCK, _rare_collections():
                variant, outcome = self.compile(call)
        except OptionalPassFailed as caught:
            outcome = Outcome(failed=frozenset({caught.name}), refused=caught.refused)
        except Exception as caught:
            error = caught
            text = caught.what if isinstance(caught, MoefxError) else f"{type(caught).__name__}: {caught}"
            where = caught.where if isinstance(caught, MoefxError) else None
            outcome = Outcome(error=text[:1000], where=where, captured=not isinstance(caught, CaptureError))
        outcomes = gather(self.home.session, self.spec.everyone, outcome, "comparing programs")
        if isinstance(error, CaptureError):
            error.everywhere = not any(other.captured for other in outcomes)
        if error is not None:
            error.together = True  # see MoefxError
            raise error
        for rank, other in enumerate(outcomes):
            if other.error is not None:
                failed = DivergenceError(
                    f"rank {rank} of the mesh failed to compile: {other.error}",
                    where=other.where,
                    hint="give every rank the same model, options and registered functions",
                )
                failed.together = True
                raise failed
        if len({o.digest for o in outcomes}) > 1 and not any(o.failed for o in outcomes):
            self._dump(variant.records, variant.program.code, f"rank{self.home.session.index(self.spec.everyone)}")
            lines = [f"rank {r} of the mesh: program {o.digest:016x}" for r, o in enumerate(outcomes)]
            raise DivergenceError(
                "ranks compiled different programs:\n    " + "\n    ".join(lines),
                hint="give every rank the same model, options and kind of input",
            )
        return variant, outcomes

    def _dump(self, made: list[Record], code: Code | None, suffix: str = "") -> None:
        """Write the steps and the code where the user wants them: the first rank for all, or, where ranks differ or
        fail, each its own."""
        folder = records.dump_folder(self.options)
        if folder is None:
            return
        sources = {} if code is None else {"forward": code.forward_source, "backward": code.backward_source}
        name = "-".join(part for part in (f"program{self.built}" if self.built else "", suffix) if part)
        try:
            written = records.write(folder / name, made, sources)
        except OSError as error:  # no reason to stop: the others would wait for this rank
            warn(f"graphs and code are not dumped to {folder}: {error}")
        else:
            log.info("dumped to %s", written)

    def look(self, leaves: list[Any], tree: Any, key: CallKey) -> tuple[Attempt, Decision]:
        """What a program for calls like this one is chosen by: one with whole regions, and the plan. No parameter gets
        its place, and no other rank is asked. Needs a machine. Raises what compiling raises."""
        skip, fixed = frozenset[str](), "" if self.options.debug.dynamic else "all"
        while True:
            try:
                with LOCK, _rare_collections():
                    return self._schedule(leaves, tree, key, sizes_of(leaves), fixed, skip, Chooser.look)
            except OptionalPassFailed as caught:
                skip |= {caught.name}

    def _schedule(self, leaves, tree, key, sizes, fixed, skip, choose=Chooser.choose) -> Any:
        """Capture and run the passes; where there is a machine first to look at."""
        is_first = [True]
        # "s1" shares out the tokens that capacities follow from.
        can_be_free = self.options.debug.dynamic and self.options.parallel.split != "s1"

        def run(mesh: MeshSpec, decisions: Decisions) -> Attempt:
            progress.step("capture")
            with loops_tried.in_place(self.root, self.forwards):
                captured = trace_with_numbers(
                    self.root, self.model, leaves, tree, self.home.session.device, sizes=sizes, fixed=fixed,
                    free=self.free if can_be_free else frozenset(), look=can_be_free)  # fmt: skip
            captured.state.look_again()
            if captured.idle is not None and is_first:
                is_first.clear()
                full, *parts = captured.idle
                for part in parts:
                    with expert_modules.naming_one_module(self.model):
                        idle_experts.check(full.gm, full.trust, part.gm, part.trust)
            modes = autocast.make_explicit(captured.gm, key.autocast)
            ctx = PassContext(mesh, self.options, captured.fake_mode, autocast=modes, grad=key.grad,
                              machine=self.machine, decisions=decisions)  # fmt: skip
            ctx.examples, ctx.written = captured.examples, frozenset(captured.written.values())
            ctx.sizes, ctx.whole_before, ctx.is_first = captured.sizes, self.home.whole, not self.built
            ctx.layouts_before, ctx.resident = self.home.layouts, self.home.unread(captured.gm)
            ctx.left_out = self._left_out(captured)
            ctx.has_kernel = implementations.chooser(self.home.session.device.type)
            pipeline = Pipeline(ctx, skip=skip)
            try:
                with (contextlib.nullcontext() if modes else compat.no_autocast(),
                      expert_modules.naming_one_module(self.model)):  # fmt: skip
                    return Attempt(captured, ctx, pipeline, pipeline.run(captured.gm))
            except Exception:
                self._dump(pipeline.records, None, f"failed-rank{self.home.session.index(self.spec.everyone)}")
                raise

        if self.machine is None:
            found = run(self.spec, Decisions())
            check_memory(found.graphs, found.ctx)
            return found
        may_fold = self.refold is not None and not self.built and not self.spec.dims("ep+esp")
        return choose(Chooser(run, self.options, self.machine, self.caches, may_fold), self.spec)

    def _left_out(self, captured: Captured) -> LeftOut:
        """Which experts the model leaves out where no token chose them."""
        turns, loops = {}, {}
        if captured.idle is not None:
            full, *parts = captured.idle
            keys = {node.target: node.meta["moefx"].key for node in full.gm.graph.find_nodes(op="placeholder")}
            found = idle_experts.left_out(full.gm, [(part.gm, part.trust) for part in parts])
            turns = {keys[target]: each for target, each in found.items()}
        names = {param: name for name, param in self.model.named_parameters()}
        for path, module in self.model.named_modules():
            tried = self.forwards.get((module, module.training))
            if tried is not None:
                loops[path] = frozenset(names[module.get_parameter(name)] for name in tried.left_out)
        return LeftOut(turns, loops)

    def _with_ones(self, general: small_sizes.Recording, free: frozenset[Key], tree: Any, key: CallKey,
                   leaves: list[Any]) -> small_sizes.Verdict:  # fmt: skip
        """Whether the forward does otherwise where sizes are one. Every rank looks for itself."""
        here = self.home.session.device
        with (LOCK, torch.inference_mode(False), torch.set_grad_enabled(key.grad), compat.own_saved_tensors(),
              torch.random.fork_rng([here] if here.type == "cuda" else [])):  # fmt: skip
            try:
                with loops_tried.in_place(self.root, self.forwards):
                    special = trace(self.root, self.model, leaves, tree, here, fixed="ones", free=free)
            except CaptureError as error:
                return small_sizes.Verdict(f"with a size of one, {error.what}")
            if not isinstance(special, Captured):
                return small_sizes.Verdict(f"with a size of one, only {sorted(map(str, special))} decide sizes alone")
            verdict = small_sizes.compare(general, special.recording, sizes_of(leaves))
            return replace(verdict, guard=special.guard(lambda _: verdict))

    def compile(self, call: Call) -> tuple[Variant, Outcome]:
        """On this rank alone. Nothing gets its place."""
        leaves, tree, key, sizes, fixed, skip = call
        device = self.home.session.device.type
        captured, ctx, pipeline, graphs, looked_at = self._schedule(leaves, tree, key, sizes, fixed, skip)
        sources = [n.meta["moefx"] for n in captured.gm.graph.find_nodes(op="placeholder")]
        names = [input_name(s) for s in sources]
        source, loops, symbols = {}, by_kinds(), Symbols(*(gm.graph for gm in graphs.graphs.values()))
        scheduled = {name: edit.copy_of(gm) for name, gm in graphs.graphs.items()}
        progress.step("write the code")
        for name, gm in graphs.graphs.items():
            link(gm, ctx, names, self.path, device)
            source[name] = emit(gm, name, None, symbols, loops=loops, verify=chosen_level(ctx.options))
        backward = source.get("backward")
        code = Code(
            load(source["forward"], "forward"),
            source["forward"],
            load(backward, "backward") if backward else None,
            backward or "",
            functools.partial(relink, scheduled, ctx, names, len(graphs.saved), self.path, device, loops),
        )
        functions = {"forward": code.forward, "backward": code.backward}
        step = replace(graphs, **scheduled)
        pipeline.checks.emitted(step, lambda graph, inputs: rehearsal.run(functions[graph], inputs, ctx.mesh.root))
        left_out = ctx.stacks_left_out()
        number = digest(self.path, *source.values(), *(str(self.home.describe(s)) for s in sources), str(left_out))
        costs = costs_of(step, ctx)
        regions = [replace(facts, costs=costs.get(facts.of)) for _, facts in sorted(ctx.decisions.regions.items())]
        draws = any(randomness.draws(node) for gm in graphs.graphs.values() for node in gm.graph.nodes)
        at_peak = Prices(step, ctx).peak_seconds() / (tokens_in(leaves) or 1)
        program = Program(self.home, graphs, code, sources, number, regions, left_out, draws, at_peak)
        # Only now: differentiation may fix sizes, too.
        guard = captured.guard(functools.partial(self._with_ones, captured.recording,
                                                 frozenset(captured.numbers.keys), tree, key))
        making = Making(pipeline.records, ctx, scheduled, looked_at, code.relink)
        variant = Variant(key, program, guard, captured.state, captured.pack_outputs, lambda: making, captured.numbers,
                          captured.written, captured.origin, ctx.mesh, ctx.decisions.expert_buffers,
                          ctx.decisions.relied, warnings_of(ctx, captured.origin), self.path)  # fmt: skip
        complaint = guard.complaint(leaves) or captured.numbers.complaint(leaves)
        return variant, Outcome(number, complaint)
