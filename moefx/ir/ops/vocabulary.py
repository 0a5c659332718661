"""Embedding and loss over a vocabulary that is cut over the axis `mp` (Megatron-LM, section 3).

Every rank looks up its own rows, and the rows are summed. The loss needs no logits of other ranks: it follows from two
numbers that each rank knows of a token, `label_terms`.
"""

from __future__ import annotations

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from moefx.ir import world
from moefx.ir.level import Level
from moefx.ir.meaning import meaning
from moefx.ir.op import Along, Volume, argument, define, free, nbytes, numel, value
from moefx.transport import vocabulary


@meaning(
    "weight [v? d], ids [..] -> [.. d]",
    gradient=lambda grad, weight, ids, *how: own_embedding_backward(grad.contiguous(), ids, weight.shape[0], *how),
)
def own_embedding(weight: Tensor, ids: Tensor, padding_idx: int, n: int, axis: str) -> Tensor:
    """`embedding` with this rank's rows of a table: [V/n, D], ids [..] -> [.., D], zeros for ids of other ranks"""
    return vocabulary.own_embedding(weight, ids, n, world.current().coordinate(axis))


@meaning("grad [..~ d], ids [..~] -> [rows d]")
def own_embedding_backward(grad: Tensor, ids: Tensor, rows: int, padding_idx: int, n: int, axis: str) -> Tensor:
    """The transpose of `own_embedding`: [.., D] -> [V/n, D], nothing from the id `padding_idx` (-1: there is none)"""
    return vocabulary.own_embedding_backward(grad, ids, rows, padding_idx, n, world.current().coordinate(axis))


@meaning(
    lambda logits, labels, ignore_index, n, axis: logits.new_empty(
        (n, 2, logits.shape[0]), dtype=torch.promote_types(logits.dtype, torch.float32)
    )
)
def label_terms(logits: Tensor, labels: Tensor, ignore_index: int, n: int, axis: str) -> Tensor:
    """What this rank knows of a token's loss, [T, V/n] -> [n, 2, T], zeros for other ranks: the logarithm of the sum of
    exponentials, and the label's logit"""
    return vocabulary.label_terms(logits, labels, ignore_index, n, world.current().coordinate(axis))


@meaning(lambda grad, logits, *_: torch.empty_like(logits, memory_format=torch.contiguous_format))
def label_terms_backward(grad: Tensor, logits: Tensor, labels: Tensor, terms: Tensor, ignore_index: int, n: int,
                         axis: str) -> Tensor:  # fmt: skip
    """Gradient of the logits of `label_terms`: [n, 2, T] -> [T, V/n]"""
    place = world.current().coordinate(axis)
    return vocabulary.label_terms_backward(grad, logits, labels, terms, ignore_index, n, place)


def loss_of_parts(logits: Tensor, labels: Tensor, dtype: torch.dtype, ignore_index: int, reduction: str,
                  label_smoothing: float, n: int, axis: str) -> Tensor:  # fmt: skip
    """`cross_entropy` of logits [T, V/n, ..] whose classes are cut: the same on all ranks. Traced through."""
    shape = labels.shape
    logits = logits.movedim(1, -1).flatten(0, -2) if logits.dim() > 1 else logits.unsqueeze(0)
    labels = labels.flatten()
    is_ignored = labels == ignore_index
    mine = torch.ops.moefx.label_terms(logits, labels, ignore_index, n, axis)
    of_ranks, of_label = torch.ops.moefx.sum_parts(mine, axis).unbind(1)
    total = of_ranks.logsumexp(0)
    loss = total - of_label.sum(0)
    if label_smoothing:
        mean = torch.ops.moefx.sum_parts(logits.to(loss.dtype).sum(1), axis) / (n * logits.shape[1])
        loss = (1 - label_smoothing) * loss + label_smoothing * (total - mean)
    loss = loss.masked_fill(is_ignored, 0)
    if reduction == "none":
        return loss.view(shape).to(dtype)
    loss = loss.sum()
    return (loss / (~is_ignored).sum() if reduction == "mean" else loss).to(dtype)


def _setup_terms(ctx, inputs, output):
    logits, labels, *ctx.how = inputs
    ctx.save_for_backward(logits, labels, output)


def _terms_backward(ctx, grad):
    return torch.ops.moefx.label_terms_backward(grad, *ctx.saved_tensors, *ctx.how), None, None, None, None


label_terms.register_autograd(_terms_backward, setup_context=_setup_terms)


def _read(*names: str):
    return lambda node: Volume(hbm_bytes=sum(nbytes(argument(node, name)) for name in names) + nbytes(node))


def _exact(node: Node) -> sympy.Expr:
    """Logits in fp32."""
    logits = argument(node, "logits")
    return 4 * numel(logits) if value(logits).element_size() < 4 else sympy.S.Zero


_ops, _runtime = torch.ops.moefx, "moefx.runtime.vocabulary"
define(
    _ops.own_embedding.default, volume=lambda node: Volume(hbm_bytes=2 * nbytes(node)), along=Along("V", "P"),
    fresh=True,
    runtime=f"{_runtime}.own_embedding(session, weight, ids, axis=axis)",
)  # fmt: skip
define(
    _ops.own_embedding_backward.default, volume=_read("grad"), along=Along("R", "V"), fresh=True,
    runtime=f"{_runtime}.own_embedding_backward(session, grad, ids, rows=rows, padding_idx=padding_idx, axis=axis)",
)  # fmt: skip
define(
    _ops.label_terms.default, volume=_read("logits"), workspace=_exact, along=Along("V", "P"), fresh=True,
    runtime=f"{_runtime}.label_terms(session, logits, labels, ignore_index=ignore_index, axis=axis)",
)  # fmt: skip
define(
    _ops.label_terms_backward.default, volume=_read("logits"), along=Along("V", "V", of="logits", dim=1), fresh=True,
    workspace=_exact,
    runtime=f"{_runtime}.label_terms_backward(session, grad, logits, labels, terms, ignore_index=ignore_index, "
            "axis=axis)",
)  # fmt: skip
define(loss_of_parts, volume=free, levels=frozenset({Level.PLACED}), along=Along("V", "I"))
