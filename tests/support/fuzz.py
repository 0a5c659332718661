"""Random MoE layers in random settings, against the eager layer on one device: outputs and every gradient.

A sample is compiled once; every rank is a thread that runs the emitted program on torch's threaded process group, on
batches of its own. One sample has several steps (batch sizes, routing), each of which is a case.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx import rooms
from moefx.errors import CollectiveError, DivergenceError, MoefxError, VerifyError
from moefx.options import STRATEGIES
from tests.support import handmade, parity
from tests.support.handmade import Capacity, LanguageModel, Loop, OneLayer, capacities, loops, make_moe
from tests.support.layered import layered
from tests.support.models import Batch, Case
from tests.support.parity import (
    NEAR_ZERO,
    TOLERANCE,
    Expected,
    cast,
    compare,
    gradients,
    one_token,
    outputs_of,
    reference_step,
    routing,
    skew,
)
from tests.support.scenarios import Layout, reads
from tests.support.sharing import run_sharing

# Unit roundoff of bf16, and by how much the compiled layer's rounding may exceed that of eager in bf16: both round the
# same number of sums, in another order, so that errors are of one size but not equal. A tensor that eager happens to
# hit better than in its other steps gets the error of those, and at least that of one number.
EPS, FACTOR = 2.0**-8, 4.0
DTYPES = {"bf16": torch.bfloat16, "fp64": torch.float64}
TOLERANCES = {"fp32": 1e-5, "fp64": 1e-10}
NOISE = 10  # more than that, in units of what is allowed, is not rounding


class NoBatch(Exception):
    """Every batch that was drawn has a token that is routed by rounding."""


@dataclass(frozen=True)
class Step:
    """One case: the (rows, length) of each batch, those of first ranks first, and what its tokens are."""

    sizes: tuple[tuple[int, int], ...]
    seed: int = 0
    same: bool = False  # one token everywhere: its experts get all, the others nothing


@dataclass(frozen=True)
class Sample:
    """A layer and the setting in which it is compiled. The first value of every field is the simplest."""

    style: Loop | Capacity
    axes: tuple[tuple[str, int], ...] = (("ep", 2),)
    steps: tuple[Step, ...] = (Step(((1, 2),)),)
    dtype: str = "fp32"  # fp32 | autocast | bf16 | fp64 (never drawn: what is wrong in fp32 is judged again in it)
    width: int = 16
    inner: int = 24
    skewed: bool = False  # the router's bias sends everything to the first experts
    chunks: int = 1
    alltoall: str = "direct"
    ranks_per_node: int | None = None
    scheduler: str | None = None
    split: str | None = None
    rows: bool | None = None
    ep: int | None = None
    esp: int | None = None
    keep: str = "eager"
    placement: str | None = None
    r: int | None = None
    dynamic: bool = True
    shard_dense: bool = False
    layers: int = 1  # three are compiled once
    whole_blocks: bool = False  # chunks go on after the layer
    attention: bool = False  # two layers of experts with attention before each, and a dense one between them

    @property
    def world(self) -> int:
        return math.prod(size for _, size in self.axes)

    @property
    def layout(self) -> Layout:
        """Sizes and names of the mesh."""
        return tuple(size for _, size in self.axes), tuple(name for name, _ in self.axes)

    @property
    def readers(self) -> int:
        """How many batches the ranks read."""
        return 1 + reads(self.world - 1, self.layout)

    @property
    def options(self) -> dict[str, Any]:
        names = ("chunks", "alltoall", "ranks_per_node", "scheduler", "split", "rows", "ep", "esp", "keep",
                 "placement", "r", "dynamic", "shard_dense", "whole_blocks")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def build(self) -> nn.Module:
        first = list(range(min(self.style.top_k, self.style.num_experts)))
        edit = partial(skew, experts=first) if self.skewed else None
        with mock.patch.multiple(handmade, D=self.width, INNER=self.inner):
            make = partial(OneLayer, self.style)
            if self.attention:
                make = partial(LanguageModel, self.style)
            elif self.layers > 1:
                make = partial(layered, partial(make_moe, self.style), self.layers)
            model = Case("fuzz", make, edit=edit).build()
        return model.to(DTYPES.get(self.dtype, torch.float32))


# Drawing


def samples() -> st.SearchStrategy[Sample]:
    styles = st.one_of(loops(), loops(), loops().map(_other), capacities())
    return st.tuples(styles, st.sampled_from(MESHES)).flatmap(lambda both: _sample(*both))


Axes = tuple[tuple[str, int], ...]
STEPS = 4  # of one program
MESHES = ((("ep", 2),), (("ep", 4),), (("dp", 2), ("ep", 2)), (("ep", 2), ("dp", 3)), (("dp", 2),),
          (("ep", 2), ("esp", 2)), (("esp", 2),), (("dp", 2), ("esp", 2)), (("mp", 2),),
          (("mp", 2), ("ep", 2)), (("dp", 2), ("mp", 2)), (("ep", 2), ("mp", 2)), (("esp", 2), ("tp", 2)))  # fmt: skip


def _other(style: Loop) -> Loop:
    """Habits that only some loops can have."""
    kind = (style.num_experts + 3 * style.top_k + style.bias + 2 * style.gated) % 5
    if kind == 0:
        return replace(style, gather="stack")
    if kind == 1:
        return replace(style, gather="assign", top_k=1, renormalise=False)
    if kind == 2:
        return replace(style, twice=True)
    if kind == 3:
        return replace(style, counting=True, correction=True)
    return replace(style, dropout=0.0, clamp=0.5, activation="relu")


def _sample(style: Loop | Capacity, axes: Axes) -> st.SearchStrategy[Sample]:
    world = math.prod(size for _, size in axes)
    folds = [(None, None)]
    if {name for name, _ in axes} <= {"dp", "mp"}:
        folds += [(ep, esp) for ep in (1, 2, 4) for esp in (1, 2) if world % (ep * esp) == 0 and ep * esp > 1]
    return st.tuples(st.sampled_from(["fp32", "fp32", "autocast", "bf16"]), st.sampled_from(folds)).flatmap(
        lambda both: _setting(style, axes, world, both[0], *both[1]))  # fmt: skip


def _setting(style: Loop | Capacity, axes: Axes, world: int, dtype: str, ep: int | None,
             esp: int | None) -> st.SearchStrategy:  # fmt: skip
    few = dtype != "fp32"  # of many tokens there is always one that rounding routes otherwise
    sizes = st.tuples(st.integers(1, 1 if few else 3), st.integers(1, 4 if few else 9))
    readers = Sample(style, axes).readers
    by_name = ["s1", "s2-tokens"] if isinstance(style, Loop) else ["s2"]  # by "s1" blocks drop other tokens
    has_parts = esp == 2 or "esp" in dict(axes)
    schedules = ([None] if readers == world else [None, None, *by_name, "baseline"]) + ["s3"] * (1 + has_parts)
    lists = st.lists(sizes, min_size=readers, max_size=readers)
    if isinstance(style, Capacity):  # of one size everywhere: a program may be for one capacity alone
        lists = st.just([(2, 4 if few else 8)])
    step = st.builds(Step, lists.map(tuple), st.integers(0, 999), st.booleans())
    placements = [None, "balanced", "exact", "calibrated"]
    made = st.builds(
        Sample,
        style=st.just(style),
        axes=st.just(axes),
        steps=st.lists(step, min_size=STEPS, max_size=STEPS).map(tuple),
        dtype=st.just(dtype),
        width=st.sampled_from([16, 4, 10]),
        inner=st.sampled_from([24, 3, 16]),
        skewed=st.booleans() if isinstance(style, Loop) else st.just(False),
        chunks=st.integers(1, 4 if isinstance(style, Loop) else 2),
        alltoall=st.sampled_from(["direct", "1dh", "2dh", "pipe", "dedup"]),
        ranks_per_node=st.sampled_from([None, 1, 2]),
        scheduler=st.sampled_from([None, "optsche", "sequential", "heuristic"]),
        split=st.sampled_from(schedules),
        rows=st.sampled_from([None] if readers == world else [None, True]),
        ep=st.just(ep),
        esp=st.just(esp),
        keep=st.sampled_from([each for each in STRATEGIES | rooms.strategies() if each != "auto"]),
        placement=st.sampled_from(placements[:1] if has_parts or isinstance(style, Capacity) else placements),
        r=st.sampled_from([None, None, 0, 1]),
        dynamic=st.sampled_from([True, True, True, False]),
        shard_dense=st.sampled_from([False, readers == world]),  # not with `mp`
        layers=st.sampled_from([1, 1, 1, 3]),
        whole_blocks=st.booleans(),
        attention=st.booleans(),
    )
    for change in (_in_parts, _castable, _one_size, _keepable, _on_nodes, _placeable, _gatherable):
        made = made.map(change)
    return made


def _in_parts(sample: Sample) -> Sample:
    """Blocks of capacities are not cut, and one chunk is the whole. Attention is for these blocks; rounding in it, as
    bf16 has, routes otherwise."""
    is_cut = sample.whole_blocks and isinstance(sample.style, Loop) and sample.chunks > 1
    return replace(sample, whole_blocks=is_cut, attention=sample.attention and is_cut and sample.dtype == "fp32")


def _gatherable(sample: Sample) -> Sample:
    """Ranks gather the weights of all experts where each has as many; in Parm's baseline none of them."""
    ep = sample.ep or dict(sample.axes).get("ep", 1)
    is_even = sample.placement is None and sample.style.num_experts % ep == 0
    return replace(sample, r=None) if sample.split == "baseline" or not (sample.r or is_even) else sample


