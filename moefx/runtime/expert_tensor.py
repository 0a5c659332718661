"""ExpertTensor: a distributed tensor in a layout that `Shard` and `Replicate` alone do not say.

To the rest of PyTorch an ExpertTensor is a DTensor of the user's shape on the root mesh. Its `placements` are true
wherever DTensor has words for them; where the storage lies its *layout* knows:

    owner                    the part (often a view into a stack of experts) at one place of an axis, elsewhere a local
                             tensor without elements, shape [0, *shape[1:]]; placements along the axis: `Replicate`
    rows by owner            this rank's rows of dim 0, as many as it may be; `Replicate`
    several pieces of a dim  this rank's share of each; `_StridedShard` where torch can handle it, else `Replicate`

How stock code runs on it (`__torch_dispatch__`):

    pointwise, same shape    on the local tensors; the result has the layout of the input; no communication
    foreach and fused lists  split in plain DTensors (DTensor's own rules) and expert tensors (as above)
    norms over all elements  of what is stored; one collective for all norms that are read together (norms.py)
    any other read           what `Shard` does not say is gathered first (one collective over the owners' axis for all
                             tensors, and for each one over every dim of such cuts), then DTensor's rules
    any other write, views   UnsupportedUse, since a write to a gathered copy would be lost
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map

from moefx import _torch_compat as compat
from moefx.errors import UnsupportedUse
from moefx.layout import Cut, Layout, Spread
from moefx.runtime import parts

aten = torch.ops.aten


class ExpertTensor(DTensor):
    """See the module's docstring. Build with `ExpertTensor.wrap`; the slots of DTensor are kept so that
    `torch.utils.swap_tensors` can exchange the two, which is why the layout lives in the instance `__dict__`."""

    __slots__ = ()

    @staticmethod
    def wrap(local: Tensor, like: DTensor, layout: Layout, shape: torch.Size | None = None) -> ExpertTensor:
        """An expert tensor around `local` (this rank's part), on `like`'s mesh, with its placements, and of its shape
        if none is given. No copy, no autograd."""
        spec = compat.dtensor_spec(like, dtype=local.dtype, shape=shape)
        tensor = compat.new_dtensor(ExpertTensor, local, spec)
        tensor._layout = layout
        return tensor

    def __repr__(self, *, tensor_contents: object = None) -> str:
        shape, local = tuple(self.shape), self._local_tensor
        return f"ExpertTensor(shape={shape}, layout={self._layout}, local={local}, mesh={self.device_mesh})"

    def data_ptr(self) -> int:
        """0: a wrapper has no memory. (It takes over the storage offset of a row of a stack, which torch would add.)"""
        return 0

    def redistribute(self, device_mesh: DeviceMesh | None = None, placements=None, **options: Any) -> DTensor:
        """A plain DTensor with `placements`; gathers the tensor first (collective over the axis). Differentiable."""
        return _Gather.apply(self).redistribute(device_mesh, placements, **options)

    def to_local(self, *, grad_placements: Sequence | None = None) -> Tensor:
        """This rank's part (of an owner's: empty elsewhere). Differentiable; the gradient has this tensor's layout."""
        if grad_placements is not None:
            raise UnsupportedUse("to_local(grad_placements=...) on an expert tensor", hint="leave grad_placements away")
        return _ToLocal.apply(self) if torch.is_grad_enabled() and self.requires_grad else self._local_tensor

    def __tensor_flatten__(self):
        inner, context = super().__tensor_flatten__()
        return inner, (context, self._layout)

    @staticmethod
    def __tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride):
        context, layout = flatten_spec
        plain = DTensor.__tensor_unflatten__(inner_tensors, context, outer_size, outer_stride)
        return ExpertTensor.wrap(plain._local_tensor, plain, layout).requires_grad_(plain.requires_grad)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return parts.write_items(fqn, self._layout, self._local_tensor, self.shape, self.device_mesh)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return parts.chunks(self._layout, self.shape, self.device_mesh)

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        boxes = parts.boxes(self._layout, self.shape, self.device_mesh)
        return next(box.of_local(self._local_tensor) for box in boxes if torch.Size(box.offset) == index.offset)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in SPECIAL:
            return SPECIAL[func](func, args, kwargs)
        if compat.is_pointwise_list_op(func):
            return _on_lists(func, args, kwargs)
        leader = _leader(func, args, kwargs)
        return on_whole(func, args, kwargs) if leader is None else _on_local(func, leader, args, kwargs)


