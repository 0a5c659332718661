"""A model that cannot be captured as a whole: its MoE blocks run as programs of their own, the rest eagerly.

The blocks are the largest modules with experts in them that can be captured. Around them the user's code runs as it
is, on this rank's own tensors in place of the DTensors; the gradients of its parameters are averaged over the ranks
when all of them are there, at the end of the backward.

What is lost: communication of a block hides only behind computation of that block, and that of the rest's gradients
behind nothing. The user's control flow must call the same blocks in the same order on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from moefx import _torch_compat as compat
from moefx.capture import expert_modules, hit_loops
from moefx.capture.inputs import copies
from moefx.capture.loops_tried import Call, Forwards, Loops
from moefx.capture.no_trace import kept
from moefx.capture.python_state import ROOT_HOOKS
from moefx.errors import CaptureError, DivergenceError, RaiseError, UnsupportedUse
from moefx.model.runner import Runner
from moefx.runtime import parameters
from moefx.runtime.agreement import gather
from moefx.runtime.collectives import all_reduce_start, check_header_start
from moefx.runtime.gradients import GradientBuffers, Ready, reduce_gradients
from moefx.runtime.session import Session
from moefx.runtime.step import StepState


def find(model: nn.Module, calls: Mapping[str, list[Call]], make: Callable[[str, nn.Module], Runner],
         why: CaptureError, strict: bool) -> tuple[dict[str, Runner], dict[str, str]]:  # fmt: skip
    """{path: a runner with programs for these calls}, {path of experts that stay as they are, if not `strict`: why}.
    Raises `why`, with what was tried, where experts are found that no block can be made of, or none at all; and
    RaiseError."""
    modules = dict(model.named_modules())
    holders = expert_modules.holders(modules, calls)
    found: dict[str, Runner] = {}
    left: dict[str, str] = {}

    def visit(path: str, tried: list[tuple[str, str | None]]) -> None:
        """Make a block of the module, or of modules in it, for all experts in it."""
        inside = [holder for holder in holders if holder == path or holder.startswith(f"{path}.")]
        if not inside:
            return
        shared = _shared(model, modules[path])
        if shared is not None:
            tried = [*tried, (f"{path}: its parameter `{shared}` is also used outside of it", "untie the parameters")]
        elif path in calls:  # a list of layers is not called itself
            runner = make(path, modules[path])
            error = _failure(runner, calls[path], last=strict and not tried)
            if error is None:
                found[path] = runner
            if error is None or (isinstance(error, RaiseError) and error.is_dense):
                return  # or its parameters [E, .., ..] are of no experts
            tried = [*tried, (f"{path}: {error.what}{f' ({error.where})' if error.where else ''}", error.hint)]
        if path in holders:
            if strict:
                is_part = isinstance(modules[path], expert_modules.LISTS) and path.rpartition(".")[0] in calls
                raise _none_around(path, tried, is_part, why) from why
            left[path] = tried[-1][0] if tried else "the first call does not reach it"
            return
        for name, _ in modules[path].named_children():
            visit(f"{path}.{name}", tried)

    for name, _ in model.named_children():
        visit(name, [])
    if not found and not left:
        raise CaptureError(f"{why.what}\n  and no module of it holds experts that could be compiled by themselves (a "
                           "list of modules of one kind, or parameters [E, .., ..])", where=why.where,
                           hint=why.hint) from why  # fmt: skip
    return found, left


def _shared(model: nn.Module, block: nn.Module) -> str | None:
    """A parameter of the block that a module outside of it has, too, as embeddings are that are tied to a head."""
    inside, own = set(block.modules()), {param: name for name, param in block.named_parameters()}
    outside = (param for module in model.modules() if module not in inside for param in module._parameters.values())
    return next((own[param] for param in outside if param in own), None)


def _failure(runner: Runner, calls: list[Call], last: bool) -> RaiseError | CaptureError | None:
    """Why there are no programs for these calls; None: now there are. Raises what smaller blocks do not mend, and,
    if this is the `last` word, that experts are not understood."""
    try:
        for args, kwargs in calls:
            with _without_hooks(runner.module):
                runner.prepare(*args, **kwargs)
    except RaiseError as error:
        if last and not error.is_dense:
            raise
        return error
    except CaptureError as error:
        if not error.everywhere:
            raise
        return error
    return None


def _none_around(path: str, tried: list[tuple[str, str | None]], is_part: bool, why: CaptureError) -> CaptureError:
    """tried: what was wrong with the blocks around it, and what to do. is_part: it is a list of modules of one that was
    called, and never called itself."""
    hints = [hint for _, hint in tried if hint]
    hint = f"{why.hint}; or for a block alone: {hints[-1]}" if hints and hints[-1] != why.hint else why.hint
    if not tried and not is_part:
        tried, hint = [(f"{path}: this call does not reach it", None)], "begin with a call that reaches all blocks"
    lines = [f"\n  and no block around {path} by itself:", *(line for line, _ in tried)]
    about = "\n    ".join(lines) if tried else ""
    return CaptureError(f"{why.what}{about}", where=why.where, hint=hint)


def observe(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> tuple[dict[str, list[Call]], Forwards]:
    """Run the model once, eagerly, and note how every module in it is called, and which loops over hit experts can be
    captured as loops over all, in training and in evaluation. Buffers, attributes and random states stay."""
    calls: dict[str, list[Call]] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng())
        for path, module in model.named_modules():
            def note(module: nn.Module, args: tuple, kwargs: dict, path: str = path) -> None:
                calls.setdefault(path, []).append((args, dict(kwargs)))

            handle = module.register_forward_pre_hook(note, with_kwargs=True)
            stack.callback(handle.remove)
        own = {p: parameters.local(p).detach().requires_grad_(p.requires_grad) for p in model.parameters()}
        with kept(model, runs=True), _in_place(model, own):
            args, kwargs = copies(args, kwargs)
            model(*args, **kwargs)
            forwards = dict(hit_loops.find(model, calls))
            for module in model.modules():
                module.training = not module.training
            forwards |= hit_loops.find(model, calls)
    return calls, forwards


def observe_together(model: nn.Module, session: Session, axes: tuple[str, ...], args: tuple,
                     kwargs: dict) -> tuple[dict[str, list[Call]], Forwards] | Exception:  # fmt: skip
    """What `observe` finds on all ranks; the reason if it fails on any."""
    calls, forwards, error = {}, {}, None
    try:
        calls, forwards = observe(model, args, kwargs)
    except Exception as caught:
        error = caught
    paths = {module: path for path, module in model.named_modules()}
    mine = None if error else {(paths[module], mode): loops.left_out for (module, mode), loops in forwards.items()}
    found = gather(session, axes, mine, "running the model once")
    if None in found:
        return error or RuntimeError("the model failed on another rank")
    common = {}
    for (module, mode), loops in forwards.items():
        of_ranks = [each.get((paths[module], mode)) for each in found]
        if None not in of_ranks:
            common[module, mode] = Loops(loops.methods, frozenset().union(*of_ranks))
    return calls, common


def loops_by_mode(model: nn.Module, session: Session, axes: tuple[str, ...], args: tuple, kwargs: dict) -> Forwards:
    """Loops over hit experts that can be captured as loops over all, where modes of the model have code of their own:
    none in other models, which are not run for it, and where the model fails."""
    if not hit_loops.differ_by_mode(model):
        return {}
    with torch.no_grad():
        seen = observe_together(model, session, axes, args, kwargs)
    return {} if isinstance(seen, Exception) else seen[1]


@contextlib.contextmanager
def _in_place(model: nn.Module, tensors: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """The model with these plain tensors in place of its parameters."""
    placed = []
    try:
        for module in model.modules():
            for name, param in list(module._parameters.items()):
                if param is not None and param in tensors:
                    placed.append((module, name, param))
                    module._parameters[name] = tensors[param]
        yield
    finally:
        for module, name, param in placed:
            module._parameters[name] = param


_UNTIE = (
    "the model is compiled block by block, since it cannot be captured as a whole: untie the parameter, or compute "
    "inside of the block what is computed from it"
)


class ByBlock:
    """Runs a model whose blocks are compiled. synchronise: as of a Runner."""

    def __init__(self, model: nn.Module, session: Session, axes: tuple[str, ...], runners: dict[str, Runner],
                 left: dict[str, str], why: CaptureError) -> None:  # fmt: skip
        self.model, self.session, self.axes = model, session, axes
        self.runners, self.left, self.why = runners, left, why
        self.buffers = GradientBuffers()
        self.synchronise = True
        self._numbers = itertools.count()
        blocks = {module for runner in runners.values() for module in runner.module.modules()}
        self.rest: dict[nn.Parameter, str] = {}
        for path, module in model.named_modules():
            for name, param in module.named_parameters(path, recurse=False) if module not in blocks else ():
                self.rest.setdefault(param, name)
        self._local: dict[nn.Parameter, Tensor] = {}  # of the last call
        self._again: dict[nn.Module, dict[str, nn.Parameter]] = {}
        for module in model.modules():
            if any(param in self.rest for param in module.parameters(recurse=False)):
                module.register_forward_pre_hook(self._enter_again)
                module.register_forward_hook(self._leave_again, always_call=True)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        step = StepState(0, next(self._numbers), self.buffers, synchronise=self.synchronise)
        params = list(self.rest)
        if torch.is_grad_enabled() and any(p.requires_grad for p in params):
            local = _Locals.apply(self, step, *params)
        else:
            local = [parameters.local(p) for p in params]
        self._local = dict(zip(params, local))
        with _in_place(self.model, self._local), self._blocks():
            try:
                outputs = self.model(*args, **kwargs)
            except DivergenceError as error:
                hint = (f"{error.hint}; what runs between blocks may call them differently on one rank, depending on "
                        "its values")  # fmt: skip
                raise DivergenceError(error.what, where=error.where, hint=hint) from error
            except RuntimeError as error:
                if "mixed torch.Tensor and DTensor" not in str(error):
                    raise
                raise self._used_outside() from error
        if any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(outputs)):
            raise self._used_outside()
        return outputs

    def _used_outside(self) -> UnsupportedUse:
        paths = ", ".join(f"`{path}`" for path in self.runners)
        return UnsupportedUse(
            f"a parameter that belongs to a block with experts ({paths}) is used outside of it", hint=_UNTIE
        )

    @contextlib.contextmanager
    def _blocks(self) -> Iterator[None]:
        """The programs in place of the blocks; they stay there for activation checkpoints, which call modules again in
        the backward."""
        for runner in self.runners.values():
            runner.synchronise = self.synchronise
            _take_away(runner.module)
            runner.module.forward = functools.partial(_run, runner, runner.module.__dict__.get("forward"))
        try:
            yield
        except BaseException:
            for runner in self.runners.values():
                _take_away(runner.module)
            raise

    def _enter_again(self, module: nn.Module, args: tuple) -> None:
        """A module of the rest is called in a backward, where the call of the model is over."""
        if compat.in_backward():
            self._again[module] = {n: p for n, p in module._parameters.items() if p in self.rest}
            module._parameters.update({n: self._local[p] for n, p in self._again[module].items()})

    def _leave_again(self, module: nn.Module, args: tuple, output: Any) -> None:
        module._parameters.update(self._again.pop(module, {}))

    def reduce(self, step: StepState, grads: list[Tensor | None]) -> list[DTensor | None]:
        """Averages over all ranks, parameter by parameter in one order; None where no rank has a gradient."""
        check_header_start(self.session, step, axis=self.axes, region="the gradients of the rest").wait()
        scale, given = 1.0 / self.session.size(self.axes), {}
        for (param, name), grad, is_wanted in zip(self.rest.items(), grads, self._wanted(step, grads)):
            if is_wanted:
                own = torch.zeros_like(parameters.local(param)) if grad is None else grad.contiguous()
                given[param] = Ready((name, self.axes, scale), own, grad is None)
        totals = dict(zip(given, reduce_gradients(self.session, step, [*given.values()])))
        return [None if totals.get(param) is None else parameters.wrap_gradient(param, totals[param])
                for param in self.rest]  # fmt: skip

    def parameters_named(self, name: str) -> list[nn.Parameter]:
        """Those whose gradient is put aside under this name."""
        return [param for param, own in self.rest.items() if own == name]

    def _wanted(self, step: StepState, grads: list[Tensor | None]) -> list[bool]:
        """Which parameters of the rest have a gradient: on this rank or on another, where that is to be averaged."""
        if not step.synchronise:
            return [grad is not None for grad in grads]
        waiting = set(self.buffers.names())
        mine = [float(grad is not None or name in waiting) for grad, name in zip(grads, self.rest.values())]
        found = torch.tensor(mine, device=self.session.device)
        total = all_reduce_start(self.session, found, axes=self.axes, scale=1.0, name="the places of gradients").wait()
        return [param.requires_grad and number > 0 for param, number in zip(self.rest, total.tolist())]


def _take_away(module: nn.Module) -> None:
    """A program from its place, where the user's own forward may have been."""
    own = module.__dict__
    if getattr(own.get("forward"), "func", None) is _run:
        _, users = own.pop("forward").args
        own.update({} if users is None else {"forward": users})


