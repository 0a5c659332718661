"""Options: what is right is taken, what is wrong is refused at once by name, value and choices."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from pathlib import Path

import pytest

import moefx
from moefx.costmodel.presets import PRESETS
from moefx.errors import MoefxError, UnsupportedUse
from moefx.options import Options
from moefx.planning.planner import machine_of


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
    assert getattr(Options(**{field: value}), field) == value


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
        Options(**{field: value})
    assert caught.value.what == f"{field} is {value!r}"
    assert caught.value.where == "moefx.Options"
    assert allowed in caught.value.hint


@pytest.mark.parametrize("field", [f.name for f in fields(Options)])
def test_every_field_is_checked(field):
    """A new field needs its line in the table."""
    with pytest.raises(MoefxError, match=f"^{field} is"):
        Options(**{field: object()})


def test_changed_copies_are_checked_and_unknown_fields_have_no_place():
    assert replace(Options(), keep="lean").keep == "lean"
    with pytest.raises(MoefxError, match="keep is 'none'"):
        replace(Options(), keep="none")
    with pytest.raises(MoefxError, match="there is no option 'colour'"):
        Options(colour="blue")


@pytest.mark.parametrize(("field", "value", "what", "allowed"), [
    ("alltoall", "nccl", "all-to-all 'nccl'", "direct, 1dh, 2dh, pipe, dedup"),
    ("alltoall", ("direct", "nccl"), "all-to-all 'nccl'", "direct, 1dh, 2dh, pipe, dedup"),
    ("scheduler", "fifo", "scheduler 'fifo'", "sequential, optsche, heuristic, optimal"),
    ("codec", "zip", "codec 'zip'", "identity, bf16, int8"),
])  # fmt: skip
def test_names_that_nobody_has_registered(field, value, what, allowed):
    for make in (Options, lambda **given: replace(Options(), **given)):
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
    ("chunk", "did you mean chunks"), ("time_out", "did you mean timeout_s"), ("foo", "one of verify, timeout_s"),
])  # fmt: skip
def test_an_option_that_there_is_not(name, hint):
    for make in (Options, lambda **given: Options.preset("schemoe", **given)):
        with pytest.raises(MoefxError, match=f"there is no option '{name}'[^?]*{hint}"):
            make(**{name: 2})


def test_help_shows_the_fields():
    assert list(inspect.signature(Options).parameters) == [field.name for field in fields(Options)]


def test_dedup_names_an_all_to_all():
    assert Options(dedup=True).alltoall == replace(Options(alltoall="dedup"), dedup=True).alltoall == "dedup"
    with pytest.raises(MoefxError, match="dedup is True, and the all-to-all '2dh'"):
        Options(dedup=True, alltoall="2dh")
