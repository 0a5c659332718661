"""Replay passes on a dumped graph, or run it: `python -m moefx.opt dump.py [-p place-experts{ep=4},..] [--run]`.

    -p      the passes to run, by their names in the pipeline, in this order; the text of the result is printed.
            Braces change the mesh (`{ep=4}`) or an option (`{keep=lean}`) from there on.
    --run   run the graph once on random inputs and print what comes out; done anyway if no pass is named.

A dump is a program of its own: `python dump.py` runs it, and so does this tool, with all that stands in the file. Give
it files that you trust. What a dump does not hold: tags of checkpointed modules.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from moefx.analysis.checking.compare import run as run_graph
from moefx.analysis.checking.random_inputs import vocabulary
from moefx.axes import MeshSpec
from moefx.capture.trace import Source
from moefx.compiler.checks import Checks
from moefx.compiler.pipeline import by_step, differentiated, refresh, tracing_modes, whole
from moefx.context.pass_types import PassContext
from moefx.errors import MoefxError
from moefx.ir import world
from moefx.ir.header import Header, read_header
from moefx.ir.infer import infer
from moefx.ir.level import Level
from moefx.ir.op import argument, lookup, value
from moefx.ir.read import example_inputs, read
from moefx.ir.regions import TABLES
from moefx.ir.text import DTYPES, text
from moefx.layout import Layout
from moefx.link import implementations
from moefx.options import NAMED, Options
from moefx.options.declare import literal
from moefx.placement.tables import contiguous, homes_only


@dataclasses.dataclass
class Loaded:
    """A dumped graph with all that its passes need."""

    path: Path
    header: Header
    gm: GraphModule
    ctx: PassContext
    sizes: Mapping[str, int]


def load(path: str | Path, sizes: Mapping[str, int] | None = None) -> Loaded:
    """Read a dump. sizes: example sizes of symbols. Raises VerifyError where the file is none."""
    path = Path(path)
    source = path.read_text()
    header = read_header(source)
    gm = read(source)
    _restore_places(gm, source)
    sizes = {**header.sizes, **(sizes or {})}
    autocast = tuple((device, getattr(torch, dtype.removeprefix("torch."))) for device, dtype in header.autocast)
    ctx = PassContext(header.mesh, Options.named(verify=1), None, autocast, header.grad)
    ctx.has_kernel = implementations.chooser("cpu")
    ctx.decisions.num_user_outputs = header.users
    trained = frozenset(name for name, (_, _, trained) in header.inputs.items() if trained)
    with tracing_modes(ctx):
        ctx.fake_mode = infer(gm, sizes, trained=trained)
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.name in header.inputs:
            kind, key, _ = header.inputs[node.name]
            if kind == "constant":
                found = value(node)
                key = torch.zeros([int(size) for size in found.shape], dtype=found.dtype)
            node.meta["moefx"] = Source(kind, key, header.layouts.get(node.name, Layout()))
    return Loaded(path, header, gm, ctx, sizes)


def _restore_places(gm: GraphModule, source: str) -> None:
    """Module and source line of every node, from the comments of the dump, for messages and for the next text."""
    comments = dict(re.findall(r"^    (\w+) = .*  # (.*)$", source, re.MULTILINE))
    for node in gm.graph.nodes:
        words = comments.get(node.name, "").split("  ")
        if re.fullmatch(r"\S+:\d+", words[-1]):
            file, _, line = words.pop().rpartition(":")
            node.meta["stack_trace"] = f'  File "{file}", line {line}, in forward\n'
        if words and re.fullmatch(r"[A-Za-z_][\w.]*", words[-1]) and (len(words) > 1 or not _is_type(words[-1])):
            node.meta["nn_module_stack"] = {words[-1]: (words[-1], "")}


def _is_type(word: str) -> bool:
    return bool(re.fullmatch(r"[suf]\d+", word))


# ---- passes


def parse_passes(words: str) -> list[tuple[str, dict[str, str]]]:
    """`place-experts{ep=4,dp=2},split-waits` -> [("place-experts", {"ep": "4", "dp": "2"}), ("split-waits", {})]."""
    found = re.findall(r"([\w-]+)(?:\{([^}]*)\})?(?:,|$)", words)
    if ",".join(name + (f"{{{inside}}}" if inside else "") for name, inside in found) != words.replace("{}", ""):
        raise MoefxError(f"'{words}' is not a list of passes", hint="place-experts{ep=4},differentiate,split-waits")
    return [(name, dict(item.split("=") for item in inside.split(",") if item)) for name, inside in found]


def replay(loaded: Loaded, passes: Sequence[tuple[str, Mapping[str, str]]]) -> dict[str, GraphModule]:
    """The graphs after the named passes, each verified. Raises MoefxError for a name or an option that is none."""
    ctx, graphs = loaded.ctx, {loaded.header.graph: loaded.gm}
    known = {entry.name: entry for entry in (*whole(), *by_step())}
    checks, step = Checks(loaded.gm, ctx), None
    if ctx.decisions.num_user_outputs:
        checks.outputs = checks.outputs[loaded.header.mutated :][: ctx.decisions.num_user_outputs]
    for name, options in passes:
        _set(ctx, options)
        if name == "differentiate":
            step = differentiated(loaded.gm, ctx)
            graphs = step.graphs
            checks.step(name, Level.PLACED, step)
        elif name not in known:
            raise MoefxError(f"there is no pass '{name}'", hint=f"one of {', '.join([*known, 'differentiate'])}")
        else:
            entry = known[name]
            for gm in graphs.values():
                result = entry.run(gm, ctx)
                for where, reason in result.skipped:
                    print(f"# {name} left {where}: {reason}", file=sys.stderr)
            if entry in whole():
                refresh(loaded.gm, ctx)
                checks.whole(name, entry.gives)
            elif step is not None:
                checks.step(name, entry.gives, step)
    return graphs


def _set(ctx: PassContext, options: Mapping[str, str]) -> None:
    """Options in braces: sizes of mesh axes, else options by name."""
    for key, word in options.items():
        if key in ctx.mesh.root:
            ctx.mesh = dataclasses.replace(ctx.mesh, root={**ctx.mesh.root, key: int(word)})
        elif key in ("dp", "ep") and not ctx.mesh.dims("ep"):
            ctx.mesh = MeshSpec.named({**ctx.mesh.root, key: int(word)}, ctx.mesh.ranks_per_node)
        elif key in NAMED:
            ctx.options = ctx.options.changed(**{key: literal(word)})
        else:
            raise MoefxError(f"'{key}' is neither an axis nor an option", hint=f"dp, ep, {', '.join(sorted(NAMED))}")


# ---- running


def execute(loaded: Loaded) -> list[list[Any]]:
    """What every rank returns on random inputs. A backward graph is fed by the forward graph dumped beside it."""
    ctx, header = loaded.ctx, loaded.header
    forward = loaded
    if header.graph == "backward":
        forward = load(loaded.path.with_name(loaded.path.name.replace(".backward.", ".forward.")), loaded.sizes)

    ranks = world.ThreadWorld(ctx.mesh.root)
    # Drawn here, since ast, which reads the types of inputs, is not safe in threads of Python 3.11.
    drawn = [_random(forward, ctx.mesh.coordinates(rank)) for rank in range(ranks.size)]

    def one(rank: int) -> list[Any]:
        inputs = drawn[rank]
        with tracing_modes(ctx), torch.no_grad():
            outputs = run_graph(forward.gm, inputs)
            if forward is loaded:
                return list(outputs)
            first = forward.header.mutated
            users = outputs[first : first + forward.header.users]
            saved = outputs[first + forward.header.users + forward.header.statistics :]
            return list(run_graph(loaded.gm, [*saved, *[torch.randn_like(users[i]) for i in header.tangents]]))

    if header.level in (Level.CAPTURED.value, Level.MOE.value):
        return [one(0)]
    return ranks.run(one)


def _random(loaded: Loaded, coordinates: Mapping[str, int]) -> list[Any]:
    """The user's inputs differ between ranks that read different data, experts along their axis; the rest is equal."""
    high = vocabulary(loaded.gm)
    data, place = (loaded.ctx.mesh.place(role, coordinates) for role in ("data", "ep"))
    seeds = {"input": 1000 + data, "experts": 2000 + place, "stack": 2000 + place}
    drawn: dict[int, list[Any]] = {}
    inputs = []
    for position, node in enumerate(loaded.gm.graph.find_nodes(op="placeholder")):
        source = node.meta["moefx"]
        seed = seeds.get(source.kind, 0)
        if seed not in drawn:
            drawn[seed] = example_inputs(loaded.gm, loaded.sizes, seed, high=high)
        found = drawn[seed][position]
        inputs.append(_table(loaded, source, found, place) if source.kind in TABLES else found)
    return inputs


