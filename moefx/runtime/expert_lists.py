"""Foreach and fused operators on lists in which expert tensors and plain DTensors are mixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moefx import _torch_compat as compat
from moefx.errors import UnsupportedUse
from moefx.runtime.expert_tensor import LISTS, SPECIAL, ExpertTensor, localised, plain_of, rewrapped


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
        outputs |= zip(plain, run(plain, lambda value, i: plain_of(value)))
    if expert:
        results = run(expert, lambda value, i: localised(value, leaders[i]))
        outputs |= {i: rewrapped(value, leaders[i]) for i, value in zip(expert, results)}
    return [outputs[i] for i in range(size)] if outputs else None


def _unscale(func, args: tuple, kwargs: dict) -> None:
    """_amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale): all ranks agree on found_inf."""
    grads, found_inf, inverse_scale = args
    func([compat.local_tensor(grad) for grad in grads], found_inf, inverse_scale)
    mesh = grads[0].device_mesh
    for dim in range(mesh.ndim):
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=mesh.get_group(dim))


SPECIAL[LISTS] = _on_lists
SPECIAL[torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default] = _unscale
