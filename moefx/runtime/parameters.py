"""Parameters of a plain module as DTensors on the user's mesh, and their re-sharding later.

Every change of layout keeps the Parameter object (`torch.utils.swap_tensors`), its attributes, hooks, gradient and
`requires_grad`, so that an optimizer, a tied name or a user's variable that holds it stays right.

    distribute_parameters   plain             -> replicated DTensor      (new objects: a plain tensor cannot become one)
    lay_out                 replicated        -> any layout              (stacked experts: rows over an axis)
    ExpertStack.build       replicated, E of  -> any layouts             (a ModuleList of experts; storage is one stack)
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.weak import WeakTensorKeyDictionary

from moefx import _torch_compat as compat
from moefx.errors import CheckpointError, ModelError, StaleStateError, UnsupportedUse
from moefx.layout import Box, Layout
from moefx.runtime import expert_lists as _lists  # noqa: F401  how lists of expert tensors are computed
from moefx.runtime import norms as _norms  # noqa: F401  and their norms
from moefx.runtime import parts
from moefx.runtime.expert_tensor import ExpertTensor, laid_out, layout_of

# Plain parameters that `distribute_parameters` replaced -> their first name. Only an optimizer built before that (or a
# user's variable) keeps them alive.
replaced_parameters: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


_layout_changes = 0


def layout_changes() -> int:
    """How often a parameter of this process was re-sharded: optimizer state made before may have to follow."""
    return _layout_changes


def distribute_parameters(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replace every plain Parameter of `module` by one whose tensor is a DTensor replicated over `mesh`.

    No communication: the ranks are taken to hold equal values, which the first call checks. Storage is shared with the
    old Parameter, parameters tied under several names stay tied, and `requires_grad`, gradients, hooks and attributes
    are kept. Buffers stay as they are. Raises ModelError, before anything was changed, for a parameter that is not a
    plain `nn.Parameter`.
    """
    for name, param in module.named_parameters():
        if type(param) is not nn.Parameter:
            kind = "is a DTensor already" if isinstance(param, DTensor) else f"is a {type(param).__name__}"
            raise ModelError(
                f"parameter `{name}` {kind}", where=name, hint="compile the plain single-device module, once"
            )

    def replicated(plain: Tensor) -> DTensor:
        placements = [Replicate()] * mesh.ndim
        return DTensor.from_local(plain.detach(), mesh, placements, shape=plain.shape, stride=plain.stride())

    compat.forget_meshes()
    new_of: dict[nn.Parameter, nn.Parameter] = {}
    for path, owner in module.named_modules():
        for name, param in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if param not in new_of:
                new_of[param] = _parameter_like(param, replicated(param), replicated)
                replaced_parameters[param] = f"{path}.{name}" if path else name
                param._backward_hooks = None  # shared with the new one
                if param.requires_grad:
                    param.register_hook(functools.partial(_refuse_gradient, replaced_parameters[param]))
            setattr(owner, name, new_of[param])


def _refuse_gradient(name: str, grad: Tensor) -> None:
    """Of the Parameter that was there before: nobody would see it."""
    raise UnsupportedUse(
        f"a gradient flows to what the parameter `{name}` was before the model was compiled",
        hint="read it as an attribute of its module in the forward: no list, dict or closure made before follows it",
    )


def move(module: nn.Module, mesh: DeviceMesh) -> None:
    """Bring replicated parameters, each Parameter object in place, to another mesh of the same ranks. No communication.
    """

    def moved(tensor: DTensor) -> DTensor:
        placements = [Replicate()] * mesh.ndim
        return DTensor.from_local(local(tensor).detach(), mesh, placements, shape=tensor.shape, stride=tensor.stride())

    for param in module.parameters():
        if param.device_mesh != mesh:
            assert is_replicated(param), "a parameter was sharded already"
            _become(param, moved(param), moved)


