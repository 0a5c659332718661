"""Every schedule of a transformer layer whose experts are cut over the ranks of a node, on an emulated cluster.

    python benchmarks/schedules.py            as root; all launches; writes results/schedules.md
    python benchmarks/schedules.py --only 0   launches by number; writes results/schedules.md and says so
    python benchmarks/schedules.py --only 1 --change '{"emulated": 0, "rates": ["800mbit"]}' --result name.md
                                              other fields of `Launch`, into another file, as on a machine of 8 cores

One decoder layer of Qwen3-MoE, attention included, forward and backward, fp32, one thread per rank; in the last launch
its experts are a GShard layer of static blocks. All ranks of a node read the same tokens: N_MP = N_ESP = ranks per node
(Parm's setting), experts are spread over nodes. Up to 2x2 ranks matmuls are real (twice as many ranks as cores) and
outputs and gradients are compared with the eager model; with more the experts' matmuls are emulated: each takes its
time at 25 GFLOP/s by the clock, without a processor, and gives zeros. "deepspeed" is DeepSpeed-MoE with experts cut
over the ranks of a node (deepspeed_tp.py says what it takes on gloo), where it is installed, matmuls are real and no
token is dropped; its gradients are averaged over nodes, too.

The schedules are forced, and so is the all-to-all of S3; rows are gathered behind every layer but with "s3 rows", which
de-duplicates as well. The planner chooses chunks and order of each, and the other all-to-alls, on a machine that was
calibrated (quickly) in the same cluster just before, at the first rate. "automatic" is the planner's choice of all, on
a machine calibrated at each rate; where that is a program that is here already, it is not built twice. All of a launch
are interleaved in the same processes (interleave.py), at every rate between nodes and for every number of tokens.
Ratios are taken round by round: median and quartiles. behind: what "automatic" loses on even rounds to the forced
schedule that was fastest on odd ones; floor: what that one loses to the fastest on even rounds, chance alone. Bytes are
counted by the kernel at the link of the first node, a step.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import deepspeed_tp
import torch
import torch.distributed as dist
from cluster import Cluster, cluster
from interleave import Spread, load, measure, wire_bytes
from layers import begin
from overlap import emulate
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeModel

import moefx
from moefx.costmodel.calibrate import calibrate
from moefx.costmodel.curves import GemmModel
from moefx.costmodel.machine import Machine
from moefx.errors import MoefxError

HERE = Path(__file__).parent
NAME = "schedules"  # of the cluster
TOLERANCE = 1e-5  # of the largest entry
AUTOMATIC, BASELINE, DEEPSPEED = "automatic", "baseline", "deepspeed"
FORCED: dict[str, dict[str, Any]] = {
    BASELINE: {"split": "baseline", "rows": False},
    "s1": {"split": "s1", "rows": False},
    "s2": {"split": "s2", "rows": False},
    "s2-tokens": {"split": "s2-tokens", "rows": False},
    "s3": {"split": "s3", "alltoall": "direct", "rows": False},
    "s3 dedup": {"split": "s3", "alltoall": "dedup", "rows": False},
    "s3 rows": {"split": "s3", "alltoall": "dedup", "rows": True},
}


@dataclass(frozen=True)
class Launch:
    """tokens: of a node. emulated: GFLOP/s of the experts' matmuls, which then take wall time alone; 0: they are real.
    """

    per_node: int
    rates: tuple[str, ...] = ("200mbit", "400mbit")
    tokens: tuple[int, ...] = (1024, 512, 2048)
    width: int = 512
    inner: int = 512
    k: int = 2
    capacity: bool = False
    nodes: int = 2
    emulated: float = 0.0

    @property
    def title(self) -> str:
        kind = "static blocks" if self.capacity else "dropless"
        how = ", experts' matmuls emulated" if self.emulated else ""
        return (f"{self.nodes} nodes of {self.per_node} ranks, {kind}, M={self.width}, H={self.inner}, E=8, "
                f"k={self.k}{how}")  # fmt: skip

    def model(self) -> nn.Module:
        """The same on all ranks."""
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            hidden_size=self.width, moe_intermediate_size=self.inner, num_experts=8, num_experts_per_tok=self.k,
            num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=8, head_dim=self.width // 8, vocab_size=8,
            norm_topk_prob=True,
        )  # fmt: skip
        config._experts_implementation = "grouped_mm"
        model = Qwen3MoeModel(config)
        if self.capacity:
            model.layers[0].mlp = GShard(self.width, self.inner, 8, self.k)
        return Layer(model)


class Layer(nn.Module):
    """[B, S, M] -> [B, S, M]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x, use_cache=False).last_hidden_state


