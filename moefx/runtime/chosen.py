"""Which experts were chosen, of those that a model leaves out where no token chose them: in plain PyTorch the others
have no gradient, and an optimizer leaves them alone.

Every rank knows what its own tokens chose. The header that opens every backward over all ranks carries that, so all
ranks have gradients of the same parameters, and no message is sent for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from moefx.runtime.groups import Axes
from moefx.runtime.session import Session
from moefx.runtime.streams import HostCopy

_WORD = 8  # experts in an int64


class Chosen:
    """The experts that the tokens of any rank along `axes` chose, in the step whose backward begins and in those whose
    gradients wait for it. own: uint8 [E] of every stack of experts, by the name of its gradient: those of this rank. On
    all ranks of the same stacks, in the same order."""

    def __init__(self, session: Session, axes: Axes, own: Mapping[str, Tensor]) -> None:
        self._session, self._axes, self._own = session, axes, own
        self._found: Tensor | None = None
        self._copy: HostCopy | None = None
        self._of: dict[str, list[bool]] | None = None

    def beside(self) -> list[tuple[Tensor, Callable[[Tensor], None]]]:
        """What the header carries, see `check_header_start`."""
        if not self._own:
            return []
        flags = torch.cat(list(self._own.values()))
        return [(pad(flags, (0, -len(flags) % _WORD)).view(torch.int64), self._hear)]

    def _hear(self, words: Tensor) -> None:
        """words int64 [n, W], of all ranks."""
        found = words.contiguous().view(torch.uint8).amax(0)
        self._copy, self._found = self._session.to_host(found), found

    def get(self, name: str) -> list[bool] | None:
        """Of every expert of a stack whether it was chosen; None: of a stack whose experts are not left out."""
        if name not in self._own:
            return None
        if self._of is None:
            if self._copy is not None:
                with self._session.guard("learning which experts were chosen", self._axes):
                    self._copy.wait(self._session.timeout)
                self._found = self._copy.host
            sizes = [len(flags) for flags in self._own.values()]
            parts = self._found[: sum(sizes)].bool().split(sizes)
            self._of = {stack: part.tolist() for stack, part in zip(self._own, parts)}
        return self._of[name]
