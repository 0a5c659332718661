"""Values that come back to a rank which did not save them: loaded right, or refused on all ranks."""

from __future__ import annotations

import copy
import io
import os
import tempfile
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import moefx
from moefx import _torch_compat as compat
from moefx.errors import CheckpointError, UnsupportedUse
from moefx.layout import Layout
from moefx.model import state_dicts
from moefx.runtime import optimizer_guard, origins, parts
from moefx.runtime.expert_tensor import ExpertTensor
from moefx.runtime.session import Session
from moefx.runtime.together import Ranks
from tests.support.handmade import Loop, LoopMoE
from tests.support.op_styles import StackedLoop
from tests.support.parity import full
from tests.support.ranks import fake_world, run_threads
from tests.support.sharing import run_sharing
from tests.support.styles import D

pytestmark = pytest.mark.usefixtures("cached")
ROWS, WHOLE = torch.arange(12.0).view(4, 3), torch.arange(20.0, 26.0).view(2, 3)
EXPERTS = [torch.full((2, 2), 30.0), torch.full((2, 2), 40.0)]
VALUES = {"rows": ROWS, "whole": WHOLE, "expert.0": EXPERTS[0], "expert.1": EXPERTS[1],
          "uneven": ROWS + 50, "buffer": torch.ones(2)}  # fmt: skip
TWO, ONE, PEERS = {"ep": 2}, {"ep": 1}, {"dp": 2, "ep": 2}


def packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(content: bytes, weights_only: bool = False) -> Any:
    return torch.load(io.BytesIO(content), weights_only=weights_only)


