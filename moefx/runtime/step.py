"""The state of one call of a program: what its forward leaves for its backward, and the autograd node between them.

State belongs to the call, so several forwards may be in flight. Values lie in named slots; a slot is read once, and
reading one that is gone, or whose tensor was changed since, raises StaleStateError.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moefx.errors import StaleStateError, UnsupportedUse
from moefx.runtime.gradients import GradientBuffers
from moefx.runtime.placement import Tables, digest_of

if TYPE_CHECKING:
    from moefx.rooms import Meter
    from moefx.runtime.gather_experts import Lease


class StepState:
    """One forward and its backward. `program`, `number` and `tables`, a digest of where experts are, travel in the
    headers of its exchanges.

    synchronise: whether the backward reduces gradients over the ranks; decided when the forward runs, as in DDP.
    meter: who measures it, if anybody does. leases: room for copies of experts that it has until the backward is done,
    or nobody has the state any more.
    """

    def __init__(self, program: int, number: int, buffers: GradientBuffers, *, synchronise: bool,
                 meter: Meter | None = None) -> None:  # fmt: skip
        self.meter = meter
        self.program, self.number = program, number
        self.buffers, self.synchronise = buffers, synchronise
        self.tables = 0
        self._tables: set[int] = set()
        self._saved_tables: dict[str, Tensor] = {}
        self.leases: list[Lease] = []
        self._slots: dict[str, tuple[Any, int]] | None = None

    def timed(self, *, forward: bool = False, has_backward: bool = True) -> AbstractContextManager:
        """While its forward or its backward runs."""
        if self.meter is None:
            return nullcontext()
        return self.meter.forward(has_backward=has_backward) if forward else self.meter.backward()

    def beside(self) -> list[tuple[Sequence[int], Callable[[Tensor], object]]]:
        """What the header that opens its backward carries of it, see `check_header_start`."""
        return [] if self.meter is None else [(self.meter.words(), self.meter.hear)]

    @property
    def waits(self) -> bool:
        """Whether its backward is still to come."""
        return self._slots is not None

    def go_by(self, tables: Collection[Tables]) -> None:
        """This is where experts are in this step, the same on all ranks along their axis."""
        self.tables = digest_of(tables)
        self._tables = {id(each) for found in tables for each in (found.table, found.ends, found.moves)}

    def save(self, names: Sequence[str], values: Sequence[Any], own: set[int]) -> None:
        """Fill the slots. `own`: ids of the tensors handed to the user, of which only an alias is kept: autograd gives
        them a grad_fn that holds this state, and a cycle through C++ would never be freed."""
        self._slots = {}
        for name, value in zip(names, values, strict=True):
            if id(value) in self._tables:
                self._saved_tables[name] = value
            if isinstance(value, Tensor):
                kept = value.detach() if id(value) in own or value.requires_grad else value
                self._slots[name] = (kept, kept._version)
            else:
                self._slots[name] = (value, 0)

    def kept(self) -> list[Tensor]:
        """The tensors in its slots."""
        return [value for value, _ in (self._slots or {}).values() if isinstance(value, Tensor)]

    def take(self, names: Sequence[str]) -> list[Any]:
        """Empty the slots, in the order of `names`."""
        if self._slots is None:
            raise StaleStateError(
                f"step {self.number} was already differentiated, and what its backward needs is freed",
                hint="run forward again; retain_graph=True and a second backward are not supported",
            )
        slots, self._slots = self._slots, None
        for lease in self.leases:
            lease.check()
        for name, (value, version) in slots.items():
            if isinstance(value, Tensor) and value._version != version:
                raise StaleStateError(
                    f"`{name}` was changed in place between the forward and the backward of step {self.number}",
                    hint="step the optimizer, and write to inputs, after backward",
                )
        # Every backward begins with a header: here no digest, which ranks of other groups do not share, but a zero.
        self.tables = sum(slots[name][0] is not table for name, table in self._saved_tables.items())
        return [slots[name][0] for name in names]

    def check_tables(self) -> None:
        """Raises StaleStateError if what was taken for the backward are other tables than those of the forward."""
        if self.tables:
            raise StaleStateError(f"the backward of step {self.number} has other tables of where experts are than its "
                                  "forward had", hint="this is a bug of moefx: please report it")  # fmt: skip


class ProgramCall(torch.autograd.Function):
    """The autograd node of one call. Every tensor that wants a gradient is an argument; the work is in `call`."""

    @staticmethod
    def forward(ctx: Any, call: Any, *wanting: Tensor) -> tuple:
        ctx.call = call
        outputs = call.forward()
        ctx.mark_non_differentiable(
            *(o for i, o in enumerate(outputs) if isinstance(o, Tensor) and i not in call.differentiable)
        )
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        if torch.is_grad_enabled():
            raise UnsupportedUse("a gradient of a gradient (create_graph=True) was asked for",
                                 hint="differentiate the uncompiled model twice")
        call = ctx.call
        return (None, *call.backward(grads))

