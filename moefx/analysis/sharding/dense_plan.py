"""What to change so that each of n ranks computes with its part of the weights outside of the experts."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node

from moefx.layout import Cut


@dataclass
class Plan:
    """cuts: {parameter: the dim that is cut, and its pieces}. columns: products cut by columns; rows: cut by rows;
    means: (mean or sum over entries, their number, 1 for a sum). losses: cross entropies of cut logits; tables:
    embeddings with cut rows; gathered: {product cut by columns that all ranks need whole: its pieces}. shared: {(reader
    of cut entries, what all ranks have): the dim that a rank takes its part of, None if it reads all}. arguments:
    {node: (args, kwargs)} with a rank's sizes. whole: {product that stays whole: why}.
    """

    cuts: dict[Node, Cut] = field(default_factory=dict)
    columns: list[Node] = field(default_factory=list)
    rows: list[Node] = field(default_factory=list)
    means: list[tuple[Node, int]] = field(default_factory=list)
    losses: list[Node] = field(default_factory=list)
    tables: list[Node] = field(default_factory=list)
    gathered: dict[Node, tuple[int, ...]] = field(default_factory=dict)
    shared: dict[tuple[Node, Node], Cut | None] = field(default_factory=dict)
    arguments: dict[Node, tuple[tuple, dict]] = field(default_factory=dict)
    whole: dict[Node, str] = field(default_factory=dict)

    def is_cut(self, node: Node) -> bool:
        """Whether a node computes with a part of a parameter."""
        return any(node in each for each in (self.columns, self.rows, self.tables, self.gathered))
