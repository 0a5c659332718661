"""Options: what is right is taken, what is wrong is refused at once by name, value and choices."""

from __future__ import annotations

import inspect
import pydoc
from dataclasses import fields, replace
from pathlib import Path
from runpy import run_path

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.costmodel.machines import PRESETS
from moefx.errors import MoefxError, UnsupportedUse
from moefx.features.tuning.options import Tune
from moefx.options import NAMED, Options
from moefx.options.groups import AllToAll, Debug, Parallel, Placement
from moefx.planning.planner import machine_of
from tests.support.ranks import fake_world


@pytest.mark.parametrize(("field", "value"), [
    ("verify", None), ("verify", 0), ("verify", 1), ("verify", 2),
    ("timeout_s", 5), ("timeout_s", 0.25), ("timeout_s", 1e9),
    ("keep", "eager"), ("keep", "lean"), ("keep", "auto"), ("keep", None), ("dynamic", False),
    ("chunks", None), ("chunks", 1), ("chunks", 7),
    ("alltoall", "2dh"), ("alltoall", None), ("scheduler", "optimal"), ("codec", "int8"), ("lossy", True),
    ("memory_limit", None), ("memory_limit", 10**9), ("memory_limit", 0.5), ("lossy", False), ("codec", "identity"),
    ("ranks_per_node", 8), ("dump_dir", None), ("dump_dir", "here"), ("dump_dir", Path("here")),
])  # fmt: skip
def test_right_values_are_taken(field, value):
    assert Options.named(**{field: value}).value_of(field) == value


@pytest.mark.parametrize(("field", "value", "allowed"), [
    ("verify", 7, "2: also run and compare"),
    ("verify", -1, "0: nothing"),
    ("verify", True, "1: structure"),
    ("verify", "2", "2: also"),
    ("verify", 1.0, "1: structure"),
    ("timeout_s", -1, "above 0"),
    ("timeout_s", 0, "above 0"),
    ("timeout_s", float("nan"), "above 0"),
    ("timeout_s", float("inf"), "at most 1e9"),
    ("timeout_s", "600", "a number"),
    ("timeout_s", True, "a number"),
    ("timeout_s", None, "a number"),
    ("keep", "everything", "'eager', 'lean'"),
    ("keep", 1, "'eager', 'lean'"),
    ("chunks", 0, "1, 2, .."),
    ("chunks", -1, "1, 2, .."),
    ("chunks", 2.0, "1, 2, .."),
    ("chunks", 2.5, "1, 2, .."),
    ("memory_limit", 0, "above 0"),
    ("memory_limit", -1.0, "above 0"),
    ("memory_limit", float("inf"), "above 0"),
    ("memory_limit", float("nan"), "above 0"),
    ("memory_limit", "1 GB", "number of bytes"),
    ("memory_limit", True, "number of bytes"),
    ("chunks", True, "1, 2, .."),
    ("alltoall", 2, "name of an all-to-all"),
    ("scheduler", max, "name of a scheduler"),
    ("codec", None, "name of a codec"),
    ("lossy", 1, "True or False"),
    ("state", "fp32", "'float32', 'bfloat16'"),
    ("dynamic", 0, "True or False"),
    ("ranks_per_node", -2, "1, 2, .."),
    ("machine", 5, "a file, the name of a preset"),
    ("machine", {}, "a file, the name of a preset"),
    ("dump_dir", 3, "a folder"),
])  # fmt: skip
def test_wrong_values_are_refused(field, value, allowed):
    with pytest.raises(MoefxError) as caught:
        Options.named(**{field: value})
    assert caught.value.what == f"{field} is {value!r}"
    owner, _ = NAMED[field]
    kind = Options if owner in (None, field) else type(getattr(Options(), owner))
    assert caught.value.where == f"moefx.{kind.__name__}"
    assert allowed in caught.value.hint


@pytest.mark.parametrize("field", [f.name for f in fields(Options)] + list(NAMED))
def test_every_field_is_checked(field):
    with pytest.raises(MoefxError, match=f"^{field} is"):
        Options.named(**{field: object()})


def test_changed_copies_are_checked_and_unknown_fields_have_no_place():
    assert replace(Options(), keep="lean").keep == "lean"
    with pytest.raises(MoefxError, match="keep is 'none'"):
        replace(Options(), keep="none")
    with pytest.raises(MoefxError, match="there is no option 'colour'"):
        Options.named(colour="blue")


