"""Train a small mixture-of-experts language model on the source of Python's standard library, expert-parallel.

    torchrun --nproc-per-node 2 examples/train_moe.py
    torchrun --nproc-per-node 4 examples/train_moe.py --dp 2 --ep 2 --model mixtral
    torchrun --nproc-per-node 4 examples/train_moe.py --dp 2 --mp 2 --fold --ep 2 --esp 2
    torchrun --nproc-per-node 2 examples/train_moe.py --steps 20 --check
    torchrun --nproc-per-node 2 examples/train_moe.py --checkpoint runs/a --save-every 20 --resume
    torchrun --nproc-per-node 2 examples/train_moe.py --autocast --accumulate 2 --ema 0.99 --evaluate-every 20

Gloo on CPU, NCCL where there is a GPU per rank. `--check` afterwards runs the same steps on one rank, eagerly and
without moefx (one copy of the model per rank's batch, gradients averaged), and prints both side by side.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from corpus import Batches, read_text
from models import MODELS, build
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn
from tqdm import tqdm

import moefx
from moefx import checkpoint

WARM_UP = 10  # steps of a rising learning rate
HELD_OUT = 200_000  # bytes of text to evaluate on


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3_moe")
    parser.add_argument("--steps", type=int, default=60, help="train up to this step")
    parser.add_argument("--dp", type=int, default=1, help="copies of the experts")
    parser.add_argument("--mp", type=int, default=1, help="ranks that read one batch and work on parts of attention")
    parser.add_argument("--ep", type=int, help="ranks that the experts are spread over; default: all that are left")
    parser.add_argument("--esp", type=int, default=1, help="ranks that every expert is cut over")
    parser.add_argument("--fold", action="store_true", help="ep and esp on the ranks of dp and mp, not beside them")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and forward")
    parser.add_argument("--seq", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--accumulate", type=int, default=1, help="forwards per step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--autocast", action="store_true", help="compute in bfloat16")
    parser.add_argument("--ema", type=float, metavar="DECAY", help="average the weights over steps, for evaluation")
    parser.add_argument("--evaluate-every", type=int, metavar="STEPS", help="on text that is not trained on")
    parser.add_argument("--checkpoint", metavar="DIR")
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="from the newest whole checkpoint of DIR, if any")
    parser.add_argument("--check", action="store_true", help="compare with eager training on one rank")
    args = parser.parse_args(arguments)
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint DIR")
    return args


def start(args: argparse.Namespace) -> tuple[torch.device, DeviceMesh]:
    """Join the other ranks; a lone process becomes a world of one."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29571"}.items():
        os.environ.setdefault(name, value)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda = torch.cuda.device_count() >= here
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    if args.ep is None:
        args.ep = dist.get_world_size() // ((1 if args.fold else args.dp * args.mp) * args.esp)
    sizes = {"dp": args.dp, "mp": args.mp} | ({} if args.fold else {"ep": args.ep, "esp": args.esp})
    if math.prod(sizes.values()) != dist.get_world_size():
        given = " x ".join(f"--{name} {size}" for name, size in sizes.items())
        raise SystemExit(f"{given} is not the number of ranks, {dist.get_world_size()}")
    return device, init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