def _placeable(sample: Sample) -> Sample:
    """Rows that go to several ranks know no copies."""
    is_gathered = sample.alltoall == "dedup" or sample.split in ("baseline", "s3")
    return replace(sample, placement=None) if is_gathered else sample


def with_more_steps(sample: Sample, count: int) -> Sample:
    """The sample with `count` steps: what was drawn, then batches of the same kind."""
    draw, (rows, length) = random.Random(repr(sample)), (3, 9) if sample.dtype == "fp32" else (1, 4)
    steps = list(sample.steps[:count])
    while len(steps) < count:
        sizes = tuple((draw.randint(1, rows), draw.randint(1, length)) for _ in range(sample.readers))
        if isinstance(sample.style, Capacity) or not sample.dynamic:
            sizes = sample.steps[0].sizes
        steps.append(Step(sizes, draw.randint(0, 9999), draw.random() < 0.25))
    return replace(sample, steps=tuple(steps))


def _castable(sample: Sample) -> Sample:
    """Under autocast `index_add_` refuses the two dtypes that it is given."""
    if sample.dtype == "autocast" and isinstance(sample.style, Loop):
        return replace(sample, style=replace(sample.style, scatter="setitem"))
    return sample


def _keepable(sample: Sample) -> Sample:
    """The baseline leaves no layer here that is cut over `mp`."""
    return replace(sample, rows=None) if sample.split == "baseline" else sample


