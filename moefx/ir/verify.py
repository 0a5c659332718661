"""The verifier: the rules that a graph of every level obeys. A broken rule is a bug of a pass, found before it runs.

Every rule is a small function of a `View`, linear in the number of nodes.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import GraphModule, Node

from moefx import rooms
from moefx.ir import (
    rules_copies,
    rules_moe,
    rules_rings,
    rules_statistics,
    rules_structure,
    rules_types,
    rules_ways,
    rules_weights,
)
from moefx.ir.level import Level
from moefx.ir.rules import BACKWARD, FORWARD, WHOLE, Facts, Role, Rule, View
from moefx.ir.types import Type, Types, same_data

__all__ = ["BACKWARD", "FORWARD", "RULES", "WHOLE", "Facts", "Role", "saved_inputs", "saved_roles", "saved_spaces",
           "saved_types", "verify"]  # fmt: skip

RULES: tuple[Rule, ...] = (
    # Form first: the others rely on it.
    rules_structure.form,
    rules_structure.leaves,
    rules_structure.level_allows,
    rules_structure.values_known,
    rules_structure.waited_once,
    rules_structure.on_the_way_left_alone,
    rules_structure.taken_memory_is_free,
    rules_structure.constraints,
    rules_structure.axes_known,
    rules_structure.routing_is_saved,
    rules_rings.rings_hold,
    rules_structure.outputs_keep_their_types,
    rules_moe.tokens_are_conserved,
    rules_ways.rows_take_their_way,
    rules_ways.gathered_rows_are_those_of_all,
    rules_ways.experts_are_cut_as_rows_travel,
    rules_types.outputs_are_whole,
    rules_types.buffers_are_whole,
    rules_types.batches_know_their_own_size,
    rules_types.parameters_are_materialised,
    rules_types.gradients_are_reduced,
    rules_copies.copies_come_home,
    rules_weights.weights_are_gathered,
    rules_weights.their_gradients_come_home,
    rules_statistics.statistics_are_summed,
)


def verify(gm: GraphModule, level: Level, facts: Facts) -> None:
    """Raises VerifyError with what is wrong and the node, module and source line where."""
    view = View(gm, level, facts)
    for rule in (*RULES, *rooms.rules()):
        if level in rule.levels and facts.graph in rule.graphs:
            rule.check(view)


def saved_roles(forward: GraphModule, level: Level, facts: Facts, first_saved: int) -> tuple[Role | None, ...]:
    """The roles of the values that a forward graph saves for the backward, in order: `Facts.saved` of the backward.

    first_saved: how many outputs stand before them.
    """
    view = View(forward, level, facts)
    known = rules_moe.roles(view)
    return tuple(known.get(node) if isinstance(node, Node) else None for node in view.returned[first_saved:])


def saved_types(forward: GraphModule, level: Level, facts: Facts, first_saved: int) -> tuple[Mapping[str, Type], ...]:
    """The same of their types per axis: `Facts.types`; nothing where all ranks read different data."""
    if not same_data(facts.mesh):
        return ()
    view = View(forward, level, facts)
    known = Types(view).known
    return tuple(known.get(node, {}) for node in view.returned[first_saved:])


def saved_inputs(forward: GraphModule, first_saved: int) -> tuple[int | None, ...]:
    """Which of the program's inputs each of them is: `Facts.given`."""
    inputs = {node: index for index, node in enumerate(forward.graph.find_nodes(op="placeholder"))}
    return tuple(inputs.get(node) for node in forward.graph.output_node().args[0][first_saved:])


def saved_spaces(forward: GraphModule, level: Level, facts: Facts, first_saved: int) -> tuple[str, ...]:
    """The memory in which each of them lies: `Facts.spaces`."""
    view = View(forward, level, facts)
    known = {call.result: call.op.space for call in view.call_of.values() if call.result is not None}
    return tuple(known.get(node, "device") for node in view.returned[first_saved:])
