"""Chunks of whole blocks beside chunks of mixtures: whole models on an emulated cluster of two nodes of one rank.

    python benchmarks/whole_blocks.py               as root; what results/whole_blocks.json lacks, then the page
    python benchmarks/whole_blocks.py --only 0 3    these configurations, again
    python benchmarks/whole_blocks.py --page        the page, of what is there
    python benchmarks/whole_blocks.py --quick       one configuration, few rounds; prints
    python benchmarks/whole_blocks.py --timeline 5  a step of blocks in 2 parts of this configuration, predicted and
                                                    measured; writes results/whole_blocks_timeline.json

Forward and backward of Mixtral's and Qwen3-MoE's kind with the attention and norms of these, experts over ep=2, fp32,
one thread a rank, gloo. All programs of a configuration are interleaved in the same processes (interleave.py), with
whatever else the machine does: only ratios count. Separate runs differ.

communication: the all-to-alls of the step alone, one after the other. share: that over the blocking step (one chunk,
"sequential"). The programs: "mixtures n": chunks=n; "blocks n": with whole_blocks, too, both ordered by "heuristic";
"planned": whole_blocks="auto" and a machine that was calibrated in the same cluster just before; what it took stands in
brackets: parts of blocks, or else chunks by layer. "by hand n": eager PyTorch with eager_ep.py's layers and one
all-reduce of dense gradients, as a whole or as two micro-batches on two threads that take turns (two_threads.py).
Ratios are to the blocking step, round by round: median and quartiles. gain: of the best mixtures over the best blocks,
by medians. behind: of the planned over the best of moefx's programs, planned among them, by medians. floor: the larger
of communication and of the blocking step less communication, over the blocking step. to it: the best program over the
floor. A program may be below it: exchanges one right after the other do not fill the link. wire: all bytes that a node
sends in a blocking step, gradients too, over the link's rate, over the blocking step. memory: measured peaks of a step,
blocks over mixtures, n=2 and n=4; parameters and inputs are not counted. "same": loss and all gradients agree with
those of the blocking step to 1e-5.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster import cluster
from interleave import Spread, load, measure, ratios, wire_bytes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from two_threads import ByHand

import moefx
from moefx.costmodel.calibrate import calibrate
from moefx.report.traces import Trace, duration

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from tests.support.peaks import Peak  # noqa: E402

BLOCKING = "blocking"
PROGRAMS: dict[str, dict[str, Any]] = {
    BLOCKING: {"chunks": 1, "scheduler": "sequential"},
    "mixtures 2": {"chunks": 2, "scheduler": "heuristic"},
    "mixtures 4": {"chunks": 4, "scheduler": "heuristic"},
    "blocks 2": {"chunks": 2, "scheduler": "heuristic", "whole_blocks": True},
    "blocks 4": {"chunks": 4, "scheduler": "heuristic", "whole_blocks": True},
}
PLANNED = "planned"
BY_HAND = {"by hand 1": 1, "by hand 2": 2}
RESULTS = HERE / "results"
FOUND, PAGE, TIMELINE = (RESULTS / f"whole_blocks{name}" for name in (".json", ".md", "_timeline.json"))


@dataclass(frozen=True)
class Configuration:
    """rate: of the link between the nodes. samples, length: of a rank's batch. inner: of an expert."""

    kind: str
    layers: int
    rate: str
    samples: int = 4
    length: int = 256
    width: int = 256
    inner: int = 256

    @property
    def title(self) -> str:
        return (f"{self.kind}, {self.layers} layers, {self.samples} x {self.length} tokens, {self.width} wide, experts "
                f"{self.inner}, {self.rate}")  # fmt: skip

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        shape = {"vocab_size": 256, "hidden_size": self.width, "num_hidden_layers": self.layers, "use_cache": False,
                 "num_attention_heads": 8, "num_key_value_heads": 8, "num_experts_per_tok": 2,
                 "experts_implementation": "grouped_mm"}  # fmt: skip
        if self.kind == "mixtral":
            return MixtralForCausalLM(MixtralConfig(**shape, intermediate_size=self.inner, num_local_experts=8))
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, head_dim=self.width // 8, num_experts=8,
                                                  norm_topk_prob=True, moe_intermediate_size=self.inner))  # fmt: skip


CONFIGURATIONS = [Configuration(kind, layers, rate) for kind in ("mixtral", "qwen3") for layers in (2, 4)
                  for rate in ("200mbit", "400mbit", "800mbit")]  # fmt: skip