def _on_nodes(sample: Sample) -> Sample:
    """On one node nothing is de-duplicated."""
    if sample.alltoall != "dedup" or sample.ranks_per_node is not None:
        return sample
    return replace(sample, ranks_per_node=1 if sample.world == 2 else 2)


def _one_size(sample: Sample) -> Sample:
    """Programs for one size each take only batches of one size."""
    if sample.dynamic:
        return sample
    sizes = sample.steps[0].sizes[:1]
    return replace(sample, steps=tuple(replace(step, sizes=sizes) for step in sample.steps))


# Running


@dataclass
class Verdict:
    """kind: void (eager itself cannot run it) | equal | rounding (beyond what fp32 is allowed, though by little, and
    equal in fp64) | refused | wrong (another number) | broken (any other failure).

    error: the class of the error. cases: the steps of a sample that ran; one, if it did not. worst: the largest error
    in units of what is allowed.
    """

    kind: str
    text: str = ""
    error: str = ""
    cases: int = 1
    worst: float = 0.0

    @property
    def ok(self) -> bool:
        return self.kind in ("void", "equal", "rounding", "refused")

    def like(self, other: Verdict) -> bool:
        return (self.kind, self.error) == (other.kind, other.error)


def judge(sample: Sample, *, verify: int = 1) -> Verdict:
    """Compile and run the sample, and compare every step."""
    found = _judge_as_it_is(sample, verify)
    if found.kind == "wrong" and sample.dtype == "fp32" and (found.worst <= NOISE or _is_of_zeros(sample, verify)):
        again = _judge_as_it_is(replace(sample, dtype="fp64"), verify)
        return replace(found, kind="rounding") if again.kind == "equal" else found
    return found