@contextlib.contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """torch calls those of a block before and after its program: they are no part of that."""
    own = module.__dict__
    hooks = {name: own[name] for name in ROOT_HOOKS}
    own.update({name: type(own[name])() for name in ROOT_HOOKS})
    try:
        yield
    finally:
        own.update(hooks)


def _run(runner: Runner, users: Callable | None, *args: Any, **kwargs: Any) -> Any:
    """What a block gives. A program may have to be made first, of the block as it is written. users: a forward that is
    no method of its class."""
    if torch.compiler.is_compiling():  # a forward that was put around this one is captured
        return (users or functools.partial(type(runner.module).forward, runner.module))(*args, **kwargs)
    program = runner.module.forward
    _take_away(runner.module)
    try:
        with _without_hooks(runner.module):
            return runner.call(*args, **kwargs)
    finally:
        runner.module.forward = program


class _Locals(torch.autograd.Function):
    """DTensors to this rank's own tensors; the backward runs once, when all gradients are there."""

    @staticmethod
    def forward(ctx: Any, owner: ByBlock, step: StepState, *params: nn.Parameter) -> tuple:
        ctx.owner, ctx.step = owner, step
        ctx.written = parameters.Written([p for p in params if p.requires_grad])
        ctx.set_materialize_grads(False)
        found = [parameters.local(p).detach() for p in params]
        ctx.mark_non_differentiable(*(t for t, p in zip(found, params) if not p.requires_grad))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        if torch.is_grad_enabled():
            raise UnsupportedUse("a gradient of a gradient (create_graph=True) was asked for",
                                 hint="differentiate the uncompiled model twice")
        ctx.written.check({name: param for param, name in ctx.owner.rest.items()}, ctx.step.number)
        return (None, None, *ctx.owner.reduce(ctx.step, list(grads)))


def describe(found: ByBlock) -> str:
    """What compiling block by block costs, for `explain` and `inspect`."""
    nbytes = sum(parameters.local(p).numel() * p.element_size() for p in found.rest if p.requires_grad)
    number = f"{len(found.runners)} block{'' if len(found.runners) == 1 else 's'}"
    return (
        f"compiled block by block ({number}), since {found.why.what} "
        f"({found.why.where or 'the whole model'}). Lost: exchanges of a block hide only behind that block's own "
        f"computation, not behind what lies between blocks, and the gradients of the rest ({nbytes / 1e6:.1f} MB) are "
        "averaged after the backward, behind nothing. What the rest adds to buffers stays each rank's own"
        + "".join(f"\n  {path} stays as it is, whole on every rank: {reason}" for path, reason in found.left.items())
    )