def lay_out(param: nn.Parameter, layout: Layout, storage: Tensor | None = None, memory: int | None = None) -> None:
    """Give a replicated parameter this layout, in place, without communication. Laid out so already: nothing changes.

    storage: where this rank's part lies, values included; None: in memory of its own, so that the full tensor can be
    freed. memory: for so many rows of dim 0, this rank's in front, zeros behind them (see `front`); None: for its own.
    A parameter that is laid out so already may get more. Raises UnsupportedUse on a torch without subclasses of DTensor
    for what is more than `Shard`s; ValueError for a layout that does not fit.
    """
    is_there = layout_of(param) == layout
    if is_there and storage is None and (memory is None or _rows_of_memory(local(param)) >= memory):
        return
    assert is_there or is_replicated(param), "a parameter was sharded already, in another way"
    sizes = parts.sizes_of(param.device_mesh)
    layout.check(param.shape, sizes)
    if layout.plain(sizes) != layout:
        check_subclass_support(param)

    def placed(whole: DTensor, memory: int | None = None) -> DTensor:
        if layout == Layout() and memory is None:
            return whole
        part = local(whole) if is_there else parts.take(layout, local(whole), whole.device_mesh)
        return laid_out(_in_memory(part, memory), whole, layout, whole.shape if memory else None)

    data = placed(param, memory) if storage is None else laid_out(storage, param, layout, param.shape)
    _become(param, data, placed)


def _in_memory(part: Tensor, rows: int | None) -> Tensor:
    """A copy of [n, ..], in memory for so many rows; zeros behind those that there are."""
    if rows is None:
        return part.clone()
    memory = part.new_zeros((rows, *part.shape[1:]))
    return memory[: len(part)].copy_(part)


def _rows_of_memory(part: Tensor) -> int:
    row = part.shape[1:].numel() * part.itemsize
    return (part.untyped_storage().nbytes() - part.storage_offset() * part.itemsize) // row if row else 0


def front(part: Tensor, rows: int) -> Tensor:
    """[rows, ..] of the memory that `lay_out` made: `part`, this rank's rows, and what lies behind them."""
    return part if len(part) == rows else part.as_strided((rows, *part.shape[1:]), part.stride(), part.storage_offset())


