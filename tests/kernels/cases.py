"""What kernels are tried on, and how their results are compared with the meaning in float64."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from moefx.runtime import kernels

HAS_TRITON = importlib.util.find_spec("triton") is not None
triton_kernels = importlib.import_module("moefx.runtime.triton_kernels") if HAS_TRITON else None
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTHS = (1, 5, 16, 40, 96, 129)
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """T tokens of width D with K choices among E experts, ordered by `kernels.route`; `used` pairs are not dropped.
    strided: tensors come with gaps between their rows, or transposed."""

    T: int
    K: int
    E: int
    D: int
    dtype: torch.dtype
    idx: Tensor
    seed: torch.Generator
    strided: bool

    @property
    def routing(self) -> tuple[Tensor, Tensor]:
        """perm [T*K], counts [E]."""
        return kernels.route(self.idx, None, None, self.E)

    @property
    def used(self) -> int:
        return int(self.routing[1].sum())

    def draw(self, *shape: int) -> Tensor:
        """Normal numbers of the case's dtype; a matrix lies as the case says."""
        if not self.strided or len(shape) != 2:
            return torch.randn(shape, generator=self.seed).to(self.dtype).to(DEVICE)
        if shape[0] % 2:
            return torch.randn(shape[::-1], generator=self.seed).to(self.dtype).to(DEVICE).t()
        return torch.randn(shape[0], shape[1] + 3, generator=self.seed).to(self.dtype).to(DEVICE)[:, : shape[1]]


@st.composite
def cases(draw: st.DrawFn, widths: tuple[int, ...] = WIDTHS) -> Case:
    """Even, skewed or all-to-one routing, with ids out of range now and then; no token at all now and then."""
    T, K, E = draw(st.sampled_from([0, 1, 7, 33])), draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 5, 8]))
    low, high = draw(st.sampled_from([(0, E - 1), (0, 0), (E - 1, E - 1), (-2, E + 1), (E, E + 2)]))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    idx = torch.randint(low, high + 1, (T, K), generator=seed).to(DEVICE)
    return Case(T, K, E, draw(st.sampled_from(widths)), draw(st.sampled_from(DTYPES)), idx, seed, draw(st.booleans()))


def wide(value: Any) -> Any:
    """Floating tensors in float64."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def assert_near(found: Tensor | None, wanted: Tensor | None, *, roundings: float = 1.0) -> None:
    """found has as many digits as its dtype; wanted is exact. roundings: of numbers in between, of that dtype."""
    if wanted is None:
        assert found is None
        return
    eps = max(torch.finfo(found.dtype).eps, 1e-6)
    torch.testing.assert_close(found.double(), wanted.double(), rtol=2 * eps * roundings, atol=4 * eps * roundings)
