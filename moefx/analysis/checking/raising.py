"""What a pass found, one candidate after the other: each is rewritten wholly, or not at all, and what becomes of the
others is decided here."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator

from torch.fx import GraphModule, Node

from moefx.analysis.checking.selfcheck import SelfCheck
from moefx.analysis.recognition.host_numbers import is_check, is_number
from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import RaiseError
from moefx.ir import edit
from moefx.ir.writes import writes


class Candidate(SelfCheck):
    """A candidate while it is rewritten: how the graph was, and whether it computes what it did."""

    def sweep(self) -> None:
        """Erase what was read before and is not any more, what was added in vain, and what only checks such."""
        graph, erased = self.mark.gm.graph, set()
        gone = [node for node in graph.nodes if not node.users and node not in self.mark.idle]
        while gone:
            node = gone.pop()
            hanging = self._hanging(node)
            if node in erased or node.op in ("placeholder", "output") or writes(node) or hanging is None:
                continue
            for each in (*hanging, node):
                gone += each.all_input_nodes
                graph.erase_node(each)
                erased.add(each)

    def _hanging(self, node: Node) -> list[Node] | None:
        """What reads a node, the last first, if it can go with it: numbers that nobody reads but checks, assignments to
        places of it, and what nobody read before. None if something else does."""
        found = list(node.users)
        for each in found:
            is_put = each.target is operator.setitem and each.args[0] is node
            may_go = is_check(each) or is_number(each) or is_put or (each in self.mark.idle and not writes(each))
            if not may_go or each.op == "output":
                return None
            found += [user for user in each.users if user not in found]
        return sorted(found, reverse=True)


class Raising:
    """The candidates of one pass. A candidate is known by a node, in most cases its routing."""

    def __init__(self, gm: GraphModule, ctx: PassContext, result: PassResult) -> None:
        self.gm, self.ctx, self.result = gm, ctx, result
        self._seen: set[tuple] = set()

    def wants(self, routing: Node) -> bool:
        """Whether a candidate is still to be raised: it was neither left as it is, nor no mixture at all."""
        return routing.name not in self.ctx.report.left and routing.name not in self.ctx.decisions.declined

    @contextlib.contextmanager
    def candidate(self, routing: Node, *, doubtful: bool = False) -> Iterator[Candidate]:
        """While a candidate is rewritten: a RaiseError takes back what was done to the graph, and is judged. doubtful:
        it may be no mixture, and nothing is said yet to be one."""
        check = Candidate(self.gm, self.ctx.autocast, self._seen)
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