@dataclass(frozen=True, eq=False)
class ExpertStack:
    """E separate parameters of one shape, of which each rank stores its parts in one tensor.

    memory  [M, ...] of all local parameters; in front the parts of the experts that this rank has any of, by
            increasing expert, then zeros, or whatever was written there
    params  the user's Parameter objects, one per expert, each laid out now
    rows    row of `memory` that holds expert e, or None where another rank holds it
    """

    memory: Tensor
    params: tuple[nn.Parameter, ...]
    rows: tuple[int | None, ...]

    @property
    def local(self) -> Tensor:
        """[E_local, ...], the parts of this rank's experts."""
        return self.memory[: sum(row is not None for row in self.rows)]

    @staticmethod
    def build(params: Sequence[nn.Parameter], layouts: Sequence[Layout], memory: int | None = None) -> ExpertStack:
        """Stack replicated parameters of one mesh; `layouts[e]`: of expert e. Their parts are of one shape.

        memory: rows of it, at least this rank's; None: as many. In place (each Parameter object stays), no
        communication. Raises ModelError if the parameters differ in shape or dtype, or if one of them stands for two
        experts; UnsupportedUse on a torch without subclasses of DTensor.
        """
        assert params, "a stack needs an expert"
        assert len(layouts) == len(params), f"{len(layouts)} layouts for {len(params)} experts"
        if len({id(p) for p in params}) < len(params):
            raise ModelError("two experts share one parameter", hint="give every expert parameters of its own")
        kinds = {(tuple(p.shape), p.dtype) for p in params}
        if len(kinds) > 1:
            raise ModelError(f"experts differ in shape or dtype: {sorted(map(str, kinds))}")
        mesh, whole = params[0].device_mesh, [local(p).detach() for p in params]
        mine = [e for e, layout in enumerate(layouts) if parts.holds(layout, mesh)]
        rows = tuple(mine.index(e) if e in mine else None for e in range(len(params)))
        shape = layouts[0].shape(whole[0].shape, parts.sizes_of(mesh))
        stack = whole[0].new_zeros((len(mine) if memory is None else memory, *shape))
        for row, e in enumerate(mine):
            stack[row].copy_(parts.take(layouts[e], whole[e], mesh))
        for param, layout, row in zip(params, layouts, rows):
            lay_out(param, layout, parts.take(layout, local(param), mesh).clone() if row is None else stack[row])
        return ExpertStack(stack, tuple(params), rows)

    def allocated(self, device: torch.device) -> ExpertStack:
        """The stack with memory of undefined values, if it was on the meta device; the Parameter objects stay."""
        if not self.memory.is_meta:
            return self
        found = torch.zeros_like(self.memory, device=device)
        for param, row in zip(self.params, self.rows):
            storage = torch.empty_like(local(param), device=device) if row is None else found[row]
            _become(param, wrap_gradient(param, storage), lambda grad: grad)
        return ExpertStack(found, self.params, self.rows)

    def split_grad(self, local_grad: Tensor, chosen: Sequence[bool] | None = None) -> list[Tensor | None]:
        """Gradients of all E parameters as ExpertTensors: views of the rows of this rank's experts in `local_grad`
        [E_local or more, ...], empty elsewhere. chosen [E]: None for the others, on all ranks."""
        assert local_grad.shape[1:] == self.memory.shape[1:], f"{tuple(local_grad.shape)} in {self.memory.shape}"
        pieces = local_grad.unbind()
        return [
            wrap_gradient(param, local(param) if row is None else pieces[row]) if has_gradient else None
            for param, row, has_gradient in zip(self.params, self.rows, chosen or [True] * len(self.params))
        ]