def step(model: moefx.CompiledModule, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The loss and this rank's gradients."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    grads = {name: param.grad.to_local() for name, param in model.named_parameters() if param.grad is not None}
    return {"loss": loss.detach(), **grads}


def exchanges(model: moefx.CompiledModule, batch: dict[str, torch.Tensor]) -> list[int]:
    """Bytes that every all-to-all of a step sends, of the rank that sends most."""
    model._session.trace = []
    step(model, batch)
    found = [each.num_bytes for each in model._session.trace if each.kind == "all_to_all"]
    model._session.trace = None
    most = torch.tensor(found)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.tolist()


def communicate(sizes: list[int]) -> None:
    for nbytes in sizes:
        sent = torch.zeros(max(1, nbytes // 4) * 2)
        dist.all_to_all_single(torch.empty_like(sent), sent)


def begin(chosen: Configuration) -> tuple[DeviceMesh, dict[str, torch.Tensor]]:
    """The mesh and this rank's batch."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tokens = torch.randint(0, 256, (chosen.samples, chosen.length),
                           generator=torch.Generator().manual_seed(dist.get_rank()))  # fmt: skip
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    return mesh, {"input_ids": tokens, "labels": tokens}


def taken(model: moefx.CompiledModule) -> str:
    """What the planner chose, and what it says of whole blocks."""
    (program,) = moefx.explain(model).programs
    (note,) = [note for note in program.notes if "as planned" in note] or ["nothing to choose"]
    return note


def peak(model: moefx.CompiledModule, batch: dict[str, torch.Tensor]) -> int:
    with Peak([*model.parameters(), *model.buffers(), *batch.values()]) as found:
        step(model, batch)
    return found.peak


def alike(mine: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return mine.keys() == wanted.keys() and all(
        torch.allclose(mine[name], wanted[name], rtol=1e-5, atol=1e-5) for name in wanted)  # fmt: skip


def run(number: int, rounds: int, out: Path) -> None:
    chosen = CONFIGURATIONS[number]
    mesh, batch = begin(chosen)
    machine = calibrate(quick=True, ranks_per_node=1)
    programs = PROGRAMS | {PLANNED: {"machine": machine, "whole_blocks": "auto"}}
    models = {}
    for name, options in programs.items():
        models[name] = moefx.compile(chosen.model(), mesh, alltoall="direct", **options)
        models[name].prepare(**batch)
    by_hand = {name: ByHand(chosen.model(), 2, parts) for name, parts in BY_HAND.items()}
    steps = {name: partial(step, model, batch) for name, model in models.items()}
    steps |= {name: partial(model.step, batch) for name, model in by_hand.items()}
    results = {name: steps[name]() for name in steps}
    found = {name: results[name] for name in models}
    found |= {name: {"loss": results[name], **model.gradients()} for name, model in by_hand.items()}
    same = {name: alike(each, found[BLOCKING]) for name, each in found.items()}
    del results, found
    sizes = exchanges(models[BLOCKING], batch)
    seconds = measure({**steps, "communication": partial(communicate, sizes)}, rounds, warm_up=1)
    sent = wire_bytes(steps[BLOCKING])
    peaks = {name: peak(models[name], batch) for name in PROGRAMS}
    if dist.get_rank() == 0:
        known = {"seconds": seconds, "same": same, "peaks": peaks, "bytes": sent, "taken": taken(models[PLANNED]),
                 "load": load(), "rounds": rounds, "torch": torch.__version__,
                 "date": str(datetime.date.today())}  # fmt: skip
        out.write_text(json.dumps(known))
    dist.barrier()
    os._exit(0)  # process groups, which need not end one by one


def step_seen(number: int, out: Path) -> None:
    """Of some steps the one that took the median time, as a trace."""
    chosen = CONFIGURATIONS[number]
    mesh, batch = begin(chosen)
    options = PROGRAMS["blocks 2"] | {"machine": calibrate(ranks_per_node=1)}
    model = moefx.compile(chosen.model(), mesh, alltoall="direct", **options)
    for _ in range(3):
        step(model, batch)
    with moefx.profile(model) as profile:
        for _ in range(9):
            step(model, batch)
    trace = profile.gather()
    if dist.get_rank() == 0:
        took = {number: duration([span for span in trace.rank(0).spans if span.step == number])
                for number in {span.step for span in trace.rank(0).spans}}  # fmt: skip
        middle = sorted(took, key=took.__getitem__)[len(took) // 2]
        kept = [replace(process, spans=tuple(span for span in process.spans if span.step == middle))
                for process in trace.processes if process.rank in (None, 0)]  # fmt: skip
        Trace(tuple(kept), {**trace.about, "title": f"{chosen.title}, blocks in 2 parts"}).save(out)
    dist.barrier()
    os._exit(0)


# -- the page ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """Medians over the blocking step: of the best of each kind of program, and of the planned one."""

    to: dict[str, Spread]

    @classmethod
    def of(cls, seconds: dict[str, list[float]]) -> Compared:
        return cls({name: ratios(seconds, name, BLOCKING) for name in seconds})

    def best(self, kind: str) -> float:
        return min(self.to[name].median for name in PROGRAMS if name.startswith(kind))

    @property
    def planned(self) -> float:
        return self.to[PLANNED].median

    @property
    def fastest(self) -> float:
        return min(self.best("mixtures"), self.best("blocks"), self.planned)

    @property
    def floor(self) -> float:
        share = self.to["communication"].median
        return max(share, 1 - share)


def summary(found: list[Compared]) -> str:
    gains = [each.best("mixtures") / each.best("blocks") for each in found]
    planned = [each.best("mixtures") / each.planned for each in found]
    behind = [each.planned / each.fastest for each in found]
    near = sum(each.fastest <= 1.1 * each.floor for each in found)
    return (f"On average the best blocks are {statistics.mean(gains):.2f} times as fast as the best mixtures, the "
            f"planned program is {statistics.mean(planned):.2f} times as fast as these. The planner is "
            f"{statistics.median(behind) - 1:.0%} behind in the median, {max(behind) - 1:.0%} at most. {near} of "
            f"{len(found)} are within 1.10 of the floor.")  # fmt: skip


def row(chosen: Configuration, found: dict[str, Any]) -> str:
    seconds, peaks = found["seconds"], found["peaks"]
    compared = Compared.of(seconds)
    to, best = compared.to, {kind: compared.best(kind) for kind in ("mixtures", "blocks")}
    share, planned, floor, fastest = to["communication"].median, compared.planned, compared.floor, compared.fastest
    memory = [f"{peaks[f'blocks {n}'] / peaks[f'mixtures {n}']:.2f}" for n in (2, 4)]
    cells = [chosen.title, Spread.of([1e3 * s for s in seconds[BLOCKING]]).text(0), f"{share:.2f}",
             *(to[name].text(2) for name in PROGRAMS if name != BLOCKING),
             f"{to[PLANNED].text(2)} [{brief(found['taken'])}]",
             *(to[name].text(2) for name in BY_HAND), f"{best['mixtures'] / best['blocks']:.2f}",
             f"{planned / fastest:.2f}", f"{floor:.2f}", f"{fastest / floor:.2f}",
             f"{wire_s(chosen, found['bytes']) / statistics.median(seconds[BLOCKING]):.2f}", " ".join(memory),
             "yes" if all(found["same"].values()) else "no"]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def wire_s(chosen: Configuration, sent: int) -> float:
    return 8 * sent / (1e6 * int(chosen.rate.removesuffix("mbit")))


def brief(note: str) -> str:
    return note.rpartition("Taken: ")[2] if "Taken: " in note else "not tried"


def page(found: dict[str, dict[str, Any]]) -> str:
    """Of all configurations that were measured, and how they compare."""
    known = [(each, found[each.title]) for each in CONFIGURATIONS if each.title in found]
    columns = ["model", "blocking, ms", "share", *(name for name in PROGRAMS if name != BLOCKING), PLANNED, *BY_HAND,
               "gain", "behind", "floor", "to it", "wire", "memory", "same"]  # fmt: skip
    measured = [f"- {each.title}: {one['date']}, torch {one['torch']}, {one['rounds']} rounds, load {one['load']}"
                for each, one in known]  # fmt: skip
    return "\n".join([
        "# Chunks of whole blocks", "", f"Written by `python benchmarks/whole_blocks.py`. Measured are {len(known)} of "
        f"{len(CONFIGURATIONS)} configurations.", "", __doc__.split("\n\n", 2)[2].strip(), "",
        f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *(row(*each) for each in known), "",
        summary([Compared.of(one["seconds"]) for _, one in known]), "",
        "What was measured when, beside what else the machine did:", "", *measured, "",
        "What the planner said:", "", *(f"- {each.title}: {one['taken']}" for each, one in known), ""])  # fmt: skip


# -- one configuration after the other ---------------------------------------------------------------------------------


def in_cluster(chosen: Configuration, *arguments: str) -> str:
    """What rank 0 writes."""
    with tempfile.TemporaryDirectory() as folder, cluster("blocks", 2, chosen.rate) as nodes:
        out = Path(folder, "found")
        command = [sys.executable, os.path.abspath(__file__), "--in-cluster", *arguments, str(out)]
        if nodes.run(command, 1, timeout_s=1500):
            raise SystemExit(f"{chosen.title} failed")
        return out.read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--only", type=int, nargs="*", help="configurations by number")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--timeline", type=int, help="configuration by number")
    parser.add_argument("--in-cluster", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_cluster:
        number, rounds, out = args.in_cluster
        (run if int(rounds) else lambda number, _, out: step_seen(number, out))(int(number), int(rounds), Path(out))
        return
    if args.timeline is not None:
        TIMELINE.write_text(in_cluster(CONFIGURATIONS[args.timeline], str(args.timeline), "0") + "\n")
        return
    if args.quick:
        print(row(CONFIGURATIONS[0], json.loads(in_cluster(CONFIGURATIONS[0], "0", "3"))))
        return
    found = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    numbers = [] if args.page else range(len(CONFIGURATIONS)) if args.only is None else args.only
    for number in numbers:
        chosen = CONFIGURATIONS[number]
        if args.only is None and chosen.title in found:
            continue
        found[chosen.title] = json.loads(in_cluster(chosen, str(number), str(args.rounds)))
        FOUND.write_text(json.dumps(found, indent=1) + "\n")
        print(row(chosen, found[chosen.title]), flush=True)
    PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
