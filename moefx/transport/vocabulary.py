"""A vocabulary of which every one of n ranks has an equal run of ids (Megatron-LM, section 3). Known to compiler and
runtime alike; `place` is the rank's."""

from __future__ import annotations

import torch
from torch import Tensor


def own_embedding(weight: Tensor, ids: Tensor, n: int, place: int) -> Tensor:
    """Rows [.., D] of a table of which this rank has `weight` [V/n, D]: zeros for the ids of other ranks.

    Raises IndexError for an id that no rank has; on CUDA a later call fails, as behind torch's own embedding.
    """
    local, mine = _own(ids, weight.shape[0], n, place)
    return weight[local].masked_fill_(~mine.unsqueeze(-1), 0)


def own_embedding_backward(grad: Tensor, ids: Tensor, rows: int, padding_idx: int, n: int, place: int) -> Tensor:
    """The transpose: [.., D] -> [V/n, D], nothing from the id `padding_idx`."""
    local, mine = _own(ids, rows, n, place)
    local = torch.where(mine & (ids != padding_idx), local, rows)  # one row more takes what is not wanted
    return torch.ops.aten.embedding_dense_backward(grad, local, rows + 1, rows, False)[:rows]


def label_terms(logits: Tensor, labels: Tensor, ignore_index: int, n: int, place: int) -> Tensor:
    """What this rank knows of every token from its logits [T, V/n]: [n, 2, T], zeros for other ranks. First the
    logarithm of the sum of their exponentials, then the label's logit, 0 if another rank has it.

    Raises IndexError for a label that no rank has and that is not `ignore_index`; on CUDA a later call fails.
    """
    local, mine = _own(labels.masked_fill(labels == ignore_index, 0), logits.shape[1], n, place)
    exact = logits.to(_exact(logits))
    terms = exact.new_zeros((n, 2, labels.numel()))
    torch.logsumexp(exact, 1, out=terms[place, 0])
    terms[place, 1] = exact.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill_(~mine, 0)
    return terms


def label_terms_backward(grad: Tensor, logits: Tensor, labels: Tensor, terms: Tensor, ignore_index: int, n: int,
                         place: int) -> Tensor:  # fmt: skip
    """The gradient of the logits [T, V/n], from that of their terms [n, 2, T]."""
    local, mine = _own(labels.masked_fill(labels == ignore_index, 0), logits.shape[1], n, place)
    (of_sum, of_label), total = grad[place], terms[place, 0]
    total = total.masked_fill(total == -torch.inf, 0)  # all logits are -inf, and e ** -inf is 0, too
    found = torch.sub(logits, total.unsqueeze(1)).exp_().mul_(of_sum.unsqueeze(1))
    found.scatter_add_(1, local.unsqueeze(1), (of_label * mine).unsqueeze(1))
    return found.to(logits.dtype)


def _exact(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _own(ids: Tensor, count: int, n: int, place: int) -> tuple[Tensor, Tensor]:
    """The places of ids among this rank's, 0 for those of others; and which are this rank's."""
    if ids.device.type == "cpu":
        wrong = ids[(ids < 0) | (ids >= n * count)]
        if wrong.numel():
            raise IndexError(f"{int(wrong[0])} is no id of a vocabulary of {n * count}: 0 to {n * count - 1}")
    else:  # a kernel looks, and the host does not wait
        ids.new_zeros(()).expand(n * count).index_select(0, ids.flatten())
    local = ids.long() - place * count
    mine = (local >= 0) & (local < count)
    return local.masked_fill_(~mine, 0), mine
