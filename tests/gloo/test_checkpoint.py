"""Checkpoints: the same bits on every mesh and in the plain model, resumed bit for bit, whole or not there."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
import warnings
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map

import moefx
from moefx import checkpoint
from moefx.errors import CheckpointError, DivergenceError, MoefxError
from tests.support.handmade import LanguageModel, Loop
from tests.support.models import Case, chosen, shallow
from tests.support.parity import full
from tests.support.ranks import run_ranks
from tests.support.scenarios import DP2_EP2, EP1, EP2, EP4, compiled_case


def first_layer(model: nn.Module) -> None:
    model.layers = model.layers[:1]
    model.unread = nn.Parameter(torch.ones(3))  # never has a gradient, and no state in the optimizer


SEPARATE = partial(LanguageModel, Loop(num_experts=6, bias=True, counting=True), tied=True)
STACKED = shallow("mixtral-grouped_mm")
STACKED = replace(STACKED, make=partial(STACKED.make, num_local_experts=7))
MODELS = {"separate": Case("separate", SEPARATE, edit=first_layer), "stacked": STACKED}  # homes differ in number
Values = dict[str, Tensor]


FIXED = partial(moefx.compile, options=moefx.Options.named(dynamic=False))  # all batches here have one size
PLACED = partial(moefx.compile, dynamic=False, placement="balanced", copies=1, rehome_every=4)


SHARDED = partial(moefx.compile, options=moefx.Options.named(dynamic=False, shard_dense=True))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)


def values(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Values:
    """Whole parameters, buffers and optimizer state by name (a collective)."""
    found = {name: full(tensor.detach()).clone() for name, tensor in model.state_dict().items()}
    for name, param in model.named_parameters():
        for key, value in (optimizer.state.get(param, {}) if optimizer else {}).items():
            found[f"{name}.{key}"] = full(value).clone()
    return found


def assert_same(actual: Values, expected: Values) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name, value in expected.items() if not torch.equal(actual[name], value)]
    assert not different, different


def spoil(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """So that loading has something to do."""
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5).add_(1.0)
    for group in optimizer.param_groups if optimizer else []:
        group["lr"] = 0.5


def train(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, steps: int) -> list[float]:
    """Steps on batches that the random state of this rank chooses; the losses."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**MODELS[name].batch(int(torch.randint(10**6, ())))).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


# ---- the same bits everywhere


def save_trained(rank, world, layout, name, folder):
    """With dense parameters in shards."""
    torch.manual_seed(rank)
    model = compiled_case(MODELS[name], layout, SHARDED)
    optimizer = adamw(model)
    train(model, optimizer, name, 2)
    path = checkpoint.save(folder, model, optimizer, step=2, extra={"place": 10 + rank})
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/users-own")
    saved = values(model, optimizer)
    model.close()
    return path, saved if rank == 0 else None


def load_and_compare(rank, world, layout, name, folder, expected):
    weights = {key: expected[key] for key in MODELS[name].build().state_dict()}
    model = compiled_case(MODELS[name], layout, SHARDED if layout == DP2_EP2 else FIXED)
    optimizer = adamw(model)
    for _ in ("before the first call", "after it"):
        spoil(model, optimizer)
        found = checkpoint.load(folder, model, optimizer)
        assert found == {"step": 2, "ranks": 4, "extra": {"place": 10 + (rank if world == 4 else 0)}}
        assert optimizer.param_groups[0]["lr"] == 0.01
        assert_same(values(model, optimizer), expected)
        for load in (
            lambda: checkpoint.load(folder, model),
            lambda: model.load_state_dict(weights),
            lambda: dcp.load(model.state_dict(), checkpoint_id=f"{folder}/users-own"),
        ):
            spoil(model)
            load()
            assert_same(values(model, optimizer), expected)
        train(model, optimizer, name, 1)
        after = values(model, optimizer)
        assert any(not torch.equal(after[key], expected[key]) for key in weights)
    model.close()


@pytest.mark.parametrize("name", chosen(["separate"], MODELS))
def test_saved_on_four_ranks_loads_bit_for_bit_everywhere(name, tmp_path):
    answers = run_ranks(4, save_trained, EP4, name, str(tmp_path))
    path, expected = answers[0]
    assert path == tmp_path / "step-000002" == checkpoint.latest(tmp_path)
    for world, layout in ((2, EP2), (4, DP2_EP2), (1, EP1)):
        run_ranks(world, load_and_compare, layout, name, str(tmp_path), expected)
    plain = MODELS[name].build()
    optimizer = adamw(plain)
    spoil(plain, optimizer)
    assert checkpoint.load(tmp_path, plain, optimizer)["step"] == 2
    assert_same(values(plain, optimizer), expected)
    assert all(type(value) in (Tensor, nn.Parameter) for value in plain.state_dict().values())


