"""A model by hand in eager PyTorch: its MoE layers are eager_ep.py's, and two micro-batches run on two threads.

The threads take turns: one that waits for an exchange lets the other one compute, as "dual batch overlap" does. So
they never compute at the same time, and a rank needs no more than its one core. Nothing here uses moefx.
"""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from eager_ep import EagerEPMoE
from torch import Tensor, nn


class ByHand:
    """The model with EagerEPMoE in the place of every layer that has `gate` and `experts` of transformers' form; its
    steps on `parts` equal parts of the batch, each on a thread with a process group of its own."""

    def __init__(self, model: nn.Module, top_k: int, parts: int) -> None:
        self.model, self.group = model, dist.new_group()
        self.groups = [dist.new_group() for _ in range(parts)]
        self.turn, self.local = threading.Lock(), threading.local()
        self.moes: dict[str, EagerEPMoE] = {}
        for path, module in list(model.named_modules()):
            if hasattr(module, "gate") and hasattr(module, "experts"):
                weights = module.gate.weight.data, module.experts.gate_up_proj.data, module.experts.down_proj.data
                self.moes[path] = EagerEPMoE(*weights, top_k, self.group, self._exchange)
                model.set_submodule(path, self.moes[path])

    def _exchange(self, out: Tensor, rows: Tensor, receives: list[int] | None = None,
                  sends: list[int] | None = None) -> None:  # fmt: skip
        """Everybody else may compute for as long as it takes."""
        begun = dist.all_to_all_single(out, rows, receives, sends, group=self.local.group, async_op=True)
        self.turn.release()
        begun.wait()
        self.turn.acquire()

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        """Forward, backward and the average of gradients over the ranks; the loss."""
        self.model.zero_grad(set_to_none=True)
        parts = len(self.groups)
        losses: list[Tensor] = []
        pieces = [{name: each.chunk(parts)[part] for name, each in batch.items()} for part in range(parts)]
        threads = [threading.Thread(target=self._part, args=(group, piece, losses))
                   for group, piece in zip(self.groups, pieces)]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._average()
        return torch.stack(losses).sum()

    def _part(self, group: dist.ProcessGroup, piece: dict[str, Tensor], losses: list[Tensor]) -> None:
        self.local.group = group
        with self.turn:
            loss = self.model(**piece).loss / len(self.groups)
            loss.backward()
            losses.append(loss.detach())

    def _average(self) -> None:
        """Of all but the experts' gradients, in one bucket; those of experts are whole already."""
        ranks = dist.get_world_size(self.group)
        experts = {id(param) for moe in self.moes.values() for param in (moe.gate_up, moe.down)}
        mine = [param for param in self.model.parameters() if id(param) not in experts]
        bucket = torch.cat([param.grad.flatten() for param in mine])
        dist.all_reduce(bucket, group=self.group)
        for param, grad in zip(mine, bucket.split([param.numel() for param in mine])):
            param.grad.copy_(grad.view_as(param))
        for param in self.model.parameters():
            param.grad /= ranks

    def gradients(self) -> dict[str, Tensor]:
        """By the names of the model as it was."""
        names = {".router": ".gate.weight", ".gate_up": ".experts.gate_up_proj", ".down": ".experts.down_proj"}
        found = {}
        for name, param in self.model.named_parameters():
            path, _, last = name.rpartition(".")
            found[path + names[f".{last}"] if path in self.moes else name] = param.grad
        return found
