"""Refuse a mixture of experts that no raise pass understood.

Contract
    takes  MOE   after all raise passes
    gives  MOE   the same graph
    never  changes anything; it only reports where there is no expert axis, so that nothing is to spread, or where the
           user said strict=False

Pseudo-code
    an expert's tokens are still picked by index; a parameter is still indexed by chosen expert ids; or no region was
    found at all: RaiseError with the module, the line, the reason and what to do

    w[idx].sum(1) @ x   ->   RaiseError: weights are gathered per token
"""

from __future__ import annotations

import operator

from torch.fx import GraphModule, Node

from moefx.analysis.recognition import choices, gathers
from moefx.analysis.recognition.facts import Index, Mask, Weighed
from moefx.analysis.recognition.host_numbers import is_check, is_number, is_returned
from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import CaptureError, RaiseError
from moefx.ir import edit
from moefx.ir.names import op_name
from moefx.ir.ops.regions import enter_experts

_STYLES = (
    "write the experts as a loop over all of them (torch.where, then index_add_), as a sort with grouped_mm, or as "
    "einsums over one-hot blocks [E, C, D]; or compile over a mesh without 'ep', which keeps every expert on every rank"
)
_UNKNOWN = "the way it gets its tokens, or puts its outputs together, is not known"


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    leftovers = _leftovers(gm, ctx.decisions.declined)
    for node, reason in leftovers:
        if ctx.refuses:
            raise RaiseError(f"a mixture of experts is not understood: {reason}", where=edit.place(node), hint=_STYLES)
        result.skip(node, reason)
        if ctx.mesh.dims("ep+esp") and not ctx.report.left:
            ctx.report.left[edit.place(node)] = reason
    if not leftovers:
        _refuse_numbers(gm, {*ctx.report.left, *ctx.decisions.declined})
    found = gm.graph.find_nodes(op="call_function", target=enter_experts)
    if not found and not ctx.report.left and ctx.mesh.size("ep+esp") > 1:
        seemings = filter(_seems_of_experts, gm.graph.find_nodes(op="placeholder"))
        seeming = min(seemings, key=lambda node: not _is_named_so(node), default=None)
        if seeming is None and not ctx.is_first:  # a call that goes past them
            return result
        doubt = "" if seeming is None else (f", though `{seeming.meta['moefx'].key}` looks like a part of one: " + (
            "; ".join(dict.fromkeys(ctx.report.nearly)) or _UNKNOWN))  # fmt: skip
        reason = f"no mixture of experts was found in the model{doubt}"
        if seeming is not None and not ctx.refuses:
            ctx.report.left[edit.place(min(seeming.users))] = reason
            return result
        error = RaiseError(
            reason,
            where="the whole model" if seeming is None else edit.place(min(seeming.users)),
            hint="for a dense model use a mesh with the dim 'dp' only; otherwise: " + _STYLES,
        )
        error.is_dense = seeming is None
        raise error
    return result


def _refuse_numbers(gm: GraphModule, left: set[str]) -> None:
    """left: the routings of what stays as it is."""
    lists = [node for node in gm.graph.nodes if op_name(node) == "tolist" and not is_returned(node)]
    for node, fact in zip(lists, map(choices.facts(gm).get, (node.args[0] for node in lists))):
        if getattr(getattr(fact, "ids", fact), "of", node).name not in left:
            raise CaptureError(
                f"the numbers of `{node.name}` are not known before the model runs",
                where=edit.place(node),
                hint="use numbers from .tolist() only to split tokens by the counts of a routing; or loop over all "
                "experts, or sort and use grouped_mm",
            )


def _seems_of_experts(node: Node) -> bool:
    """For a message alone."""
    is_read = node.meta["moefx"].kind == "param" and bool(node.users)
    return is_read and (edit.tensor_value(node).dim() == 3 or _is_named_so(node))


def _is_named_so(node: Node) -> bool:
    return "expert" in node.meta["moefx"].key.lower()


def _leftovers(gm: GraphModule, declined: set[str]) -> list[tuple[Node, str]]:
    """Nodes that only a mixture of experts has, and what is wrong with them."""
    found: list[tuple[Node, str]] = []
    facts = choices.facts(gm)
    for node in gm.graph.nodes:
        fact = facts.get(node)
        if getattr(getattr(getattr(fact, "mask", fact), "idx", None), "name", None) in declined:
            continue
        by_index = isinstance(fact, Index) and (_reader_of_size(node) or any(map(_has_rows, node.users)))
        by_mask = isinstance(fact, Mask) and fact.is_of_tokens and any(_indexes(u, node) for u in node.users)
        if by_index or by_mask:
            expert = fact.mask.expert if by_index else fact.expert
            reason = f"the tokens of expert {expert} are picked, but what is done with them is not recognised"
            reader = _reader_of_size(node) if by_index else None
            if reader is not None:
                reason = (f"{op_name(reader)} reads how many tokens of expert {expert} were picked as a Python "
                          "number, not as (ids == e).sum()")  # fmt: skip
            return [*found, (reader or node, reason)]
        if isinstance(fact, Weighed) and fact.is_of_tokens and any(op_name(u) == "mul" for u in node.users):
            reason = f"tokens are weighed for expert {fact.mask.expert}, but what is done with them is not recognised"
            return [*found, (node, reason)]
        if _gathers_parameter(node):
            found.append((node, "weights of the chosen experts are gathered per token"))
    return found


def _reader_of_size(index: Node) -> Node | None:
    """The first op on tensors that reads the length of an index vector, of which nothing else is read."""
    sizes = [user for user in index.users if is_number(user)]
    found = list(sizes) if len(sizes) == len(index.users) else []
    for node in found:
        for user in node.users:
            if not is_number(user) and not is_check(user):
                return user
        found += [user for user in node.users if user not in found]
    return None


def _has_rows(node: Node) -> bool:
    """Whether it is, or writes to, rows of hidden states: not places or numbers of tokens."""
    found = edit.tensor_value(node.args[0] if node.target is operator.setitem else node)
    return found is not None and found.dtype.is_floating_point and found.dim() > 1 and found.shape[-1] != 1


def _indexes(user: Node, mask: Node) -> bool:
    return user.target in (operator.getitem, operator.setitem) and user.args[1] is mask


def _gathers_parameter(node: Node) -> bool:
    """W[ids] of a parameter with at least two dims per expert."""
    read = gathers.read_of(node)
    return read is not None and edit.tensor_value(read.param).dim() >= 3
