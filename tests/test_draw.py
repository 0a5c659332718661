"""The picture: what is drawn, joined and marked, and that boxes neither overlap nor leave the frame."""

from __future__ import annotations

from itertools import combinations
from xml.etree import ElementTree

from torch import fx

from docs.draw import COLORS, is_drawn, kind_of, svg_before_after
from moefx.ir.read import read
from tests.ir.test_text import joint_graph

SVG = "{http://www.w3.org/2000/svg}"

BEFORE = """def graph(x: "f32[T, D]", gate_weight: "f32[E, D]", w1: "f32[E, F, D]"):
    logits = F.linear(x, gate_weight)
    topk = torch.topk(logits, 2)
    ids = topk[1]
    flat = ids.reshape(-1)
    order = torch.argsort(flat)
    out = torch.bmm(x, w1, order)
    return (out,)"""
AFTER = BEFORE.replace("torch.bmm(x, w1, order)", "torch.bmm(moved, w1, order)").replace(
    "    out", "    moved = torch.distributed.all_gather(x, 'ep')\n    out"
)


def panels(before: fx.GraphModule, after: fx.GraphModule, **options: object) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(svg_before_after(before, after, title="a < b & c", **options))
    return root.findall(f"{SVG}g")


def labels(panel: ElementTree.Element) -> list[str]:
    return [words.text for words in panel.findall(f"{SVG}text") if words.get("font-weight") == "bold"]


def boxes(panel: ElementTree.Element) -> list[tuple[float, float, float, float]]:
    """Left, top, right, bottom of each."""
    rects = [[float(r.get(k)) for k in ("x", "y", "width", "height")] for r in panel.findall(f"{SVG}rect")]
    return [(x, y, x + w, y + h) for x, y, w, h in rects]


def edges(panel: ElementTree.Element) -> set[tuple[str, str]]:
    """Which label is joined to which, by where the paths start and end."""
    found = set()
    places = list(zip(boxes(panel), labels(panel)))
    for path in panel.findall(f"{SVG}path"):
        points = [tuple(map(float, word.lstrip("MCL").split(","))) for word in path.get("d").split()]
        ends = []
        for x, y in (points[0], points[-1]):
            ends += [
                label for (left, top, right, bottom), label in places if left <= x <= right and top - 4 <= y <= bottom
            ]
        found.add(tuple(ends))
    return found


def test_edges_bridge_what_is_left_out() -> None:
    before, after = panels(read(BEFORE), read(AFTER))
    assert sorted(labels(before)) == sorted(["x", "gate_weight", "w1", "linear", "topk", "argsort", "bmm"])
    shared = {("x", "linear"), ("gate_weight", "linear"), ("linear", "topk"), ("topk", "argsort"), ("argsort", "bmm")}
    assert edges(before) == shared | {("x", "bmm"), ("w1", "bmm")}
    assert edges(after) == shared | {("x", "all_gather (ep)"), ("all_gather (ep)", "bmm"), ("w1", "bmm")}


def test_what_is_new_has_a_thick_rim() -> None:
    before, after = panels(read(BEFORE), read(AFTER))
    thick = [
        [r.get("fill") for r in panel.findall(f"{SVG}rect") if r.get("stroke-width") == "2.6"]
        for panel in (before, after)
    ]
    assert thick == [[], [COLORS["collective"][0]]]


def test_kinds() -> None:
    kinds = {node.name: kind_of(node) for node in read(AFTER).graph.nodes}
    assert kinds == {
        "x": "input", "gate_weight": "parameter", "w1": "parameter", "logits": "compute", "topk": "routing",
        "ids": "compute", "flat": "compute", "order": "routing", "moved": "collective", "out": "compute",
        "output": "compute",
    }  # fmt: skip


def test_keep_and_kind_are_the_callers() -> None:
    def keep(node: fx.Node) -> bool:
        return is_drawn(node) and node.op != "placeholder"

    before, _ = panels(read(BEFORE), read(AFTER), keep=keep, kind=lambda node: "routing")
    assert edges(before) == {("linear", "topk"), ("topk", "argsort"), ("argsort", "bmm")}
    assert {rect.get("fill") for rect in before.findall(f"{SVG}rect")} == {COLORS["routing"][0]}


def test_boxes_do_not_overlap_and_stay_inside() -> None:
    gm = joint_graph()
    source = svg_before_after(gm, gm, title="joint")
    assert source == svg_before_after(joint_graph(), joint_graph(), title="joint")
    root = ElementTree.fromstring(source)
    for panel in root.findall(f"{SVG}g"):
        across, down = map(float, panel.get("transform").removeprefix("translate(").rstrip(")").split(","))
        places = boxes(panel)
        assert len(places) > 10
        for left, top, right, bottom in places:
            assert left >= -0.1
            assert top >= 0
            assert right + across <= float(root.get("width"))
            assert bottom + down <= float(root.get("height"))
        for a, b in combinations(places, 2):
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_a_graph_with_nothing_to_draw() -> None:
    nothing = read("def graph(x):\n    return x")
    assert [boxes(panel) for panel in panels(nothing, nothing)] == [[], []]