ESP4, DIVIDED = ((4,), ("esp",)), partial(moefx.compile, options=moefx.Options.named(dynamic=False, r=2))


def save_with_changing_r(rank, world, layout, name, folder):
    torch.manual_seed(rank)
    model = compiled_case(MODELS[name], layout, DIVIDED)
    optimizer = adamw(model)
    for r in (2, 0, 1, 4):
        model.use(r=r)
        train(model, optimizer, name, 1)
    checkpoint.save(folder, model, optimizer, step=4, extra={"place": 10 + rank})
    saved = values(model, optimizer)
    followed = train(model, optimizer, name, 2)
    after = values(model, optimizer)
    model.close()
    return saved, after, followed


def resume_with_r(rank, world, layout, name, folder, expected):
    model = compiled_case(MODELS[name], layout, DIVIDED)
    model.use(r=4)
    optimizer = adamw(model)
    spoil(model, optimizer)
    checkpoint.load(folder, model, optimizer)
    assert_same(values(model, optimizer), expected[rank][0])
    assert train(model, optimizer, name, 2) == expected[rank][2]
    assert_same(values(model, optimizer), expected[rank][1])
    model.close()


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_parts_of_experts_are_saved_and_loaded_whatever_r_is(name, tmp_path):
    answers = run_ranks(4, save_with_changing_r, ESP4, name, str(tmp_path))
    run_ranks(4, resume_with_r, ESP4, name, str(tmp_path), answers)
    for world, layout in ((4, EP4), (2, EP2)):
        run_ranks(world, load_plain, layout, name, str(tmp_path), answers[0][0])


@pytest.mark.full
def test_a_checkpoint_of_whole_experts_is_loaded_as_parts(tmp_path):
    plain = MODELS["stacked"].build()
    optimizer = adamw(plain)
    train(plain, optimizer, "stacked", 2)
    checkpoint.save(tmp_path, plain, optimizer, step=2)
    run_ranks(4, load_divided, ESP4, "stacked", str(tmp_path), values(plain, optimizer))


def load_divided(rank, world, layout, name, folder, expected):
    load_plain(rank, world, layout, name, folder, expected, DIVIDED)


def load_plain(rank, world, layout, name, folder, expected, compile_fn=FIXED):
    model = compiled_case(MODELS[name], layout, compile_fn)
    optimizer = adamw(model)
    checkpoint.load(folder, model, optimizer)
    assert_same(values(model, optimizer), expected)
    model.close()


def test_a_plain_model_saves_for_compiled_ones(tmp_path):
    plain = MODELS["stacked"].build()
    optimizer = adamw(plain)
    train(plain, optimizer, "stacked", 2)
    checkpoint.save(tmp_path, plain, optimizer, step=2)
    run_ranks(2, load_plain, EP2, "stacked", str(tmp_path), values(plain, optimizer))


