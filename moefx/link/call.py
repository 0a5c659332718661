"""One execution of a program: what its forward leaves for its backward, and gradients as parameters get them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moefx import _torch_compat as compat
from moefx.context.region_facts import split_statistics
from moefx.errors import StaleStateError
from moefx.link import out_of_memory
from moefx.runtime import parameters
from moefx.runtime.chosen import Chosen
from moefx.runtime.collectives import check_header_start
from moefx.runtime.gradients import reduce_waiting
from moefx.runtime.step import StepState

if TYPE_CHECKING:
    from moefx.link.program import Program


class Call:
    """One execution of a program: forward now, backward perhaps later."""

    def __init__(self, program: Program, leaves: Sequence[Any], step: StepState) -> None:
        self.program, self.leaves, self.step = program, leaves, step
        self.differentiable = set(program.graphs.differentiable_outputs)
        self.statistics: list[Tensor] = []
        self.updates = program.home.updates
        self.written = parameters.Written([])

    @compat.no_autocast()
    def forward(self) -> list[Any]:
        program, graphs = self.program, self.program.graphs
        self.tables = program.tables()
        self.step.go_by(self.tables.values())
        inputs = program.inputs(self.leaves, self.tables)
        changed = [inputs[i] for i in graphs.mutated_inputs]
        function, _ = program.function("forward")
        with torch.no_grad():
            given = [v.detach() if isinstance(v, Tensor) and v.requires_grad else v for v in inputs]
            results = self._run("forward", function, given)
            for target, value in zip(changed, results):
                target.copy_(value)
        outputs = results[len(changed) :][: graphs.num_user_outputs]
        rest = results[len(changed) + graphs.num_user_outputs :]
        self.statistics = rest[: graphs.num_statistics]
        if graphs.backward is None:
            return outputs
        saved = rest[graphs.num_statistics :]
        self.written = parameters.Written(program.kept(inputs, saved))
        outputs, saved = _free_of_views(outputs, saved)
        own = {id(o) for o in outputs}
        self.step.save(graphs.saved, saved, own)
        program.home.steps.add(self.step)
        self.shapes = [(o.shape, o.dtype, o.device) if isinstance(o, Tensor) else None for o in outputs]
        self.leaves = [leaf if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in self.leaves]
        return outputs

    @compat.no_autocast()
    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        program, graphs = self.program, self.program.graphs
        if self.updates != program.home.updates:
            raise StaleStateError(
                f"an optimizer stepped between the forward and the backward of step {self.step.number}",
                hint="call backward before optimizer.step()",
            )
        self.written.check(program.home.params, self.step.number)
        values = self.step.take(graphs.saved)
        # Exchanges of a backward have no headers, and ranks may differentiate calls in another order, or other ones.
        session, everyone = program.home.session, program.home.spec.everyone
        chosen = Chosen(session, everyone, self._own_choices())
        beside = [*self.step.beside(), *chosen.beside()]
        absent = tuple(i for i, output in enumerate(graphs.tangent_outputs) if grads[output] is None)
        check_header_start(session, self.step, axis=everyone, region="the backward", like=absent, beside=beside).wait()
        self.step.check_tables()
        with self.step.timed():
            return self._run_backward(grads, absent, values, chosen)

    def _run(self, graph: str, function: Callable, values: list[Any]) -> list[Any]:
        """Raises OutOfMemoryError, which says what is alive."""
        home = self.program.home
        try:
            with home.session.running():
                return function(home.session, self.step, values)
        except torch.OutOfMemoryError as error:
            raise out_of_memory.told(error, home, self.step, graph) from error

    def _own_choices(self) -> dict[str, Tensor]:
        """Of all stacks whose experts the model leaves out where no token chose them, uint8 [E]: which this rank chose,
        in this call and in those whose gradients wait. Of a stack that a program reads otherwise: all."""
        program, home, rows = self.program, self.program.home, self._rows_of_experts()
        read, own = {source.key for source in program.sources if source.kind == "stack"}, {}
        for key in home.left_out:
            if key in program.left_out:
                experts = functools.reduce(torch.bitwise_or, [rows[region] for region in program.left_out[key]])
            else:
                experts = torch.full((len(key),), key in read, dtype=torch.uint8, device=home.session.device)
            name = home.stack_name(key)
            own[name] = self.step.buffers.with_chosen(name, experts, synchronise=self.step.synchronise)
        return own

    def _rows_of_experts(self) -> dict[int, Tensor]:
        """uint8 [E] of every region: the experts that have rows, of any of its chunks."""
        found: dict[int, Tensor] = {}
        for number, (load, _) in split_statistics(self.program.regions, self.statistics).items():
            facts = self.program.facts[number]
            rows = load.reshape(-1, load.shape[-1]).amax(0)
            if facts.slots is not None and facts.slots.are_plain(self.program.home.spec.size("ep")):  # counted by slot
                rows = rows[self.tables[facts.of].table[:, 0]]
            has_rows = (rows > 0).to(torch.uint8)
            found[facts.of] = has_rows | found[facts.of] if facts.of in found else has_rows
        return found

    def _run_backward(self, grads: Sequence[Tensor | None], absent: tuple[int, ...], values: list[Any],
                      chosen: Chosen) -> list[Tensor | None]:  # fmt: skip
        """absent: outputs without a gradient. values: what the forward left."""
        program, graphs = self.program, self.program.graphs
        function, unread = program.function("backward", absent)
        for i, output in enumerate(graphs.tangent_outputs):
            shape, dtype, device = self.shapes[output]
            if i in absent:
                values.append(None if i in unread else torch.zeros(shape, dtype=dtype, device=device))
            else:
                values.append(grads[output].contiguous())
        del grads
        locals_ = self._run("backward", function, values)
        self.step.leases.clear()
        if self.step.synchronise and len(self.step.buffers):
            self._add_leftovers(chosen)
        return self._wrap(locals_, chosen)

    def _wrap(self, locals_: list[Tensor | None], chosen: Chosen) -> list[Tensor | None]:
        program = self.program
        wrapped: list[Tensor | None] = []
        for index, grad in zip(program.graphs.grad_inputs, locals_):
            source = program.sources[index]
            if source.kind == "stack":
                stack = program.home.stacks[source.key]
                name, none = program.home.stack_name(source.key), [None] * len(stack.params)
                wrapped += none if grad is None else stack.split_grad(grad, chosen.get(name))
            elif source.kind == "input" or grad is None:
                wrapped.append(grad)
            else:
                wrapped.append(parameters.wrap_gradient(program.home.params[source.key], grad))
        return wrapped

    def _add_leftovers(self, chosen: Chosen) -> None:
        """Gradients of earlier micro-steps for parameters that this step did not use."""
        home, buffers = self.program.home, self.step.buffers
        for name, total in reduce_waiting(home.session, buffers).items():
            params, grads = home.gradient_of(name, total, chosen)
            for param, grad in zip(params, grads):
                if grad is not None:
                    param.grad = grad if param.grad is None else param.grad + grad


def _free_of_views(outputs: list[Any], saved: list[Any]) -> tuple[list[Any], list[Any]]:
    """Autograd forbids users to write to what a function gives back if it is a view: it gets a tensor of its own over
    the same memory, which no other output shares. What is saved there becomes a view of it, so that such a write is
    still noticed."""
    given, bases = [], {}
    for output in outputs:
        is_view = isinstance(output, Tensor) and compat.is_view(output)
        given.append(output.data if is_view else output)
        if is_view:
            bases.setdefault(memory_of(output), given[-1])

    def rebased(value: Any) -> Any:
        base = bases.get(memory_of(value)) if isinstance(value, Tensor) and value.numel() else None
        return value if base is None else base.as_strided(value.shape, value.stride(), value.storage_offset())

    return given, [rebased(value) for value in saved] if bases else saved


def memory_of(tensor: Tensor) -> tuple[int, torch.dtype]:
    return tensor.untyped_storage().data_ptr(), tensor.dtype
