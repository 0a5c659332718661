"""Dumps: every file runs, and replaying the passes on one gives the next."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moefx.axes import MeshSpec
from moefx.compiler import records
from moefx.compiler.pipeline import Pipeline
from moefx.errors import MoefxError, VerifyError
from moefx.ir.header import Header, read_header
from moefx.ir.text import text
from moefx.layout import Cut, Layout
from moefx.opt import execute, load, main, parse_passes, replay
from tests.support.graphs import context, graph
from tests.support.small import CAPTURED

# With everything that a header has to tell: a frozen parameter, a buffer that changes, and two symbols.
INPUTS = 'def graph(x: "f32[s0, 16]"'
SOURCE = CAPTURED.replace(INPUTS, INPUTS + ', other: "i64[s1]", buffer: "f32[8]"')
SOURCE = SOURCE.replace("    flat =", "    seen = torch.bincount(idx.reshape(-1), minlength=8).float()\n"
                        "    changed = buffer.add_(seen)\n    flat =")


@pytest.fixture(scope="module", params=[{"dp": 1, "ep": 1}, {"dp": 1, "ep": 2}], ids=["one", "two"])
def dumped(request, tmp_path_factory) -> tuple[Path, Pipeline]:
    gm, mode = graph(SOURCE, frozen=("up",), sizes={"s0": 5, "s1": 3})
    next(n for n in gm.graph.nodes if n.name == "scores").meta.update(
        nn_module_stack={"1": ("layers.0.mlp", "")}, stack_trace='  File "/a/model.py", line 12, in forward\n    y\n')
    pipeline = Pipeline(context(mode, **request.param))
    pipeline.run(gm)
    return records.write(tmp_path_factory.mktemp("dump"), pipeline.records, {"forward": "pass\n"}), pipeline


def file_of(dumped: tuple[Path, Pipeline], step: str, key: str = "graph") -> Path:
    """The graph after a step: steps that changed nothing have no file, and then it is that of an earlier one."""
    folder, pipeline = dumped
    names = [record.name for record in pipeline.records]
    files = [found for name in names[: names.index(step) + 1] for found in folder.glob(f"*-{name}.{key}.py")]
    return files[-1]


def test_replaying_a_pass_gives_the_next_dump(dumped):
    _, pipeline = dumped
    names = ["canonicalize", "unstack-experts", "raise-grouped", "raise-gathered", "raise-loop", "raise-einsum",
             "place-experts"]
    wanted = {record.name: record.texts["graph"] for record in pipeline.records if "graph" in record.texts}
    pairs = [("capture", "canonicalize"), ("canonicalize", "raise-grouped"), ("raise-einsum", "place-experts"),
             ("place-experts", "sum-statistics")]
    for start, name in pairs:
        found = replay(load(file_of(dumped, start)), [(name, {})])
        assert text(found["graph"], where=True) == wanted[name]
    found = replay(load(file_of(dumped, "capture")), [(name, {}) for name in names])
    assert text(found["graph"], where=True) == wanted["place-experts"]
    assert "layers.0.mlp  model.py:12" in wanted["place-experts"]


def test_replaying_differentiation_and_schedule(dumped):
    _, pipeline = dumped
    passes = parse_passes("differentiate,split-waits,order,reuse")
    found = replay(load(file_of(dumped, "sum-statistics")), passes)
    last = pipeline.records[-1]
    assert last.name == "reuse"
    assert {key: text(gm) for key, gm in found.items()} == {k: p.printed.plain for k, p in last.pictures.items()}
    found = replay(load(file_of(dumped, "split-waits", "backward")), [("order", {}), ("reuse", {})])
    *lines, last_line = text(found["backward"]).splitlines()
    lines.append(last_line.split("  # ")[0].rstrip())  # the output has a type since the dump was read
    assert lines == last.pictures["backward"].printed.plain.splitlines()


def test_every_dump_runs(dumped):
    folder, pipeline = dumped
    ranks = pipeline.ctx.mesh.size("data")
    for path in sorted(folder.glob("[0-9]*.py")):
        loaded = load(path)
        results = execute(loaded)
        assert len(results) == (1 if loaded.header.level in ("captured", "moe") else ranks)
        if loaded.header.graph != "backward":
            assert tuple(results[0][loaded.header.mutated].shape) == (5, 16)
        else:
            assert [tuple(g.shape) for g in results[0]] == [(8, 16), (8 // ranks, 16, 24)]


def test_mesh_and_sizes_can_be_changed(dumped, capsys):
    main([str(file_of(dumped, "raise-grouped")), "-p", "place-experts{ep=4,dp=2}", "--run", "--sizes", "s0=7"])
    out = capsys.readouterr().out
    assert "# 8 ranks as threads of this process (dp=2 ep=4)" in out
    assert 'down: "f32[2, 16, 24]"' in out
    assert "f32[7, 16]" in out


def test_python_runs_a_dump(dumped):
    _, pipeline = dumped
    done = subprocess.run([sys.executable, str(file_of(dumped, "order", "forward"))], capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    ranks = pipeline.ctx.mesh.size("data")
    told = f"# {ranks} ranks as threads" if ranks > 1 else "# one rank: every axis of the mesh has size 1"
    assert told in done.stdout
    assert "f32[5, 16]" in done.stdout


@pytest.mark.parametrize(("words", "passes"), [
    ("split-waits", [("split-waits", {})]),
    ("place-experts{ep=4,dp=2},differentiate{keep=lean}", [("place-experts", {"ep": "4", "dp": "2"}),
                                                         ("differentiate", {"keep": "lean"})]),
])  # fmt: skip
def test_list_of_passes(words, passes):
    assert parse_passes(words) == passes


def test_wrong_words_are_refused(dumped):
    path = file_of(dumped, "raise-grouped")
    with pytest.raises(MoefxError, match="is not a list of passes"):
        parse_passes("place-experts{ep=4")
    with pytest.raises(MoefxError, match=r"there is no pass 'place-expert'[\s\S]*place-experts"):
        replay(load(path), [("place-expert", {})])
    with pytest.raises(MoefxError, match="'depth' is neither an axis nor an option"):
        replay(load(path), [("place-experts", {"depth": "2"})])
    with pytest.raises(SystemExit, match="8 experts do not divide"):
        main([str(path), "-p", "place-experts{ep=3,alltoall=dedup}"])


def test_file_without_a_header_is_refused(tmp_path):
    path = tmp_path / "plain.py"
    path.write_text("def graph(x):\n    return x\n")
    with pytest.raises(VerifyError, match="neither level nor mesh"):
        load(path)


def test_header_is_read_back():
    header = Header(
        "placed", "backward", MeshSpec.named({"dp": 2, "ep": 4}), False, (("cpu", "torch.bfloat16"),),
        {"s0": 4, "s1": 6},
        {"x": ("input", 3, False), "w": ("param", "a.b.weight", True), "s": ("stack", ("a.0.w", "a.1.w"), True),
         "c": ("constant", "", False), "t": ("table", 0, False)}, 1, 2, 3, (0, 1), (4, 5),
        {"s": Layout.rows(2, "ep"), "w": Layout((Cut(1, ("dp", "ep"), (8, 16)),))},
    )  # fmt: skip
    assert read_header('"""Title.\n\n' + "\n".join(header.lines()) + '\n"""\n') == header
    plain = Header("moe", mesh=MeshSpec.named({"dp": 1}))
    assert read_header('"""Title.\n\n' + "\n".join(plain.lines()) + '\n"""\n') == plain


def test_constants_are_random_but_present(tmp_path):
    gm, mode = graph(CAPTURED)
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.name == "gate":
            node.meta["moefx"] = type(node.meta["moefx"])("constant", torch.rand(*node.meta["val"].shape))
            node.meta["val"] = node.meta["val"].detach()
    pipeline = Pipeline(context(mode, ep=1))
    pipeline.run(gm)
    folder = records.write(tmp_path, pipeline.records, {})
    loaded = load(file_of((folder, pipeline), "place-experts"))
    assert loaded.gm.graph.find_nodes(op="placeholder")[1].meta["moefx"].kind == "constant"
    assert execute(loaded)[0][0].shape == (4, 16)


def test_help_says_that_the_file_is_run(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "The file is Python and is run: give only files that you trust." in " ".join(capsys.readouterr().out.split())