class GShard(nn.Module):
    """A layer of static blocks (Lepikhin et al. 2020): every expert takes C = 2kT/E tokens, later ones are dropped."""

    def __init__(self, width: int, inner: int, experts: int, k: int) -> None:
        super().__init__()
        self.k = k
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, inner) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, width) * inner**-0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.reshape(-1, hidden.shape[-1])
        experts = self.up.shape[0]
        capacity = 2 * self.k * x.shape[0] // experts
        weights, chosen = self.gate(x).softmax(-1).topk(self.k)
        masks = nn.functional.one_hot(chosen, experts)  # [T, k, E]
        flat = masks.transpose(0, 1).reshape(-1, experts)
        place = ((flat.cumsum(0) - flat) * flat).sum(-1).view(self.k, -1).T  # [T, k]
        slots = nn.functional.one_hot(place.clamp(max=capacity), capacity + 1)[..., :capacity].to(x.dtype)
        combine = torch.einsum("tk,tke,tkc->tec", weights, masks.to(x.dtype), slots)
        blocks = torch.einsum("tec,tm->ecm", (combine > 0).to(x.dtype), x)
        out = torch.relu(torch.einsum("ecm,emh->ech", blocks, self.up))
        out = torch.einsum("ech,ehm->ecm", out, self.down)
        return torch.einsum("tec,ecm->tm", combine, out).view(hidden.shape)


# Six configurations each, two of static blocks: what is sent against what is computed, and how many rows.
LAUNCHES = (Launch(2), Launch(4, emulated=25.0), Launch(2, tokens=(1024,), capacity=True))


# -- on every rank -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contestant:
    """run(T): one forward and backward of T tokens from clean gradients; (output, gradient of the input)."""

    run: Callable[[int], tuple[Tensor, Tensor]]
    chosen: str = ""
    layer: Any = None


def on_rank(launch: Launch, names: list[str], rounds: int, out: Path) -> None:
    begin()
    machine = _machine(launch, launch.rates[0])
    if launch.emulated:
        emulate(1e9 * launch.emulated)
    refused: dict[str, str] = {}
    forced: dict[str, Contestant] = {}
    for name in names:
        if name == DEEPSPEED or (name == "s2" and not launch.capacity):
            continue  # without capacities s2 is s2-tokens
        try:
            forced[name] = _built(launch, machine, **FORCED[name])
        except MoefxError as error:  # on all ranks alike
            refused[name] = str(error)
            continue
        _say(f"{name}: {forced[name].chosen}")
        _compare(launch, name, forced[name])
    if DEEPSPEED in names and not launch.emulated and not launch.capacity:
        try:
            forced[DEEPSPEED] = _deepspeed(launch)
            _compare(launch, DEEPSPEED, forced[DEEPSPEED])
        except ImportError as error:
            refused[DEEPSPEED] = str(error)
    found = []
    for rate in launch.rates:
        if rate != launch.rates[0]:
            machine = _machine(launch, rate)
        automatic = _built(launch, machine)
        _say(f"{rate}: {AUTOMATIC}: {automatic.chosen}")
        _compare(launch, AUTOMATIC, automatic)
        twin = next((name for name, each in forced.items() if each.chosen == automatic.chosen), None)
        contestants = {**forced, **({AUTOMATIC: automatic} if twin is None else {})}
        for tokens in launch.tokens:
            steps = {name: lambda each=each, n=tokens: each.run(n) for name, each in contestants.items()}
            wire = {name: wire_bytes(step) for name, step in steps.items()}
            seconds = measure(steps, rounds)
            chosen = {name: each.chosen for name, each in contestants.items()}
            if twin is not None:
                seconds[AUTOMATIC], wire[AUTOMATIC], chosen[AUTOMATIC] = seconds[twin], wire[twin], f"that of {twin}"
            found.append({"rate": rate, "tokens": tokens, "seconds": seconds, "bytes": wire, "chosen": chosen,
                          "load": load()})  # fmt: skip
            if dist.get_rank() == 0:  # now: a launch takes an hour, and may be cut off
                out.write_text(json.dumps({"launch": asdict(launch), "found": found, "refused": refused}))
        automatic.layer.close()
    dist.barrier()
    os._exit(0)  # process groups, which need not end one by one


