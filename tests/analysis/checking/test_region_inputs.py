import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from moefx.analysis.checking.region_inputs import symbol_values


def test_sizes_that_a_guard_divides_by_zero_are_those_of_the_example():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    kinds = [DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, DimDynamic.STATIC]
    x = mode.from_tensor(torch.zeros(2, 16, 8), symbolic_context=StatelessSymbolicContext(kinds))
    x.view(x.shape[0], x.shape[1] // 8, 8, -1)  # of fewer than eight tokens there is no group
    node = Graph().placeholder("x")
    node.meta["val"] = x
    assert sorted(symbol_values([node]).values()) == [2, 16]
