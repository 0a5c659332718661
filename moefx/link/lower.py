"""Scheduled graph -> linked graph: every dialect op becomes a plain call into `moefx.runtime`.

The linked graph takes `session` and `step` first. What differs from rank to rank comes from them alone, so the code is
the same on all ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from moefx._torch_compat import OpOverload
from moefx.axes import MeshSpec, split_axes
from moefx.errors import VerifyError
from moefx.ir import edit, regions
from moefx.ir.describe import module_path
from moefx.ir.level import Level
from moefx.ir.ops.order import start, wait
from moefx.ir.verify import Facts, verify
from moefx.link import reuse
from moefx.pass_types import RegionFacts, module_name, region_names
from moefx.runtime import alltoall, collectives, gradients, grouped, kernels
from moefx.transport import codecs

_ops = torch.ops.moefx
_VIEWS = {"t", "transpose", "permute", "reshape", "view", "_unsafe_view", "squeeze", "unsqueeze", "slice", "select"}


class Linker:
    """Links one graph. `names`: the parameter or input name of every program input, for messages and buffers. regions:
    of the program. path: of the module in the model."""

    def __init__(self, gm: GraphModule, names: Sequence[str], device_type: str, regions: Iterable[RegionFacts] = (),
                 path: str = "") -> None:  # fmt: skip
        self.gm, self.names, self.device_type, self.path = gm, names, device_type, path
        self.regions = region_names(regions, path)
        self.lowered: dict[Node, str] = {}  # names of the nodes that were lowered, before
        self.renamed: dict[str, str] = {}  # {a node's name: its name before, which means something else here}
        with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
            self.session = gm.graph.placeholder("session")
            self.step = gm.graph.placeholder("step")

    def run(self) -> GraphModule:
        for node in list(self.gm.graph.nodes):
            if node.op in ("placeholder", "output"):
                continue
            self._lower(node)
        verify(self.gm, Level.LINKED, Facts(MeshSpec({})))
        reuse.run(self.gm)
        names = {node: self.lowered.get(node, node.name) for node in self.gm.graph.nodes}
        self.renamed = edit.rename(self.gm, names)
        return self.gm

    def _lower(self, node: Node) -> None:
        if node.target is start:
            new = _STARTS[node.args[0]](self, node, *node.args[1:])
        elif node.target is wait:
            new = self.gm.graph.call_method("wait", (node.args[0],))
        elif node.target in _PLAIN:
            new = _PLAIN[node.target](self, node, *node.args)
        elif isinstance(node.target, OpOverload) and node.target.namespace == "moefx":
            raise VerifyError(f"{node.target} has no runtime function", where=node.name)
        else:
            self._place_on_device(node)
            return
        node.prepend(new)
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        self.lowered[new] = node.name
        self.gm.graph.erase_node(node)

    def region_of(self, node: Node) -> str:
        """The region that a collective belongs to, as users know it."""
        return self.regions.get(regions.region_of(node)) or module_name(self.path, module_path(node))

    def call(self, function: Callable, *args, **kwargs) -> Node:
        return self.gm.graph.call_function(function, args, kwargs)

    def _place_on_device(self, node: Node) -> None:
        """`cuda:3` in the graph of rank 3 becomes `cuda`: every rank works on its own current device."""

        def plain(value):
            is_device = isinstance(value, torch.device) and value.index is not None
            return torch.device(value.type) if is_device else value

        node.args = torch.utils._pytree.tree_map(plain, node.args)
        node.kwargs = torch.utils._pytree.tree_map(plain, node.kwargs)


def _exchange_counts(link: Linker, node: Node, counts, n, axis) -> Node:
    return link.call(
        collectives.exchange_counts_start, link.session, link.step, counts, axis=axis, region=link.region_of(node)
    )


def _counts_to_host(link: Linker, node: Node, traffic, axis) -> Node:
    return link.call(collectives.counts_to_host_start, link.session, traffic, axis=axis)


def _all_to_all(link: Linker, node: Node, rows, plan, out_rows, n, axis, reverse) -> Node:
    return link.call(
        collectives.all_to_all_start,
        link.session,
        rows,
        plan,
        axis=axis,
        region=link.region_of(node),
        reverse=reverse,
        num_rows=out_rows,
    )


def _exchange_phase(link: Linker, node: Node, rows, plan, out_rows, n, axis, m, algorithm, step, reverse) -> Node:
    return link.call(
        alltoall.exchange_phase_start,
        link.session,
        rows,
        plan,
        axis=axis,
        m=m,
        algorithm=algorithm,
        step=step,
        region=link.region_of(node),
        reverse=reverse,
        num_rows=out_rows,
    )


def _repack(link: Linker, node: Node, rows, plan, out_rows, n, axis, m, algorithm, step, reverse) -> Node:
    return link.call(
        alltoall.repack, rows, plan, m=m, algorithm=algorithm, step=step, reverse=reverse, num_rows=out_rows
    )


def _unpack_blocks(link: Linker, node: Node, rows, sizes, shape, expert_dim, row_dim, n, axis, reverse) -> Node:
    return link.call(
        alltoall.unpack_blocks,
        link.session,
        rows,
        sizes,
        shape,
        axis=axis,
        expert_dim=expert_dim,
        row_dim=row_dim,
        reverse=reverse,
    )


def _exchange_sizes(link: Linker, node: Node, size, n, axis) -> Node:
    region = link.region_of(node)  # the first of those that share the capacity
    return link.call(collectives.exchange_sizes_start, link.session, link.step, size, axis=axis, region=region)


def _all_to_all_capacity(link: Linker, node: Node, x, sizes, out_rows, expert_dim, row_dim, n, axis, reverse) -> Node:
    return link.call(
        collectives.all_to_all_capacity_start,
        link.session,
        x,
        sizes,
        axis=axis,
        expert_dim=expert_dim,
        row_dim=row_dim,
        region=link.region_of(node),
        reverse=reverse,
    )


def _reduce_gradient(link: Linker, node: Node, grad, axes, scale, param) -> Node:
    return link.call(
        gradients.reduce_gradient_start,
        link.session,
        link.step,
        grad,
        axes=split_axes(axes),
        scale=scale,
        name=link.names[param],
        owned=_is_owned(grad, node),
    )


def _sum_statistic(link: Linker, node: Node, old, new, axes) -> Node:
    return link.call(collectives.sum_statistic_start, link.session, old, new, axes=split_axes(axes))


def _is_owned(grad: Node, user: Node) -> bool:
    """Whether nobody but `user` sees the memory of `grad`, so that it may be written to and handed out."""
    while True:
        if set(grad.users) != {user} or grad.op == "placeholder":
            return False
        name = getattr(getattr(grad.target, "overloadpacket", None), "__name__", "")
        if name not in _VIEWS:
            return name not in ("expand", "detach", "alias", "split", "unbind") and grad.target is not operator.getitem
        grad, user = grad.args[0], grad


_STARTS = {
    _ops.exchange_counts.default: _exchange_counts,
    _ops.counts_to_host.default: _counts_to_host,
    _ops.all_to_all.default: _all_to_all,
    _ops.exchange_phase.default: _exchange_phase,
    _ops.exchange_sizes.default: _exchange_sizes,
    _ops.all_to_all_capacity.default: _all_to_all_capacity,
    _ops.reduce_gradient.default: _reduce_gradient,
    _ops.sum_statistic.default: _sum_statistic,
}

_PLAIN = {
    _ops.route.default: lambda link, node, idx, num_slots, table=None, quota=None: link.call(
        kernels.route, idx, table, quota, num_slots
    ),
    _ops.dispatch.default: lambda link, node, x, perm, k: link.call(kernels.dispatch, x, perm, k),
    _ops.combine.default: lambda link, node, rows, perm, k, weights=None: link.call(
        kernels.combine, rows, weights, perm, k
    ),
    _ops.combine_backward.default: lambda link, node, grad, rows, weights, perm, k: link.call(
        kernels.combine_backward, grad, rows, weights, perm, k
    ),
    _ops.dispatch_choices.default: lambda link, node, c, perm: link.call(kernels.dispatch_choices, c, perm),
    _ops.one_hot.default: lambda link, node, x, num_classes: link.call(kernels.one_hot, x, num_classes),
    _ops.bincount.default: lambda link, node, x, num_classes: link.call(kernels.bincount, x, num_classes),
    _ops.collect_choices.default: lambda link, node, v, perm, k: link.call(
        kernels.dispatch_choices_backward, v, perm, k
    ),
    _ops.grouped_linear.default: lambda link, node, rows, weight, counts, transposed, bias=None: link.call(
        grouped.grouped_linear, rows, weight, counts, transposed=transposed, **({} if bias is None else {"bias": bias})
    ),
    _ops.grouped_wgrad.default: lambda link, node, rows, grad, counts, transposed, base=None: link.call(
        grouped.grouped_wgrad, rows, grad, counts, transposed=transposed, **({} if base is None else {"out": base})
    ),
    _ops.expert_rows.default: lambda link, node, param, counts, rows: link.call(
        kernels.expert_rows, param, counts, rows
    ),
    _ops.expert_rows_backward.default: lambda link, node, grad, counts: link.call(
        kernels.expert_rows_backward, grad, counts
    ),
    _ops.received_rows.default: lambda link, node, plan, n, axis: link.call(getattr, plan, "num_received"),
    _ops.total_size.default: lambda link, node, sizes: link.call(sum, sizes),
    _ops.slot_counts.default: lambda link, node, traffic, n, axis: link.call(
        collectives.slot_counts, link.session, traffic, axis=axis
    ),
    _ops.own_experts.default: lambda link, node, whole, n, axis: link.call(
        collectives.own_experts, link.session, whole, axis=axis
    ),
    _ops.own_experts_backward.default: lambda link, node, grad, n, axis: link.call(
        collectives.own_experts_backward, link.session, grad, axis=axis
    ),
    _ops.phase_rows.default: lambda link, node, plan, n, axis, m, algorithm, step, reverse: link.call(
        alltoall.phase_rows, plan, m=m, algorithm=algorithm, step=step, reverse=reverse
    ),
    _ops.repack.default: _repack,
    _ops.encode.default: lambda link, node, rows, codec: link.call(codecs.encode, rows, codec),
    _ops.decode.default: lambda link, node, payload, codec, width, dtype: link.call(
        codecs.decode, payload, codec, width, dtype
    ),
    _ops.block_traffic.default: lambda link, node, sizes, shape, expert_dim, row_dim, n, axis, reverse: link.call(
        alltoall.block_plan, link.session, sizes, shape, axis=axis, expert_dim=expert_dim, row_dim=row_dim,
        reverse=reverse,
    ),
    _ops.pack_blocks.default: lambda link, node, x, sizes, expert_dim, row_dim, n, axis, reverse: link.call(
        alltoall.pack_blocks, x, sizes, expert_dim=expert_dim, row_dim=row_dim, reverse=reverse
    ),
    _ops.unpack_blocks.default: _unpack_blocks,
    _ops.regroup.default: lambda link, node, rows, plan, n, axis, reverse: link.call(
        collectives.regroup, rows, plan, reverse=reverse
    ),
}


def free_points(gm: GraphModule) -> dict[Node, list[Node]]:
    """{node: values whose last reader it is}: what the emitted code lets go of after each line."""
    last: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        map_arg((node.args, node.kwargs), lambda a, n=node: last.__setitem__(a, n))
    frees: dict[Node, list[Node]] = {}
    for value, reader in last.items():
        if reader.op != "output":
            frees.setdefault(reader, []).append(value)
    return frees
