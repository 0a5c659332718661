"""Weights that are gathered per token before they are computed with: W[ids] * S[ids] is (W * S)[ids]."""

from __future__ import annotations

import operator

from torch.fx import GraphModule, Node

from moefx.analysis.recognition.gathers import Read, read_of
from moefx.context.pass_types import PassResult
from moefx.ir import edit, ragged
from moefx.ir.dims import CASTS, is_pointwise
from moefx.ir.expert_weights import is_weight
from moefx.ir.names import op_name


def compute_before(gm: GraphModule, result: PassResult) -> None:
    """What is computed of matrices that are gathered by the same ids, of buffers and of numbers is computed of those
    of all experts, and then gathered. (Of vectors there may be more than tokens, and they are rows to what follows.)"""
    reads = {node: read for node in gm.graph.nodes if (read := read_of(node)) is not None}
    known = _Computed(gm, reads)
    for node in list(gm.graph.nodes) if reads else ():
        read = known.read_of(node)
        if read is None or node in reads or not read.is_matrix or not known.computes(node):
            continue
        if all(map(known.read_of, node.users)):
            continue
        with edit.at(node):
            new = edit.call(gm.graph, operator.getitem, known.of_all(node), read.ids, name=f"{node.name}_of_chosen")
        new.meta["val"] = edit.tensor_value(node)
        known.found[new], known.made[new] = read, known.of_all(node)
        edit.rewrite_uses(node, new)
        result.changed(f"{node.name} is computed from the weights before they are gathered")
    edit.erase_unused(n for n in known.found if n.op.startswith("call"))


class _Computed:
    """What is computed of gathered weights in a way that does the same to them before they are gathered."""

    def __init__(self, gm: GraphModule, reads: dict[Node, Read]) -> None:
        self.gm, self.found = gm, dict(reads)
        self.made = {node: read.param for node, read in reads.items()}
        for node in gm.graph.nodes if reads else ():
            if node not in reads and (read := self._read_behind(node)) is not None:
                self.found[node] = read

    def read_of(self, node: Node) -> Read | None:
        return self.found.get(node)

    def computes(self, node: Node) -> bool:
        """Whether there is more than one view or cast of one read."""
        while node in self.found and node not in self.made:
            tensors = [a for a in node.all_input_nodes if edit.tensor_value(a) is not None]
            if len(tensors) > 1 or not (op_name(node) in CASTS or _is_view(node, self.found[node])):
                return True
            node = tensors[0]
        return False

    def of_all(self, node: Node) -> Node:
        """The node computed of the weights [E, ..] of all experts."""
        if node not in self.made:
            rows = ragged.Rows(self.gm, edit.tensor_value(node).fake_mode, "all")
            mapping = {a: self.of_all(a) if a in self.found else a for a in node.all_input_nodes}
            front = edit.tensor_value(self.found[node].ids).dim()
            if op_name(node) == "unsqueeze" and node.args[1] >= 0:
                self.made[node] = rows.method("unsqueeze", mapping[node.args[0]], node.args[1] - front + 1)
            elif node.target is operator.getitem and node.args[1][0] is not Ellipsis:
                item = (slice(None), *node.args[1][front:])
                self.made[node] = rows.emit_call(operator.getitem, mapping[node.args[0]], item)
            else:
                self.made[node] = rows.copy(node, mapping)
        return self.made[node]

    def _read_behind(self, node: Node) -> Read | None:
        """One of the reads that a node is computed of, of a matrix if any is, if these are all by the same ids."""
        if not node.op.startswith("call") or edit.tensor_value(node) is None:
            return None
        tensors = [a for a in node.all_input_nodes if edit.tensor_value(a) is not None]
        reads = sorted((self.found[a] for a in tensors if a in self.found), key=lambda read: not read.is_matrix)
        if not reads or len({read.ids for read in reads}) > 1 or len(tensors) < len(node.all_input_nodes):
            return None
        if "dropout" in op_name(node):  # of a token's own numbers
            return None
        if len(tensors) == 1 and _is_view(node, reads[0]):
            return reads[0]
        dims, front = edit.tensor_value(node).dim(), edit.tensor_value(reads[0].ids).dim()
        gathered = all(edit.tensor_value(a).dim() == dims for a in tensors if a in self.found)
        small = all(edit.tensor_value(a).dim() <= dims - front and is_weight(a) for a in tensors if a not in self.found)
        is_product = op_name(node) in ("matmul", "bmm") and dims == front + 2 and len(reads) == 2
        return reads[0] if gathered and small and (is_pointwise(op_name(node)) or is_product) else None


def _is_view(node: Node, read: Read) -> bool:
    """Whether a node only moves or adds dims behind those of the ids."""
    name, front = op_name(node), edit.tensor_value(read.ids).dim()
    if name == "mT" or (node.target is getattr and node.args[1] == "mT"):
        return True
    if name == "unsqueeze":
        return len(node.args) > 1 and node.args[1] % edit.tensor_value(node).dim() >= front
    if name in ("transpose", "swapaxes"):
        return len(node.args) > 2 and all(front - edit.tensor_value(node).dim() <= d < 0 for d in node.args[1:3])
    if node.target is operator.getitem and isinstance(node.args[1], tuple):
        items, kept = node.args[1], edit.tensor_value(node.args[0]).dim() - front
        others = items[1:] if items[0] is Ellipsis else items[front:]
        if items[0] is not Ellipsis and items[:front] != (slice(None),) * front:
            return False
        slices = [each for each in others if each is not None]
        return len(slices) <= kept and all(isinstance(each, slice) for each in slices)
    return False
