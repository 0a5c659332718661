"""Draw a graph, or a region of one, before and after a step, as an SVG picture written by hand.

Boxes stand in layers, data flows downwards. Nodes that `keep` leaves out (views, sizes, constants) are bridged: an
edge joins two boxes if data flows from one to the other through left-out nodes only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

import torch
from torch import fx

from moefx.ir.ops.order import unsplit
from moefx.ir.text import Symbols, op_name

_VIEWS = re.compile(
    r"_?(unsafe_view|view|reshape|flatten|t|transpose|permute|expand|expand_as|unsqueeze|squeeze|detach|contiguous|clone"
    r"|to|to_copy|float|alias|getitem|getattr|size|sym_size|sym_numel|slice|select|split|chunk)"
)
# Ops that are not of the dialect, whose records say it.
_ROUTING = re.compile(r"topk|sort|one_hot|histc|bincount|cumsum|scatter_add|index_add")
_COLLECTIVE = re.compile(r"all_to_all|all_gather|all_reduce|reduce_scatter")
# Fill and stroke of each kind of box.
COLORS = {
    "compute": ("#dce9f7", "#3a6ea5"),
    "collective": ("#fde2c5", "#c65f12"),
    "routing": ("#dcf0dc", "#37833f"),
    "parameter": ("#ececec", "#858585"),
    "input": ("#ffffff", "#444444"),
}
_FONT = "DejaVu Sans Mono, Menlo, Consolas, monospace"  # of fixed width, so that boxes fit without measuring text
_BOX_HEIGHT, _LAYER_STEP, _GAP, _MARGIN = 40, 72, 18, 24
_LABEL_PX, _TYPE_PX = 7.3, 6.1  # width of a character of each of the two lines


def is_drawn(node: fx.Node) -> bool:
    """The default of `keep`: everything but the output, views and sizes."""
    return node.op != "output" and not _VIEWS.fullmatch(op_name(node)) and _is_tensor(node)


def _is_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val", node.meta.get("example_value"))
    return value is None or isinstance(value, torch.Tensor | tuple | list)


def kind_of(node: fx.Node) -> str:
    """The default of `kind`, one of `COLORS`: what the op's record says, or its name; float inputs named like weights
    are parameters."""
    if node.op == "placeholder":
        is_weight = re.search(r"param|weight|bias|buffer|(^|_)w\d*(_|$)", node.name)
        return "parameter" if is_weight else "input"
    op, _ = unsplit(node)
    if op is not None:
        return op.drawn
    if _COLLECTIVE.search(op_name(node)):
        return "collective"
    return "routing" if _ROUTING.search(op_name(node)) else "compute"


@dataclass(eq=False)
class _Box:
    """A node to draw, or, with no node, a bend of an edge that passes a layer."""

    layer: int
    node: fx.Node | None = None
    label: str = ""
    type_text: str = ""
    width: float = 0.0
    x: float = 0.0  # of the centre
    above: list[_Box] = field(default_factory=list)
    below: list[_Box] = field(default_factory=list)


def _boxes(graph: fx.Graph, keep: Callable[[fx.Node], bool]) -> list[_Box]:
    """A box per kept node, joined and with layers: inputs stand just above their first user."""
    symbols = Symbols()
    boxes: dict[fx.Node, _Box] = {}
    sources: dict[
        fx.Node, dict[_Box, None]
    ] = {}  # ordered set of the kept nodes that a node reads, seen through others
    for node in graph.nodes:
        type_text = symbols.type_text(node.meta.get("val", node.meta.get("example_value")))
        read = {box: None for arg in node.all_input_nodes for box in sources[arg]}
        if not keep(node):
            sources[node] = read
            continue
        axes = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, str)]
        name = _shorten(node.name) if node.op == "placeholder" else op_name(node)
        label = name + (f" ({', '.join(axes)})" if axes and len(axes[0]) < 8 else "")
        type_text = type_text or node.meta.get("annotation", "")
        box = boxes[node] = _Box(1 + max((b.layer for b in read), default=-1), node, label, type_text)
        box.width = max(len(label) * _LABEL_PX, len(type_text) * _TYPE_PX) + 20
        box.above = list(read)
        for source in read:
            source.below.append(box)
        sources[node] = {box: None}
    for box in boxes.values():
        if not box.above and box.below:
            box.layer = min(user.layer for user in box.below) - 1
    return [box for box in boxes.values() if box.above or box.below]


def _shorten(name: str, limit: int = 24) -> str:
    return name if len(name) <= limit else f"..{name[2 - limit :]}"


def _layers(boxes: Sequence[_Box]) -> list[list[_Box]]:
    """The boxes by layer, with a bend wherever an edge passes a layer."""
    layers: list[list[_Box]] = [[] for _ in range(1 + max((box.layer for box in boxes), default=0))]
    for box in boxes:
        layers[box.layer].append(box)
    for box in boxes:
        for source in list(box.above):
            previous = source
            for layer in range(source.layer + 1, box.layer):
                bend = _Box(layer, width=8.0, above=[previous])
                _replace(previous.below, box, bend)
                bend.below = [box]
                layers[layer].append(bend)
                previous = bend
            _replace(box.above, source, previous)
    return layers


def _replace(items: list[_Box], old: _Box, new: _Box) -> None:
    items[items.index(old)] = new


def _wanted(box: _Box, neighbours: Sequence[_Box]) -> float:
    """The mean of the neighbours, weighted so that long edges and chains of boxes come out straight."""
    if not neighbours:
        return box.x
    bend = box.node is None
    weights = [(8 if bend else 1) if other.node is None else (1 if bend else 4) for other in neighbours]
    return sum(weight * other.x for weight, other in zip(weights, neighbours)) / sum(weights)


def _pack(layer: Sequence[_Box], wanted: Sequence[float]) -> None:
    """Put the boxes of a layer, in order, as near (least squares) to the wanted places as they go without overlap."""
    offsets = [0.0]
    for left, right in pairwise(layer):
        offsets.append(offsets[-1] + (left.width + right.width) / 2 + _GAP)
    blocks: list[tuple[float, int]] = []  # isotonic regression: runs of touching boxes and their mean shift
    for target, offset in zip(wanted, offsets):
        mean, count = target - offset, 1
        while blocks and blocks[-1][0] > mean:
            other, size = blocks.pop()
            mean, count = (mean * count + other * size) / (count + size), count + size
        blocks.append((mean, count))
    shifts = [mean for mean, count in blocks for _ in range(count)]
    for box, shift, offset in zip(layer, shifts, offsets):
        box.x = shift + offset


def _place(layers: list[list[_Box]]) -> None:
    """Order each layer by the mean of its neighbours (few crossings), then straighten the edges."""
    for layer in layers:
        _pack(layer, [0.0] * len(layer))
    for sweep in range(12):
        down = sweep % 2 == 0
        for layer in layers if down else reversed(layers):
            layer.sort(key=lambda box, down=down: _wanted(box, box.above if down else box.below))
            _pack(layer, [_wanted(box, box.above if down else box.below) for box in layer])
    for sweep in range(80):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            _pack(layer, [_wanted(box, box.above + box.below) for box in layer])
    left = min((box.x - box.width / 2 for layer in layers for box in layer), default=0.0)
    for layer in layers:
        for box in layer:
            box.x -= left


def _y(box: _Box) -> float:
    return box.layer * _LAYER_STEP


def _edges(layers: list[list[_Box]]) -> Iterator[str]:
    for layer in layers:
        for box in layer:
            if box.node is None:
                continue
            for target in box.below:
                x, y = box.x, _y(box) + _BOX_HEIGHT
                path = f"M{x:.1f},{y:.1f}"
                while True:
                    # A bend is passed straight down, a box is met with room for the head of the arrow.
                    top = _y(target) - (3 if target.node else 0)
                    half = (top - y) / 2
                    path += f" C{x:.1f},{y + half:.1f} {target.x:.1f},{top - half:.1f} {target.x:.1f},{top:.1f}"
                    if target.node:
                        break
                    x, y = target.x, _y(target) + _BOX_HEIGHT
                    path += f" L{x:.1f},{y:.1f}"
                    target = target.below[0]
                yield f'<path d="{path}" fill="none" stroke="#8a8f98" stroke-width="1.3" marker-end="url(#head)"/>'


def _box_svg(box: _Box, kind: str, changed: bool) -> Iterator[str]:
    fill, stroke = COLORS[kind]
    left, top, middle = box.x - box.width / 2, _y(box), _y(box) + _BOX_HEIGHT / 2
    radius = _BOX_HEIGHT / 2 if kind in ("parameter", "input") else 5
    yield (
        f'<rect x="{left:.1f}" y="{top}" width="{box.width:.1f}" height="{_BOX_HEIGHT}" rx="{radius}" fill="{fill}" '
        f'stroke="{stroke}" stroke-width="{2.6 if changed else 1.2}"/>'
    )
    yield _words(box.x, middle + (-2 if box.type_text else 4), box.label, 12, weight="bold")
    if box.type_text:
        yield _words(box.x, middle + 12, box.type_text, 10, color="#555555")


def _words(x: float, y: float, words: str, size: int, *, weight: str = "normal", color: str = "#1f2328",
           anchor: str = "middle") -> str:  # fmt: skip
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{color}" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )


def _panel(graph: fx.Graph, other: fx.Graph, keep: Callable[[fx.Node], bool],
           kind: Callable[[fx.Node], str]) -> tuple[list[str], float, float]:  # fmt: skip
    """The SVG elements of one side, its width and its height. What the other side lacks has a thick rim."""
    known = {(node.name, op_name(node)) for node in other.nodes}
    layers = _layers(_boxes(graph, keep))
    _place(layers)
    elements = list(_edges(layers))
    for box in (box for layer in layers for box in layer if box.node is not None):
        elements += _box_svg(box, kind(box.node), (box.node.name, op_name(box.node)) not in known)
    width = max((box.x + box.width / 2 for layer in layers for box in layer), default=0.0)
    return elements, width, (len(layers) - 1) * _LAYER_STEP + _BOX_HEIGHT


def _legend(x: float, y: float, kinds: Sequence[str]) -> Iterator[str]:
    for kind in (*kinds, "only on this side"):
        fill, stroke = COLORS.get(kind, ("#ffffff", "#1f2328"))
        rim = f'stroke="{stroke}" stroke-width="{1.2 if kind in COLORS else 2.6}"'
        yield f'<rect x="{x}" y="{y}" width="18" height="13" rx="3" fill="{fill}" {rim}/>'
        yield _words(x + 25, y + 11, kind, 12, anchor="start")
        x += 25 + len(kind) * _LABEL_PX + 24


def svg_before_after(
    before: fx.GraphModule | fx.Graph,
    after: fx.GraphModule | fx.Graph,
    *,
    title: str,
    keep: Callable[[fx.Node], bool] = is_drawn,
    kind: Callable[[fx.Node], str] = kind_of,
) -> str:
    """The source of an SVG picture with `before` on the left and `after` on the right.

    `keep` says which nodes are drawn, `kind` names the entry of `COLORS` for each.
    """
    graphs = [graph.graph if isinstance(graph, fx.GraphModule) else graph for graph in (before, after)]
    left, left_width, left_height = _panel(graphs[0], graphs[1], keep, kind)
    right, right_width, right_height = _panel(graphs[1], graphs[0], keep, kind)
    used = {kind(node) for graph in graphs for node in graph.nodes if keep(node)}
    kinds = [name for name in COLORS if name in used]
    top, right_x = 112, left_width + 4 * _MARGIN
    width = max(
        right_x + right_width + _MARGIN, sum(49 + len(k) * _LABEL_PX for k in kinds) + 220, 40 + len(title) * 10
    )
    height = top + max(left_height, right_height) + _MARGIN
    line = f'x1="{right_x - 1.5 * _MARGIN}" x2="{right_x - 1.5 * _MARGIN}" y1="{top - 24}" y2="{height - _MARGIN}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="{_FONT}">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0.8 L7,4 L0,7.2 z" fill="#8a8f98"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="#ffffff"/>',
        _words(_MARGIN, 34, title, 17, weight="bold", anchor="start"),
        *_legend(_MARGIN, 52, kinds),
        _words(_MARGIN, top - 14, "before", 13, weight="bold", color="#6e7781", anchor="start"),
        _words(right_x, top - 14, "after", 13, weight="bold", color="#6e7781", anchor="start"),
        f'<line {line} stroke="#d0d7de" stroke-dasharray="4 4"/>',
        f'<g transform="translate({_MARGIN},{top})">', *left, "</g>",
        f'<g transform="translate({right_x:.1f},{top})">', *right, "</g>",
        "</svg>",
    ]  # fmt: skip
    return "\n".join(parts) + "\n"