def _table(loaded: Loaded, source: Source, like: Tensor, place: int) -> Tensor:
    """The placement of a region whose experts live in order and have no copies."""
    ops = ((node, lookup(node)) for node in loaded.gm.graph.nodes)
    routings = (node for node, op in ops if op is not None and op.tokens and op.tokens.rule == "routing")
    tables = ((argument(node, "table"), argument(node, "num_slots")) for node in routings)
    slots = next(slots for table, slots in tables if table is not None and table.meta["moefx"].key == source.key)
    (experts, places), ranks = like.shape, loaded.ctx.mesh.size("ep")
    plan = homes_only(contiguous(experts, ranks), ranks, slots // ranks, places)
    return torch.from_numpy(plan.ends[place] if source.kind == "ends" else plan.slots)


def _report(loaded: Loaded, results: list[list[Any]], out: Callable[[str], None]) -> None:
    axes = " ".join(f"{axis}={size}" for axis, size in loaded.ctx.mesh.root.items())
    if loaded.header.level in (Level.CAPTURED.value, Level.MOE.value):
        out("# one device: a graph of this level knows no ranks")
    elif len(results) == 1:
        out(f"# one rank: every axis of the mesh has size 1 ({axes})")
    else:
        out(f"# {len(results)} ranks as threads of this process ({axes})")
    names = loaded.gm.graph.output_node().args[0]
    for position, name in enumerate(names):
        shapes = list(dict.fromkeys(_shape(result[position]) for result in results))
        out(f"{name}: {' | '.join(shapes)}")


def _shape(found: Any) -> str:
    if not isinstance(found, Tensor):
        return str(found)
    return f"{DTYPES.get(found.dtype, found.dtype)}{list(found.shape)}"


def main(argv: Sequence[str] | None = None) -> None:
    """The command line, see the module's docstring."""
    parser = argparse.ArgumentParser(prog="moefx.opt", description="Replay passes on a dumped graph, or run it. "
                                     "The file is Python and is run: give only files that you trust.")
    parser.add_argument("dump", help="a file that moefx dumped; its code is run")
    parser.add_argument("-p", "--passes", default="", help="for example place-experts{ep=4},differentiate,split-waits")
    parser.add_argument("--sizes", default="", help="sizes of symbols: s0=4,s1=8")
    parser.add_argument("--run", action="store_true", help="run the graph once on random inputs")
    args = parser.parse_args(argv)
    sizes = {name: int(size) for name, size in (item.split("=") for item in args.sizes.split(",") if item)}
    try:
        loaded = load(args.dump, sizes)
        if args.passes:
            passes = parse_passes(args.passes)
            for name, gm in replay(loaded, passes).items():
                print(f"# {name}")
                print(text(gm, where=True))
            last = next((e.gives for e in (*whole(), *by_step()) if e.name == passes[-1][0]), Level.PLACED)
            loaded.header = dataclasses.replace(loaded.header, level=last.value)
        if args.run or not args.passes:
            _report(loaded, execute(loaded), print)
    except MoefxError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error


if __name__ == "__main__":
    main()
