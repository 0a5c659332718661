"""Models that no rank could build whole: compiled on the meta device, filled by an initialiser or from files."""

from __future__ import annotations

import json
import re
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, PreTrainedConfig

import moefx
from moefx import checkpoint
from moefx.errors import CheckpointError, CollectiveError, DivergenceError, MoefxError, UnsupportedUse
from moefx.weights import values as weights
from tests.support.families import case_of, tiny_config
from tests.support.handmade import LanguageModel, Loop, OneLayer
from tests.support.models import chosen
from tests.support.op_styles import StackedLoop
from tests.support.parity import buffers, compare, full, outputs_of, parameters
from tests.support.ranks import one_rank, run_ranks

TOKENS = torch.arange(16).view(2, 8) + 3
BATCH = {"input_ids": TOKENS, "labels": TOKENS}
STYLE = Loop(num_experts=7, bias=True, counting=True, correction=True, scores="sigmoid")


def draw(module: nn.Module) -> None:
    """An init_fn."""
    for parameter in module.parameters(recurse=False):
        parameter.normal_(0.0, 0.3)
    for buffer in module.buffers(recurse=False):
        buffer.uniform_(-0.1, 0.1)


def on_meta(build, ranks: int, **options):
    with torch.device("meta"):
        model = build()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    return moefx.compile(model, mesh, dynamic=False, **options, example_inputs=BATCH)


def tied() -> nn.Module:
    return LanguageModel(STYLE, tied=True)


# An initialiser


def _initialise(rank, world, expected):
    with closing(on_meta(tied, world)) as compiled:
        with pytest.raises(UnsupportedUse, match="on the meta device"):
            compiled(**BATCH)
        compiled.materialize(draw, seed=5)
        compare({**parameters(compiled), **buffers(compiled)}, expected).check(f"rank {rank}")
        experts = [p for name, p in compiled.named_parameters() if ".experts." in name]
        held = sum(p.to_local().numel() for p in experts)
        assert held * 7 == sum(p.numel() for p in experts) * (4, 3)[rank]
        optimizer = torch.optim.AdamW(compiled.parameters(), 1e-2)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = compiled(**BATCH).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        with pytest.raises(UnsupportedUse, match="no parameter is on the meta device"):
            compiled.materialize(draw)


def test_all_ranks_draw_what_one_device_draws():
    plain = tied()
    with torch.no_grad():
        torch.manual_seed(5)
        for module in plain.modules():
            draw(module)
    run_ranks(2, _initialise, {**parameters(plain), **buffers(plain)})


# Files of transformers: homes of four experts and of three


def config_of(family: str) -> PreTrainedConfig:
    config = tiny_config(family)
    for name in ("num_local_experts", "n_routed_experts", "num_experts"):
        if hasattr(config, name):
            setattr(config, name, 7)
    return config


def _from_files(rank, world, family, folder, expected):
    read: list[str] = []
    with closing(on_meta(lambda: AutoModelForCausalLM.from_config(config_of(family)), world)) as compiled:
        original = weights.Files.read

        def noting(self, name, block=None):
            read.append(f"{name}[{block[0].start}:{block[0].stop}]" if block else name)
            return original(self, name, block)

        with mock.patch.object(weights.Files, "read", noting):
            compiled.materialize(folder)
        out = compiled(**BATCH)
        compare({**outputs_of(out), **parameters(compiled)}, expected).check(f"{family}, rank {rank}")
        compiled.save_safetensors(f"{folder}/again", max_file_bytes=40_000)
    return read


def _ours(read: list[str], path: str) -> set[str]:
    """What a rank read of one module: expert numbers, or rows."""
    return {name.removeprefix(path) for name in read if name.startswith(path)}


