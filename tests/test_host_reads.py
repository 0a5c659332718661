"""Where all sizes are known when a model is compiled, its programs read no tensor on the host.

On CPU every read is counted, by whom it is done. Headers do not count: on CUDA they reach the host on the side, and are
looked at later (`runtime.headers`). Nor do comparisons of weights, once in so many steps, which are off here.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import moefx
from tests.support.models import shallow
from tests.support.scenarios import EP1, EP2, Layout, compiled_case
from tests.support.sharing import run_sharing

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero")
PACKAGE = str(Path(moefx.__file__).parent)
STATIC = {"dynamic": False}


class Reader:
    """Who reads tensors on the host, in threads that are watched."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._here = threading.local()

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._here.on = True
        try:
            yield
        finally:
            self._here.on = False

    def note(self) -> None:
        frame = sys._getframe(2)  # of what called the method of the tensor
        file = frame.f_code.co_filename
        is_ours = file.startswith((PACKAGE, "<moefx ")) and not file.endswith("runtime/headers.py")
        if is_ours and getattr(self._here, "on", False):
            self.found[f"{Path(file).stem}.{frame.f_code.co_name}"] += 1

    def patches(self) -> Iterator[Any]:
        for name in READS:
            yield mock.patch.object(torch.Tensor, name, self._noting(getattr(torch.Tensor, name)))

    def _noting(self, method: Any) -> Any:
        def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.note()
            return method(tensor, *args, **kwargs)

        return noted


def step(rank: int, world: int, name: str, layout: Layout, options: dict[str, Any], reader: Reader) -> None:
    """Of the second step, the forward and the backward are watched."""
    case = shallow(name)
    batch = case.batch(0)
    with closing(compiled_case(case, layout, partial(moefx.compile, **options))) as compiled:
        compiled(**batch).loss.backward()
        with reader.watching():
            compiled(**batch).loss.backward()


def reads(name: str, layout: Layout, options: dict[str, Any]) -> dict[str, int]:
    """How often who read in a step of all ranks."""
    reader, options = Reader(), {**options, "compare_every": 0}
    world = 1 if layout == EP1 else 2
    with ExitStack() as stack:
        for patch in reader.patches():
            stack.enter_context(patch)
        run_sharing(world, step, name, layout, options, reader)
    return dict(reader.found)


@pytest.mark.parametrize("name", ["gshard-swiglu", "gshard-grouped"])
@pytest.mark.parametrize(("layout", "options"), [(EP1, {}), (EP2, STATIC)], ids=str)
def test_capacity_mode_reads_nothing(name: str, layout: Layout, options: dict[str, Any]) -> None:
    assert reads(name, layout, options) == {}


@pytest.mark.parametrize(("name", "options", "wanted"), [
    ("gshard-swiglu", {}, {"collectives.finish"}),  # batches of other ranks may be longer
    ("mixtral-grouped_mm", STATIC, {"collectives.finish", "grouped._sizes"}),
], ids=["capacities that may differ", "rows that are data"])  # fmt: skip
def test_other_programs_read_and_the_test_sees_it(name: str, options: dict[str, Any], wanted: set[str]) -> None:
    assert reads(name, EP2, options).keys() == wanted


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("name", ["mixtral-grouped_mm", "gpt_oss-grouped_mm"])
def test_with_kernels_experts_at_home_read_nothing_where_sizes_are_data(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("MOEFX_KERNELS", "triton")
    assert reads(name, EP1, {}) == {}
