"""How many bytes a rank sends over each link in a step, and for what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from moefx.analysis.tasks import stage_of
from moefx.compiler.variant import Variant
from moefx.costmodel.amounts import Kind, amounts_of
from moefx.ir.op import BACKGROUND, Stage
from moefx.ir.ops.order import start, unsplit
from moefx.planning.pricing import Prices

LINKS = {"intra": "within a node", "inter": "between nodes"}
_PURPOSES = {Stage.OUT: "rows out", Stage.BACK: "rows back", Stage.COUNTS: "counts", Stage.WEIGHTS: "weights",
             Stage.COPIES: "gradients of copies", **dict.fromkeys(BACKGROUND, "gradients")}  # fmt: skip


def links_of(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """{graph, link, what, bytes} of what one rank sends, predicted for balanced routing. A reduction over several nodes
    counts on the link between them."""
    found: dict[tuple[str, str, str], float] = defaultdict(float)
    for variant, name in ((each, name) for each in variants for name in each.scheduled):
        prices, gm = Prices(variant.step, variant.context), variant.scheduled[name]
        for node in gm.graph.find_nodes(op="call_function", target=start):
            amounts = amounts_of(node)
            if amounts.kind is not Kind.COLLECTIVE:
                continue
            what = _PURPOSES.get(stage_of(node), unsplit(node)[0].name.replace("_", " "))
            sent = prices.machine.sent_by(amounts, prices.sizes, variant.context.mesh.root)
            for link, nbytes in sent.items():
                found[name, LINKS[link], what] += nbytes
    return [{"graph": graph, "link": link, "what": what, "bytes": nbytes}
            for (graph, link, what), nbytes in found.items() if nbytes]