def _machine(launch: Launch, rate: str) -> Machine:
    """Of the cluster at this rate."""
    if dist.get_rank() == 0:
        replace(Cluster.load(NAME), rate=rate).limit()
    dist.barrier()
    machine = calibrate(quick=True, ranks_per_node=launch.per_node)
    return replace(machine, gemm={"float32": GemmModel(1e9 * launch.emulated)}) if launch.emulated else machine


def _built(launch: Launch, machine: Machine, **choices: Any) -> Contestant:
    mesh = init_device_mesh("cpu", (launch.nodes, launch.per_node), mesh_dim_names=("dp", "mp"))
    options = moefx.Options.named(machine=machine, ep=launch.nodes, esp=launch.per_node, ranks_per_node=launch.per_node,
                            verify=0, **choices)  # fmt: skip
    layer = moefx.compile(launch.model(), mesh, options)
    found = _of(launch, layer)
    found.run(launch.tokens[0])
    (program,) = moefx.explain(layer).programs
    (region,) = program.regions
    choice = {**region.choice.to_dict(), "scheduler": region.scheduler}
    del choice["split"]  # None where it is forced
    told = [*(how for _, how in program.schedules), *(f"{k} {v}" for k, v in choice.items()),
            *{how for _, how in program.rows if how == "rows stay cut"}]  # fmt: skip
    return replace(found, layer=layer, chosen=", ".join(filter(None, told)))


def _deepspeed(launch: Launch) -> Contestant:
    layer = launch.model()
    average = deepspeed_tp.cut(layer.model, launch.nodes, launch.per_node)
    return replace(_of(launch, layer, average), chosen=f"deepspeed {version('deepspeed')}")


