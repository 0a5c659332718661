"""Does what is computed of rows depend on their order?"""

from __future__ import annotations

import re
from collections.abc import Collection

import torch
from torch.fx import Node

from moefx.analysis.checking.evaluate import boundary
from moefx.analysis.checking.region_inputs import Calm, draw, drawn_shape, is_dropout, is_size, symbol_values
from moefx.analysis.recognition.structure import structure
from moefx.ir import edit
from moefx.ir.expert_weights import is_weight
from moefx.ir.randomness import is_random

_MOST = 2**27  # entries of weights
_TOLERANCE = 2e-4


def keeps_rows_apart(outputs: Collection[Node], of_rows: Collection[Node], computed: Collection[Node],
                     seen: dict[str, bool]) -> bool:  # fmt: skip
    """Whether rows in another order give `outputs` in that order, and nothing else. of_rows: what has a row for each of
    these; computed: what is computed of some of them; seen: what was found of others, as of other experts. False, too,
    if it cannot be run."""
    reads, inside = boundary(outputs, of_rows)
    outside = {each for node in inside & set(computed) for each in node.all_input_nodes} - set(computed)
    reads, inside = boundary(outputs, {*of_rows, *outside})
    key = re.sub(r"\bu\d+\b", "u", str(structure(inside)))  # sizes of experts have names of their own
    if key not in seen:
        seen[key] = _keeps_apart(outputs, of_rows, reads, inside)
    return seen[key]


def _keeps_apart(outputs: Collection[Node], of_rows: Collection[Node], reads: Collection[Node],
                 inside: Collection[Node]) -> bool:  # fmt: skip
    weights = sum(edit.tensor_value(node).numel() for node in reads if is_weight(node))
    if weights > _MOST or any(is_random(node) and not is_dropout(node) for node in inside):
        return False
    symbols, generator = symbol_values(reads), torch.Generator().manual_seed(0)
    drawn = {node: draw(node, symbols, generator, None, 0, 0) for node in reads if not is_size(node)}
    rows = torch.arange(drawn_shape(next(iter(of_rows)), symbols)[0])
    swapped = torch.cat([rows[:2].flip(0), rows[2:]])
    try:
        with torch.no_grad():
            mine = Calm(symbols, drawn).run(outputs)
            for order in (rows.roll(1), swapped):  # of which all orders are made
                other = {node: tensor[order] if node in of_rows else tensor for node, tensor in drawn.items()}
                for was, new in zip(mine, Calm(symbols, other).run(outputs), strict=True):
                    torch.testing.assert_close(new, was[order], rtol=0, atol=_TOLERANCE * was.abs().max().item())
    except (RuntimeError, ValueError, IndexError, TypeError, KeyError, AssertionError):
        return False
    return True
