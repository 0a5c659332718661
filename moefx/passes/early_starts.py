"""Start collectives early and wait for them late.

Contract
    takes  SCHEDULED   every collective is a start and a wait
    gives  SCHEDULED   the same nodes in another topological order
    never  changes the order of starts among each other: it is the same on every rank; or that in which random numbers
           are drawn; does anything where a scheduler was chosen, see `order`

Pseudo-code
    for every start that a chain of the program waits for (tokens, counts), in order:
        if what it needs includes a wait: first do everything at hand that does not depend on an outstanding wait
        then do what the start needs, and start. Only what stands behind the last grouped matmul but one may be
        put off for it: a weight gradient frees the saved rows it reads, and memory counts more than an early start
    gradient reductions start where their gradient is ready and are waited for at the end

    wait(a); dgrad; wgrad; start(b)   ->   wait(a); dgrad; start(b); wgrad
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit
from moefx.ir.op import BACKGROUND, lookup
from moefx.ir.ops.order import start, unsplit, wait
from moefx.ir.randomness import draws_before


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    if ctx.scheduler is not None:
        return result
    before = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    after = _Order(before).build()
    if after == before:
        return result
    anchor = gm.graph.output_node()
    for node in after:
        anchor.prepend(node)
    moved = sum(a is not b for a, b in zip(before, after))
    result.changed(f"{moved} nodes moved")
    return result


class _Order:
    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.index = {n: i for i, n in enumerate(nodes)}
        self.done: set[Node] = set()
        self.out: list[Node] = []
        self.draws = draws_before(nodes)
        self.urgent_waits = {n for n in nodes if n.target is wait and _is_urgent(n.args[0])}

    def build(self) -> list[Node]:
        for node in self.nodes:
            if node.target is start and _is_urgent(node) and node not in self.done:
                self._reach(node)
        self._fill(len(self.nodes))
        for node in self.nodes:
            self._emit(node)
        return self.out

    def _reach(self, target: Node) -> None:
        needed = sorted(
            (n for n in self._needs(target) if n in self.index and n not in self.done), key=self.index.__getitem__
        )
        if any(n in self.urgent_waits for n in needed):
            self._fill(self.index[target])
        inner = self._last_inner_matmul(needed)
        if inner is not None:
            for node in needed:
                if self.index[node] < inner:
                    self._emit_before(node)
        for node in needed:
            self._emit(node)

    def _needs(self, target: Node) -> set[Node]:
        """The node, what it depends on, and what draws random numbers before any of these do."""
        found = edit.ancestors([target])
        while earlier := {self.draws[n] for n in found if n in self.draws} - found:
            found |= edit.ancestors(earlier)
        return found

    def _last_inner_matmul(self, needed: list[Node]) -> int | None:
        """Place of the last grouped matmul that another grouped matmul of `needed` depends on."""
        matmuls = list(filter(_multiplies_rows, needed))
        inner = [n for n in matmuls if any(n in edit.ancestors([m]) for m in matmuls if m is not n)]
        return self.index[inner[-1]] + 1 if inner else None

    def _emit_before(self, node: Node) -> None:
        """Emit `node`, and before it everything at hand that stands before it."""
        self._fill(self.index[node])
        self._emit(node)

    def _fill(self, limit: int) -> None:
        """Everything that stands before `limit` and does not depend on an outstanding wait."""
        blocked: set[Node] = set()
        for node in self.nodes[:limit]:
            if node in self.done:
                continue
            needed = [*node.all_input_nodes, self.draws.get(node)]
            if node in self.urgent_waits or any(a in blocked for a in needed) or self._is_late(node):
                blocked.add(node)
            else:
                self._emit(node)

    def _is_late(self, node: Node) -> bool:
        """Waits for background work are for the end, or for the one who needs the result."""
        return node.target is wait and node not in self.urgent_waits

    def _emit(self, node: Node) -> None:
        if node not in self.done:
            self.done.add(node)
            self.out.append(node)


def _multiplies_rows(node: Node) -> bool:
    op = lookup(node)
    return op is not None and op.gemm is not None and op.tokens is not None and op.tokens.gives != ""


def _is_urgent(handle: Node) -> bool:
    op, call = unsplit(handle)
    return op.stage_of(call) not in BACKGROUND
