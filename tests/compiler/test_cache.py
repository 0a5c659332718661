"""Programs that come from a cache on disk: when they do, that they are the same, and what is never executed."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._sympy.functions import FloorDiv, Mod
from typer.testing import CliRunner

import moefx
from moefx.__main__ import app
from moefx.compiler.cache import entries, facts, sources, told
from moefx.compiler.cache.data import decoded, encoded
from moefx.compiler.cache.folder import Folder, Refused, chosen
from moefx.compiler.cache.shelf import Shelf
from moefx.compiler.cache.told import Teller, Untold, of_code
from moefx.compiler.variants import Builder
from moefx.errors import UnsupportedUse
from moefx.options import Options
from tests.support.handmade import D, Loop, make_moe
from tests.support.ranks import fake_world, run_threads

TOKENS = torch.arange(12).view(2, 6)
SCALE = 1.0  # a global variable that the forward reads


def helper(x: Tensor) -> Tensor:
    return x * SCALE


class Model(nn.Module):
    """One MoE layer; a flag and a number that are read from Python."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp, self.head = nn.Embedding(64, D), make_moe(Loop(num_experts=2, top_k=1)), nn.Linear(D, 64)
        self.factor = 2.0
        self.calls = 0
        self.last: Tensor | None = None

    def forward(self, ids: Tensor) -> dict[str, Any]:
        hidden = self.embed(ids) * self.factor
        hidden = helper(hidden + self.mlp(hidden))
        self.last = hidden.detach()
        self.calls = 7
        return {"logits": self.head(hidden), "rest": (hidden, None, [ids])}


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def compiled(change: Callable[[Model], object] = lambda model: None, options: Options | None = None,
             tokens: Tensor = TOKENS) -> tuple[Any, Any]:  # fmt: skip
    """A compiled model as rank 0 of two, and its program."""
    with fake_world(2):
        mine = model()
        change(mine)
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
        with closing(moefx.compile(mine, mesh, options)) as found:
            (program,) = found.prepare(tokens)
            return found, program


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A cache with the entry of the model, and the program that was compiled for it."""
    folder = tmp_path_factory.mktemp("cache")
    with mock.patch.dict(os.environ, {"MOEFX_CACHE": str(folder)}):
        return folder, compiled()[1]


@pytest.fixture
def cache(first: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that cache, for one test."""
    folder = tmp_path / "cache"
    shutil.copytree(first[0], folder)
    monkeypatch.setenv("MOEFX_CACHE", str(folder))
    return folder


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the log says meanwhile."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    log = logging.getLogger("moefx")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield found
    log.removeHandler(handler)
    log.setLevel(before)


class Compiled(Exception):
    """In place of a compile."""


@pytest.fixture
def no_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise Compiled

    monkeypatch.setattr(Builder, "compile", refuse)


def entry_of(folder: Path) -> Path:
    (found,) = folder.glob("*.json")
    return found


def test_a_hit_is_the_same_program(cache, first, no_compile):
    _, program = compiled()
    before = first[1]
    assert program.origin is None
    assert program.program.code.forward_source == before.program.code.forward_source
    assert program.program.code.backward_source == before.program.code.backward_source
    assert program.program.digest == before.program.digest
    assert [replace(each, load=None, choices=()) for each in program.program.regions] == [
        replace(each, load=None, choices=()) for each in before.program.regions]  # fmt: skip
    assert program.program.sources == before.program.sources
    for each in ("saved", "tangent_outputs", "grad_inputs", "differentiable_outputs", "num_statistics"):
        assert getattr(program.program.graphs, each) == getattr(before.program.graphs, each)
    assert program.state.told_apart_by[0] == before.state.told_apart_by[0]


def test_reports_of_a_hit_compile_it_after_all(cache, first):
    found, program = compiled()
    with mock.patch.object(Builder, "compile", autospec=True, side_effect=Builder.compile) as compiles:
        found.eval()  # it is compiled as it was asked for
        assert [each.name for each in program.records] == [each.name for each in first[1].records]
        assert program.step.forward.graph.find_nodes(op="placeholder")
        assert not found.training
        assert compiles.call_count == 1


def test_reports_of_a_hit_refuse_a_model_that_has_changed(cache):
    found, program = compiled()
    found.factor = 3.0
    with pytest.raises(UnsupportedUse, match="no longer as it was"):
        program.records  # noqa: B018


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "factor", 3.0),
        lambda model: setattr(model, "added", "text"),
        lambda model: model.mlp.eval(),
        lambda model: model.head.weight.requires_grad_(False),
        lambda model: setattr(model, "head", nn.Linear(D, 64, bias=False)),
        lambda model: setattr(model.head, "weight", model.embed.weight),
        lambda model: model.double(),
        lambda model: model.head.register_forward_hook(lambda *_: None),
        lambda model: setattr(model.mlp, "__class__", type("Other", (type(model.mlp),), {})),
    ],
    ids=["attribute", "new attribute", "flag", "frozen", "no bias", "tied", "dtype", "hook", "class"],
)
def test_another_model_is_a_miss(cache, no_compile, change):
    with pytest.raises(Compiled):
        compiled(change)