def of_all(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


# ---- values as a compiled model has them


def values_on(mesh: DeviceMesh, whole: bool = False) -> dict[str, Tensor]:
    """Stacked experts, what all ranks have, two experts of a list, stacked experts of which ranks have different
    numbers, a buffer. whole: as before the first call."""
    everywhere = [Replicate()] * mesh.ndim
    found: dict[str, Tensor] = {"buffer": torch.ones(2)}
    for name, value in VALUES.items():
        if name != "buffer":
            found[name] = DTensor.from_local(value.clone(), mesh, everywhere)
    if not whole:
        size, here = mesh.size(mesh.ndim - 1), mesh.get_local_rank("ep")
        if size > 1:
            found["rows"] = DTensor.from_local(ROWS.chunk(size)[here].clone(), mesh, [*everywhere[:-1], Shard(0)])
        layouts = {f"expert.{number}": Layout(owner=(("ep",), number * size // 2)) for number in range(2)}
        for name, layout in (layouts | ({"uneven": Layout.spread((1, 0, 1, 1), "ep", 2)} if size > 1 else {})).items():
            local = parts.take(layout, VALUES[name], mesh).clone()
            found[name] = ExpertTensor.wrap(local, found[name], layout)
    return found


class Place:
    """One rank, and what it holds."""

    def __init__(self, axes: dict[str, int]) -> None:
        self.mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        self.ranks = Ranks(Session(self.mesh, "test", timedelta(seconds=30)), tuple(axes))
        compat.keep_origins()
        self.own = values_on(self.mesh)

    def load(self, given: dict[str, Any]) -> None:
        """What `compiled.load_state_dict` does; spoilt values before, the right ones afterwards."""
        for value in self.own.values():
            (compat.local_tensor(value) if isinstance(value, DTensor) else value).fill_(-1.0)
        state_dicts.load(self.own, given, True, self.ranks)
        for name, value in self.own.items():
            assert torch.equal(full(value), VALUES[name]), name

    def refuse(self, given: dict[str, Any]) -> str:
        before = {name: full(value).clone() for name, value in self.own.items()}
        with pytest.raises(CheckpointError) as caught:
            state_dicts.load(self.own, given, True, self.ranks)
        for name, value in self.own.items():
            assert torch.equal(full(value), before[name]), name
        return str(caught.value)


def on(axes: dict[str, int], body: Callable[..., Any], *args: Any) -> list[Any]:
    def one(rank: int, world: int) -> Any:
        place = Place(axes)
        try:
            return body(place, *args)
        finally:
            place.ranks.session.close()

    world = 1
    for size in axes.values():
        world *= size
    return run_threads(world, one, timeout=60)


def the_first_ranks(place: Place) -> list[str]:
    file = of_all(packed(place.own))[0]
    given = unpacked(file)
    experts = {name: given[name] if "expert" in name else value for name, value in place.own.items()}
    return [place.refuse(each) for each in (
        given, unpacked(file, weights_only=True), copy.deepcopy(given),
        {name: value.clone() for name, value in given.items()}, {name: value * 2 for name, value in given.items()},
        experts,
    )]  # fmt: skip


def test_the_first_ranks_file_on_all_ranks_is_refused():
    first, second = on(TWO, the_first_ranks)
    assert first == second
    for name, error in zip(["rows"] * 5 + ["expert.0"], first):
        assert f"`{name}` holds the part of another rank (ep=0), not that of this one (ep=1)" in error
        assert "rank 1 of 2, loading a state dict" in error
        assert "moefx.checkpoint.save(folder, compiled, optimizer, step=..)" in error


def what_fits(place: Place) -> None:
    whole = {name: full(value).clone() for name, value in place.own.items()}
    before_the_call = values_on(place.mesh, whole=True)
    for state in (place.own, whole, before_the_call):
        for given in (unpacked(packed(state)), unpacked(packed(state), weights_only=True), copy.deepcopy(state),
                      {name: value.clone() for name, value in state.items()}):  # fmt: skip
            place.load(given)
    for state in (whole, before_the_call):  # of another rank, and of another layout than the model has now
        place.load(unpacked(of_all(packed(state))[0]))
        place.load({k: v.clone() for k, v in unpacked(of_all(packed(state))[1]).items()})


def test_what_a_rank_itself_or_anybody_whole_has_saved_is_loaded_right():
    on(TWO, what_fits)


def into_whole_values(place: Place) -> str:
    """Before the first call: ranks put their parts together, all of them or none."""
    parts, whole = packed(place.own), packed(values_on(place.mesh, whole=True))
    place.own = values_on(place.mesh, whole=True)
    place.load(unpacked(parts))
    place.refuse(unpacked(of_all(parts)[0]))
    return place.refuse(unpacked(parts if place.ranks.index == 0 else whole))


def test_parts_are_put_together_where_the_model_is_not_yet_spread():
    first, second = on(TWO, into_whole_values)
    assert first == second
    assert "gathered is ['rows', 'expert.0', 'expert.1', 'uneven'] on rank 0 but [] on rank 1" in first


def from_a_peer(place: Place) -> str:
    files = of_all(packed(place.own))
    place.load(unpacked(files[place.ranks.index % 2]))
    return place.refuse(unpacked(files[1 - place.ranks.index % 2]))


def test_a_rank_that_stores_the_same_part_has_saved():
    errors = on(PEERS, from_a_peer)
    assert len(set(errors)) == 1
    assert "rank 0 of 4 (and 3 more), loading a state dict" in errors[0]


def test_another_number_of_ranks():
    """One rank has whole values, which fit all; parts of two fit nobody else."""
    alone = on(ONE, lambda place: packed(place.own))[0]
    on(TWO, lambda place: place.load(unpacked(alone)))
    on(PEERS, lambda place: place.load(unpacked(alone)))
    two = on(TWO, lambda place: packed(place.own))[0]
    for error in (*on(ONE, lambda place: place.refuse(unpacked(two))),
                  *on(PEERS, lambda place: place.refuse(unpacked(two)))):  # fmt: skip
        assert "`rows` is spread over DeviceMesh((ep=2)" in error


def test_values_of_another_rank_do_not_mix_with_own_ones():
    """By hand, without a load_state_dict. (The meshes of ranks that are threads never equal one another.)"""
    compat.keep_origins()
    with fake_world(2, rank=0):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        file, before = packed(values_on(mesh)), packed(values_on(mesh, whole=True))
    with fake_world(2, rank=1):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        given, own = unpacked(file), values_on(mesh)
        for name in ("rows", "expert.0", "uneven"):
            for use in (lambda a, b: a.copy_(b), lambda a, b: b.lerp_(a, 0.5), lambda a, b: a * 0.5 + b,
                        lambda a, b: b * 0.5 + a):  # fmt: skip
                with pytest.raises((RuntimeError, UnsupportedUse), match=r"different mesh|another rank stores"):
                    use(own[name], given[name])
        for foreign, mine in ((given["rows"], own["rows"]), (given["rows"].clone(), own["rows"].clone()),
                              (given["rows"] * 2, own["rows"] * 2)):  # fmt: skip
            assert origins.complaint(foreign, mesh)
            assert origins.complaint(mine, mesh) is None
        whole = unpacked(before)["rows"]  # of which torch would take the rows of the rank that saved it
        assert torch.equal(own["rows"].copy_(whole).to_local(), ROWS[2:])


# ---- state of optimizers, without a model


def stepped(place: Place) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    params = [nn.Parameter(value) for name, value in place.own.items() if name != "buffer"]
    optimizer = torch.optim.AdamW(params, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return params, optimizer


def states(place: Place, mine: str, state: bytes | None = None) -> tuple[str | None, list[Tensor], bytes]:
    """What is said of loaded state, and the parameters after the step that follows. mine: whose state is loaded."""
    optimizer_guard.guard_optimizers()
    params, optimizer = stepped(place)
    saved = packed(optimizer.state_dict())
    names = {param: f"p{number}" for number, param in enumerate(params)}
    given = {"own": saved, "first": of_all(saved)[0], "other": state, "none": None}[mine]
    if given is not None:
        optimizer.load_state_dict(unpacked(given))
        assert optimizer_guard.was_loaded(optimizer)
    error = None
    try:
        optimizer_guard.check_state(optimizer, names)
    except CheckpointError as caught:
        error = str(caught)
    if any(of_all(error)):
        return error, [], saved
    optimizer.step()
    assert not optimizer_guard.was_loaded(optimizer)
    kept = [optimizer.state[param]["exp_avg"] for param in params]
    assert all(origins.same_layout(value, param) and value.device_mesh is param.device_mesh
               for value, param in zip(kept, params))  # fmt: skip
    return None, [full(param.detach()) for param in params], saved


def test_state_of_an_optimizer():
    (_, expected, _), _ = on(TWO, states, "none")
    for error, found, _ in on(TWO, states, "own"):
        assert error is None
        assert all(map(torch.equal, found, expected))
    (error, _, two), (wrong, _, _) = on(TWO, states, "first")
    assert error is None
    assert "AdamW's loaded `exp_avg` of `p0` holds the part of another rank (ep=0), not that of this one" in wrong
    (_, _, alone), *_ = on(ONE, states, "own")
    for axes in (TWO, PEERS):  # whole state fits all
        for error, found, _ in on(axes, states, "other", alone):
            assert error is None
            assert all(map(torch.equal, found, expected))
    (error, _, _), *_ = on(ONE, states, "other", two)
    assert "AdamW's loaded `exp_avg` of `p0` is spread over DeviceMesh((ep=2)" in error


# ---- compiled models


class Small(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.embed, self.mlp, self.head = nn.Embedding(64, D), mlp, nn.Linear(D, 64)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.mlp(x))


def train(compiled: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        compiled(torch.arange(12).view(2, 6)).square().mean().backward()
        optimizer.step()


def save_and_load(rank: int, model: nn.Module, steps: int) -> tuple[list[str], dict[str, Tensor]]:
    compiled = moefx.compile(model, init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)), verify=0)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)

    def values() -> dict[str, Tensor]:
        return {name: full(value.detach()).clone() for name, value in compiled.state_dict().items()}

    def refused(use: Callable[[], object]) -> str:
        before = values()
        with pytest.raises(CheckpointError) as caught:
            use()
        assert all(torch.equal(value, before[name]) for name, value in values().items())
        return str(caught.value)

    with closing(compiled):
        train(compiled, optimizer, 1)
        own = packed(compiled.state_dict()), packed(optimizer.state_dict())
        if not steps:
            train(compiled, optimizer, 1)
            return [], values()
        first = of_all(own)[0]
        errors = [refused(lambda: compiled.load_state_dict(unpacked(first[0])))]
        optimizer.load_state_dict(unpacked(first[1]))
        errors += [refused(optimizer.step) for _ in range(2)]
        folder = Path(tempfile.gettempdir()) / f"moefx-{os.getpid()}-never-made"
        errors += [refused(lambda: moefx.checkpoint.save(folder, compiled, optimizer, step=1))]
        assert not folder.exists()
        for value in unpacked(first[0]).values():
            if isinstance(value, ExpertTensor):  # its owner would wait in the broadcast for a rank that gave up
                with pytest.raises(UnsupportedUse, match="what another rank stores of it"):
                    value.full_tensor()
        train_apart = {name: value.clone() for name, value in compiled.state_dict().items()}
        optimizer.load_state_dict(unpacked(own[1], weights_only=True))
        train(compiled, optimizer, 2)
        compiled.load_state_dict(train_apart)
        optimizer.load_state_dict(unpacked(own[1]))
        train(compiled, optimizer, 1)
        return errors, values()


@pytest.mark.parametrize("experts", [StackedLoop, lambda: LoopMoE(Loop(num_experts=4))], ids=["stacked", "listed"])
def test_a_compiled_model_and_its_optimizer(experts):
    torch.manual_seed(0)
    plain = Small(experts())

    def both(rank: int, world: int) -> tuple:
        models = [copy.deepcopy(plain) for _ in range(2)]
        return save_and_load(rank, models[0], 0)[1], *save_and_load(rank, models[1], 1)

    (expected, errors, found), (_, others, _) = run_sharing(2, both, timeout=120)
    assert errors == others
    assert all("holds the part of another rank (ep=0), not that of this one (ep=1)" in error for error in errors)
    assert "rank 1 of 2, loading a state dict" in errors[0]
    assert "AdamW's loaded `exp_avg` of `mlp." in errors[1]
    assert "rank 1 of 2, stepping with loaded state" in errors[1]
    assert "rank 1 of 2, looking at the optimizer's state" in errors[3]
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
