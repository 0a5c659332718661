"""What a compiled model must equal, and how equal.

The reference: N copies of the eager model, each on its rank's own batch, gradients averaged with equal weight over
the N ranks, what the model adds to its buffers summed over them. The bound: for outputs, every gradient and every
buffer, max|a-b| / max|b| and the ratio of the norms within 1e-5; where max|b| is below 1e-7, |a-b| within 1e-7.
A parameter that has no gradient in eager on any rank, as those of experts that are left out where no token chose them,
has none when compiled.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from tests.support.models import Batch, Case

TOLERANCE = 1e-5
NEAR_ZERO = 1e-7
MIN_GAP = 1e-5

Numbers = dict[str, Tensor]


# Comparing


@dataclass
class Report:
    """Errors by tensor name, as (max error, norm error); `wrong` names what is out of bounds or not comparable."""

    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)

    def check(self, title: str = "") -> None:
        """Raise AssertionError with the worst tensors (outputs first) if any is wrong, or if none was compared."""
        if self.wrong:
            worst = sorted(self.wrong, key=lambda n: (n[:4] != "out.", -max(self.errors.get(n, (float("inf"),)))))
            lines = "\n".join(f"  {name}: {self.wrong[name]}" for name in worst[:16])
            total = len(self.wrong | self.errors)
            raise AssertionError(f"{title}: {len(worst)} of {total} tensors differ, outputs and worst first\n{lines}")
        assert self.errors, f"{title}: nothing was compared"


def compare(actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None],
            tolerance: float = TOLERANCE) -> Report:
    """Compare all tensors by name; a name on one side only is wrong."""
    report = Report()
    for name in sorted(set(actual) | set(expected)):
        if name not in actual or name not in expected:
            report.wrong[name] = "missing" if name not in actual else "not in the reference"
            continue
        a, b = actual[name], expected[name]
        if a is None or b is None:
            if a is not b:
                report.wrong[name] = f"{'None' if a is None else 'a tensor'}, expected {'None' if b is None else 'one'}"
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            report.wrong[name] = f"{a.dtype}{list(a.shape)}, expected {b.dtype}{list(b.shape)}"
            continue
        report.errors[name] = errors = distance(a, b)
        if not max(errors) <= tolerance:  # so written, NaN is wrong
            report.wrong[name] = f"max error {errors[0]:.2e}, norm error {errors[1]:.2e}, max |b| {b.abs().max():.2e}"
    return report


def distance(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """(max|a-b| / max|b|, |norm a / norm b - 1|); near zero, the first in units that make 1e-7 the bound 1e-5."""
    a, b = actual.double(), expected.double()
    if b.numel() == 0:
        return 0.0, 0.0
    scale = b.abs().max().item()
    if scale < NEAR_ZERO:
        return (a - b).abs().max().item() / NEAR_ZERO * TOLERANCE, 0.0
    return (a - b).abs().max().item() / scale, abs(a.norm().item() / b.norm().item() - 1)


# Reading a model


def outputs_of(out: Any, prefix: str = "out") -> Numbers:
    """Every tensor in a model's output (mapping, named tuple, sequence), detached, by path."""
    if isinstance(out, Tensor):
        return {prefix: full(out.detach()).clone()}
    if hasattr(out, "_asdict"):
        out = out._asdict()
    if isinstance(out, Mapping):
        pairs = list(out.items())
    else:
        pairs = list(enumerate(out)) if isinstance(out, (list, tuple)) else []
    return {name: t for key, value in pairs for name, t in outputs_of(value, f"{prefix}.{key}").items()}


def full(tensor: Tensor) -> Tensor:
    """The whole tensor of a DTensor (collective), or the tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Whole gradients of all parameters by name (collective)."""
    return {f"grad.{n}": None if p.grad is None else full(p.grad).clone() for n, p in model.named_parameters()}


def parameters(model: nn.Module) -> Numbers:
    """Whole values of all parameters by name (collective)."""
    return {f"param.{n}": full(p.detach()).clone() for n, p in model.named_parameters()}


