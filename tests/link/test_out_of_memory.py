"""What is said when memory runs out in a program, and that nothing holds on to its values then."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import moefx
from moefx.errors import OutOfMemoryError
from tests.support.handmade import Loop, OneLayer
from tests.support.ranks import one_rank


class RunsOut(TorchDispatchMode):
    """No memory is left for the matrix product of this number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left, self.memory = number, []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.left -= 1
            if self.left < 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore that nobody reads")
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.memory.append(weakref.ref(found.untyped_storage()))
        return found


def test_it_names_the_rank_the_line_and_what_is_alive():
    with one_rank():
        torch.manual_seed(0)
        compiled = moefx.compile(OneLayer(Loop(num_experts=4)), init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))
        tokens = torch.randint(0, 64, (3, 50))
        waits = compiled(tokens, labels=tokens)
        runs_out = RunsOut(1)
        with runs_out, pytest.raises(torch.OutOfMemoryError) as caught:
            compiled(tokens, labels=tokens)
        text = str(caught.value)
        assert type(caught.value) is OutOfMemoryError
        assert text.startswith("Rank 0 is out of memory: CUDA out of memory. Tried to allocate 2.00 GiB.\nAlive are\n")
        number, names = re.search(r"MiB: (\d+) values of this forward; the largest are (.*)\n", text).groups()
        assert int(number) > 5
        assert len(re.findall(r"\w+ \d+\.\d MiB \((?:float32|int64) \[[\d, ]+\]\)", names)) == 5
        assert "MiB: parameters on this rank" in text
        assert "MiB: what 1 other forwards keep for their backwards" in text
        assert re.search(r"at: rank 0, step 1, the forward, `\w+ = aten.mm.default\(", text)
        assert "Tried" not in text.split("Alive are")[1]
        del caught
        gc.collect()
        assert len(runs_out.memory) == 1
        assert all(each() is None for each in runs_out.memory), "somebody holds on to values of the program"
        waits.loss.backward()
        loss = compiled(tokens, labels=tokens).loss
        with RunsOut(0), pytest.raises(OutOfMemoryError, match=r"MiB: their gradients(.|\n)*the backward, `"):
            loss.backward()
        compiled.close()