class Average:
    """An exponential moving average of the weights: of each rank's own parts, so that nothing is sent."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.mix = model, get_ema_multi_avg_fn(decay)
        self.values: list[Tensor] = []
        self.resume_from: Path | None = None  # a checkpoint of the average

    def update(self) -> None:
        """After a step: by then every parameter is where it lives."""
        weights = [p.detach() for p in self.model.parameters()]
        is_first = not self.values
        if is_first:
            self.values = [p.clone() for p in weights]
        if is_first and self.resume_from is not None:
            with self.in_place():
                checkpoint.load(self.resume_from, self.model)
        if not is_first or self.resume_from is not None:
            self.mix(self.values, weights, None)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the average as its weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for p, value in zip(self.model.parameters(), self.values, strict=True):
            before = p.detach().clone()
            p.copy_(value)
            value.copy_(before)


class Trainer:
    """A model with its optimizer: the same for the compiled and for the plain one."""

    def __init__(self, model: nn.Module, args: argparse.Namespace) -> None:
        self.model, self.args = model, args
        self.average = None if args.ema is None else Average(model, args.ema)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: min(1.0, (s + 1) / WARM_UP))

    def step(self, batches: list[Tensor], average_over: int, hold_back: bool) -> tuple[Tensor, Tensor]:
        """One step of the optimizer on several batches; (mean loss, norm of the gradient), both on the device.

        hold_back: gradients of all but the last batch wait for those of the last (the compiled model's `no_sync`).
        """
        self.optimizer.zero_grad()
        total = torch.zeros((), device=batches[0].device)
        for number, tokens in enumerate(batches):
            last = number == len(batches) - 1
            with self.model.no_sync() if hold_back and not last else contextlib.nullcontext():
                with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.args.autocast):
                    loss = self.model(input_ids=tokens, labels=tokens).loss
                (loss / average_over).backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        self.optimizer.step()
        self.schedule.step()
        if self.average is not None:
            self.average.update()
        return total / len(batches), full(norm)

    def averaged(self) -> contextlib.AbstractContextManager:
        """With the average of the weights in place, where there is one."""
        return contextlib.nullcontext() if self.average is None else self.average.in_place()

    @torch.no_grad()
    def evaluate(self, batches: list[Tensor]) -> Tensor:
        """The mean loss, on the device."""
        self.model.eval()
        with self.averaged(), torch.autocast(batches[0].device.type, torch.bfloat16, enabled=self.args.autocast):
            losses = [self.model(input_ids=tokens, labels=tokens).loss for tokens in batches]
        self.model.train()
        return torch.stack(losses).mean()


def full(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def resume(trainer: Trainer, args: argparse.Namespace) -> int:
    """The step to go on from; 0 if there is nothing to resume."""
    newest = checkpoint.latest(args.checkpoint) if args.resume else None
    if newest is None:
        return 0
    found = checkpoint.load(newest, trainer.model, trainer.optimizer)
    trainer.schedule.load_state_dict(found["extra"]["schedule"])
    if trainer.average is not None:
        trainer.average.resume_from = checkpoint.latest(newest / "ema")
    data = data_settings(args)
    if found["extra"]["data"] != data:
        raise SystemExit(f"the checkpoint was made with {found['extra']['data']}, not {data}")
    return found["step"]


def data_settings(args: argparse.Namespace) -> dict:
    """What decides which sequences a step has: as many of them may be read by more ranks, a few each."""
    readers = dist.get_world_size() // args.mp
    return {"seed": args.seed, "seq": args.seq, "accumulate": args.accumulate, "sequences": args.batch * readers}


def train(trainer: Trainer, first: int, batches: Batches, held_out: Batches, device: torch.device) -> list[float]:
    """Steps first..args.steps - 1; the losses, averaged over the ranks."""
    args, model = trainer.args, trainer.model
    reader, readers, leads = model.data_mesh.get_coordinate()[0], model.data_mesh.size(), dist.get_rank() == 0
    losses = []
    bar = tqdm(total=args.steps, initial=first, unit="step", disable=None if leads else True)  # None: off if no TTY
    for step in range(first, args.steps):
        begin = time.perf_counter()
        tokens = [batches(step * args.accumulate + i, reader).to(device) for i in range(args.accumulate)]
        loss, norm = trainer.step(tokens, args.accumulate, hold_back=True)
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
        if leads:
            rate = sum(t.numel() for t in tokens) * readers / (time.perf_counter() - begin)
            line = f"step {step + 1:4d}  loss {losses[-1]:.5f}  grad norm {norm.item():7.4f}  {rate:7.0f} tokens/s"
            bar.write(f"{line}  {describe(model.moe_stats())}")
        bar.update()
        if args.evaluate_every and (step + 1) % args.evaluate_every == 0:
            found = trainer.evaluate([held_out(number, reader).to(device) for number in range(2)])
            dist.all_reduce(found)
            if leads:
                bar.write(f"step {step + 1:4d}  held-out loss {found.item() / dist.get_world_size():.5f}")
        if args.checkpoint and (step + 1) % args.save_every == 0:
            extra = {"data": data_settings(args), "schedule": trainer.schedule.state_dict()}
            path = checkpoint.save(args.checkpoint, model, trainer.optimizer, step=step + 1, extra=extra, keep_last=3)
            if trainer.average is not None:
                with trainer.averaged():
                    checkpoint.save(path / "ema", model, step=step + 1)
            if leads:
                bar.write(f"saved {path}")
    bar.close()
    return losses


def describe(stats: dict) -> str:
    """The load of the busiest expert over the mean in every layer, and how many choices were dropped."""
    loads = " ".join(f"{layer.max_over_mean:.2f}" for layer in stats.values())
    return f"expert load max/mean {loads}  dropped {sum(layer.dropped or 0 for layer in stats.values())}"


def check(plain: Trainer, trainer: Trainer, first: int, losses: list[float], batches: Batches,
          device: torch.device) -> None:  # fmt: skip
    """Run the same steps eagerly on rank 0 and print both; the other ranks only help to gather parameters."""
    with trainer.averaged():
        ours = {name: full(param).clone() for name, param in trainer.model.named_parameters()}
    if dist.get_rank() == 0:
        args, readers = plain.args, batches.readers
        print(f"{'step':>4}  {'moefx':>9}  {'eager':>9}  difference")
        worst = 0.0
        for step, loss in enumerate(losses, first):
            numbers = range(step * args.accumulate, (step + 1) * args.accumulate)
            tokens = [batches(number, reader).to(device) for reader in range(readers) for number in numbers]
            theirs = plain.step(tokens, len(tokens), hold_back=False)[0].item()
            worst = max(worst, abs(loss - theirs))
            print(f"{step + 1:4d}  {loss:9.6f}  {theirs:9.6f}  {loss - theirs:+.1e}")
        with plain.averaged():
            named = plain.model.named_parameters()
            apart = {name: (ours[name] - param.detach()).abs().max().item() for name, param in named}
        name, what = max(apart, key=apart.get), "parameters" if plain.average is None else "averages"
        print(f"largest difference of the losses {worst:.1e}, of the {what} {apart[name]:.1e} ({name})")
    dist.barrier()


def main() -> None:
    args = parse()
    device, mesh = start(args)
    warnings.filterwarnings("ignore", message="While compiling, we found certain side effects")  # transformers' own
    torch.manual_seed(args.seed)  # the same model on all ranks
    model = build(args.model).to(device)
    plain = copy.deepcopy(model) if args.check and dist.get_rank() == 0 else model
    if dist.get_rank() == 0:
        size = sum(p.numel() for p in model.parameters()) / 1e6
        print(f"{args.model}, {size:.1f} million parameters, dp {args.dp} x mp {args.mp} x ep {args.ep} x "
              f"esp {args.esp} on {device.type}; the first step compiles", flush=True)  # fmt: skip

    compiled = moefx.compile(model, mesh, parallel=moefx.Parallel(args.ep, args.esp) if args.fold else moefx.Parallel())
    trainer = Trainer(compiled, args)
    first = resume(trainer, args)
    text, windows = read_text(), {"rows": args.batch, "length": args.seq, "readers": compiled.data_mesh.size()}
    trained = text[:-HELD_OUT] if args.evaluate_every else text
    batches = Batches(trained, **windows, seed=args.seed)
    held_out = Batches(text[-HELD_OUT:], **windows, seed=args.seed)
    reference = Trainer(plain, args) if plain is not model else trainer
    if reference is not trainer:
        resume(reference, args)
    losses = train(trainer, first, batches, held_out, device)
    if dist.get_rank() == 0 and losses:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")
    if args.check:
        check(reference, trainer, first, losses, batches, device)
    compiled.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