def buffers(model: nn.Module) -> Numbers:
    """Whole values of the buffers of the state dict by name (collective)."""
    saved = set(model.state_dict())
    return {f"buffer.{n}": full(b.detach()).clone() for n, b in model.named_buffers() if n in saved}


# The reference


@dataclass
class Expected:
    """What one step must give: outputs of each rank, and the gradients and buffers that all ranks agree on."""

    outputs: list[Numbers]
    grads: dict[str, Tensor | None]
    buffers: Numbers

    def of(self, rank: int) -> dict[str, Tensor | None]:
        """What `rank` must have."""
        return {**self.outputs[rank], **self.grads, **self.buffers}


def reference_step(model: nn.Module, batches: list[Batch], *, autocast: torch.dtype | None = None) -> Expected:
    """One forward and backward of the reference on one batch per rank; leaves the gradients in `model`."""
    model.zero_grad()
    start = {n: b.clone() for n, b in model.named_buffers()}
    total = {n: b.clone() for n, b in start.items()}
    outputs = []
    for batch in batches:
        _restore(model, start)
        with cast(autocast):
            out = model(**batch)
        out.loss.backward()
        outputs.append(outputs_of(out))
        for n, b in model.named_buffers():
            total[n] += b - start[n]
    _restore(model, total)
    for p in model.parameters():
        p.grad = None if p.grad is None else p.grad / len(batches)
    return Expected(outputs, gradients(model), buffers(model))


def cast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
    """CPU autocast to `dtype`, or nothing."""
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def _restore(model: nn.Module, values: Numbers) -> None:
    with torch.no_grad():
        for n, b in model.named_buffers():
            b.copy_(values[n])


# Routing


class RoutingRecord(TorchFunctionMode):
    """Records each choice among last-dim scores: `gap`, the least distance of chosen to not chosen; `chosen`."""

    def __init__(self) -> None:
        super().__init__()
        self.gap, self.chosen = float("inf"), []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in (torch.topk, Tensor.topk):
            scores, k = args[0].detach(), args[1] if len(args) > 1 else kwargs["k"]
            self.chosen.append(out[1].detach())
            if k < scores.shape[-1] and scores.numel():
                ordered = scores.sort(-1, descending=True).values
                self.gap = min(self.gap, (ordered[..., k - 1] - ordered[..., k]).min().item())
        return out


def routing(model: nn.Module, batch: Batch) -> RoutingRecord:
    """The choices of `model` on `batch`, in order of execution; buffers are left as they were."""
    start = {n: b.clone() for n, b in model.named_buffers()}
    with torch.no_grad(), RoutingRecord() as record:
        model(**batch)
    _restore(model, start)
    return record


def draw(case: Case, model: nn.Module, seed: int, rows: int = 2, length: int = 8, *, padded: bool = False,
         gap: float = MIN_GAP) -> Batch:
    """A batch int64 [rows, length] on which no choice of the router is nearer than `gap` to going the other way."""
    for attempt in range(100):
        batch = case.batch(1000 * seed + attempt, rows, length, padded=padded)
        if routing(model, batch).gap >= gap:
            return batch
    raise AssertionError(f"{case.name}: no batch with a routing gap of {gap:g} in 100 draws")


def skew(model: nn.Module, experts: list[int], strength: float = 20.0) -> int:
    """Make the routers prefer `experts`, by biases and score corrections; returns how many were changed."""
    changed = 0
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            inside = re.search(r"experts\.\d|shared", name)  # a gate of an expert's own is no router
            if not inside and name.endswith(("router.bias", "gate.bias", "correction", "correction_bias")):
                full(tensor)[experts] += strength
                changed += 1
    return changed


def one_token(batch: Batch, token: int) -> Batch:
    """The batch with `token` everywhere: all rows of causal attention are then equal, k experts get everything."""
    return {**batch, "input_ids": torch.full_like(batch["input_ids"], token)}
