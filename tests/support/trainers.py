"""A small run of transformers.Trainer on a compiled model, and the same run by a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from tests.support.families import tiny_config

ROWS, STEPS, ROWS_PER_STEP, RATE, CLIP = 16, 2, 8, 1.0, 1.0


def model() -> nn.Module:
    config = tiny_config("mixtral")
    config.num_hidden_layers = 1
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def rows() -> list[dict[str, Tensor]]:
    """With unlike numbers of labels, and a column that the model does not know."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(ROWS):
        tokens = torch.randint(0, 60, (8,), generator=generator)
        labels = tokens.masked_fill(torch.arange(8) > index % 7 + 1, -100)
        found.append({"input_ids": tokens, "labels": labels, "note": torch.tensor(index)})
    return found


def trainer(compiled: nn.Module, folder: Path, **given: Any) -> Trainer:
    arguments = {"max_steps": STEPS, "learning_rate": RATE, "max_grad_norm": CLIP, "lr_scheduler_type": "constant",
                 "optim": "sgd", "train_sampling_strategy": "sequential",
                 "per_device_train_batch_size": ROWS_PER_STEP, "per_device_eval_batch_size": 4, "logging_steps": 1,
                 "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}  # fmt: skip
    args = TrainingArguments(str(folder), **{**arguments, **given})
    return Trainer(model=compiled, args=args, train_dataset=rows(), eval_dataset=rows())


def logged(run: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in run.state.log_history if name in entry]


def plain_run() -> dict[str, Any]:
    """On one device, all rows of a step at once: losses, norms of the gradients, the loss after, logits, weights."""
    plain, losses, norms = model(), [], []
    optimizer = torch.optim.SGD(plain.parameters(), RATE)
    for step in range(STEPS):
        loss = _loss(plain, rows()[step * ROWS_PER_STEP : (step + 1) * ROWS_PER_STEP])
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        # Trainer's loss of an evaluation is the mean over batches.
        after = sum(_loss(plain, rows()[first : first + 4]).item() for first in range(0, ROWS, 4)) / (ROWS // 4)
        logits = plain(input_ids=_stacked(rows(), "input_ids")).logits
    return {"loss": losses, "grad_norm": norms, "eval_loss": after, "logits": logits,
            "weights": {name: tensor.detach() for name, tensor in plain.state_dict().items()}}  # fmt: skip


def _stacked(of: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.stack([row[name] for row in of])


def _loss(plain: nn.Module, of: list[dict[str, Tensor]]) -> Tensor:
    """The mean over all labels."""
    logits = plain(input_ids=_stacked(of, "input_ids")).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), _stacked(of, "labels")[:, 1:].flatten())