def _is_of_zeros(sample: Sample, verify: int) -> bool:
    """Whether only tensors are off of which rounding is all that there is, as the gradient of the router is where the
    weight of the only choice is divided by itself."""
    with mock.patch.object(parity, "NEAR_ZERO", 10 * NEAR_ZERO):
        return _judge_as_it_is(sample, verify).worst <= NOISE


def _judge_as_it_is(sample: Sample, verify: int) -> Verdict:
    model = sample.build()
    try:
        steps = [_expected(sample, model, step) for step in sample.steps]
    except (RuntimeError, NoBatch) as error:
        return Verdict("void", str(error), type(error).__name__)
    copies = [copy.deepcopy(model) for _ in range(sample.world)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = run_sharing(sample.world, _on_rank, sample, copies, steps, verify)
    except Exception as error:  # of a rank alone; the others were woken up
        return Verdict("broken", str(error), type(error).__name__)
    failed = [each for each in found if isinstance(each, Exception)]
    if failed:
        return Verdict("refused" if _is_refusal(failed[0]) else "broken", str(failed[0]), type(failed[0]).__name__)
    texts = [text for text, _, _ in found if text]
    cases, worst = found[0][1], max(worst for _, _, worst in found)
    return Verdict("wrong" if texts else "equal", "\n".join(texts), cases=cases, worst=worst)


def _is_refusal(error: Exception) -> bool:
    """Batches that no single program fits are the user's; any other divergence of equal ranks is not."""
    if isinstance(error, DivergenceError):
        return "no single program fits" in error.what
    return isinstance(error, MoefxError) and not isinstance(error, (VerifyError, CollectiveError))


def _on_rank(rank: int, world: int, sample: Sample, models: list[nn.Module], steps: list, verify: int) -> Any:
    """(what is wrong, the steps that ran, the worst error) of this rank; or the exception that every rank gets."""
    sizes, names = sample.layout
    mesh, mine = init_device_mesh("cpu", sizes, mesh_dim_names=names), reads(rank, sample.layout)
    done: list[tuple[int, Wanted, dict[str, Tensor | None]]] = []
    try:
        options = moefx.Options.named(verify=verify, timeout_s=120, **sample.options)
        with _precision(sample.dtype):
            compiled = moefx.compile(models[rank], mesh, options, example_inputs=steps[0].batches[mine])
    except MoefxError as error:
        return error
    for number, step in enumerate(steps):
        with _precision(sample.dtype):
            alone = _alone(compiled, step.batches[mine], world)
        if alone:
            continue
        done.append((number, step, _run(compiled, step.batches[mine], sample.dtype)))
    compiled.close()
    usual = _usual_rounding([step.rounding(mine, actual) for _, step, actual in done])
    texts, worst = [], 0.0
    for number, step, actual in done:
        text, error = step.compare(mine, actual, usual)
        texts += [f"step {number}, rank {rank}: {text}"] if text else []
        worst = max(worst, error)
    return "\n".join(texts), len(done), worst


def _usual_rounding(steps: list[dict[str, float]]) -> dict[str, float]:
    """The root of the mean square of eager's rounding error, by tensor."""
    squares: dict[str, list[float]] = {}
    for errors in steps:
        for name, error in errors.items():
            squares.setdefault(name, []).append(error * error)
    return {name: math.sqrt(sum(each) / len(each)) for name, each in squares.items()}


def _alone(compiled: nn.Module, batch: Batch, world: int) -> bool:
    """Whether this batch needs another program on some ranks than on others. That is an error of the user's, which only
    real ranks find out by themselves."""
    found, variant = [0] * world, compiled._whole.find(**batch)
    dist.all_gather_object(found, variant and variant.program.digest)
    return len(set(found)) > 1


def _run(compiled: nn.Module, batch: Batch, dtype: str) -> dict[str, Tensor | None]:
    compiled.zero_grad()
    with _precision(dtype):
        out = compiled(**batch)
    out.loss.backward()
    return {**outputs_of(out), **gradients(compiled)}


def _precision(dtype: str) -> contextlib.AbstractContextManager:
    return cast(torch.bfloat16 if dtype == "autocast" else None)


# Comparing


@dataclass
class Wanted:
    """What one step must give. rounded: in bf16, what eager gives in that precision; exact: what it gives in fp32, or
    fp64. tolerance: of what is not rounded."""

    batches: list[Batch]
    exact: Expected
    rounded: Expected | None = None
    tolerance: float = TOLERANCE

    def rounding(self, rank: int, actual: dict[str, Tensor | None]) -> dict[str, float]:
        """Eager's rounding error, by tensor; in fp32 nothing."""
        if self.rounded is None:
            return {}
        exact, rounded = (_without_buffers(each.of(rank)) for each in (self.exact, self.rounded))
        return {name: _norm(rounded[name] - want) for name, want in exact.items() if want is not None}

    def compare(self, rank: int, actual: dict[str, Tensor | None], usual: dict[str, float]) -> tuple[str, float]:
        """(what is wrong or nothing, the worst error in units of what is allowed). usual: eager's rounding errors."""
        exact = _without_buffers(self.exact.of(rank))
        if self.rounded is None:
            report = compare(actual, exact, self.tolerance)
            text = "; ".join(f"{name}: {what}" for name, what in report.wrong.items())
            return text, max(max(errors) for errors in report.errors.values()) / self.tolerance
        return _compare_rounded(actual, exact, self.rounding(rank, actual), usual)


def _without_buffers(tensors: dict) -> dict:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("buffer.")}


