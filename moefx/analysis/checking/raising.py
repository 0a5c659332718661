"""What a pass found, one candidate after the other: each is rewritten wholly, or not at all, and what becomes of the
others is decided here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.fx import GraphModule, Node

from moefx.analysis.checking.selfcheck import SelfCheck
from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import RaiseError
from moefx.ir import edit


class Raising:
    """The candidates of one pass. A candidate is known by a node, in most cases its routing."""

    def __init__(self, gm: GraphModule, ctx: PassContext, result: PassResult) -> None:
        self.gm, self.ctx, self.result = gm, ctx, result
        self._seen: set[tuple] = set()

    def wants(self, routing: Node) -> bool:
        """Whether a candidate is still to be raised: it was neither left as it is, nor no mixture at all."""
        return routing.name not in self.ctx.report.left and routing.name not in self.ctx.decisions.declined

    @contextlib.contextmanager
    def candidate(self, routing: Node, *, doubtful: bool = False) -> Iterator[SelfCheck]:
        """While a candidate is rewritten: a RaiseError takes back what was done to the graph, and is judged. doubtful:
        it may be no mixture, and nothing is said yet to be one. Gives the comparison with what was before."""
        check = SelfCheck(self.gm, self.ctx.autocast, self._seen)
        try:
            yield check
        except RaiseError as error:
            check.mark.put_back()
            if doubtful:
                self.result.skip(routing, error.what)
                self.ctx.report.nearly.append(error.what)
            else:
                self.refuse(routing, error)

    def refuse(self, routing: Node, error: RaiseError) -> None:
        """What a pass wrote as a routing may turn out to be none: it stays as it is. An MoE that must be raised is an
        error; another one is left as it is."""
        decisions, report = self.ctx.decisions, self.ctx.report
        if routing.name in decisions.tentative - decisions.declined:
            decisions.declined.add(routing.name)
            report.nearly.append(error.what)
        elif self.ctx.refuses:
            raise error
        else:
            report.left[routing.name] = f"{error.what} ({edit.place(routing) if error.where is None else error.where})"
