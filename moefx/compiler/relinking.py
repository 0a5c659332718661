"""What is made of a scheduled program beside its code: other backwards, profiled functions, and what users are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch.fx import GraphModule

from moefx import rooms
from moefx.capture.origin import Origin
from moefx.compiler.checks import chosen_level
from moefx.context.pass_types import PassContext
from moefx.ir import edit
from moefx.link.emit import emit, load
from moefx.link.instrument import marks_of
from moefx.link.lower import Linker
from moefx.passes import absent_tangents, reuse


def link(gm: GraphModule, ctx: PassContext, names: Sequence[str], path: str, device: str) -> Linker:
    """Let rooms have their turn at a scheduled graph that nobody looks at any more, and link it. path: of the block
    that it runs. device: its type."""
    for each in rooms.behind("schedule"):
        each.run(gm, ctx)
    linker = Linker(gm, names, device, ctx.decisions.regions.values(), path)
    linker.run()
    return linker


def relink(scheduled: Mapping[str, GraphModule], ctx: PassContext, names: Sequence[str], num_saved: int, path: str,
           device: str, loops: bool, graph: str, absent: tuple[int, ...],
           profiled: bool) -> tuple[Callable, str, list[int]]:  # fmt: skip
    """One graph again: a backward for calls that leave outputs undifferentiated, or with the profiler's marks. Also its
    source, and which absent tangents it does not read. path, device: see `link`. loops: see `emit`."""
    gm = edit.copy_of(scheduled[graph])
    marks = marks_of(gm, ctx) if profiled else {}
    unread: list[int] = []
    if absent:
        tangents = [n.name for n in gm.graph.find_nodes(op="placeholder")][num_saved:]
        gone = absent_tangents.run(gm, [tangents[i] for i in absent])
        unread = [i for i in absent if tangents[i] in gone]
        reuse.run(gm, ctx)
    linker = link(gm, ctx, names, path, device)
    marks |= {new: marks[old] for new, old in linker.renamed.items() if old in marks}
    marks |= {node.name: marks[node.meta["begins"]] for node in gm.graph.nodes if node.meta.get("begins") in marks}
    code = emit(gm, graph, marks if profiled else None, loops=loops, verify=chosen_level(ctx.options))
    return load(code, graph), code, unread


def warnings_of(ctx: PassContext, origin: Origin) -> tuple[str, ...]:
    """What is not as users might take it to be."""
    said = []
    if origin.prints:
        said.append(f"the program does not print or log what the forward does at {', '.join(origin.prints)}")
    for what, found in (
        (f"{len(ctx.report.left)} mixtures of experts stay as they are, whole on every rank", ctx.report.left),
        ("weights of experts that every rank keeps whole", ctx.report.kept_whole),
        ("experts that are not cut over 'esp'", ctx.not_cut),
        ("buffers that decide choices of experts are each rank's own, so that ranks may come to choose differently: "
         "only what is added to a buffer is summed over ranks", ctx.report.drifting),
    ):  # fmt: skip
        if found:
            lines = [f"\n  {name}: {reason}" for name, reason in found.items()]
            said.append(f"{what}:{''.join(lines)}")
    return tuple(said)