def _compare_rounded(actual: dict, exact: dict, own: dict[str, float], usual: dict[str, float]) -> tuple[str, float]:
    if actual.keys() != exact.keys():
        return f"names differ: {sorted(actual.keys() ^ exact.keys())}", math.inf
    texts, worst = [], 0.0
    for name, want in exact.items():
        have = actual[name]
        if have is None or want is None:
            texts += [f"{name}: None or not"] if have is not want else []
            continue
        unit = max(own[name], usual[name], EPS * _norm(want), NEAR_ZERO)
        error = _norm(have - want) / (FACTOR * unit)
        worst = max(worst, error if error == error else math.inf)
        if not error <= 1:
            texts.append(f"{name}: {FACTOR * error:.2g} times the rounding error of eager")
    return "; ".join(texts), worst


def _norm(tensor: Tensor) -> float:
    return tensor.double().norm().item()


def _expected(sample: Sample, model: nn.Module, step: Step) -> Wanted:
    fine = sample.dtype in TOLERANCES
    exact = copy.deepcopy(model) if fine else copy.deepcopy(model).float()
    batches = []
    for rank in range(sample.readers):
        rows, length = step.sizes[rank % len(step.sizes)]
        batches.append(_draw(sample, model, exact, 100 * step.seed + 1000 * rank, rows, length, step.same))
    if fine:
        return Wanted(batches, reference_step(exact, batches), tolerance=TOLERANCES[sample.dtype])
    autocast = torch.bfloat16 if sample.dtype == "autocast" else None
    return Wanted(batches, reference_step(exact, batches),
                  reference_step(copy.deepcopy(model), batches, autocast=autocast))  # fmt: skip