# torch.load(weights_only=True) knows DTensor, too.
torch.serialization.add_safe_globals([ExpertTensor, Layout, Cut, Spread])

# Norms, clipping and averages of lists of them need not go tensor by tensor.
compat.allow_lists(ExpertTensor)

# Asynchronous checkpoints copy a tensor by the `__slots__` of its own class; the storage of the slots is DTensor's.
ExpertTensor.__slots__ = DTensor.__slots__


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: ExpertTensor) -> DTensor:
        ctx.like, ctx.layout = tensor.detach(), tensor._layout
        return _plain(tensor)

    @staticmethod
    def backward(ctx, grad: DTensor) -> ExpertTensor:
        return ExpertTensor.wrap(parts.take(ctx.layout, _whole(grad), grad.device_mesh).clone(), ctx.like, ctx.layout)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: ExpertTensor) -> Tensor:
        ctx.like, ctx.layout = tensor.detach(), tensor._layout
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx, grad: Tensor) -> ExpertTensor:
        return ExpertTensor.wrap(grad, ctx.like, ctx.layout)


def laid_out(part: Tensor, like: DTensor, layout: Layout, shape: torch.Size | None = None) -> DTensor:
    """A DTensor around this rank's part, on the mesh and in the shape of `like`, or with the strides of `shape`: a
    plain one where that says all. No copy, no autograd, no check."""
    sizes = parts.sizes_of(like.device_mesh)
    spec = compat.dtensor_spec(like, part.dtype, shape, layout.placements(sizes))
    plain = compat.new_dtensor(DTensor, part, spec)
    return plain if layout.plain(sizes) == layout else ExpertTensor.wrap(part, plain, layout)


def layout_of(tensor: DTensor) -> Layout:
    """How a DTensor is laid out. Its shards are even."""
    if isinstance(tensor, ExpertTensor):
        return tensor._layout
    return Layout.of(tensor.placements, tensor.device_mesh.mesh_dim_names or (), tensor.shape)


def apart(tensor: ExpertTensor) -> tuple[str, ...]:
    """The dims of the mesh along which ranks store different parts."""
    dims = tensor.device_mesh.mesh_dim_names
    same = tensor._layout.sharers(dims)
    return tuple(dim for dim in dims if dim not in same)


def _own_part(value: ExpertTensor) -> Tensor:
    """The local tensor. Where it came from another rank, which stores it, all ranks hear of it: they would wait."""
    local, mesh = value._local_tensor, value.device_mesh
    is_wrong = local.numel() != parts.count(value._layout, value.shape, mesh)
    if parts.is_anywhere(is_wrong, mesh, apart(value)):
        raise UnsupportedUse(
            f"an expert tensor {tuple(value.shape)} holds, on some rank, what another rank stores of it",
            hint="load what each rank itself has saved; moefx.checkpoint keeps every rank's part",
        )
    return local


def _whole(value: Tensor) -> Tensor:
    """The plain whole tensor behind an argument of an operator."""
    value = _plain(value)
    if isinstance(value, DTensor):
        if all(placement.is_replicate() for placement in value.placements):
            return value._local_tensor
        return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)._local_tensor
    if value.ndim:
        raise UnsupportedUse(
            "an operator got both an expert parameter and a plain tensor",
            hint="make the plain tensor a DTensor, or use moefx's loading functions to write parameters",
        )
    return value


def _gathered(tensors: list[ExpertTensor]) -> dict[int, DTensor]:
    """id -> plain DTensor, cut no more than by `Shard`s. What owners have comes by one all-gather per mesh and axis."""
    different = {id(tensor): tensor for tensor in tensors}
    result: dict[int, DTensor] = {}
    groups: dict[tuple[DeviceMesh, tuple[str, ...]], list[ExpertTensor]] = {}
    for tensor in different.values():
        if tensor._layout.owner:
            groups.setdefault((tensor.device_mesh, tensor._layout.owner[0]), []).append(tensor)
        else:
            is_uneven = any(isinstance(cut, Spread) for cut in tensor._layout.cuts)
            result[id(tensor)] = _uncut(tensor, _own_part(tensor) if is_uneven else tensor._local_tensor)
    for (mesh, _), members in groups.items():
        held = [_own_part(t) if len(members) == 1 else t._local_tensor for t in members]
        found = parts.from_owners([t._layout for t in members], held, [t.shape for t in members], mesh)
        result |= {id(tensor): _uncut(tensor, part) for tensor, part in zip(members, found)}
    return result


