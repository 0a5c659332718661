"""ExpertTensor: a distributed tensor in a layout that `Shard` and `Replicate` alone do not say.

To the rest of PyTorch an ExpertTensor is a DTensor of the user's shape on the root mesh. Its `placements` are true
wherever DTensor has words for them; where the storage lies its *layout* knows:

    owner                    the part (often a view into a stack of experts) at one place of an axis, elsewhere a local
                             tensor without elements, shape [0, *shape[1:]]; placements along the axis: `Replicate`
    rows by owner            this rank's rows of dim 0, as many as it may be; `Replicate`
    several pieces of a dim  this rank's share of each; `_StridedShard` where torch can handle it, else `Replicate`

How stock code runs on it (`__torch_dispatch__`):

    pointwise, same shape    on the local tensors; the result has the layout of the input; no communication
    foreach and fused lists  split in plain DTensors (by DTensor's rules) and expert tensors (as above; expert_lists.py)
    norms over all elements  of what is stored; one collective for all norms that are read together (norms.py)
    on one whole expert      at its home, views and writes as well; elsewhere nothing; no communication (at_home.py)
    transposes               of the local tensor and of the layout
    any other read           what `Shard` does not say is gathered first (one collective over the owners' axis for all
                             tensors, and for each one over every dim of such cuts), then DTensor's rules
    any other view           as a read; what comes out refuses to be written to, since the write would be lost
    any other write          UnsupportedUse

Autograd records what would live at an expert's home as any other read, and no views: gradients live where the
parameter does, however it was used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map

from moefx import _torch_compat as compat
from moefx.errors import UnsupportedUse
from moefx.layout import Cut, Layout, Spread
from moefx.runtime import at_home, parts
from moefx.runtime.expert_parts import gathered, own_part
from moefx.runtime.stepping import stepping

aten = torch.ops.aten


class ExpertTensor(DTensor):
    """See the module's docstring. Build with `ExpertTensor.wrap`; the slots of DTensor are kept so that
    `torch.utils.swap_tensors` can exchange the two, which is why the layout lives in the instance `__dict__`."""

    __slots__ = ()

    @staticmethod
    def wrap(local: Tensor, like: DTensor, layout: Layout, shape: torch.Size | None = None,
             stride: tuple[int, ...] | None = None) -> ExpertTensor:  # fmt: skip
        """An expert tensor around `local` (this rank's part), on `like`'s mesh, with its placements, and of its shape
        if none is given. No copy, no autograd."""
        spec = compat.dtensor_spec(like, dtype=local.dtype, shape=shape, stride=stride)
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
            return SPECIAL[LISTS](func, args, kwargs)
        leader = _leader(func, args, kwargs)
        return _not_by_element(func, args, kwargs) if leader is None else _on_local(func, leader, args, kwargs)


# torch.load(weights_only=True) knows DTensor, too.
torch.serialization.add_safe_globals([ExpertTensor, Layout, Cut, Spread])

# Norms, clipping and averages of lists of them need not go tensor by tensor.
compat.allow_lists(ExpertTensor)

# Asynchronous checkpoints copy a tensor by the `__slots__` of its own class; the storage of the slots is DTensor's.
ExpertTensor.__slots__ = DTensor.__slots__


class GatheredView(ExpertTensor):
    """A view of a copy of what no rank stores whole. It reads as a plain DTensor, and refuses to be written to."""

    @staticmethod
    def of(view: DTensor) -> GatheredView:
        found = compat.new_dtensor(GatheredView, view._local_tensor, view._spec)
        found._layout = Layout()  # its placements say all
        return found

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(isinstance(t, GatheredView) for t in compat.written_arguments(func, args, kwargs)):
            raise refusal(f"{func} writes to a view of an expert parameter")
        is_view = any(isinstance(t, GatheredView) for t in compat.viewed_arguments(func, args, kwargs))

        def plain(value: Any) -> Any:
            is_here = isinstance(value, GatheredView)
            return compat.new_dtensor(DTensor, value._local_tensor, value._spec) if is_here else value

        found = func(*tree_map(plain, args), **tree_map(plain, kwargs))
        return _read_only(found) if is_view else found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: ExpertTensor) -> DTensor:
        ctx.like, ctx.layout = tensor.detach(), tensor._layout
        return plain_of(tensor)

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


def refusal(what: str) -> UnsupportedUse:
    """Why an operator on expert tensors is refused, and what does the same."""
    return UnsupportedUse(what, where=stepping(),
                          hint="make x, a plain tensor of the whole shape that all ranks have (of p: p.full_tensor()), "
                          "a DTensor by DTensor.from_local(x, p.device_mesh); under no_grad, p.copy_ writes it to p")


def layout_of(tensor: DTensor) -> Layout:
    """How a DTensor is laid out. Its shards are even."""
    if isinstance(tensor, ExpertTensor):
        return tensor._layout
    return Layout.of(tensor.placements, tensor.device_mesh.mesh_dim_names or (), tensor.shape)


def _whole(value: Tensor) -> Tensor:
    """The plain whole tensor behind an argument of an operator."""
    value = plain_of(value)
    if isinstance(value, DTensor):
        if all(placement.is_replicate() for placement in value.placements):
            return value._local_tensor
        return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)._local_tensor
    if value.ndim:
        raise refusal("an operator got both an expert parameter and a plain tensor")
    return value


def localised(value: Any, leader: ExpertTensor) -> Any:
    """An operator's argument as the local tensor that fits `leader`'s local tensor."""
    if value is leader:
        return leader._local_tensor
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, ExpertTensor) and value._layout == leader._layout and value.shape == leader.shape:
        if value._local_tensor.shape == leader._local_tensor.shape:
            return value._local_tensor
        own_part(leader)
        return own_part(value)
    if isinstance(value, ExpertTensor) and value._layout == leader._layout and at_home.lives_whole(value):
        is_here = parts.holds(value._layout, value.device_mesh)
        return value._local_tensor if is_here else value._local_tensor.new_zeros((1,) * value.ndim)
    whole = _whole(value)
    if whole.ndim == 0 and (leader.ndim > 0 or whole is value):  # a scalar or step count, as the kernels want it
        return whole
    return parts.take(leader._layout, whole.expand(leader.shape), leader.device_mesh)


def plain_of(value: Any) -> Any:
    """`value`, an expert tensor as a plain DTensor (collective)."""
    return gathered([value])[id(value)] if isinstance(value, ExpertTensor) else value


def rewrapped(value: Any, leader: ExpertTensor) -> Any:
    return ExpertTensor.wrap(value, leader, leader._layout) if isinstance(value, Tensor) else value


def _leader(func, args: tuple, kwargs: dict) -> ExpertTensor | None:
    """The expert tensor whose layout the result takes if `func` may run on local tensors, else None."""
    if not _is_by_element(func, args):
        return None
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    written = compat.written_arguments(func, args, kwargs)
    leader = written[0] if written else next(t for t in tensors if isinstance(t, ExpertTensor))
    if not isinstance(leader, ExpertTensor) or len(written) > 1:
        return None
    is_by_rows = not at_home.lives_whole(leader) or all(tensor.is_contiguous() for tensor in tensors)
    if not is_by_rows and at_home.may_run(func, _experts(tensors), tensors, written):
        return None  # the strides of what comes out are not those of the leader
    shapes = {t.shape for t in tensors if t.ndim} - {leader.shape}  # broadcast_shapes takes its time
    return leader if not shapes or torch.broadcast_shapes(*shapes, leader.shape) == leader.shape else None


def _experts(tensors: Sequence[Tensor]) -> list[ExpertTensor]:
    return [tensor for tensor in tensors if isinstance(tensor, ExpertTensor)]


def _is_by_element(func, args: tuple) -> bool:
    if func is aten.index_put_.default:  # x[mask] = number
        mask = args[1][0] if len(args[1]) == 1 else None
        is_mask = mask is not None and mask.dtype == torch.bool and mask.shape == args[0].shape
        return is_mask and args[2].numel() == 1
    other = torch.Tag.nondeterministic_seeded in func.tags or torch.Tag.data_dependent_output in func.tags
    return (torch.Tag.pointwise in func.tags and not other) or func in _ELEMENT_BY_ELEMENT


def _on_local(func, leader: ExpertTensor, args: tuple, kwargs: dict) -> Any:
    def part(value: Any) -> Any:
        is_nested = isinstance(value, (list, tuple, dict))
        return tree_map(part, value) if is_nested else localised(value, leader)

    result = func(*map(part, args), **{name: part(value) for name, value in kwargs.items()})
    if compat.written_arguments(func, args, kwargs):
        return leader
    return tree_map(lambda value: rewrapped(value, leader), result)


def _not_by_element(func, args: tuple, kwargs: dict) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    experts = _experts(tensors)
    if at_home.may_run(func, experts, tensors, compat.written_arguments(func, args, kwargs)):
        home = experts[0]

        def wrap(local: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> ExpertTensor:
            return ExpertTensor.wrap(local, home, home._layout, shape, stride)

        found = at_home.run(func, args, kwargs, home, wrap)
        if found is not NotImplemented:
            return found
    if func in _TRANSPOSES and not at_home.is_tracked(tensors):
        found = _transposed(func, args, kwargs)
        if found is not None:
            return found
    return on_whole(func, args, kwargs)


def _transposed(func, args: tuple, kwargs: dict) -> DTensor | None:
    """A view of what is stored, in the layout that it has; None where rows that are spread would be no rows."""
    tensor, rest = args[0], args[1:]
    numbered = torch.empty(tuple(range(tensor.ndim)), device="meta")  # dim i has size i
    order, layout = list(func(numbered, *rest, **kwargs).shape), tensor._layout
    if any(isinstance(cut, Spread) for cut in layout.cuts) and order[0] != 0:
        return None
    cuts = tuple(cut if isinstance(cut, Spread) else replace(cut, dim=order.index(cut.dim)) for cut in layout.cuts)
    shape, part = torch.Size(tensor.shape[dim] for dim in order), tensor._local_tensor
    is_here = parts.holds(layout, tensor.device_mesh) or layout.owner is None
    part = func(part, *rest, **kwargs) if is_here else part.new_empty((0, *shape[1:]))
    return laid_out(part, tensor, Layout(cuts, layout.owner), shape)


def _read_only(found: Any) -> Any:
    return tree_map(lambda value: GatheredView.of(value) if isinstance(value, DTensor) else value, found)


def on_whole(func, args: tuple, kwargs: dict) -> Any:
    """A read that is not pointwise: gather, then DTensor's own rules."""
    if any(isinstance(t, ExpertTensor) for t in compat.written_arguments(func, args, kwargs)):
        raise refusal(f"{func} writes to an expert parameter")
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    is_view = any(isinstance(t, ExpertTensor) for t in compat.viewed_arguments(func, args, kwargs))
    is_view = is_view and func is not aten.expand.default  # autograd reads by it, and nobody writes to the result
    if is_view and at_home.is_tracked(tensors):
        raise refusal(f"{func} makes a view of an expert parameter, which autograd would record")
    whole = gathered([t for t in tensors if isinstance(t, ExpertTensor)])
    args, kwargs = tree_map(lambda value: whole.get(id(value), value), (args, kwargs))
    found = func(*args, **kwargs)
    return _read_only(found) if is_view else found


def _new(func, args: tuple, kwargs: dict) -> DTensor:
    """new_empty(self, size, ...) and the like read no element: of the same shape local, else replicated."""
    tensor, size = args[0], torch.Size(args[1])
    if size == tensor.shape:
        local = func(tensor._local_tensor, tensor._local_tensor.shape, *args[2:], **kwargs)
        return ExpertTensor.wrap(local, tensor, tensor._layout, size)
    spec = compat.dtensor_spec(tensor, tensor.dtype, placements=(Replicate(),) * tensor.device_mesh.ndim)
    return func(compat.new_dtensor(DTensor, tensor._local_tensor, spec), size, *args[2:], **kwargs)


LISTS = "lists"  # foreach and fused operators

SPECIAL: dict[Any, Callable] = {
    # Not a new local tensor: that one would lose the version counter which it shares with the stack.
    aten.detach.default: lambda func, args, kwargs: rewrapped(args[0]._local_tensor, args[0]),
    aten.new_empty.default: _new,
    aten.new_full.default: _new,
    aten.new_ones.default: _new,
    aten.new_zeros.default: _new,
    aten.is_same_size.default: lambda func, args, kwargs: args[0].shape == args[1].shape,
    aten.is_pinned.default: lambda func, args, kwargs: compat.local_tensor(args[0]).is_pinned(),
}

_TRANSPOSES = {aten.t.default, aten.transpose.int, aten.permute.default}

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
