"""What is known of an op stands in its record: nobody else lists ops by name, and the docs show what the records say.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.draw import COLORS
from docs.make_map import FUNCTIONS, home_of
from moefx._torch_compat import OpOverload
from moefx.ir.op import COLLECTIVES, REGISTRY
from moefx.ir.rules_moe import _Roles
from moefx.ir.text import resolve

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "moefx"

# Who makes ops of the dialect, or rewrites what was made into others.
MAKERS = {
    "_torch_compat/capture.py", "capture/substitutes.py", "capture/trace.py", "analysis/recognition/slices.py",
    "analysis/recognition/one_hots.py",
    "ir/ragged.py", "passes/shard_dense.py", "passes/gather_tokens.py", "passes/hoist_split.py",
    "passes/gather_experts.py", "passes/chunk.py", "passes/join_gates.py", "passes/bucket_gradients.py",
    "passes/join_expert_layers.py",
    "passes/split_tokens.py", "passes/split_batch.py", "passes/keep_rows_cut.py", "analysis/sharding/kept_rows.py",
    "passes/accumulate_wgrads.py", "passes/expand_transport.py", "features/saa/phase_returns.py",
    "features/whole_blocks/cut_blocks.py", "features/fp8/scale_products.py",
    "features/fp8/ops.py",  # what its op is without rounding
    "passes/place_parameters.py", "passes/place_regions.py",
    "features/exact/plan_exactly.py", "passes/raise_grouped.py",
    "passes/sum_statistics.py", "passes/weigh_inside.py", "features/dedup/dedup_nodes.py", "features/dedup/place.py",
    "model/moves.py",  # asks whether a program takes its experts' part of whole weights
}  # fmt: skip
# Who makes markers, or reads the form of a region between its.
OF_REGIONS = {
    *(f"analysis/recognition/{name}.py" for name in ("expert_buffers", "kept_whole", "routings", "structure")),
    "analysis/sharding/dense_dims.py", "analysis/sharding/hidden_dims.py",
    "analysis/sharding/kept_rows.py", "analysis/statistics/summed_buffers.py",
    "analysis/region_rows.py",
    "ir/expert_weights.py",
    "ir/ragged.py", "ir/regions.py", "ir/rules_structure.py", "ir/rules_types.py",
    "ir/rules_weights.py", "features/dedup/dedup_nodes.py", "features/whole_blocks/cut_blocks.py",
    *(f"passes/{name}.py" for name in ("chunk", "materialise", "place_parameters", "place_regions", "raise_loop",
                                       "refuse_unraised", "gather_tokens", "hoist_split", "keep_rows_cut",
                                       "shard_dense", "shard_experts", "split_batch", "split_tokens",
                                       "weigh_inside", "assign_slots", "gather_experts", "fold_layers",
                                       "unfold_layers")),
}  # fmt: skip
# Words that are names of ops, too.
WORDS = {
    "ir/rules_moe.py": {"enter_experts", "leave_experts"},  # come in pairs
    "ir/ragged.py": {"route", "dispatch", "combine", "expert_rows"},  # names of nodes
    "analysis/tasks.py": {"route", "repack"},  # kinds of tasks, and their colours
    "report/charts.py": {"route", "repack"},
    "report/layer_graphs.py": {"route", "repack", "exchange_counts", "counts_to_host",  # kinds of tasks
                               "dispatch", "combine"},  # and words for people
    "report/step_times.py": {"route", "repack", "exchange_counts"},
    "weights/values.py": {"total_size"},  # a key of safetensors' index
    "opt.py": {"dump"},  # a file
    "model/stats.py": {"gather_experts", "scatter_experts"},  # kinds of traffic
    "ir/ways.py": {"dump", "local_combine"},  # kinds of hops
    "planning/schedules.py": {"dump", "local_combine"},
    "features/adaptive/prices.py": {"dump", "dump_counts", "local_combine", "regroup", "slot_counts",
                                    "received_rows"},  # by r
    "features/dedup/price.py": {"dispatch", "combine", "combine_backward"},  # priced by hand in their place
    "costmodel/layers.py": {"repack"},  # a kind of tasks
    "ir/rules_weights.py": {"gather_weights", "scatter_weights"},
    "ir/rules_ways.py": {"materialize"},  # which layouts experts have
}
ELSEWHERE = {*COLLECTIVES, "start", "wait", *(op.name for op in REGISTRY.values() if op.of_user)}  # words of others


def named(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(how, which op) of every place where a file names one: "op" by torch.ops, "word" as text, "marker" by import."""
    names = {op.name for op in REGISTRY.values()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if owner in ("_ops", "moefx"):
                yield "op", node.attr
        elif isinstance(node, ast.Constant) and node.value in names - ELSEWHERE:
            yield "word", node.value
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moefx.ir.ops"):
            imported = {alias.name for alias in node.names}
            yield from (("marker", name) for name in imported & (names | {"regions"}) - ELSEWHERE)


@functools.cache
def own_ops(folder: Path) -> frozenset[str]:
    """Those that a room defines, which all of its files may name."""
    prefix = ".".join(("moefx", *folder.relative_to(PACKAGE).parts, ""))
    is_room = folder.parent == PACKAGE / "features"
    return frozenset(op.name for op in REGISTRY.values() if is_room and (home_of(op).__name__ + ".").startswith(prefix))


def test_nobody_but_who_makes_an_op_knows_it_by_name():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        file = str(path.relative_to(PACKAGE))
        if file.startswith(("ir/ops/", "runtime/")):  # the runtime knows nothing of the compiler
            continue
        for how, name in named(ast.parse(path.read_text())):
            if name in own_ops(path.parent):
                continue
            is_allowed = {"op": file in MAKERS, "marker": file in OF_REGIONS, "word": name in WORDS.get(file, ())}
            if not is_allowed[how]:
                found.setdefault(file, set()).add(name)
    assert not found, f"{found}: let the record say it (moefx/ir/op.py)"


@pytest.mark.parametrize("text", [
    "x = torch.ops.moefx.regroup.default", "x = {_ops.route.default: 1}", "TABLE = ('regroup', 'repack')",
    "from moefx.ir.ops.parameters import materialize",
])  # fmt: skip
def test_the_rule_itself_finds(text):
    assert list(named(ast.parse(text)))


def test_every_op_has_a_record():
    assert FUNCTIONS.keys() == {op.name for op in REGISTRY.values() if isinstance(op.target, OpOverload)}


def test_what_records_name_is_there():
    for op in REGISTRY.values():
        assert op.drawn in COLORS, op.name
        rule = op.tokens.rule if op.tokens is not None else ""
        assert not rule or callable(rule) or callable(getattr(_Roles, f"_{rule}")), op.name
        if op.runtime is not None and "." in op.runtime.function:  # functions of Python have no signature
            inspect.signature(resolve(op.runtime.function)).bind(*op.runtime.args, **op.runtime.kwargs)
