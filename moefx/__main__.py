"""The command line: `python -m moefx <command>`. Each command is a thin face of a library function."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console

from moefx import rooms
from moefx.compiler.cache.folder import Folder, chosen
from moefx.costmodel import calibrate as measure
from moefx.costmodel.machines import PRESETS
from moefx.errors import MoefxError
from moefx.options import NAMES, Options
from moefx.options.declare import literal
from moefx.options.groups import Parallel
from moefx.report.doctor import examine
from moefx.report.run import load
from moefx.report.search import search as searched
from moefx.report.trace_views import summary
from moefx.report.traces import Trace
from moefx.report.tried import MACHINE, try_model
from moefx.report.what_if import plan as what_if

_ALLTOALLS = [*NAMES["alltoall"][1]()]
_MACHINES = f"A file that calibrate wrote, or a preset: {', '.join(sorted(PRESETS))}."
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def moefx() -> None:
    """moefx compiles a plain MoE module into a distributed training program."""


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option(help="The machine file to write.")] = Path("machine.json"),
    quick: Annotated[bool, typer.Option(help="Fewer and smaller sizes: seconds instead of a minute.")] = False,
    name: Annotated[str, typer.Option(help="The machine's name.")] = "here",
    ranks_per_node: Annotated[int | None, typer.Option(help="Default: what torchrun started per node.")] = None,
) -> None:
    """Measure this machine; under torchrun also its collectives. Writes one file, the same figures for all ranks."""
    starts = "RANK" in os.environ and not dist.is_initialized()
    if starts:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        machine = measure.calibrate(name=name, quick=quick, ranks_per_node=ranks_per_node)
        measure.write(machine, out)
        if not dist.is_initialized() or dist.get_rank() == 0:
            typer.echo(measure.report(machine))
            typer.echo(f"written to {out}, digest {machine.digest()}")
    finally:
        if starts:
            dist.destroy_process_group()


@app.command()
def trace(
    file: Annotated[Path, typer.Argument(help="What the save() of moefx.profile(..) or moefx.timeline(..) wrote.")],
    top: Annotated[int, typer.Option(help="How many of the longest tasks to list.")] = 12,
) -> None:
    """What a timeline says: busy times, hidden communication, the longest tasks, predicted against measured."""
    found = Trace.load(file)
    _console().print(summary(found, top))


@app.command()
def report(
    file: Annotated[Path, typer.Argument(help="What compiled.report('run.json'), plan --json or the save() of "
                                              "moefx.profile(..) wrote.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("run.html"),
    step: Annotated[int | None, typer.Option(help="Of a trace; default: a typical one.")] = None,
) -> None:  # fmt: skip
    """One page that shows a run, a plan or a trace: HTML that needs no network."""
    typer.echo(f"written to {load(file, step).save(out)}")


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="A config class of transformers, a config.json, or module:function.")],
    gpus: Annotated[int, typer.Option(help="Ranks in all.")],
    machine: Annotated[str, typer.Option(help=_MACHINES)],
    search: Annotated[bool, typer.Option("--search", help="The ten best of mesh, batch, accumulation and more "
                                                          "within --memory-limit. Takes minutes.")] = False,
    batch: Annotated[int | None, typer.Option(help="Sequences of one rank at once. Default: 1; searched.")] = None,
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 4096,
    accumulate: Annotated[int | None, typer.Option(help="Micro-batches of a step. Default: 1; searched.")] = None,
    sequences: Annotated[int | None, typer.Option(help="Of a step on all ranks: what a search keeps to.")] = None,
    dp: Annotated[int | None, typer.Option(help="Default: what mp leaves.")] = None,
    mp: Annotated[int | None, typer.Option(help="Ranks that share all except experts. Default: 1; searched.")] = None,
    ep: Annotated[int | None, typer.Option(help="Ranks that experts are spread over. Default: planned.")] = None,
    esp: Annotated[int | None, typer.Option(help="Ranks that an expert is cut over. Default: planned.")] = None,
    memory_limit: Annotated[float | None, typer.Option(help="Bytes of a rank, such as 80e9.")] = None,
    layers: Annotated[int | None, typer.Option(help="In place of the config's number.")] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and gradients.")] = "bfloat16",
    state: Annotated[str, typer.Option(help="Dtype of AdamW's moments, and of master weights where weights are "
                                            "narrower.")] = "float32",
    chunks: Annotated[int | None, typer.Option(help="Default: planned, as the next three.")] = None,
    alltoall: Annotated[str | None, typer.Option(help=f"{', '.join(_ALLTOALLS[:-1])} or {_ALLTOALLS[-1]}.")] = None,
    keep: Annotated[str | None, typer.Option(help="What is kept for the backward: eager, lean, ..")] = None,
    placement: Annotated[str | None, typer.Option(help="Who holds copies of experts: balanced, auto, ..")] = None,
    more: Annotated[list[str], typer.Option("--set", help="NAME=VALUE of any other option of moefx.compile, such as "
                                                          "shard_dense=True. A search keeps to it.")] = [],  # noqa: B006
    whole: Annotated[bool, typer.Option(help="Compile all layers, extrapolate nothing.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page into this file: time, memory, crossovers.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write the plan as data into this file.")] = None,
) -> None:  # fmt: skip
    """What training a model takes on a cluster that you may not have: time, memory, choices, and why."""
    if search and (dp is not None or whole or html is not None):
        raise MoefxError("--search finds dp, extrapolates, and draws nothing", where="plan",
                         hint="leave out --dp, --whole and --html; plan the best one for a picture")  # fmt: skip
    if sequences is not None and not search:
        raise MoefxError("--sequences is what a search keeps to", where="plan", hint="--accumulate, or --search")
    asked = {"batch": batch, "accumulate": accumulate, "mp": mp}
    options = Options(chunks=chunks, alltoall=alltoall, keep=keep, placement=placement,
                      parallel=Parallel(state=state)).changed(**(given := _given(more)))  # fmt: skip
    common = {"seq": seq, "ep": ep, "esp": esp, "layers": layers, "dtype": dtype, "options": options,
              "memory_limit": memory_limit}  # fmt: skip
    if search:
        axes = {axis.option: given[axis.option] for axis in rooms.axes() if axis.option in given}
        found = searched(model, machine, gpus, **common, **asked, sequences=sequences, axes=axes)
    else:
        named = {name: number for name, number in asked.items() if number is not None}
        found = what_if(model, machine, gpus, **common, **named, dp=dp, whole=whole,
                        curves=html is not None or out is not None)  # fmt: skip
    _console().print(found)
    if out is not None:
        out.write_text(found.to_json(), encoding="utf-8")
    if html is not None:
        typer.echo(f"drawn to {found.draw(html)}", err=True)


def _given(words: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE of options. Raises MoefxError for what is not of this form."""
    found = {}
    for each in words:
        name, is_given, word = each.partition("=")
        if not is_given:
            raise MoefxError(f"--set {each} gives no value", where="plan", hint=f"--set {name}=VALUE")
        found[name] = literal(word)
    return found


