"""`moefx.compile` and the module it returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moefx import _torch_compat as compat
from moefx import rooms
from moefx.axes import MeshSpec
from moefx.compiler.variant import Variant
from moefx.compiler.variants import Builder
from moefx.costmodel.machine import BUCKET_BYTES
from moefx.errors import CaptureError, DivergenceError, ModelError, UnsupportedUse
from moefx.link.program import Home
from moefx.mesh import check_mesh, cut_along, spec_of
from moefx.model import by_block, generation, guards, metrics, state_dicts
from moefx.model.moves import Moves, Owners
from moefx.model.observed import Observed
from moefx.model.replicas import Replicas
from moefx.model.runner import Runner
from moefx.model.stand_in import signed_like_the_model
from moefx.options import ARMS, Options
from moefx.placement import policies
from moefx.planning.planner import check_names, machine_of
from moefx.runtime import optimizer_guard, parameters
from moefx.runtime.gradients import GradientBuffers
from moefx.runtime.session import Session
from moefx.runtime.together import Ranks
from moefx.weights import values as weights

AT_COMPILE: list[Callable[[], None]] = []  # called for every model, for modules that stand above this one


def compile(
    model: nn.Module,
    mesh: DeviceMesh,
    options: Options | None = None,
    *,
    example_inputs: tuple | Mapping[str, Any] | Tensor | None = None,
    **changes: Any,
) -> CompiledModule:
    """Compile a plain single-device MoE `model` into a distributed training program over `mesh`.

    mesh: its dims are named "dp" (copies of everything), "mp" (attention and dense layers are cut over it), "ep"
        (experts are spread over it) and "esp" (every expert is cut over it); or "dp" and "mp" alone, into which
        `Parallel(ep, esp)` folds the experts. Every rank calls this with the same model. The parameters of `model`
        become DTensors on the mesh, or on one that divides its dims further (`compiled.mesh`). So build the optimizer
        afterwards.
    options, changes: what to choose, see `moefx.Options`. Each option, including those in groups, is also a keyword:
        `compile(model, mesh, chunks=4, ep=8)`.
    example_inputs: positional arguments as a tuple, keyword arguments as a dict, or one tensor. With them moefx
        compiles at once, instead of at the first call.
    Raises MoefxError for unknown options, MeshError and ModelError. When it captures it also raises CaptureError,
    RaiseError (an MoE layer that cannot be expressed) and DivergenceError (ranks hold different models or weights).
    """
    _check_model(model)
    options = Options() if options is None else options
    options = options.changed(**changes) if isinstance(options, Options) else options
    check_names(options)
    check_mesh(mesh)
    rooms.check_mesh(options, mesh)
    compiled = CompiledModule(model, mesh, options)
    if example_inputs is not None:
        args, kwargs = _as_call(example_inputs)
        try:
            compiled.prepare(*args, **kwargs)
        except BaseException:
            compiled.close()
            raise
    return compiled


def _as_call(example: Any) -> tuple[tuple, dict]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, (tuple, list)) else ((example,), {})


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ModelError(f"a {type(model).__name__} is not an nn.Module", hint="pass the model itself")
    if isinstance(model, CompiledModule):
        raise ModelError("the model was compiled by moefx already", hint="use it as it is")
    guards.check_not_wrapped(model)


class CompiledModule(Observed):
    """Your module, with the same submodules, parameter names and buffers, run by compiled programs.

    moefx makes a program for every kind of call (training or not, gradients or not, dtypes, argument structure).
    Sizes of the inputs are symbolic if the model allows it.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, options: Options) -> None:
        machine = machine_of(options)
        parallel = options.parallel
        spec = spec_of(mesh, parallel.ranks_per_node or (machine and machine.ranks_per_node), parallel.ep, parallel.esp,
                       divide=machine is not None or parallel.r is not None or rooms.choose(options))  # fmt: skip
        spec.token_dims(options.parallel.r or 0)
        session = Session(mesh, type(model).__name__, timedelta(seconds=options.debug.timeout_s), root=spec.root,
                          placement=policies.chosen(options.placement))  # fmt: skip
        session.bucket_bytes = BUCKET_BYTES if machine is None else machine.bucket_bytes
        mesh = session.root_mesh(mesh, cut_along(spec))
        super().__init__(model, mesh)
        parameters.distribute_parameters(model, mesh)
        optimizer_guard.guard_optimizers()
        optimizer_guard.register_step_check(self._before_optimizer_step)
        optimizer_guard.follow_zero_grad(self._after_zero_grad)
        compat.check_all_layouts_for_inf()
        compat.mend_operators()
        compat.keep_origins()
        state_dicts.cut_what_is_loaded(model)
        for follow in AT_COMPILE:
            follow()
        self.__dict__.update(
            options=options,
            _spec=spec,
            _session=session,
            _machine=machine,
            _synchronise=True,
            _arm=(),
            _arm_is_new=False,
            _by_block=None,
            _forwards={},
            _loops=None,
            _data_mesh=None,
            _profile=None,  # the last one, for reports
            _pace=metrics.Pace(),
            _params=list(model.parameters()),
            _intact=guards.Intact(model),
            _plain=guards.Plain(model),
            _pending=weights.pending(model),
            _replicas=Replicas(model, session, options.debug.compare_every),
            _moves=Moves(),
        )
        self.__dict__["_followers"] = followers = rooms.followers(self)
        self.__dict__.update(followers)  # by the names of their features
        self.__dict__["_whole"] = self._runner("", model)

    def _refold(self, spec: MeshSpec) -> None:
        """The planner spreads the experts over the mesh, before any parameter has its place."""
        self._session.refactor(spec.root)
        mesh = self._session.root_mesh(self.mesh, cut_along(spec))
        parameters.move(self._inner, mesh)
        data = self.data_mesh if self.mesh.ndim == 1 else self._data_mesh  # who has it already goes on with it
        self.__dict__.update(mesh=mesh, _spec=spec, _data_mesh=data)

    def _runner(self, path: str, module: nn.Module) -> Runner:
        home = Home(module, self._session, self._spec, path)
        ranks, asked = self._session.view.table, (self.options.parallel.ep, self.options.parallel.esp)
        refold = self._refold if not path and asked == (None, None) and ranks == tuple(sorted(ranks)) else None
        builder = Builder(self._inner, path, self._spec, self.options, self._machine, home, self._forwards, refold)
        return Runner(module, path, self._session, builder)

    @property
    def _runners(self) -> list[Runner]:
        """What was compiled: the whole model, or its blocks."""
        return [self._whole] if self._by_block is None else list(self._by_block.runners.values())

    @property
    def _homes(self) -> list[Home]:
        return [runner.builder.home for runner in self._runners]

    @property
    def _variants(self) -> list[Variant]:
        return [variant for runner in self._runners for variant in runner.variants]

    @property
    def _note(self) -> str | None:
        """Why the MoE blocks were compiled one by one, and what is lost by it; None: the model is one program."""
        return None if self._by_block is None else by_block.describe(self._by_block)

    # ---- the user's calls

    @signed_like_the_model
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns. Raises DivergenceError or CollectiveError when ranks do not act alike."""
        with self._plain.callable():
            return self._call(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self._check_values()
        guards.check_call(self._intact)
        if self._moves.wanted:
            self.prepare(*args, **kwargs)
            self._moves.restore(self._ranks(), self._runners)
        if self._synchronise and torch.is_grad_enabled():
            self._replicas.before_step(self._homes)
        self._agree_on_arm()
        for follower in self._followers.values():  # who may move experts, which ends plans for their former homes
            follower.begin_call(self._arm, args, kwargs, grad=torch.is_grad_enabled())
        self._session.placements.begin_call(self._session, is_training=self.training and torch.is_grad_enabled())
        self._session.trace, self._session.waits = [], {}
        self._pace.begin_call((args, kwargs), self._variants, trains=self.training and torch.is_grad_enabled())
        if self._by_block is None:
            self._whole.synchronise = self._synchronise
            self._try_loops(args, kwargs)
            try:
                return self._whole.call(*args, **kwargs)
            except CaptureError as error:
                self._without_whole(error, args, kwargs)
        runner = self._by_block or self._whole
        runner.synchronise = self._synchronise
        return runner.call(*args, **kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> list[Variant]:
        """Compile for this kind of call without running it. Returns the program, or one for every MoE block if the
        model cannot be captured as a whole. `moefx.inspect` shows it."""
        with self._plain.callable():
            return self._prepare(*args, **kwargs)

    def _prepare(self, *args: Any, **kwargs: Any) -> list[Variant]:
        for follower in self._followers.values():
            follower.set_arm(self._arm)
        if self._by_block is None:
            self._try_loops(args, kwargs)
            try:
                return [self._whole.prepare(*args, **kwargs)]
            except CaptureError as error:
                self._without_whole(error, args, kwargs)
        return self._variants

    def _without_whole(self, error: CaptureError, args: tuple, kwargs: dict) -> None:
        """The model as it is written cannot be captured: with loops over all experts it may be, else block by block.
        Raises the error, or what came of trying, where neither can be."""
        if self._pending and error.everywhere:
            raise CaptureError(f"{error.what} (only models with values can be compiled block by block)",
                               where=error.where, hint=f"{error.hint}; or give it values") from error  # fmt: skip
        if self._whole.variants and error.everywhere and self._loops:
            self._forwards.update(self._loops)
            self.__dict__["_loops"] = {}
            self._whole.prepare(*args, **kwargs)
            return
        if self._whole.variants and error.everywhere and "depends on values" in error.what:
            raise CaptureError(error.what, where=error.where, hint=f"{error.hint}; or make this kind of call the first "
                               "one, by compiled.prepare(..): while every rank has all weights, loops over the experts "
                               "that were hit are rewritten") from error  # fmt: skip
        if self._whole.variants or self._pending or not error.everywhere:
            raise error
        seen = by_block.observe_together(self._inner, self._session, self._spec.everyone, args, kwargs)
        if isinstance(seen, Exception):
            raise error from seen
        calls, forwards = seen
        if forwards:
            self.__dict__["_forwards"] = forwards
            self.__dict__["_whole"] = self._runner("", self._inner)
            try:
                self._whole.prepare(*args, **kwargs)
                return
            except CaptureError as again:
                error = again
        guards.check_may_be_blocks(self.options, error)
        runners, left = by_block.find(self._inner, calls, self._runner, error, self.options.debug.strict)
        found = by_block.ByBlock(self._inner, self._session, self._spec.everyone, runners, left, error)
        self.__dict__["_by_block"] = found
        self._session.tell(by_block.describe(found))

    def _try_loops(self, *call: Any) -> None:
        """While every rank has all weights: note which loops over hit experts the other mode could have rewritten."""
        if self._loops is None:
            where = self._inner, self._session, self._spec.everyone
            self.__dict__["_loops"] = {} if self._pending else by_block.loops_by_mode(*where, *call)

    def use(self, **choices: Any) -> None:
        """Use these choices from the next call on, in place of those of the options; without any, those of the options
        again. Names are those of `moefx.options.ARMS`. A program for other choices is made when first needed, and
        kept. Parameters stay where they are. All ranks call this alike, between the same two calls.

        Raises UnsupportedUse for other names, MoefxError for values that an option cannot have, and MeshError for an r
        that the mesh does not have. The next call raises DivergenceError if ranks use different choices."""
        strange = next((name for name in choices if name not in ARMS), None)
        if strange is not None:
            raise UnsupportedUse(f"'{strange}' is not chosen from call to call", where="use",
                                 hint=f"one of {', '.join(ARMS)}")  # fmt: skip
        arm = tuple(sorted(choices.items()))
        check_names(self.options.changed(**choices))
        self._spec.token_dims(choices.get("r") or 0)
        self.__dict__.update(_arm=arm, _arm_is_new=True)

    def _agree_on_arm(self) -> None:
        """Behind `use`, before the first exchange of a call: programs of other choices may begin with other ones."""
        if not self._arm_is_new:
            return
        self.__dict__["_arm_is_new"] = False
        found = self._ranks().gather(self._arm, "a call with other choices, by use()")
        other = next((rank for rank, arm in enumerate(found) if arm != found[0]), None)
        if other is not None:
            raise DivergenceError(f"ranks use different choices: rank 0 of the mesh {dict(found[0])}, rank {other} "
                                  f"{dict(found[other])}", where="use",
                                  hint="call use(..) alike on all ranks, between the same two calls")  # fmt: skip

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """For gradient accumulation: backwards of forwards in here hold their gradients back. The next backward outside
        reduces the sum, once, and adds it to `.grad`."""
        before = self._synchronise
        self.__dict__["_synchronise"] = False
        try:
            yield
        finally:
            self.__dict__["_synchronise"] = before

    @property
    def data_mesh(self) -> DeviceMesh:
        """A one-dimensional mesh of the ranks that read different data, for the data loader: `get_local_rank()` and
        `size()`. Along `mp` all ranks have the same place on it. All ranks make the first call, which makes it. It
        lives until `close`."""
        if self.mesh.ndim == 1 and not self._spec.dims("mp"):
            return self.mesh
        if self._data_mesh is None:
            dims = self._spec.dims("data")
            group, ranks = self._session.group(dims, "data", alone=True), self._session.ranks(dims)
            self.__dict__["_data_mesh"] = DeviceMesh.from_group(group, self.mesh.device_type, mesh=ranks,
                                                                mesh_dim_names=("data",))  # fmt: skip
        return self._data_mesh

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, including those of unsynchronised micro-steps."""
        for buffers in self._gradients:
            buffers.clear()
        super().zero_grad(set_to_none)

    def move_experts(self, owners: Owners) -> None:
        """Move experts to other ranks. All ranks call this, between two steps. Parameters keep their objects and names.
        They and their gradients move at once; optimizer state follows when its optimizer steps next.

        owners: {path of their module, or name of a parameter: the place of every expert along `ep`}.
        Raises UnsupportedUse, on all ranks and before anything has moved: such experts or places do not exist; a rank
        has no room for so many; the experts cannot move (cut over `esp`, static blocks, nested routings, weights that
        every rank has whole); an optimizer has state for them of another shape; a backward is pending, or gradients
        wait in `no_sync`. DivergenceError: ranks give different owners."""
        self._check_values()
        self._moves.move(self._ranks(), self._runners, owners)

    def placement_state(self) -> dict[str, Any]:
        """Which rank holds which expert, as plain data. `moefx.checkpoint` saves and restores it."""
        return self._moves.state(self._runners)

    def _ranks(self) -> Ranks:
        return Ranks(self._session, self._spec.everyone)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """`generate` of a model of transformers, see `moefx.model.generation`."""
        with self._plain.callable():
            return generation.generate(self, self._inner, self._ranks(), *args, **kwargs)

    def close(self) -> None:
        """Destroy the process groups that `compile` made. The module cannot run afterwards."""
        self._session.close()

    # ---- gradients

    @property
    def _gradients(self) -> list[GradientBuffers]:
        rest = [] if self._by_block is None else [self._by_block.buffers]
        return [*rest, *(runner.buffers for runner in self._runners)]

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        mine = {id(p) for p in self._params}
        if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            return
        self._moves.follow(self._ranks(), optimizer, self._inner)
        self._replicas.note_step(optimizer, self._homes)
        waiting = [name for buffers in self._gradients for name in buffers.names()]
        if waiting:
            raise UnsupportedUse(
                f"the optimizer steps while gradients of {len(waiting)} parameters wait to be synchronised",
                hint="run the last backward of an accumulation outside of no_sync(), or drop them by model.zero_grad()",
            )
        self._session.placements.note_step()

    def _after_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """What waits for parameters of an optimizer is dropped with their gradients."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for owner in (*self._runners, *([self._by_block] if self._by_block else ())):
            for name in owner.buffers.names():
                if all(id(param) in held for param in owner.parameters_named(name)):
                    owner.buffers.drop(name)
