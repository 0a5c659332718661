"""What emitted code calls where a vocabulary is cut over ranks: `transport.vocabulary` with the place of this rank."""

from __future__ import annotations

from torch import Tensor

from moefx.runtime.groups import Axes
from moefx.runtime.session import Session
from moefx.transport import vocabulary


def own_embedding(session: Session, weight: Tensor, ids: Tensor, *, axis: Axes) -> Tensor:
    return vocabulary.own_embedding(weight, ids, session.size(axis), session.index(axis))


def own_embedding_backward(session: Session, grad: Tensor, ids: Tensor, *, rows: int, padding_idx: int, axis: Axes,
                      ) -> Tensor:  # fmt: skip
    return vocabulary.own_embedding_backward(grad, ids, rows, padding_idx, session.size(axis), session.index(axis))


def label_terms(session: Session, logits: Tensor, labels: Tensor, *, ignore_index: int, axis: Axes) -> Tensor:
    return vocabulary.label_terms(logits, labels, ignore_index, session.size(axis), session.index(axis))


def label_terms_backward(session: Session, grad: Tensor, logits: Tensor, labels: Tensor, terms: Tensor, *,
                         ignore_index: int, axis: Axes) -> Tensor:  # fmt: skip
    n, place = session.size(axis), session.index(axis)
    return vocabulary.label_terms_backward(grad, logits, labels, terms, ignore_index, n, place)