@pytest.mark.parametrize(("field", "value", "what", "allowed"), [
    ("alltoall", "nccl", "all-to-all 'nccl'", "direct, 1dh, 2dh, pipe, dedup"),
    ("alltoall", ("direct", "nccl"), "all-to-all 'nccl'", "direct, 1dh, 2dh, pipe, dedup"),
    ("scheduler", "fifo", "scheduler 'fifo'", "sequential, optsche, heuristic, optimal"),
    ("codec", "zip", "codec 'zip'", "identity, bf16, int8"),
])  # fmt: skip
def test_names_that_nobody_has_registered(field, value, what, allowed):
    for make in (Options.named, Options(chunks=2).changed):
        with pytest.raises(UnsupportedUse, match=f"there is no {what}") as caught:
            make(**{field: value})
        assert allowed in caught.value.hint
        assert caught.value.where == "moefx.Options"


def test_a_machine_that_is_neither_a_file_nor_a_preset():
    with pytest.raises(MoefxError, match="there is no machine 'h100'") as caught:
        machine_of(Options(machine="h100"))
    assert all(name in caught.value.hint for name in PRESETS)
    assert "python -m moefx calibrate" in caught.value.hint
    for name in ("h100.json", Path("h100.json")):
        with pytest.raises(MoefxError, match=r"there is no machine file h100\.json"):
            machine_of(Options(machine=name))


def test_the_version_is_that_of_the_package():
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'version = "{moefx.__version__}"' in project


@pytest.mark.parametrize(("name", "hint"), [
    ("chunk", "did you mean chunks"), ("time_out", "did you mean timeout_s"), ("foo", "one of machine, chunks"),
])  # fmt: skip
def test_an_option_that_there_is_not(name, hint):
    for make in (Options, Options.named, lambda **given: Options.preset("schemoe", **given)):
        with pytest.raises(MoefxError, match=f"there is no option '{name}'[^?]*{hint}"):
            make(**{name: 2})


def test_help_shows_the_fields():
    assert list(inspect.signature(Options).parameters) == [field.name for field in fields(Options)]


def test_a_group_takes_a_value_for_its_first_field():
    found = Options(alltoall=("direct", "2dh"), placement="exact", tune="online")
    assert found.alltoall == AllToAll(("direct", "2dh"))
    assert found.placement == Placement("exact")
    assert found.tune == Tune(mode="online")
    with pytest.raises(MoefxError, match=r"parallel is 2(.|\n)*try: moefx.Parallel\(\.\.\)"):
        Options(parallel=2)


def test_options_by_name_alone_are_those_in_groups():
    found = Options.named(placement="exact", copies=1, ep=4, codec="int8", verify=2)
    assert found == Options(placement=Placement("exact", copies=1), parallel=Parallel(ep=4),
                            alltoall=AllToAll(codec="int8"), debug=Debug(verify=2))  # fmt: skip
    assert found.changed(placement="hecate").placement == Placement("hecate", copies=1)  # the rest stays
    assert found.changed(placement=Placement("hecate")).placement == Placement("hecate")
    assert found.changed() is found


def test_an_option_of_a_group_is_told_where_it_belongs():
    with pytest.raises(MoefxError, match=r"no option 'ep'(.|\n)*try: parallel=moefx.Parallel\(ep=\.\.\)"):
        Options(ep=2)


def test_compile_takes_options_as_keywords():
    with fake_world(1):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        compiled = moefx.compile(nn.Linear(1, 1), mesh, Options(chunks=2), copies=1, placement="balanced")
        assert compiled.options == Options(chunks=2, placement=Placement("balanced", copies=1))
        with pytest.raises(MoefxError, match=r"no option 'chunk'(.|\n)*did you mean chunks"):
            moefx.compile(nn.Linear(1, 1), mesh, chunk=2)


def test_help_fits_on_a_screen():
    assert len(pydoc.render_doc(Options).splitlines()) <= 64
    for group in (AllToAll, Placement, Parallel, Tune, Debug):
        assert len(pydoc.render_doc(group).splitlines()) <= 40
        assert all(f"{field.name}: " in group.__doc__ for field in fields(group))


def test_the_repr_is_what_differs_and_makes_the_same():
    found = Options(chunks=2, placement=Placement("auto", copies=3))
    assert repr(found) == "Options(chunks=2, placement=Placement(policy='auto', copies=3))"
    assert eval(repr(found), vars(moefx)) == found


def test_the_page_of_options_is_what_they_say():
    script = run_path(str(Path(__file__).parents[1] / "docs" / "make_options.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"](), "run python docs/make_options.py"


def test_names_are_of_one_option_alone():
    inner = [name for group in (AllToAll, Placement, Parallel, Tune, Debug) for name in [f.name for f in fields(group)]]
    assert len({*inner}) == len(inner)
    assert not {*inner} & {f.name for f in fields(Options)}


def test_what_rooms_add_is_given_by_its_name():
    assert moefx.Placement("auto", 3, rehome_every=2).rehome_every == 2
    with pytest.raises(TypeError, match="positional"):
        moefx.Placement("auto", 3, 2)