def test_other_options_sizes_and_modes_are_misses(cache, no_compile):
    with pytest.raises(Compiled):
        compiled(options=Options(chunks=2))
    with pytest.raises(Compiled):
        compiled(tokens=torch.arange(12).view(3, 4))
    with pytest.raises(Compiled), torch.no_grad():
        compiled()
    with pytest.raises(Compiled), torch.autocast("cpu", torch.bfloat16):
        compiled()


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (sys.modules[__name__], "SCALE", 2.0),
        (sys.modules[__name__], "helper", lambda x: x * 2),
        (torch, "__version__", "9.9"),
        (facts, "of_moefx", lambda: "another"),
    ],
    ids=["global", "function", "torch", "moefx"],
)
def test_other_surroundings_are_misses(cache, no_compile, monkeypatch, owner, name, value):
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(Compiled):
        compiled()


def test_other_variables_of_moefx_are_misses(cache, no_compile, monkeypatch):
    monkeypatch.setenv("MOEFX_LAYERS", "another")
    with pytest.raises(Compiled):
        compiled()


def test_a_file_that_was_edited_is_a_miss(cache, no_compile, monkeypatch, said):
    mine = sources.of_file
    monkeypatch.setattr(sources, "of_file", lambda path: "another" if path == __file__ else mine(path))
    with pytest.raises(Compiled):
        compiled()
    assert f"{__file__} is another one now" in said[0]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "is damaged"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"def forward", b"def Forward")), "is damaged"),
        (lambda path: path.write_bytes(b""), "is damaged"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"moefx 1 ", b"moefx 0 ", 1)), "of another version"),
        (lambda path: rewritten(path, name="foreign"), "is of another program"),
        (lambda path: rewritten(path, sources={"strange": 1}), "not to be read"),
        (lambda path: rewritten(path, forward="def"), "not to be read"),
        (lambda path: path.chmod(0o666), "others can write to"),
        (lambda path: path.parent.chmod(0o777), "others can write to"),
        (lambda path: linked(path), "cannot be read"),
    ],
    ids=["cut", "edited", "empty", "version", "foreign", "form", "syntax", "mode", "folder", "link"],
)
def test_what_is_not_right_is_not_run(cache, said, damage, why, monkeypatch, no_compile):
    damage(entry_of(cache))
    executed: list[str] = []
    monkeypatch.setattr(entries, "load", lambda source, name: executed.append(source) or compile(source, name, "exec"))
    with pytest.raises(Compiled):
        compiled()
    assert why in said[0]
    assert why == "not to be read" or not executed


def rewritten(path: Path, **changes: Any) -> None:
    folder = Folder(path.parent)
    folder.write(path.stem, folder.read(path.stem) | changes)


def linked(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def test_a_damaged_entry_is_made_anew(cache, first, said):
    path = entry_of(cache)
    whole = path.read_bytes()
    path.write_bytes(whole[:1000])
    assert compiled()[1].program.digest == first[1].program.digest
    assert "is damaged" in said[0]
    assert "is kept in the cache" in said[1]
    assert Folder(cache).read(path.stem)["forward"] == first[1].program.code.forward_source


def test_ranks_use_a_program_only_together(cache, monkeypatch):
    """Numbers, outputs and gradients are those of a miss; a rank without the entry makes all compile."""
    monkeypatch.setenv("MOEFX_CACHE", str(cache / "threads"))
    compiles: list[int] = []
    original = Builder.compile

    def counted(self: Builder, call: Any) -> Any:
        compiles.append(self.home.session.rank)
        return original(self, call)

    monkeypatch.setattr(Builder, "compile", counted)
    before = run_threads(2, step, [model(), model()])
    assert sorted(compiles) == [0, 1]
    again = run_threads(2, step, [model(), model()])
    assert sorted(compiles) == [0, 1]
    for mine, other in zip(before, again):
        assert mine.keys() == other.keys()
        assert len(mine) > 8
        assert all(torch.equal(mine[name], other[name]) for name in mine)
    find = Shelf.find
    monkeypatch.setattr(Shelf, "find", lambda self, builder, call: find(self, builder, call)
                        if builder.home.session.rank else None)  # fmt: skip
    monkeypatch.setattr(Builder, "compile", mock.Mock(side_effect=Compiled))
    with pytest.raises(RuntimeError, match="Compiled"):
        run_threads(2, step, [model(), model()])


def step(rank: int, world: int, models: list[Model]) -> dict[str, Tensor]:
    """One step with outputs that nobody differentiates, and another kind of call."""
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "ep"))
    with closing(moefx.compile(models[rank], mesh)) as found:
        given = found(TOKENS + rank)
        assert isinstance(given, dict)
        assert given["rest"][1] is None
        assert given["rest"][2][0].equal(TOKENS + rank)
        assert found.calls == 7
        assert torch.equal(found.last, given["rest"][0])
        given["logits"].square().mean().backward()
        values = {"logits": given["logits"].detach(), "hidden": given["rest"][0].detach()}
        return values | {name: local(param.grad) for name, param in found.named_parameters()}