@pytest.mark.parametrize("family", chosen(["mixtral"], ["mixtral", "gpt_oss", "deepseek_v3", "jamba"]))
def test_every_rank_reads_its_own_experts_and_files_stay_as_they_are(family, tmp_path):
    model = AutoModelForCausalLM.from_config(config_of(family)).train()
    model.save_pretrained(tmp_path)
    expected = {**outputs_of(model(**BATCH)), **parameters(model)}
    first, second = run_ranks(2, _from_files, family, str(tmp_path), expected)
    if family == "mixtral":
        experts = "model.layers.0.block_sparse_moe.experts."
        assert {name.split(".")[0] for name in _ours(first, experts)} == {"0", "1", "2", "3"}
        assert {name.split(".")[0] for name in _ours(second, experts)} == {"4", "5", "6"}
    if family == "gpt_oss":
        experts = "model.layers.0.mlp.experts.down_proj"
        assert _ours(first, experts) == {"[0:4]", "_bias[0:4]"}
        assert _ours(second, experts) == {"[4:7]", "_bias[4:7]"}
    again = tmp_path / "again"
    index = json.loads((again / weights.INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert set(index["weight_map"]) == set(load_file(tmp_path / weights.SINGLE))
    assert json.loads((again / "config.json").read_text())["architectures"] == [type(model).__name__]
    loaded = AutoModelForCausalLM.from_pretrained(again).train()
    compare({**outputs_of(loaded(**BATCH)), **parameters(loaded)}, expected).check(family)


# What goes wrong


def test_what_cannot_be_filled_is_named(tmp_path):
    plain = LanguageModel(STYLE)
    torch.save({}, tmp_path / "other.bin")
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        with torch.device("meta"):
            early = moefx.compile(LanguageModel(STYLE), mesh)
        with pytest.raises(UnsupportedUse, match="not known before a program is compiled") as error:
            early.materialize(draw)
        assert "example_inputs" in str(error.value)
        early.close()
        compiled = on_meta(lambda: LanguageModel(STYLE), 1)
        with pytest.raises(UnsupportedUse, match=r"init_fn left \d+ tensors without a value: embed.weight"):
            compiled.materialize(lambda module: None)
        with pytest.raises(UnsupportedUse, match="no values yet"):
            compiled(**BATCH)
        _refused_without_values(compiled, plain, tmp_path)
        with pytest.raises(CheckpointError, match="there are no safetensors files"):
            compiled.materialize(tmp_path / "nowhere")
        _refused_without_values(compiled, plain, tmp_path)
        with pytest.raises(UnsupportedUse, match="no values yet"):  # but memory, with whatever was in it
            compiled.state_dict()
        compiled.materialize(draw)
        assert compiled(**BATCH).loss.isfinite()
        compiled.close()
        wrong = {
            "nothing": "there are no safetensors files",
            "missing": "no values for 1 tensors: norm.bias",
            "shape": r"`norm.bias` has shape \(3,\)",
            "damaged": "is not a whole safetensors file",
            "index": "lacks model-00002",
            "null": "is damaged",
            "twice": r"has `norm\.bias` in several files",
            "quantised": r"`norm\.bias` is of torch.int8 in .*, not torch.float32",
        }
        with closing(on_meta(lambda: LanguageModel(STYLE), 1)) as compiled:
            for change, message in wrong.items():
                _write(plain, tmp_path / change, change)
                with pytest.raises(CheckpointError, match=message):
                    compiled.materialize(tmp_path / change)
            _write(plain, tmp_path / "right", "right")
            compiled.materialize(tmp_path / "right")
            assert torch.equal(compiled.norm.bias.full_tensor(), plain.norm.bias)


def _refused_without_values(compiled: nn.Module, plain: nn.Module, folder: Path) -> None:
    for use in (
        lambda: compiled.save_safetensors(folder / "early"),
        lambda: checkpoint.save(folder / "early", compiled, step=1),
        lambda: checkpoint.load(folder / "early", compiled),
        lambda: compiled.load_state_dict(plain.state_dict()),
    ):
        with pytest.raises(UnsupportedUse, match="no values yet"):
            use()
    assert not (folder / "early").exists()


class Positions(nn.Module):
    """Buffers of whole numbers and of truths, which no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = LanguageModel(STYLE)
        self.register_buffer("order", torch.arange(8), persistent=False)
        self.register_buffer("causal", torch.ones(8, 8, dtype=torch.bool).tril(), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, input_ids, labels=None):
        length = input_ids.shape[1]
        seen = self.causal[:length, :length].any(0) & (self.order[:length] >= self.count)
        return self.inner(torch.where(seen, input_ids, 0), labels)


def _draw_numbers(module: nn.Module) -> None:
    """Sets them, in each way that there is."""
    if not isinstance(module, Positions):
        draw(module)
        return
    torch.arange(8, out=module.order)
    module.causal.data.copy_(torch.ones(8, 8).tril())
    module.count = torch.zeros((), dtype=torch.int64)


def test_whole_numbers_and_truths_that_nobody_sets_are_named():
    with one_rank(), closing(on_meta(Positions, 1)) as compiled:
        with pytest.raises(UnsupportedUse, match="left 3 tensors without a value: order, causal, count"):
            compiled.materialize(lambda module: None if isinstance(module, Positions) else draw(module))
        compiled.materialize(_draw_numbers)
        for name in ("order", "causal", "count"):
            assert torch.equal(getattr(compiled, name), getattr(Positions(), name))


EXPERT = "model.layers.1.block_sparse_moe.experts.{}.w1.weight"


@pytest.mark.parametrize(("change", "message"), [
    ("gap", r"there is no 3 among the experts of model.layers.1.block_sparse_moe.experts.9.w1.weight and others"),
    ("one less", "there are 7 like .*w1.weight, but 8 like .*w3.weight"),
    ("of another kind", "w1.weight is of torch.float32, .*w1.weight is of torch.int8"),
    ("cut", "model.safetensors is not a whole safetensors file"),
])  # fmt: skip
def test_what_is_wrong_with_experts_in_files_is_said(change, message, tmp_path):
    case_of("mixtral").build().save_pretrained(tmp_path)
    file = tmp_path / weights.SINGLE
    tensors = load_file(file)
    if change == "gap":
        tensors |= {EXPERT.format(9).replace("w1", w): tensors.pop(EXPERT.format(3).replace("w1", w))
                    for w in ("w1", "w2", "w3")}  # fmt: skip
    if change == "one less":
        del tensors[EXPERT.format(7)]
    if change == "of another kind":
        tensors[EXPERT.format(3)] = tensors[EXPERT.format(3)].to(torch.int8)
    weights.save_file(tensors, file, metadata={"format": "pt"})
    if change == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    build = lambda: AutoModelForCausalLM.from_config(tiny_config("mixtral"))  # noqa: E731
    with one_rank(), closing(on_meta(build, 1)) as compiled, pytest.raises(CheckpointError, match=message):
        compiled.materialize(tmp_path)


def _with_bytes() -> nn.Module:
    model = LanguageModel(STYLE)
    model.register_buffer("scales", torch.arange(4.0).to(torch.float8_e4m3fn))
    return model


def test_numbers_of_one_byte_are_read_where_the_model_has_such(tmp_path):
    with one_rank():
        plain = _with_bytes()
        _write(plain, tmp_path / "bytes", "bytes")
        with closing(on_meta(_with_bytes, 1)) as compiled:
            compiled.materialize(tmp_path / "bytes")
            assert torch.equal(compiled._inner.scales.float(), plain.scales.float())


def _write(plain: nn.Module, folder: Path, change: str) -> None:
    folder.mkdir()
    tensors = {name: full(tensor).clone() for name, tensor in plain.state_dict().items()}
    if change == "missing":
        del tensors["norm.bias"]
    if change == "shape":
        tensors["norm.bias"] = torch.zeros(3)
    if change == "quantised":
        tensors["norm.bias"] = tensors["norm.bias"].to(torch.int8)
    if change == "null":
        (folder / weights.INDEX).write_text(json.dumps({"weight_map": None}))
    elif change == "twice":
        weights.save_file(tensors, folder / "a.safetensors")
        weights.save_file({"norm.bias": tensors["norm.bias"]}, folder / "b.safetensors")
    elif change == "index":
        where = dict.fromkeys(tensors, "model-00002-of-00002.safetensors")
        (folder / weights.INDEX).write_text(json.dumps({"weight_map": where}))
    elif change == "damaged":
        (folder / weights.SINGLE).write_bytes(b"no")
    elif change != "nothing":
        weights.save_file(tensors, folder / weights.SINGLE)


def stacked(experts: int = 4) -> nn.Module:
    model = OneLayer(Loop())
    model.mlp = StackedLoop()
    if experts != 4:
        model.mlp.up = nn.Parameter(torch.randn(experts, 16, 24))
    return model


def _differently(rank, world, folder):
    """What a rank is told where ranks do other things, or files are of other experts; then all is well."""
    said = []
    with closing(on_meta(stacked, world, timeout_s=30)) as compiled:
        for materialize in (
            lambda: compiled.materialize(folder / "8"),
            lambda: compiled.materialize(folder / f"of rank {rank}"),
            lambda: compiled.materialize(draw, seed=rank),
            lambda: compiled.materialize(draw if rank == 0 else fail),
        ):
            with pytest.raises(MoefxError) as error:
                materialize()
            said.append(str(error.value))
        compiled.materialize(folder / "of rank 0")
        loss = compiled(**BATCH).loss.item()
        with pytest.raises(CheckpointError, match=r"folder is .*/by 0 on rank 0 but .*/by 1 on rank 1"):
            compiled.save_safetensors(folder / f"by {rank}")
        with pytest.raises(DivergenceError, match="rank 1 of the mesh has different values of"):
            compiled.load_state_dict(draw_state(rank), strict=False)
        with pytest.raises(DivergenceError, match="rank 1 of the mesh has different values of"):
            compiled.save_safetensors(folder / "apart")
        assert not (folder / "apart").exists()
    return said, loss


def draw_state(rank: int) -> dict[str, torch.Tensor]:
    return {"head.weight": torch.full((64, 16), float(rank))}


def fail(module: nn.Module) -> None:
    raise ValueError("no disk")


def test_ranks_that_do_other_things_are_told(tmp_path):
    for folder, model in (("8", stacked(8)), ("of rank 0", first := stacked()), ("of rank 1", stacked())):
        (tmp_path / folder).mkdir()
        weights.save_file(model.state_dict(), tmp_path / folder / weights.SINGLE)
    wanted = first(**BATCH).loss.item()
    for (size, files, seeds, failure), loss in run_ranks(2, _differently, tmp_path, timeout=120):
        assert "`mlp.up` has shape (8, 16, 24)" in size
        assert "not (4, 16, 24)" in size
        assert "rank 1 of the mesh has different values of" in files
        assert "rank 1 of the mesh has different values of" in seeds
        assert "ValueError: no disk" in failure
        assert "rank 1 of 2, setting values" in failure
        assert loss == pytest.approx(wanted, rel=1e-5)


def _stalled(rank, world, folder):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    with closing(moefx.compile(stacked(), mesh, example_inputs=BATCH)) as compiled:
        compiled._session.timeout = timedelta(seconds=2)
        original, met = compiled._session.meet, []

        def meet(doing, axes):
            met.extend([doing] if doing.startswith("gathering") else [])
            if rank == 1 and len(met) == 3:
                while not Path(f"{folder} told").exists():
                    time.sleep(0.1)
            original(doing, axes)

        with mock.patch.object(compiled._session, "meet", meet), pytest.raises(CollectiveError) as error:
            compiled.save_safetensors(folder)
        Path(f"{folder} told").touch()
        return str(error.value)


def test_a_rank_that_stalls_while_weights_are_gathered_is_named(tmp_path):
    said = run_ranks(2, _stalled, tmp_path / "out", timeout=120)[0]
    assert re.search(r"Rank 0 failed in .*(.|\n)*rank 1: waiting in gathering", said), said
    assert not list((tmp_path / "out").glob("*"))