def _draw(sample: Sample, model: nn.Module, exact: nn.Module, seed: int, rows: int, length: int, same: bool) -> Batch:
    """A batch that no rounding routes otherwise; of fewer tokens, should there be none that large."""
    case, fine = Case("fuzz", nn.Identity), sample.dtype in TOLERANCES
    for attempt in range(200):
        batch = case.batch(seed + attempt, rows, max(1, length - attempt // 20))
        batch = one_token(batch, 1 + (seed + attempt) % 60) if same else batch
        record = routing(exact, batch)
        if record.gap < (1e-5 if fine else 2e-3):
            continue
        with _precision(sample.dtype):
            if fine or all(map(torch.equal, record.chosen, routing(model, batch).chosen)):
                return batch
    raise NoBatch("no batch routes alike in bf16")


# Shrinking


def shrunk(sample: Sample, verdict: Verdict, *, budget: int = 60, verify: int = 1) -> tuple[Sample, Verdict]:
    """The simplest sample found, in at most `budget` runs, that fails in the same way."""
    progress = True
    while progress and budget > 0:
        progress = False
        for simpler in simplifications(sample):
            budget -= 1
            found = judge(simpler, verify=verify)
            if found.like(verdict):
                sample, verdict, progress = simpler, found, True
                break
            if budget <= 0:
                break
    return sample, verdict


def simplifications(sample: Sample) -> Iterator[Sample]:
    """Samples with one thing simpler, the largest steps first."""
    if len(sample.steps) > 1:
        yield from (replace(sample, steps=(step,)) for step in sample.steps)
    first = sample.steps[0]
    for sizes in (((1, 2),), ((2, 2),), first.sizes[:1]):
        if first.sizes != sizes and len(sizes) * sum(map(math.prod, sizes)) < sum(map(math.prod, first.sizes)):
            yield replace(sample, steps=(replace(first, sizes=sizes), *sample.steps[1:]))
    if first.same:
        yield replace(sample, steps=(replace(first, same=False), *sample.steps[1:]))
    yield from _towards_defaults(sample, keep=("style", "steps"))
    for style in _towards_defaults(sample.style, keep=("num_experts",)):
        if style.top_k <= style.num_experts:
            yield replace(sample, style=style)
    for count in (2, 4):
        if sample.style.top_k <= count < sample.style.num_experts:
            yield replace(sample, style=replace(sample.style, num_experts=count))


def _towards_defaults(thing: Any, keep: tuple[str, ...]) -> Iterator[Any]:
    for field in fields(thing):
        if field.name not in keep and getattr(thing, field.name) != field.default:
            yield replace(thing, **{field.name: field.default})


SCRIPT = '''"""{title}

{text}

Run from the root of the repository: python {name}. Found by benchmarks/fuzz.py and shrunk.
"""

from tests.support.fuzz import Sample, Step, judge
from tests.support.handmade import Capacity, Loop

SAMPLE = {sample}

if __name__ == "__main__":
    verdict = judge(SAMPLE, verify=2)
    print(verdict.kind, verdict.text)
    raise SystemExit(not verdict.ok)
'''


def script(sample: Sample, verdict: Verdict, name: str) -> str:
    """A file that shows the failure again."""
    text = "\n".join(verdict.text.splitlines()[:12]).replace("\\", "/").replace('"""', "'''")
    title = f"{verdict.kind}: {verdict.error or 'numbers differ'}"
    return SCRIPT.format(title=title, text=text, name=name, sample=sample)