class Written:
    """Which of the parameters are written to from now on. A write to a DTensor is not counted by its local tensor."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params, self._versions, self._changes = params, list(map(_version, params)), _layout_changes

    def check(self, names: Mapping[str, nn.Parameter], step: int) -> None:
        """Raises StaleStateError if one was. names: of all parameters."""
        now = list(map(_version, self._params))
        if now == self._versions or self._changes != _layout_changes:  # another layout counts anew
            return
        written = next(param for param, a, b in zip(self._params, now, self._versions) if a != b)
        name = next(name for name, param in names.items() if param is written)
        raise StaleStateError(
            f"the parameter {name} was written to between the forward and the backward of step {step}",
            hint="write to parameters after backward",
        )


_version = operator.attrgetter("_version")


def local(param: DTensor) -> Tensor:
    """The plain local tensor that stores `param` on this rank: no copy, no autograd, no communication."""
    return compat.local_tensor(param)


def held(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Layout]]:
    """What this rank stores of all parameters that are not on the meta device, and how these are laid out."""
    params = {name: param for name, param in module.named_parameters() if not local(param).is_meta}
    return {name: local(p) for name, p in params.items()}, {name: layout_of(p) for name, p in params.items()}


def allocate(param: nn.Parameter, device: torch.device, memory: int | None = None) -> None:
    """Give a parameter on the meta device memory of undefined values, in its layout and in place. memory: as in
    `lay_out`."""
    if local(param).is_meta:
        storage = torch.empty_like(local(param), device=device)
        storage = storage if memory is None else _in_memory(storage, memory)
        _become(param, wrap_gradient(param, storage), lambda grad: grad)


def wrap_gradient(param: DTensor, local_grad: Tensor) -> DTensor:
    """`local_grad` (of the local tensor's shape, or with more rows behind; any dtype) as a DTensor with the layout of
    `param`, without a copy."""
    if local_grad.shape != (part := local(param)).shape:
        local_grad = local_grad[: len(part)]
    if isinstance(param, ExpertTensor):
        return ExpertTensor.wrap(local_grad, param, layout_of(param))
    return compat.new_dtensor(DTensor, local_grad, compat.dtensor_spec(param, dtype=local_grad.dtype))


def take_local(param: DTensor, whole: Tensor) -> Tensor:
    """This rank's part of a plain tensor of the whole shape, cut in the layout of `param`; a view unless there are
    several pieces."""
    return parts.take(layout_of(param), whole, param.device_mesh)


def boxes(param: DTensor) -> list[Box]:
    """The blocks of the whole tensor that this rank stores."""
    return parts.boxes(layout_of(param), param.shape, param.device_mesh)


def load_full_(param: DTensor, full: Tensor) -> None:
    """Copy this rank's part of the plain tensor `full` (any device) into `param`, in place, without communication.

    Raises CheckpointError if `full` is distributed or of another shape or dtype.
    """
    if isinstance(full, DTensor):
        raise CheckpointError("a plain tensor was expected, got a DTensor", hint="pass full_tensor() of it")
    if full.shape != param.shape or full.dtype != param.dtype:
        raise CheckpointError(
            f"a tensor {tuple(full.shape)} of {full.dtype} does not fit "
            f"a parameter {tuple(param.shape)} of {param.dtype}"
        )
    with torch.no_grad():
        local(param).copy_(take_local(param, full.detach()))


def full(param: DTensor) -> Tensor:
    """The whole plain tensor, on every rank; a collective for all ranks of the mesh. Do not write to it."""
    with torch.no_grad():
        return param.detach().full_tensor()


def follow_layout(param: DTensor, state: DTensor) -> DTensor:
    """Replicated optimizer state of `param` in the layout that `param` has now, in memory of its own."""
    return wrap_gradient(param, take_local(param, local(state)).clone())


def is_replicated(tensor: DTensor) -> bool:
    """Whether every rank stores the whole tensor."""
    return not isinstance(tensor, ExpertTensor) and all(p.is_replicate() for p in tensor.placements)


def check_subclass_support(param: nn.Parameter) -> None:
    """Raises UnsupportedUse where torch runs operators on a subclass of DTensor as on a plain one. 2.11 does so unless
    it is told."""
    plain = param.detach()
    wrapped = ExpertTensor.wrap(local(plain), plain, Layout(owner=((), 0)))
    if type(wrapped.detach()) is not ExpertTensor:
        compat.let_subclasses_dispatch()
    if type(wrapped.detach()) is not ExpertTensor:
        raise UnsupportedUse(
            f"torch {torch.__version__} cannot spread a parameter {tuple(param.shape)} in uneven slices",
            hint="use torch 2.13 or later, or a number of experts that divides over ep. If experts have parameters of "
            "their own: one stacked parameter [E, ...]. If gate and up are one matrix: a mesh without esp",
        )


def _parameter_like(param: nn.Parameter, data: DTensor, convert: Callable[[Tensor], DTensor]) -> nn.Parameter:
    """A new Parameter around `data` with everything that a user can have set on `param`; its gradient is converted."""
    new = nn.Parameter(data, requires_grad=param.requires_grad)
    for name, value in vars(param).items():
        vars(new).setdefault(name, value)
    if param.grad is not None:
        new.grad = convert(param.grad)
    compat.copy_hooks(param, new)
    return new


def _become(param: nn.Parameter, data: DTensor, convert: Callable[[Tensor], DTensor]) -> None:
    """Give the Parameter object `param` new content, and `convert` its gradient."""
    global _layout_changes
    with torch.no_grad():
        new = _parameter_like(param, data, convert)
    try:
        torch.utils.swap_tensors(param, new)
    except RuntimeError as error:
        raise UnsupportedUse(
            "a parameter could not be re-sharded because something else holds on to its tensor",
            hint=f"drop weak references to it and graphs made from it before the first call ({error})",
        ) from error
    _layout_changes += 1
