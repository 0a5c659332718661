"""The layers of a program, those that are alike once: each as a graph of a few boxes, as its forward runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch.fx import Node

from moefx.analysis.tasks import stage_of, tasks_of
from moefx.compiler.variant import Variant
from moefx.costmodel.amounts import Kind, amounts_of
from moefx.costmodel.tasks import Task
from moefx.ir import alike
from moefx.ir.describe import layer_of, module_path
from moefx.ir.op import Stage
from moefx.ir.ops.order import begun, unsplit
from moefx.ir.regions import region_of
from moefx.ir.text import op_name
from moefx.planning.pricing import Prices

_STAGES = {"C1": "dispatch", "E": "experts", "D2": "combine",
           "A1": "rows out", "A2": "rows back", "route": "route", "repack": "rows in another order",
           "exchange_counts": "counts", "counts_to_host": "counts, read by the host"}  # fmt: skip
_CODING = {Stage.COMPRESS: "rows encoded", Stage.DECOMPRESS: "rows decoded"}
_REST = "the rest of the model"


@dataclass
class Box:
    """Ops of a layer that belong together. kind: of a task, see `costmodel.tasks.Task`. ops: how often each is in it;
    seconds: predicted, of all of them. after: numbers of the boxes whose results it reads, of the same layer."""

    label: str
    kind: str
    ops: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    after: set[int] = field(default_factory=set)

    @property
    def form(self) -> tuple:
        return self.label, self.kind, tuple(sorted(self.ops.items()))


@dataclass(frozen=True)
class Layer:
    """Layers that are alike in what they run and in how. name: their class; paths: of their modules. Of the first of
    them: the number of its program, the numbers of its MoE regions there, and the boxes of its forward."""

    name: str
    paths: tuple[str, ...]
    program: int
    regions: tuple[int, ...]
    boxes: list[Box]

    @property
    def where(self) -> str:
        """`model.layers.0, 3 to 47`"""
        return "; ".join(alike.once(self.paths))

    def to_dict(self) -> dict[str, Any]:
        boxes = [{**asdict(box), "ops": dict(box.ops), "after": sorted(box.after)} for box in self.boxes]
        return {"name": self.name, "count": len(self.paths), "where": self.where, "paths": list(self.paths),
                "graph": boxes}  # fmt: skip


def layers_of(variants: Sequence[Variant]) -> list[Layer]:
    """The distinct layers of a model's programs (of one, or one for each of its blocks), in the order in which they
    first run; what is in none of them comes last."""
    found: dict[tuple, list[tuple[str, int, tuple[int, ...], list[Box]]]] = {}
    for program, variant in enumerate(variants):
        ctx, inside = variant.context, defaultdict(list)
        for number, facts in sorted(ctx.decisions.regions.items()):
            if facts.of == number:
                inside[layer_of(facts.module)].append(number)
        for path, boxes in _graphs(variant).items():
            ways = tuple(ctx.choice(number) for number in inside[path])
            whole = ".".join(filter(None, (variant.path, path)))
            form = _class_of(variant, path) if whole else _REST, ways, tuple(box.form for box in boxes)
            found.setdefault(form, []).append((whole, program, tuple(inside[path]), boxes))
    layers = [Layer(name, tuple(path for path, *_ in of_form), *of_form[0][1:])
              for (name, *_), of_form in found.items()]  # fmt: skip
    if [layer.paths for layer in layers] == [("",)]:
        return [replace(layers[0], name=_class_of(variants[0], ""))]
    return sorted(layers, key=lambda layer: layer.name == _REST)


def _class_of(variant: Variant, path: str) -> str:
    try:
        return type(variant.program.home.model.get_submodule(path)).__name__
    except AttributeError:  # what it was captured from is no module of the model
        return path


def _graphs(variant: Variant) -> dict[str, list[Box]]:
    """The boxes of every layer, by its path; those of several chunks are one."""
    ctx, prices = variant.context, Prices(variant.step, variant.context)
    nodes = [node for node in variant.scheduled["forward"].graph.nodes if node.op not in ("placeholder", "output")]
    tasks = tasks_of(nodes, ctx, prices)
    task_of = {node: tasks.graph[name] for name, found in tasks.nodes.items() for node in found}
    graphs: dict[str, _Layer] = defaultdict(_Layer)
    made_by: dict[Node, set[tuple[str, int]]] = {}  # the boxes that a value comes from, through views and waits
    for node in nodes:
        read = set().union(*(made_by.get(each, ()) for each in node.all_input_nodes))
        if begun(node) is not None or amounts_of(node).kind is Kind.FREE:
            made_by[node] = read
            continue
        path, label, kind = _named(node, task_of.get(node), ctx.decisions.regions)
        chunk = ctx.decisions.chunks.get(region_of(node))
        after = {number for where, number in read if where == path}
        number = graphs[path].place(label, kind, chunk and chunk.index, after)
        box = graphs[path].boxes[number]
        box.ops[_op(node)] += 1
        box.seconds += prices(node)
        made_by[node] = {(path, number)}
    return {path: found.finished() for path, found in graphs.items()}


class _Layer:
    """boxes: by chunk at first. names: the label and the chunk of each, and how many of that name were before it."""

    def __init__(self) -> None:
        self.boxes: list[Box] = []
        self.names: list[tuple[str, Any, int]] = []
        self._last: dict[tuple[str, Any], int] = {}

    def place(self, label: str, kind: str, chunk: int | None, after: set[int]) -> int:
        """The number of the box for what comes after these: the last one of its name, if none of these comes after that
        one; else a new one."""
        number = self._last.get((label, chunk))
        if number is None or any(number in _before(self.boxes, each) for each in after - {number}):
            times = 0 if number is None else self.names[number][2] + 1
            self._last[label, chunk] = number = len(self.boxes)
            self.boxes.append(Box(label, kind))
            self.names.append((label, chunk, times))
        self.boxes[number].after |= after - {number}
        return number

    def finished(self) -> list[Box]:
        """Chunks joined; every box below those it reads."""
        first: dict[tuple[str, int], int] = {}
        for number, (label, _, times) in enumerate(self.names):
            first.setdefault((label, times), number)
        into = {number: first[label, times] for number, (label, _, times) in enumerate(self.names)}
        for number, box in enumerate(self.boxes):
            kept = self.boxes[into[number]]
            kept.after = {into[each] for each in kept.after | box.after} - {into[number]}
            if box is not kept:
                kept.ops, kept.seconds = kept.ops + box.ops, kept.seconds + box.seconds
        depth = {number: len(_before(self.boxes, number)) for number in first.values()}
        order = sorted(first.values(), key=lambda number: (depth[number], number))
        place = {number: new for new, number in enumerate(order)}
        boxes = [self.boxes[number] for number in order]
        for box in boxes:
            box.after = {place[number] for number in box.after}
            box.label = box.label or ", ".join(list(box.ops)[:2])
        for box in boxes:
            if box.kind != "dense":  # what follows from other edges; of dense boxes it may be a residual
                box.after -= set().union(*(_before(boxes, each) for each in box.after))
        return boxes


def _before(boxes: list[Box], number: int) -> set[int]:
    """All boxes that a box comes after."""
    found: set[int] = set()
    open_ = [number]
    while open_:
        more = boxes[open_.pop()].after - found
        found |= more
        open_ += more
    return found


def _op(node: Node) -> str:
    return op_name(node) if unsplit(node)[0] is None else unsplit(node)[0].name


def _named(node: Node, task: Task | None, regions: Mapping[int, Any]) -> tuple[str, str, str]:
    """(layer, label, kind) of the box that a node belongs to."""
    region, path = region_of(node), module_path(node)
    if region is not None:
        facts = regions.get(region)
        layer = layer_of(facts.module if facts is not None else path)
        kind, stage = task.kind if task is not None else "dense", stage_of(node)
        if stage in _CODING:  # one task may decode, compute and encode
            return layer, _CODING[stage], "C1"
        kind = "E" if kind in ("D1", "C2") else kind
        return layer, _STAGES.get(kind) or (_op(node) if kind != "dense" else "dispatch"), kind
    layer = layer_of(path)
    inner = path[len(layer) :].lstrip(".").split(".")
    inside = next((facts.module for facts in regions.values() if layer_of(facts.module) == layer), "")
    holds = layer and inside[len(layer) :].lstrip(".").split(".")[0] == inner[0]  # the gate beside the experts
    return layer, ".".join(inner[: 2 if holds else 1]), "dense"