def _uncut(tensor: ExpertTensor, part: Tensor) -> DTensor:
    """A plain DTensor of `tensor`, of which every rank has its part now."""
    mesh, layout = tensor.device_mesh, tensor._layout
    if not layout.cuts:
        return compat.new_dtensor(DTensor, part, compat.dtensor_spec(tensor, tensor.dtype))
    sizes = parts.sizes_of(mesh)
    plain = layout.plain(sizes)
    rest = Layout(tuple(cut for cut in layout.cuts if cut not in plain.cuts))
    said = tuple(each if dim in rest.sharers(sizes) else Replicate() for dim, each in zip(sizes, tensor.placements))
    whole = parts.joined(rest, part, plain.shape(tensor.shape, sizes), mesh)
    return compat.new_dtensor(DTensor, whole, compat.dtensor_spec(tensor, tensor.dtype, placements=said))


def _localised(value: Any, leader: ExpertTensor) -> Any:
    """An operator's argument as the local tensor that fits `leader`'s local tensor."""
    if value is leader:
        return leader._local_tensor
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, ExpertTensor) and value._layout == leader._layout and value.shape == leader.shape:
        if value._local_tensor.shape == leader._local_tensor.shape:
            return value._local_tensor
        _own_part(leader)
        return _own_part(value)
    whole = _whole(value)
    if whole.ndim == 0 and (leader.ndim > 0 or whole is value):  # a scalar or step count, as the kernels want it
        return whole
    return parts.take(leader._layout, whole.expand(leader.shape), leader.device_mesh)


def _plain(value: Any) -> Any:
    """`value`, an expert tensor as a plain DTensor (collective)."""
    return _gathered([value])[id(value)] if isinstance(value, ExpertTensor) else value


def _rewrapped(value: Any, leader: ExpertTensor) -> Any:
    return ExpertTensor.wrap(value, leader, leader._layout) if isinstance(value, Tensor) else value


def _leader(func, args: tuple, kwargs: dict) -> ExpertTensor | None:
    """The expert tensor whose layout the result takes if `func` may run on local tensors, else None."""
    pointwise = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
    if not pointwise and func not in _ELEMENT_BY_ELEMENT:
        return None
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    written = compat.written_arguments(func, args, kwargs)
    leader = written[0] if written else next(t for t in tensors if isinstance(t, ExpertTensor))
    if not isinstance(leader, ExpertTensor) or len(written) > 1:
        return None
    shapes = {t.shape for t in tensors if t.ndim} - {leader.shape}  # broadcast_shapes takes its time
    return leader if not shapes or torch.broadcast_shapes(*shapes, leader.shape) == leader.shape else None


def _on_local(func, leader: ExpertTensor, args: tuple, kwargs: dict) -> Any:
    def part(value: Any) -> Any:
        is_nested = isinstance(value, (list, tuple, dict))
        return tree_map(part, value) if is_nested else _localised(value, leader)

    result = func(*map(part, args), **{name: part(value) for name, value in kwargs.items()})
    if compat.written_arguments(func, args, kwargs):
        return leader
    return tree_map(lambda value: _rewrapped(value, leader), result)


def on_whole(func, args: tuple, kwargs: dict) -> Any:
    """A read that is not pointwise: gather, then DTensor's own rules."""
    aliased = compat.written_arguments(func, args, kwargs)
    if func is not aten.expand.default:  # autograd reads scalars through it, and nobody writes to the result
        aliased = aliased + compat.viewed_arguments(func, args, kwargs)
    if any(isinstance(t, ExpertTensor) for t in aliased):
        raise UnsupportedUse(
            f"{func} writes to an expert parameter, or makes a view of it",
            hint="read it through full_tensor(); write it with pointwise operators on the whole parameter",
        )
    whole = _gathered([t for t in tree_leaves((args, kwargs)) if isinstance(t, ExpertTensor)])
    args, kwargs = tree_map(lambda value: whole.get(id(value), value), (args, kwargs))
    return func(*args, **kwargs)