@app.command()
def doctor(
    seconds: Annotated[float, typer.Option(help="To measure links for, at most, where torchrun started ranks.")] = 5.0,
) -> None:
    """What is here, what will be slow or refused, and a mesh. Exit code 0: moefx can run here; 1: it is refused."""
    found = examine(seconds)
    if int(os.environ.get("RANK", 0)) == 0:
        _console().print(found)
    raise typer.Exit(found.exit_code)


@app.command("try")
def try_(
    model: Annotated[str, typer.Argument(help="A hub model in the local cache, a folder, a config.json, a class of "
                                              "configs of transformers, file.py:function or module:function.")],
    gpus: Annotated[int, typer.Option("--gpus", "--ranks", help="Ranks in all.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of a rank.")] = 4096,
    machine: Annotated[str, typer.Option(help=_MACHINES)] = MACHINE,
    ep: Annotated[int | None, typer.Option(help="Ranks that experts are spread over. Default: planned.")] = None,
    mp: Annotated[int, typer.Option(help="Ranks that share what is not an expert.")] = 1,
) -> None:
    """Can moefx train this model? Compiles it without weights; prints a plan and lints. Exit code 0: yes; 1: no."""
    found = try_model(model, gpus, tokens=tokens, machine=machine, ep=ep, mp=mp)
    _console().print(found)
    if not found.is_recognised:
        raise typer.Exit(1)


@app.command()
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove them all.")] = False,
) -> None:
    """The compiled programs that are kept on this machine: how many, how large, and of which models."""
    path = chosen()
    if path is None:
        typer.echo("the cache is off (MOEFX_CACHE)")
        return
    folder = Folder(path)
    if clear:
        typer.echo(f"removed {folder.clear()} of {path}")
        return
    found = folder.entries()
    for entry in found:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        typer.echo(f"{entry.path.stem}  {entry.nbytes / 1e6:8.2f} MB  used {when}  {folder.model_of(entry)}")
    total = sum(entry.nbytes for entry in found)
    many = f"{len(found)} program{'s' * (len(found) != 1)}, {total / 1e6:.2f} MB" if found else "no programs"
    typer.echo(f"{many} in {path}, of at most {folder.most / 1e6:.0f} MB")


def _console() -> Console:
    console = Console()
    if not console.is_terminal:  # a pipe or a file knows no width
        console.width = 120
    return console


def main() -> None:
    try:
        app()
    except MoefxError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