def local(grad: Tensor) -> Tensor:
    return grad.to_local() if hasattr(grad, "to_local") else grad


def test_off_and_default(monkeypatch, tmp_path):
    assert chosen("off") is None
    assert chosen("0") is None
    assert chosen(str(tmp_path)) == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert chosen("") == tmp_path / "moefx"


def test_what_cannot_be_told_is_not_kept(cache, said, no_compile):
    for strange in (threading.Lock(), torch.ones(2), object(), torch.Generator()):
        with pytest.raises(Compiled):
            compiled(lambda model, strange=strange: setattr(model, "strange", strange))
    assert sum("nor kept: the model.strange holds a" in each for each in said) == 4


def test_the_oldest_entries_make_room(tmp_path):
    folder = Folder(tmp_path / "cache", most=3000)
    for number in range(5):
        folder.write(f"e{number}", {"text": "x" * 800})
        os.utime(folder.path / f"e{number}.json", (number, number))
    assert [entry.path.stem for entry in folder.entries()] == ["e4", "e3", "e2"]
    assert folder.read("e2")
    assert not folder.read("e0")
    folder.write("e5", {"text": "x" * 800})
    assert {entry.path.stem for entry in folder.entries()} == {"e5", "e2", "e4"}
    assert folder.path.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_replace_is_refused(tmp_path):
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    with pytest.raises(Refused, match="others can write to"):
        Folder(open_folder / "cache").write("e", {})
    open_folder.chmod(0o1777)  # as /tmp: nobody replaces what is another's
    Folder(open_folder / "cache").write("e", {})


def test_many_who_write_at_once_leave_a_whole_entry(tmp_path):
    folder = Folder(tmp_path / "cache")

    def work(number: int) -> None:
        for _ in range(20):
            folder.write("e", {"text": str(number) * 10_000})
            assert len(folder.read("e")["text"]) == 10_000

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(folder.read("e")["text"]) == 10_000
    assert [*folder.path.glob(".*")] == []


def test_the_command(cache):
    run = CliRunner().invoke
    listed = run(app, ["cache"])
    assert listed.exit_code == 0
    assert str(cache) in listed.stdout
    assert "Model" in listed.stdout
    assert "1 program" in listed.stdout
    assert "removed 1" in run(app, ["cache", "--clear"]).stdout
    assert not [*cache.glob("*.json")]
    assert "no programs" in run(app, ["cache"]).stdout
    assert "off" in run(app, ["cache"], env={"MOEFX_CACHE": "off"}).stdout


def test_values_are_told_alike_in_another_process():
    """Sets and hashes of text have another order in every process."""
    code = ("import runpy, sys; Teller = runpy.run_path(sys.argv[1])['Teller'];"
            "print(Teller({}).told([set('abcdefgh'), {'k': 1.5}, {'a', 'b', 'c'}, compile]))")
    other = subprocess.run([sys.executable, "-c", code, told.__file__], env=os.environ | {"PYTHONHASHSEED": "7"},
                           text=True, capture_output=True, check=True)  # fmt: skip
    assert other.stdout.strip() == Teller({}).told([set("abcdefgh"), {"k": 1.5}, {"a", "b", "c"}, compile])


def test_other_code_is_told_apart():
    found = [of_code(each.__code__) for each in (lambda x: x + 1, lambda x: x + 2, lambda x: x + 1)]
    assert found[0] != found[1]
    assert found[0] == found[2]
    number = 3
    assert Teller({}).told(lambda: number) != Teller({}).told(lambda: None)
    lock = threading.Lock()
    with pytest.raises(Untold):
        Teller({}).told(lambda: lock)


def test_conditions_on_sizes_come_back():
    s, u = sympy.Symbol("s0", positive=True, integer=True), sympy.Symbol("u0", integer=True, nonnegative=True)
    for each in (sympy.Eq(s, 2 * u), s + u * 3, sympy.Ne(s, 4), FloorDiv(s, 4), Mod(s + 1, 8), sympy.And(s > u, u < 3)):
        assert decoded(json.loads(json.dumps(encoded(each)))) == each
