"""Imported by the server that forks ranks: what dynamo and fake tensors look up once in a process, they then know.

A capture alone: autograd must not have run in a process that forks.
"""

from __future__ import annotations

import torch

from moefx._torch_compat.capture import capture_graph
from tests.support.models import shallow

for _name in ("loop-setitem", "mixtral-grouped_mm"):
    _case = shallow(_name)
    capture_graph(_case.build(), (), _case.batch(0))
torch._dynamo.reset()
