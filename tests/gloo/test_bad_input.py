"""What users do wrong, and the one clear error they get for it, on every rank."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import moefx
from moefx import errors
from moefx.model import runner
from tests.capture.test_python_state import ReadsAttribute
from tests.support.handmade import Capacity, LanguageModel, Loop
from tests.support.models import Case
from tests.support.ranks import fake_world, one_rank, run_ranks
from tests.support.scenarios import EP2, compiled_case

pytestmark = pytest.mark.usefixtures("cached")
TOKENS = torch.arange(12).view(2, 6)


def model(**style) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(Loop(**style))


def mesh(*names: str, shape: tuple[int, ...] | None = None):
    return init_device_mesh("cpu", shape or (1,) * len(names), mesh_dim_names=names or None)


@pytest.fixture
def alone():
    with one_rank():
        yield


def test_mesh_without_names(alone):
    with pytest.raises(errors.MeshError, match=r"no dim names[\s\S]*'dp', 'mp', 'ep'"):
        moefx.compile(model(), init_device_mesh("cpu", (1,)))


def test_unknown_mesh_dim(alone):
    with pytest.raises(errors.MeshError, match=r"'pp' is unknown[\s\S]*\('etp' is 'esp', 'tp' is 'mp'\)[\s\S]*slice"):
        moefx.compile(model(), mesh("pp", "ep"))


@pytest.mark.parametrize(("names", "message"), [
    (("esp", "ep"), r"'esp' stands before 'ep' in the mesh: esp, ep[\s\S]*put it behind 'ep'"),
    (("ep", "esp", "etp"), r"the mesh dims ep, esp, etp name one dim twice"),
])  # fmt: skip
def test_dims_of_expert_sharding(alone, names, message):
    with pytest.raises(errors.MeshError, match=message):
        moefx.compile(model(), mesh(*names))


def test_a_mesh_in_another_order():
    with fake_world(4):
        for ranks in ([[0, 1], [3, 2]], [[1, 0], [2, 3]]):
            with pytest.raises(errors.MeshError, match="ranks along 'ep' are not in ascending order"):
                moefx.compile(model(), DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "ep")))
        moefx.compile(model(), DeviceMesh("cpu", [[2, 3], [0, 1]], mesh_dim_names=("dp", "ep"))).close()


def test_no_mesh_at_all(alone):
    with pytest.raises(errors.MeshError, match="not a DeviceMesh"):
        moefx.compile(model(), 4)


def test_a_wrapped_model(alone):
    for wrapped in (DistributedDataParallel(model()), nn.DataParallel(model()), torch.compile(model())):
        with pytest.raises(errors.ModelError, match="wrapped by"):
            moefx.compile(wrapped, mesh("ep"))


def test_compiling_twice(alone):
    compiled = moefx.compile(model(), mesh("ep"))
    with pytest.raises(errors.ModelError, match="already"):
        moefx.compile(compiled, mesh("ep"))


def test_a_refused_model_is_left_as_it_was(alone):
    plain = model()
    before = dict(plain.named_parameters())
    with pytest.raises(errors.MeshError):
        moefx.compile(plain, mesh("pp"))
    assert all(p is before[n] for n, p in plain.named_parameters())


def test_an_optimizer_built_before_compile(alone):
    plain = model()
    optimizer = torch.optim.AdamW(plain.parameters())
    compiled = moefx.compile(plain, mesh("ep"))
    compiled(TOKENS, labels=TOKENS).loss.backward()
    with pytest.raises(errors.StaleOptimizerError, match=r"after moefx\.compile"):
        optimizer.step()


def test_conversion_after_compile(alone):
    compiled = moefx.compile(model(), mesh("ep"))
    for convert in (lambda: compiled.to(torch.bfloat16), compiled.half, compiled.double):
        with pytest.raises(errors.UnsupportedUse, match=r"before moefx\.compile"):
            convert()


def test_a_second_backward_and_a_second_derivative(alone):
    compiled = moefx.compile(model(), mesh("ep"))
    loss = compiled(TOKENS, labels=TOKENS).loss
    loss.backward(retain_graph=True)
    with pytest.raises(errors.StaleStateError, match="already differentiated"):
        loss.backward()
    loss = compiled(TOKENS, labels=TOKENS).loss
    with pytest.raises(errors.UnsupportedUse, match="gradient of a gradient"):
        torch.autograd.grad(loss, list(compiled.parameters()), create_graph=True)


def test_an_optimizer_step_between_forward_and_backward(alone):
    compiled = moefx.compile(model(), mesh("ep"))
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    first, second = (compiled(TOKENS, labels=TOKENS).loss for _ in range(2))
    first.backward()
    optimizer.step()
    with pytest.raises(errors.StaleStateError, match="optimizer stepped"):
        second.backward()


def test_a_step_with_gradients_still_waiting(alone):
    compiled = moefx.compile(model(), mesh("ep"))
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    with compiled.no_sync():
        compiled(TOKENS, labels=TOKENS).loss.backward()
    with pytest.raises(errors.UnsupportedUse, match="wait to be synchronised"):
        optimizer.step()
    compiled.zero_grad()
    optimizer.step()


def test_an_argument_that_is_no_tensor(alone):
    compiled = moefx.compile(model(), mesh("ep"))
    with pytest.raises(errors.UnsupportedUse, match="argument of type object"):
        compiled(TOKENS, labels=object())


def test_control_flow_on_values_names_the_line(alone):
    class Fickle(LanguageModel):
        def forward(self, input_ids, labels=None):
            if input_ids.sum() > 3:
                return super().forward(input_ids, labels)
            return None

    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=r"block by block (.|\n)*test_bad_input\.py:\d+ in forward"):
        moefx.compile(Fickle(Loop()), mesh("ep"), example_inputs=(TOKENS,)).close()


def test_loading_what_does_not_fit(alone):
    compiled = moefx.compile(model(), mesh("ep"))
    state = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in compiled.state_dict().items()}
    with pytest.raises(errors.CheckpointError, match="missing"):
        compiled.load_state_dict({k: v for k, v in state.items() if "head" not in k})
    with pytest.raises(errors.CheckpointError, match="head"):
        compiled.load_state_dict(state | {"head.weight": torch.zeros(3, 3)})
    other = state["head.weight"] + 1
    elsewhere = DTensor.from_local(other.clone(), mesh("dp"), [Shard(0)])  # whole, as one rank has all of it
    compiled.load_state_dict(state | {"head.weight": elsewhere})
    assert torch.equal(compiled.state_dict()["head.weight"].full_tensor(), other)
    compiled.load_state_dict({k: v.bfloat16() for k, v in compiled.state_dict().items()})


class GatheredExperts(nn.Module):
    """The weights of a token's experts become one matrix: a style that is not raised."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.w = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x):
        scores, idx = self.gate(x).softmax(-1).topk(2)
        return torch.einsum("td,tde->te", x, (self.w[idx] * scores[:, :, None, None]).sum(1))


