"""What several ranks have copies of, which must stay the same: parameters, and parts of those that are spread."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import nn
from torch.optim import Optimizer

from moefx.errors import DivergenceError
from moefx.link.program import Home
from moefx.runtime import parameters
from moefx.runtime.agreement import check_same_values, gather
from moefx.runtime.session import Session

_HINT = "give every rank the same optimizer, learning rate and number of steps, and write the same values into " \
    "parameters on all ranks; if they may differ: compile(.., compare_every=0)"  # fmt: skip


class Replicas:
    """The parameters of `model` on this rank. every: after so many steps they are compared; 0 for never."""

    def __init__(self, model: nn.Module, session: Session, every: int) -> None:
        self._model, self._session, self._every = model, session, every
        self._steps = 0
        self._settings: list[dict[str, Any]] = []  # of the last update
        self._all_settings = b""  # of all updates

    def compare(self, homes: list[Home], hint: str | None = None) -> None:
        """A collective; raises DivergenceError on all ranks where copies differ."""
        held, layouts = parameters.held(self._model)
        for home in homes:
            held |= home.shared_buffers()
        check_same_values(self._session, self._session.view.names, held, layouts, hint=hint)

    def before_step(self, homes: list[Home]) -> None:
        """`compare` where it is time to: often at first, when mistakes show. A collective of all ranks, who train
        equally often; the weights of the first step were compared when it was compiled."""
        done, self._steps = self._steps, self._steps + 1
        if done and self._every and (done % self._every == 0 or (done < self._every and done & (done - 1) == 0)):
            self.check(homes)

    def note_step(self, optimizer: Optimizer, homes: list[Home]) -> None:
        """An optimizer of parameters of the model is about to make an update."""
        for home in homes:
            home.updates += 1
        self._settings = [{name: setting for name, setting in group.items() if _is_setting(name, setting)}
                          for group in optimizer.param_groups]  # fmt: skip
        self._all_settings = hashlib.blake2b(self._all_settings + repr(self._settings).encode()).digest()

    def check(self, homes: list[Home]) -> None:
        """`compare`, and the numbers of updates, if that is wanted at all."""
        if self._every:
            self._compare_updates(sum(home.updates for home in homes))
            self.compare(homes, _HINT)

    def _compare_updates(self, mine: int) -> None:
        """Also where no copies show it, of experts of which there is one copy."""
        fact = mine, self._settings, self._all_settings
        first, *others = gather(self._session, self._session.view.names, fact, "comparing the numbers of updates")
        for rank, (theirs, settings, all_settings) in enumerate(others, 1):
            if theirs != first[0]:
                raise DivergenceError(f"rank {rank} of the mesh has made {theirs} optimizer steps where rank 0 has "
                                      f"made {first[0]}", hint=_HINT)  # fmt: skip
            if all_settings != first[2]:
                raise DivergenceError(f"rank {rank} of the mesh has made optimizer steps with settings other than rank "
                                      f"0's{_difference(first[1], settings)}", hint=_HINT)  # fmt: skip


def _is_setting(name: str, setting: Any) -> bool:
    """Whether an entry of a group of parameters says what an update is, and is at hand."""
    parts = setting if isinstance(setting, tuple) else (setting,)
    plain = all(isinstance(part, (bool, int, float, str)) for part in parts)
    return plain and name not in ("foreach", "fused", "capturable")


def _difference(first: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    for ours, own in zip(first, theirs):
        for name in ours:
            if ours[name] != own.get(name):
                return f": {name} is {ours[name]} on rank 0 but {own.get(name)} on that rank"
    return " before the last step"
