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
from moefx.report.trace_views import draw, summary
from moefx.report.traces import Trace

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
    console = Console()
    if not console.is_terminal:  # a pipe or a file knows no width
        console.width = 120
    console.print(summary(found, top))
    if svg is not None:
        typer.echo(f"drawn to {draw(found, svg, step=step)}")


def main() -> None:
    try:
        app()
    except MoefxError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
