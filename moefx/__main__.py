"""The command line: `python -m moefx <command>`. Each command is a thin face of a library function."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console

from moefx.costmodel import calibrate as measure
from moefx.errors import MoefxError
from moefx.options import Options
from moefx.report.trace_views import draw, summary
from moefx.report.traces import Trace
from moefx.report.what_if import plan as what_if

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
    svg: Annotated[Path | None, typer.Option(help="Draw a typical step into this file, too.")] = None,
    step: Annotated[int | None, typer.Option(help="The step to draw instead.")] = None,
    top: Annotated[int, typer.Option(help="How many of the longest tasks to list.")] = 12,
) -> None:
    """What a timeline says: busy times, hidden communication, the longest tasks, predicted against measured."""
    found = Trace.load(file)
    _console().print(summary(found, top))
    if svg is not None:
        typer.echo(f"drawn to {draw(found, svg, step=step)}")


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="A config class of transformers, a config.json, or module:function.")],
    gpus: Annotated[int, typer.Option(help="Ranks in all.")],
    machine: Annotated[str, typer.Option(help="A preset, or a file that calibrate wrote.")],
    batch: Annotated[int, typer.Option(help="Sequences of one rank.")] = 1,
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 4096,
    dp: Annotated[int | None, typer.Option(help="Default: what mp leaves.")] = None,
    mp: Annotated[int, typer.Option(help="Ranks that share what is no expert.")] = 1,
    ep: Annotated[int | None, typer.Option(help="Ranks that experts are spread over. Default: planned.")] = None,
    esp: Annotated[int | None, typer.Option(help="Ranks that an expert is cut over. Default: planned.")] = None,
    memory_limit: Annotated[float | None, typer.Option(help="Bytes of a rank, such as 80e9.")] = None,
    layers: Annotated[int | None, typer.Option(help="In place of the config's number.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the parameters.")] = "bfloat16",
    shard_dense: Annotated[bool, typer.Option(help="What is no expert is cut over all ranks.")] = False,
    whole: Annotated[bool, typer.Option(help="Compile all layers, extrapolate nothing.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Draw the crossovers into this file.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write the plan as data into this file.")] = None,
) -> None:
    """What training a model takes on a cluster that need not be there: time, memory, choices, and why."""
    found = what_if(model, machine, gpus, batch=batch, seq=seq, dp=dp, mp=mp, ep=ep, esp=esp, layers=layers,
                    memory_limit=memory_limit, dtype=dtype, whole=whole, options=Options(shard_dense=shard_dense),
                    curves=svg is not None or out is not None)  # fmt: skip
    _console().print(found)
    if out is not None:
        out.write_text(found.to_json(), encoding="utf-8")
    if svg is not None:
        typer.echo(f"drawn to {found.draw(svg)}")


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