def _of(launch: Launch, layer: nn.Module, after: Callable[[], object] = lambda: None) -> Contestant:
    seed = torch.Generator().manual_seed(10 + dist.get_rank() // launch.per_node)
    batches = {n: torch.randn(2, 1, n, launch.width, generator=seed) for n in launch.tokens}

    def run(tokens: int) -> tuple[Tensor, Tensor]:
        x, grad = batches[tokens]
        x = x.clone().requires_grad_()
        layer.zero_grad(set_to_none=True)
        out = layer(x)
        out.backward(grad)
        after()
        return out.detach(), x.grad

    return Contestant(run)


def _compare(launch: Launch, name: str, found: Contestant) -> None:
    """With the eager model, where matmuls are real."""
    if launch.emulated:
        return
    eager, tokens = _of(launch, launch.model()), launch.tokens[0]
    for what, mine, wanted in zip(("output", "gradient"), found.run(tokens), eager.run(tokens)):
        worst = float((mine - wanted).abs().max() / wanted.abs().max())
        assert worst <= TOLERANCE, f"{name}: its {what} is off by {worst:.1e}"


def _say(what: str) -> None:
    if dist.get_rank() == 0:
        print(what, flush=True)



# -- the report ----------------------------------------------------------------------------------------------------


def behind(seconds: Mapping[str, list[float]]) -> tuple[str, float, float]:
    """(the forced schedule that was fastest on odd rounds, what "automatic" loses to it on even ones, floor)."""
    shares = {name: [a / b for a, b in zip(seconds[name], seconds[BASELINE])] for name in seconds}
    odd, even = ({name: statistics.median(found[first::2]) for name, found in shares.items()} for first in (1, 0))
    forced = [name for name in seconds if name not in (AUTOMATIC, DEEPSPEED)]
    best = min(forced, key=odd.__getitem__)
    return best, even[AUTOMATIC] / even[best] - 1, even[best] / min(even[name] for name in forced) - 1


def gain(seconds: Mapping[str, list[float]], name: str) -> Spread:
    return Spread.of([b / a for a, b in zip(seconds[name], seconds[BASELINE])])


def section(of: dict) -> str:
    lines = [f"## {Launch(**of['launch']).title}", ""]
    lines += [f"- {name} is not here: {why}" for name, why in of["refused"].items()]
    for found in of["found"]:
        best, lost, floor = behind(found["seconds"])
        lines += ["", f"### T={found['tokens']}, {found['rate']} between nodes", "",
                  f"Load: {found['load']}. Fastest forced schedule: {best}; automatic is {lost:+.1%} behind it, "
                  f"floor {floor:.1%}.", "",
                  "| | ms a step | times as fast as baseline | MB between nodes | chosen |", "|---" * 5 + "|"]
        for name, times in found["seconds"].items():
            ms, ratio = Spread.of([1e3 * s for s in times]).text(0), gain(found["seconds"], name).text()
            wire = found["bytes"][name] / 1e6
            lines.append(f"| {name} | {ms} | {ratio} | {wire:.1f} | {found['chosen'][name]} |")
    return "\n".join([*lines, ""])


def report(launches: list[dict], rounds: int, failures: list[str]) -> str:
    lines = []
    for of in launches:
        gains = [gain(found["seconds"], AUTOMATIC).median for found in of["found"]]
        lines.append(f"- {Launch(**of['launch']).title}: automatic is {min(gains):.2f} to {max(gains):.2f} times as "
                     f"fast as baseline, median {statistics.median(gains):.2f}, in {len(gains)} configurations")
    lost = [behind(found["seconds"]) for of in launches for found in of["found"]]
    if lost:
        mean, floor = (statistics.mean(each[i] for each in lost) for i in (1, 2))
        lines.append(f"- automatic behind the fastest forced schedule: mean {mean:+.1%}, worst "
                     f"{max(each[1] for each in lost):+.1%}; floor: mean {floor:.1%}")
    head = ["# Schedules on an emulated cluster", "",
            f"Written by `{' '.join(['python benchmarks/schedules.py', *sys.argv[1:]])}`, "
            f"{datetime.date.today().isoformat()}: torch {torch.__version__}, {rounds} rounds; "
            f"{len(launches)} of {len(LAUNCHES)} launches.", "",
            __doc__.split("\n\n", 2)[2].strip(), "", *lines, ""]  # fmt: skip
    return "\n".join([*head, *map(section, launches), *(f"- {line}" for line in failures), ""])


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", type=int, nargs="*", default=range(len(LAUNCHES)), help="numbers of the launches")
    parser.add_argument("--names", nargs="*", default=[*FORCED, DEEPSPEED], help="contestants")
    parser.add_argument("--change", type=json.loads, default={}, help="fields of every launch, as JSON")
    parser.add_argument("--result", default="schedules.md", help="file in results/")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)  # given to the ranks: which launch, as JSON
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        launch = Launch(**_tuples(json.loads(arguments.rank_of)))
        on_rank(launch, arguments.names, arguments.rounds, Path(arguments.out))
        return
    launches, failures = [], []
    with tempfile.TemporaryDirectory() as folder:
        for launch in (replace(LAUNCHES[number], **_tuples(arguments.change)) for number in arguments.only):
            out = Path(folder) / "found.json"
            out.unlink(missing_ok=True)
            given = ["--rank-of", json.dumps(asdict(launch)), "--out", str(out)]
            with cluster(NAME, launch.nodes, launch.rates[0]) as nodes:
                status = nodes.run([sys.executable, __file__, *sys.argv[1:], *given], launch.per_node, timeout_s=3600)
            if status:
                failures.append(f"{launch.title}: not all was measured, the ranks ended with status {status}")
            if out.is_file():
                launches.append(json.loads(out.read_text()))
            (HERE / "results" / arguments.result).write_text(report(launches, arguments.rounds, failures))
    print(report(launches, arguments.rounds, failures))


if __name__ == "__main__":
    main()