def refuse(rank: int, world: int, kind: str) -> str:
    """The error of each rank for a model that two ranks cannot run."""
    grid = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    inputs = (TOKENS,)
    if kind == "uneven":
        plain = Case("capacities", partial(LanguageModel, Capacity(num_experts=9))).build()
    elif kind == "gathered":
        plain, inputs = GatheredExperts(), (torch.randn(6, 8),)
    elif kind == "dense":
        plain, inputs = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (torch.randn(6, 8),)
    else:
        plain = model(
            activation="gelu" if kind == "another activation" and rank else "silu",
            bias=kind == "more parameters" and bool(rank),
        )
    options = moefx.Options.named(dynamic=not (kind == "options" and rank))
    try:
        moefx.compile(plain, grid, options, example_inputs=inputs)
    except moefx.errors.MoefxError as error:
        return f"{type(error).__name__}: {error}"
    return "compiled"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("uneven", ["MeshError", "9 experts do not divide", "size 2", "1, 3, 9"]),
        ("gathered", ["RaiseError", "gathered per token", "test_bad_input.py", "write the experts as"]),
        ("dense", ["RaiseError", "no mixture of experts", "'dp' only"]),
        ("another activation", ["DivergenceError", "different programs", "same model"]),
        ("options", ["DivergenceError", "dynamic is True on rank 0 of the mesh but False on rank 1", "same options"]),
        ("more parameters", ["DivergenceError", "rank 1 of the mesh has the parameter", "bias where rank 0 has",
                             "same model"]),
    ],
)
def test_every_rank_gets_the_error(kind, words):
    for text in run_ranks(2, refuse, kind):
        for word in words:
            assert word in text, text


def fail_on_one(rank: int, world: int) -> str:
    class Broken(LanguageModel):
        def forward(self, input_ids, labels=None):
            if rank == 1:
                print(input_ids.tolist())
                raise ValueError("on rank 1 only")
            return super().forward(input_ids, labels)

    torch.manual_seed(0)
    try:
        moefx.compile(
            Broken(Loop()), init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)), example_inputs=(TOKENS,)
        )
    except moefx.errors.MoefxError as error:
        return f"{type(error).__name__}: {error}"
    return "compiled"


def test_a_rank_that_fails_to_compile_fails_all(monkeypatch):
    monkeypatch.setenv("MOEFX_CACHE", "off")
    first, second = run_ranks(2, fail_on_one)
    assert "DivergenceError" in first, first
    assert "rank 1 of the mesh failed to compile" in first, first
    assert "CaptureError" in second, second


def step_that_is_refused(rank, world, layout, case):
    """Of calls in which a number has another value each time; nobody waits for a rank that has refused."""
    runner._MOST_VALUES = 3
    with closing(compiled_case(case, layout)) as compiled:
        for step in range(5):
            compiled.weight = 1.0 + step
            try:
                compiled(**case.batch(step, rows=(3, 1)[(step + rank) % 2]))  # sizes of one take programs of their own
            except errors.UnsupportedUse:
                return step
    return None


def test_all_ranks_refuse_a_value_of_every_step_in_one_call():
    assert run_ranks(2, step_that_is_refused, EP2, Case("reads", ReadsAttribute)) == [3, 3]