def on_a_slice(rank, world, folder):
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "ep"))["dp", "ep"]
    model = FIXED(MODELS["stacked"].build(), mesh)
    own = f"{folder}/{rank // 2}"
    with torch.no_grad():
        for param in model.parameters():
            param.add_(rank // 2)
    expected = values(model)
    checkpoint.save(own, model, step=1)
    spoil(model)
    assert checkpoint.load(own, model)["ranks"] == 2
    assert_same(values(model), expected)
    model.close()


def test_a_mesh_may_be_a_slice_of_the_world(tmp_path):
    run_ranks(4, on_a_slice, str(tmp_path))


# ---- resuming


def turned(model):
    """Every expert lives where the one before it did."""
    return {name: owners[-1:] + owners[:-1] for name, owners in model.placement_state()["homes"].items()}


def plain(state):
    return tree_map(lambda each: each.tolist() if isinstance(each, Tensor) else each, state)


def resume(rank, world, layout, name, folder):
    def fresh():
        model = compiled_case(MODELS[name], layout, PLACED)
        return model, adamw(model)

    torch.manual_seed(100 + rank)
    model, optimizer = fresh()
    straight = train(model, optimizer, name, 3)
    model.move_experts(turned(model))
    straight += train(model, optimizer, name, 2)
    model.move_experts(turned(model))  # the optimizer's state is where the experts were
    checkpoint.save(folder, model, optimizer, step=5)  # with plans, one of which is being made
    straight += train(model, optimizer, name, 5)
    expected, placement = values(model, optimizer), plain(model.placement_state())
    model.close()

    torch.manual_seed(7)
    model, optimizer = fresh()
    spoil(model)
    checkpoint.load(folder, model, optimizer)
    assert train(model, optimizer, name, 5) == straight[5:]
    assert plain(model.placement_state()) == placement
    assert_same(values(model, optimizer), expected)
    model.close()


@pytest.mark.parametrize("name", chosen(["stacked"], MODELS))
def test_a_run_resumed_behind_moves_of_experts_continues_bit_for_bit(name, tmp_path):
    run_ranks(2, resume, EP2, name, str(tmp_path))


# ---- whole or not there


def pair(folder: Path) -> nn.Module:
    """Two whole checkpoints, of steps 10 and 20; the second is of the model that is returned."""
    model = nn.Linear(3, 2)
    optimizer = adamw(model)
    for step in (10, 20):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        checkpoint.save(folder, model, optimizer, step=step)
    return model


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("damage", ["removed", "emptied", "short", "longer"])
def test_a_cut_file_is_seen(tmp_path, damage):
    pair(tmp_path / "whole")
    names = [path.name for path in files_of(tmp_path / "whole" / "step-000020")]
    assert len(names) == 4, names
    for name in names:
        root = tmp_path / name.strip(".")
        shutil.copytree(tmp_path / "whole", root)
        path, newest = root / "step-000020" / name, root / "step-000020"
        if damage == "removed":
            path.unlink()
        else:
            size = path.stat().st_size
            os.truncate(path, {"emptied": 0, "short": size - 1, "longer": size + 1}[damage])
        assert checkpoint.latest(root) == root / "step-000010"
        assert f"`{name}`" in checkpoint.complaint(newest)
        model = nn.Linear(3, 2)
        with pytest.raises(CheckpointError, match=re.escape(f"`{name}`")) as caught:
            checkpoint.load(newest, model)
        assert "step-000010" in caught.value.hint
        with pytest.warns(UserWarning, match=re.escape(f"`{name}`")):
            assert checkpoint.load(root, model)["step"] == 10


def test_a_changed_byte_is_seen(tmp_path):
    pair(tmp_path)
    for path in files_of(tmp_path / "step-000020"):
        whole = path.read_bytes()
        middle = len(whole) // 2
        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        with pytest.raises(CheckpointError, match=f"`{path.name}`|not a whole|damaged"):
            checkpoint.load(tmp_path / "step-000020", nn.Linear(3, 2))
        path.write_bytes(whole)
    assert checkpoint.load(tmp_path, nn.Linear(3, 2))["step"] == 20


def die_at(number: int, folder: str) -> None:
    """End this process the hard way at its `number`-th file operation in `folder`."""
    seen = 0

    def hook(event: str, args: tuple) -> None:
        nonlocal seen
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and str(args[0]).startswith(folder):
            seen += 1
            if seen == number:
                os._exit(3)

    sys.addaudithook(hook)


def killed_saves(rank, world, folder):
    """Save step 20 again and again, each time killed one file operation later; what `latest` says each time."""
    model = nn.Linear(3, 2)
    optimizer = adamw(model)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    checkpoint.save(folder, model, optimizer, step=10)
    found = []
    for number in range(1, 200):
        child = os.fork()
        if child == 0:
            die_at(number, folder)
            checkpoint.save(folder, model, optimizer, step=20)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        newest = checkpoint.latest(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step = checkpoint.load(folder, nn.Linear(3, 2))["step"]
        assert newest.name == f"step-{step:06d}"
        found.append((code, step))
        if code == 0:
            return found, sorted(os.listdir(folder))
        shutil.rmtree(Path(folder) / "step-000020", ignore_errors=True)
    raise AssertionError("never done")


def test_killed_at_any_point_leaves_a_whole_checkpoint(tmp_path):
    found, left = run_ranks(1, killed_saves, str(tmp_path))[0]
    codes, steps = zip(*found)
    assert codes == (3,) * (len(found) - 1) + (0,)
    assert len(found) > 10
    assert steps == tuple(sorted(steps))
    assert steps[0] == 10
    assert steps[-1] == 20
    assert left == ["step-000010", "step-000020"]  # nothing half-written stays behind


def one_rank_fails(rank, world, folder):
    model = compiled_case(MODELS["stacked"], EP2, FIXED)
    checkpoint.save(folder, model, step=1)
    before = [(path, path.read_bytes()) for path in files_of(Path(folder))]
    errors = []

    def attempt(what, **options):
        with pytest.raises(CheckpointError) as caught:
            what(folder, model, **options)
        errors.append(str(caught.value))
        dist.barrier()
        assert [(path, path.read_bytes()) for path in files_of(Path(folder))] == before
        assert os.listdir(folder) == ["step-000001"]
        dist.barrier()

    attempt(checkpoint.save, step=2, extra={"bad": object()} if rank == 1 else None)
    real = checkpoint._write_file, checkpoint.dcp.FileSystemWriter.write_data
    if rank == 1:
        def full_disk(*args, **kwargs):
            raise OSError("No space left on device")

        checkpoint._write_file = full_disk
    attempt(checkpoint.save, step=2)
    checkpoint._write_file = real[0]
    if rank == 1:
        checkpoint.dcp.FileSystemWriter.write_data = full_disk
    attempt(checkpoint.save, step=2)
    checkpoint.dcp.FileSystemWriter.write_data = real[1]
    attempt(checkpoint.save, step=1)
    attempt(checkpoint.save, step=2, keep_last=0)
    attempt(checkpoint.save, step=2 + rank)
    one = {"optimizer": adamw(model)} if rank == 0 else {}
    attempt(checkpoint.save, step=2, **one)
    attempt(checkpoint.save, step=2, keep_last=rank)
    attempt(checkpoint.save, step=-2)
    attempt(checkpoint.save, step=2.0)
    attempt(checkpoint.load, **one)
    attempt(lambda folder, *rest, **more: checkpoint.save(f"{folder}/{rank}", *rest, **more), step=2)
    assert checkpoint.save(folder, model, step=2).name == "step-000002"
    model.close()
    return errors


def test_what_fails_on_one_rank_fails_on_all(tmp_path):
    first, second = run_ranks(2, one_rank_fails, str(tmp_path))
    assert first == second
    assert "extra" in first[0]
    assert "rank 1 of 2" in first[0]
    assert "No space left" in first[1]
    assert "rank 1 of 2" in first[1]
    assert "No space left" in first[2]
    assert "there already" in first[3]
    assert "keep_last" in first[4]
    assert "step is 2 on rank 0 but 3 on rank 1" in first[5]
    assert "optimizer is AdamW on rank 0 but None on rank 1" in first[6]
    assert "rank 0 of 2" in first[7]
    assert "keep_last is 0" in first[7]
    assert "step is -2" in first[8]
    assert "step is 2.0" in first[9]
    assert "optimizer is AdamW on rank 0 but None on rank 1" in first[10]
    assert "directory is" in first[11]


def misfits(rank, world):
    model = compiled_case(MODELS["stacked"], EP2, FIXED)
    before, errors = values(model), []
    last = list(before)[-1]
    for change in ({last: torch.ones(1)}, {last: [1.0]}, {"more": torch.ones(1)}, {last: None}):
        given = {name: tensor + 1 for name, tensor in before.items()} | (change if rank == 1 else {})
        if rank == 1 and change == {last: None}:
            del given[last]
        with pytest.raises(CheckpointError) as caught:
            model.load_state_dict(given)
        errors.append(str(caught.value))
        assert_same(values(model), before)
    with pytest.raises(CheckpointError, match="missing is"):
        model.load_state_dict(given, strict=False)
    assert_same(values(model), before)
    model.close()
    return errors


def test_a_state_dict_that_fits_one_rank_is_loaded_by_none():
    first, second = run_ranks(2, misfits)
    assert first == second
    assert all("rank 1 of 2" in each and "loading a state dict" in each for each in first)
    assert ["has shape (1,)" in first[0], "is a list, not a tensor" in first[1]] == [True, True]
    assert ["unexpected ['more']" in first[2], "missing ['" in first[3]] == [True, True]


def save_apart(rank, world, folder, compare_every):
    """Rank 1 has left out an update."""
    options = moefx.Options.named(compare_every=compare_every)
    model = compiled_case(MODELS["separate"], EP2, partial(moefx.compile, options=options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**MODELS["separate"].batch(rank)).loss.backward()
    if rank == 0:
        optimizer.step()
    error = None
    try:
        checkpoint.save(folder, model, optimizer, step=1)
    except DivergenceError as caught:
        error = str(caught)
    model.close()
    return error


def test_copies_that_have_come_apart_are_not_saved(tmp_path):
    for error in run_ranks(2, save_apart, str(tmp_path), 100):
        assert "rank 1 of the mesh has made 0 optimizer steps where rank 0 has made 1" in error
    assert os.listdir(tmp_path) == []
    assert run_ranks(2, save_apart, str(tmp_path), 0) == [None, None]
    assert os.listdir(tmp_path) == ["step-000001"]


def save_alone(rank, world, folder):
    model = compiled_case(MODELS["stacked"], EP2, FIXED)
    model._session.timeout = timedelta(seconds=3)
    checkpoint.save(folder, model, step=1)
    error = None
    if rank == 0:
        with pytest.raises(MoefxError) as caught:
            checkpoint.save(folder, model, step=2)
        error = str(caught.value)
        Path(folder, "told").touch()
    else:
        while not Path(folder, "told").exists():
            time.sleep(0.1)
    model.close()
    return error


def test_a_save_that_one_rank_leaves_out_names_it(tmp_path):
    error, _ = run_ranks(2, save_alone, str(tmp_path))
    assert "preparing a checkpoint" in error
    assert "rank 1" in error
    assert sorted(os.listdir(tmp_path)) == ["step-000001", "told"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    pair(tmp_path)
    for other in (nn.Linear(3, 4), nn.Linear(3, 2, bias=False), nn.Sequential(nn.Linear(3, 2))):
        if isinstance(other, nn.Linear) and other.bias is None:
            checkpoint.load(tmp_path, other)  # a part of what was saved
            continue
        with pytest.raises(CheckpointError, match="does not fit"):
            checkpoint.load(tmp_path, other)


def test_keep_last_and_order(tmp_path):
    model = nn.Linear(3, 2)
    assert checkpoint.latest(tmp_path / "nowhere") is None
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        checkpoint.load(tmp_path, model)
    for step in (9, 10, 999999, 1000000):
        checkpoint.save(tmp_path, model, step=step, keep_last=3)
    assert sorted(os.listdir(tmp_path)) == ["step-000010", "step-1000000", "step-999999"]
    assert checkpoint.load(tmp_path, model)["step"] == 1000000
    (tmp_path / "step-1000000" / "manifest.json").unlink()
    checkpoint.save(tmp_path, model, step=1000000, keep_last=1)
    assert os.listdir(tmp_path) == ["step-1000000"]


# ---- parameters that had no gradient


class _Halves(nn.Module):
    """Two parameters, of which a call reads one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(3, generator=torch.Generator().manual_seed(n))) for n in (0, 1))

    def step(self, optimizer: torch.optim.Optimizer, *read: str) -> None:
        optimizer.zero_grad()
        sum(getattr(self, name).pow(2).sum() for name in read).backward()
        optimizer.step()


def _halves(*reads: str, of: type = torch.optim.AdamW) -> tuple[_Halves, torch.optim.Optimizer]:
    model = _Halves()
    optimizer = of(model.parameters(), lr=0.1)
    for read in reads:
        model.step(optimizer, *read)
    return model, optimizer


@pytest.mark.parametrize("before", [(), ("a",), ("b",), ("ab", "a")])
@pytest.mark.parametrize("saved", [("a", "a"), ("ab", "a")])
def test_state_is_of_parameters_that_had_a_gradient(tmp_path, saved, before):
    """Whatever the optimizer that loads has state of. Both go on with the same bits."""
    model, optimizer = _halves(*saved)
    checkpoint.save(tmp_path, model, optimizer, step=2)
    other, loading = _halves(*before)
    if before:
        other.b.grad = torch.ones(3)  # neither an obstacle nor lost
    checkpoint.load(tmp_path, other, loading)
    assert (other.b.grad is None) == (not before)
    for each, its in ((model, optimizer), (other, loading)):
        assert {name for name, param in each.named_parameters() if its.state.get(param)} == {*"".join(saved)}
        each.step(its, "a", "b")
    assert_same(values(other, loading), values(model, optimizer))


def test_state_that_another_optimizer_saved_is_refused_and_nothing_lost(tmp_path):
    model, optimizer = _halves("a", of=torch.optim.SGD)
    checkpoint.save(tmp_path / "sgd", model, optimizer, step=1)
    few = torch.optim.AdamW([model.a])
    model.step(few, "a")
    checkpoint.save(tmp_path / "few", model, few, step=1)
    other, loading = _halves("a")
    before = values(other, loading)
    with pytest.raises(CheckpointError, match="does not fit the model and optimizer"):
        checkpoint.load(tmp_path / "sgd", other, loading)
    assert_same({**values(other, loading)}, before)
    with pytest.raises(CheckpointError, match="the optimizer that was saved did not have `b`"):
        checkpoint.load(tmp_path / "few", other, loading)