def _stored_otherwise(value: Tensor, leader: ExpertTensor) -> bool:
    if value is leader or not isinstance(value, DTensor):
        return False
    return not (isinstance(value, ExpertTensor) and value._layout == leader._layout)


def _list_leaders(func, lists: list, written: set[int]) -> dict[int, ExpertTensor]:
    """Position in the lists -> the expert tensor that says how this position runs. Positions that only read expert
    tensors and write plain DTensors are left out; a position that writes both kinds is refused."""
    leaders = {}
    for position, row in enumerate(zip(*lists)):
        experts = [value for value in row if isinstance(value, ExpertTensor)]
        if not experts:
            continue
        strangers = [t for t in row if id(t) in written and _stored_otherwise(t, experts[0])]
        if not strangers:
            leaders[position] = experts[0]
        elif any(id(t) in written for t in experts):
            raise UnsupportedUse(
                f"{func} would write expert tensors and tensors stored in another way together",
                hint="give an expert parameter gradients and optimizer state of its own layout, e.g. by zeros_like",
            )
    return leaders


def _on_lists(func, args: tuple, kwargs: dict) -> Any:
    """A pointwise foreach or fused operator; lists are as long as the first one, or empty."""
    size = len(args[0])
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple)) and value]
    leaders = _list_leaders(func, lists, {id(t) for t in compat.written_arguments(func, args, kwargs)})

    def run(positions: list[int], convert: Callable[[Any, int], Any]) -> list:
        """The operator on some positions of the lists; its outputs (none for in-place operators)."""

        def part(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [convert(value[i], i) for i in positions] if value else value
            return convert(value, positions[0])

        return func(*map(part, args), **{name: part(value) for name, value in kwargs.items()}) or []

    outputs: dict[int, Any] = {}
    plain, expert = [i for i in range(size) if i not in leaders], list(leaders)
    if plain:
        outputs |= zip(plain, run(plain, lambda value, i: _plain(value)))
    if expert:
        results = run(expert, lambda value, i: _localised(value, leaders[i]))
        outputs |= {i: _rewrapped(value, leaders[i]) for i, value in zip(expert, results)}
    return [outputs[i] for i in range(size)] if outputs else None


def _new(func, args: tuple, kwargs: dict) -> DTensor:
    """new_empty(self, size, ...) and the like read no element: of the same shape local, else replicated."""
    tensor, size = args[0], torch.Size(args[1])
    if size == tensor.shape:
        return _rewrapped(func(tensor._local_tensor, tensor._local_tensor.shape, *args[2:], **kwargs), tensor)
    spec = compat.dtensor_spec(tensor, tensor.dtype, placements=(Replicate(),) * tensor.device_mesh.ndim)
    return func(compat.new_dtensor(DTensor, tensor._local_tensor, spec), size, *args[2:], **kwargs)


def _unscale(func, args: tuple, kwargs: dict) -> None:
    """_amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale): all ranks agree on found_inf."""
    grads, found_inf, inverse_scale = args
    func([compat.local_tensor(grad) for grad in grads], found_inf, inverse_scale)
    mesh = grads[0].device_mesh
    for dim in range(mesh.ndim):
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=mesh.get_group(dim))


SPECIAL: dict[Any, Callable] = {
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    # Not a new local tensor: that one would lose the version counter which it shares with the stack.
    aten.detach.default: lambda func, args, kwargs: _rewrapped(args[0]._local_tensor, args[0]),
    aten.new_empty.default: _new,
    aten.new_full.default: _new,
    aten.new_ones.default: _new,
    aten.new_zeros.default: _new,
    aten.is_same_size.default: lambda func, args, kwargs: args[0].shape == args[1].shape,
    aten.is_pinned.default: lambda func, args, kwargs: compat.local_tensor(args[0]).is_pinned(),
}

# Pointwise in effect, though torch does not tag them so.
_ELEMENT_BY_ELEMENT = {
    aten._to_copy.default,
    aten.alias.default,
    aten.copy_.default,
    aten.empty_like.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.full_like.default,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
    aten.ones_like.default,
    aten.zero_.default,
    aten.zeros_like.default,
}
