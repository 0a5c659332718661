"""The pieces of benchmarks/gpu.py: each checks or times something and returns plain numbers.

Sizes are those of Qwen3-30B-A3B on a GPU, and tiny on CPU, where Triton interprets and times say nothing.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moefx
from moefx.runtime import glu, grouped, kernels
from moefx.runtime import triton_kernels as fused
from moefx.runtime.triton_kernels import layer, matmul
from moefx.runtime.triton_kernels.matmul import Tiles
from moefx.transport import codecs

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
HALF = torch.bfloat16
T, K, D, E, H = (32768, 8, 2048, 128, 768) if ON_GPU else (64, 2, 32, 4, 16)
N = T * K
SWIGLU = glu.Glu()
CODED = ("int8", "fp8-e4m3", "fp8-e5m2")
TRIED = (
    matmul.HOPPER, matmul.AMPERE, Tiles(128, 256, 64, 8, 4), Tiles(128, 128, 64, 4, 4), Tiles(256, 128, 64, 8, 3),
    Tiles(64, 256, 64, 4, 4), Tiles(128, 256, 64, 8, 3, group=16),
) if ON_GPU else (matmul.INTERPRETED,)  # fmt: skip
CONTESTANTS = {  # {name: how transformers runs experts, MOEFX_KERNELS if moefx does}
    "grouped_mm": ("grouped_mm", None), "moefx": ("grouped_mm", "auto" if ON_GPU else "triton"),
    "moefx islands": ("grouped_mm", "auto"), "moefx aten": ("grouped_mm", "aten"),
    "moefx triton": ("grouped_mm", "triton"),
    "compiled grouped_mm": ("grouped_mm", None), "eager": ("eager", None),
}  # fmt: skip


# Clocks


def milliseconds(run: Callable[[], Any], times: int = 10, warm: int = 3) -> list[float]:
    """Of every run after some; by CUDA events."""
    found = []
    for number in range(warm + times if ON_GPU else 1):
        if ON_GPU:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            took = begin.elapsed_time(end)
        else:
            start = time.perf_counter()
            run()
            took = 1e3 * (time.perf_counter() - start)
        if number >= warm or not ON_GPU:
            found.append(took)
    return found


def median(run: Callable[[], Any]) -> float:
    return statistics.median(milliseconds(run))


# Operands


def operands(tokens: int, k: int, width: int, experts: int, inner: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """By name, on the device, all drawn from one seed; every expert is equally likely, a few ids are out of range."""
    seed = torch.Generator(DEVICE).manual_seed(0)
    draw = partial(torch.randn, generator=seed, device=DEVICE)
    idx = torch.rand(tokens, experts, generator=seed, device=DEVICE).topk(k).indices
    if tokens < T or not ON_GPU:
        idx[::7, 0] = experts
    perm, counts = kernels.route(idx, None, None, experts)
    pairs = tokens * k
    found = {
        "x": draw(tokens, width), "rows": draw(pairs, width), "weights": draw(tokens, k).softmax(1),
        "gates": draw(pairs, 2 * inner), "hidden": draw(pairs, inner), "bias": draw(experts, width),
        "gate_up": draw(experts, 2 * inner, width) * width**-0.5, "down": draw(experts, width, inner) * inner**-0.5,
    }  # fmt: skip
    found = {name: tensor.to(dtype) for name, tensor in found.items()}
    return found | {"idx": idx, "perm": perm, "counts": counts, "scale": draw(pairs).float()}


def calls(t: dict[str, Tensor], k: int) -> dict[str, tuple[Callable, Callable, float]]:
    """{function: Triton's form, ATen's form, the least bytes that it moves}."""
    size = t["x"].element_size()
    tokens, rows = size * t["x"].numel(), size * t["rows"].numel()
    gates, hidden, pairs = size * t["gates"].numel(), size * t["hidden"].numel(), 8 * t["perm"].numel()
    experts, perm, counts = len(t["counts"]), t["perm"], t["counts"]
    w, x, r = t["weights"], t["x"], t["rows"]
    coded = r.numel() + 4 * len(r)

    def both(name: str, *args: Any, least: float, meaning: Any = kernels, **more: Any) -> tuple:
        return partial(getattr(fused, name), *args, **more), partial(getattr(meaning, name), *args, **more), least

    return {
        "route": both("route", t["idx"], None, None, experts, least=2 * pairs),
        "dispatch": both("dispatch", x, perm, k, least=tokens + rows + pairs),
        "combine": both("combine", r, w, perm, k, least=tokens + rows + pairs),
        "combine, unweighted": both("combine", r, None, perm, k, least=tokens + rows + pairs),
        "combine_backward": both("combine_backward", x, r, w, perm, k, least=tokens + 2 * rows + pairs),
        "expert_rows": both("expert_rows", t["bias"], counts, len(r), least=rows),
        "expert_rows_backward": both("expert_rows_backward", r, counts, least=rows),
        "finish_rows": (lambda: fused.finish_rows(r.clone(), counts, t["bias"]),
                        lambda: kernels.finish_rows(r.clone(), counts, t["bias"]), 4 * rows),
        **{f"glu {name}": both("glu", t["gates"], glu.Glu(name, name == "clamped"), counts, meaning=glu,
                               least=gates + hidden) for name in glu.NAMES},
        "glu_backward": both("glu_backward", t["hidden"], t["gates"], SWIGLU, counts, t["scale"], meaning=glu,
                             least=2 * gates + 2 * hidden),
        **{f"encode {name}": both("encode", r, name, meaning=codecs, least=rows + coded) for name in CODED},
        **{f"decode {name}": both("decode", codecs.encode(r, name), name, r.shape[1], r.dtype, meaning=codecs,
                                  least=rows + coded) for name in CODED},
    }  # fmt: skip


# Pieces


def facts() -> dict[str, Any]:
    import triton

    found = {"torch": torch.__version__, "triton": triton.__version__, "device": "CPU, interpreted"}
    if ON_GPU:
        about = torch.cuda.get_device_properties(0)
        found |= {"device": about.name, "GiB": about.total_memory / 2**30, "CUDA": torch.version.cuda,
                  "processors": about.multi_processor_count}  # fmt: skip
    return found


def copy() -> dict[str, float]:
    """GB/s read and written by a copy of a gibibyte, the bar for what moves rows."""
    source = torch.empty(2**30 if ON_GPU else 2**20, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return {"GB/s": 2 * source.numel() / median(lambda: target.copy_(source)) / 1e6}


def right_kernels() -> dict[str, float]:
    """{function: largest error over largest number}, in bf16 and in float32, beside the meaning in float64."""
    found = {}
    for dtype in (HALF, torch.float32):
        t = operands(*((1003, 4, 520, 17, 136) if ON_GPU else (21, 2, 40, 5, 24)), dtype)
        k = t["weights"].shape[1]
        exact = {name: each.double() if each.is_floating_point() else each for name, each in t.items()}
        for (name, (mine, _, _)), (_, meant, _) in zip(calls(t, k).items(), calls(exact, k).values()):
            found[f"{name} {dtype}".replace("torch.", "")] = error(mine(), meant())
        for transposed in (False, True):
            rows, weight = ("rows", "gate_up") if not transposed else ("gates", "gate_up")
            mine = fused.grouped_linear(t[rows], t[weight], t["counts"], transposed=transposed)
            meant = grouped.grouped_linear(exact[rows], exact[weight], t["counts"], transposed=transposed)
            found[f"grouped_linear {transposed} {dtype}".replace("torch.", "")] = error(mine, meant)
        mine = fused.grouped_wgrad(t["rows"], t["gates"], t["counts"])
        found[f"grouped_wgrad {dtype}".replace("torch.", "")] = error(
            mine, grouped.grouped_wgrad(exact["rows"], exact["gates"], t["counts"]))  # fmt: skip
        found |= {f"layer {name} {dtype}".replace("torch.", ""): each for name, each in right_layer(t, exact).items()}
    return found


def right_layer(t: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Of the output and all gradients of the fused layer, and of ATen's in the same dtype."""
    names, routing = ("x", "weights", "gate_up", "down"), (t["perm"], t["counts"])
    grad = t["x"].flip(0)
    x, weights, gate_up, down = (t[name] for name in names)
    out, kept = layer.forward(x, weights, *routing, gate_up, down, SWIGLU)
    mine = layer.backward(grad, x, weights, t["counts"], gate_up, down, SWIGLU, kept)
    meant, gradients = plain_layer(*(exact[name] for name in names), *routing, grad.double())
    other, others = plain_layer(x, weights, gate_up, down, *routing, grad)
    wanted = meant, *gradients
    return {f"{what} {way}": error(a, b) for way, found in (("", (out, *mine)), ("in ATen", (other, *others)))
            for what, a, b in zip(("out", *names), found, wanted)}  # fmt: skip


def plain_layer(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, perm: Tensor, counts: Tensor,
                grad: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """(output, gradients) of a layer as moefx runs it with ATen alone."""
    k, used = weights.shape[1], len(perm)
    rows = kernels.dispatch(x, perm, k)
    gates = grouped.grouped_linear(rows, gate_up, counts)
    gate, up = gates.chunk(2, 1)
    act = F.silu(gate)
    hidden = act * up
    result = grouped.grouped_linear(hidden, down, counts)
    out = kernels.combine(result, weights, perm, k)
    grad_rows, grad_weights = kernels.combine_backward(grad, result, weights, perm, k)
    grad_down = grouped.grouped_wgrad(hidden, grad_rows, counts)
    grad_hidden = grouped.grouped_linear(grad_rows, down, counts, transposed=True)
    grad_gate = torch.ops.aten.silu_backward(grad_hidden * up, gate)
    grad_gates = torch.cat([grad_gate, grad_hidden * act], 1)
    grad_gate_up = grouped.grouped_wgrad(rows, grad_gates, counts)
    grad_x = kernels.combine(grouped.grouped_linear(grad_gates, gate_up, counts, transposed=True), None, perm, k)
    assert len(rows) == used
    return out, (grad_x, grad_weights, grad_gate_up, grad_down)


def error(found: Any, meant: Any) -> float:
    """The largest difference over the largest number; of several tensors, of the worst. 1 where shapes differ or a
    number is not finite."""
    if isinstance(found, tuple):
        return max((error(a, b) for a, b in zip(found, meant, strict=True)), default=0.0)
    if found is None and meant is None:
        return 0.0
    if found.shape != meant.shape or not found.double().isfinite().all():
        return 1.0
    if not found.numel():
        return 0.0
    return float((found.double() - meant.double()).abs().max() / meant.double().abs().max().clamp(min=1e-30))


def timed_kernels() -> dict[str, dict[str, float]]:
    """{function: milliseconds of both forms, and GB/s of Triton's if it moved the least bytes}."""
    t, found = operands(T, K, D, E, H, HALF), {}
    for name, (mine, meant, least) in calls(t, K).items():
        took = median(mine)
        found[name] = {"triton ms": took, "aten ms": median(meant), "GB/s": least / took / 1e6}
    return found


def products() -> dict[str, dict[str, float]]:
    """TFLOP/s of the products of a layer's first weights, torch's and each way that is tried."""
    t = operands(T, K, D, E, H, HALF)
    rows, gates, weight, counts = t["rows"], t["gates"], t["gate_up"], t["counts"]
    flops = 2 * N * D * 2 * H
    ends = counts.cumsum(0).to(torch.int32)
    torchs = {
        "forward": lambda: F.grouped_mm(rows, weight.transpose(1, 2), offs=ends),
        "input gradient": lambda: F.grouped_mm(gates, weight, offs=ends),
        "weight gradient": lambda: F.grouped_mm(gates.t(), rows, offs=ends),
    }
    mine = {
        "forward": lambda tiles: matmul.product(rows, weight.transpose(1, 2), counts, tiles=tiles),
        "input gradient": lambda tiles: matmul.product(gates, weight, counts, tiles=tiles),
        "weight gradient": lambda tiles: matmul.weight_gradient(gates, rows, counts, tiles=tiles),
    }
    found: dict[str, dict[str, float]] = {}
    for name, run in torchs.items():
        found[name] = {"grouped_mm": flops / median(run) / 1e9}
        for tiles in TRIED:
            found[name][called(tiles)] = _rate(flops, partial(mine[name], tiles))
    return found


def called(tiles: Tiles) -> str:
    return f"{tiles.rows}x{tiles.columns}x{tiles.depth} w{tiles.warps} s{tiles.stages} g{tiles.group}"


def _rate(flops: float, run: Callable[[], Any]) -> float:
    """TFLOP/s; 0 where the GPU has no room for the tiles."""
    try:
        return flops / median(run) / 1e9
    except Exception as problem:
        if "OutOfResources" not in type(problem).__name__:
            raise
        return 0.0


def layers() -> dict[str, float]:
    """TFLOP/s of a whole layer of experts, forward and with its backward: fused, and with ATen."""
    t = operands(T, K, D, E, H, HALF)
    x, weights, gate_up, down, perm, counts = (t[n] for n in ("x", "weights", "gate_up", "down", "perm", "counts"))
    flops, grad = 6 * N * D * H, torch.randn_like(x)
    found = {"aten forward and backward": 3 * flops / median(
        lambda: plain_layer(x, weights, gate_up, down, perm, counts, grad)) / 1e9}  # fmt: skip
    for tiles in TRIED[:3]:
        ways = layer.Ways(tiles, tiles, tiles)

        def forward(ways: layer.Ways = ways) -> tuple:
            return layer.forward(x, weights, perm, counts, gate_up, down, SWIGLU, ways)

        def both(ways: layer.Ways = ways) -> tuple:
            _, kept = layer.forward(x, weights, perm, counts, gate_up, down, SWIGLU, ways)
            return layer.backward(grad, x, weights, counts, gate_up, down, SWIGLU, kept, ways)

        found[f"forward {called(tiles)}"] = _rate(flops, forward)
        found[f"forward and backward {called(tiles)}"] = _rate(3 * flops, both)
    return found


def overlap() -> dict[str, float]:
    """Milliseconds of a product, of a copy from the host on a stream of its own, and of both at once."""
    size = 8192 if ON_GPU else 64
    a = torch.randn(size, size, device=DEVICE, dtype=HALF)
    host = torch.empty(2**28 if ON_GPU else 2**12, dtype=torch.uint8, pin_memory=ON_GPU)
    target = torch.empty_like(host, device=DEVICE)
    side = torch.cuda.Stream() if ON_GPU else None

    def product() -> None:
        for _ in range(4):
            a @ a

    def beside() -> None:
        if side is None:
            target.copy_(host)
            return
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            target.copy_(host, non_blocking=True)

    def joined() -> None:
        beside()
        product()
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)

    def alone() -> None:
        beside()
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)

    return {"product": median(product), "copy": median(alone), "both": median(joined)}


# Models


def model(implementation: str, dtype: torch.dtype, small: bool = False) -> nn.Module:
    """Two decoder layers with the sizes of Qwen3-30B-A3B, or small ones."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
                 moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, vocab_size=4096)  # fmt: skip
    if small or not ON_GPU:
        sizes = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
                     moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, vocab_size=128)  # fmt: skip
    config = Qwen3MoeConfig(num_hidden_layers=2 if ON_GPU else 1, norm_topk_prob=True, use_cache=False,
                            attn_implementation="sdpa", experts_implementation=implementation, **sizes)  # fmt: skip
    with torch.device(DEVICE):
        return Qwen3MoeForCausalLM(config).to(dtype)


class _One:
    """A process group of one rank, and moefx.compile on its mesh with MOEFX_KERNELS set."""

    def __enter__(self) -> _One:
        store = dist.HashStore()
        dist.init_process_group("nccl" if ON_GPU else "gloo", store=store, rank=0, world_size=1)
        self.mesh = init_device_mesh(DEVICE, (1,), mesh_dim_names=("ep",))
        return self

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()

    def compile(self, plain: nn.Module, name: str, **example: Tensor) -> closing:
        os.environ["MOEFX_KERNELS"] = CONTESTANTS[name][1]
        compiled = moefx.compile(plain, self.mesh, islands="islands" in name)
        compiled(**example).loss.backward()
        compiled.zero_grad(set_to_none=True)
        return closing(compiled)


def right_model(name: str) -> dict[str, float]:
    """{who: largest error over largest number} of loss, logits and all gradients in bf16 (float32 on CPU) beside the
    same weights in float64, eager: of transformers, eager, and of this contestant."""
    dtype = HALF if ON_GPU else torch.float32
    tokens = torch.randint(0, 128, (2, 64 if ON_GPU else 8), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    exact = model("eager", dtype, small=True).double()
    meant = numbers(exact, tokens)
    found = {"eager": worst(numbers(model("eager", dtype, small=True), tokens), meant)}
    plain = model("grouped_mm", dtype, small=True)
    with _One() as one, one.compile(plain, name, input_ids=tokens, labels=tokens) as compiled:
        return found | {name: worst(numbers(compiled, tokens), meant)}


def numbers(of: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """Loss, logits and gradients."""
    out = of(input_ids=tokens, labels=tokens)
    out.loss.backward()
    found = {name: p.grad for name, p in of.named_parameters() if p.grad is not None}
    found = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in found.items()}
    return found | {"loss": out.loss.detach(), "logits": out.logits.detach()}


def worst(found: dict[str, Tensor], meant: dict[str, Tensor]) -> float:
    assert found.keys() == meant.keys(), f"gradients of {found.keys() ^ meant.keys()} are missing or too many"
    return max(error(found[name], meant[name]) for name in meant)


def step(name: str) -> dict[str, float]:
    """Forward and backward of two layers, 4 x 2048 tokens: milliseconds, GiB at the peak above what stood before,
    seconds until the first step was done; and milliseconds of 1 x 512 tokens, but for what torch.compile would compile
    again."""
    implementation, mode = CONTESTANTS[name]
    shape, vocabulary = ((4, 2048), 4096) if ON_GPU else ((2, 8), 128)
    tokens = torch.randint(0, vocabulary, shape, device=DEVICE)
    plain, begin = model(implementation, HALF if ON_GPU else torch.float32), time.perf_counter()
    if mode is None:
        return _steps(torch.compile(plain) if name.startswith("compiled") else plain, tokens, begin)
    with _One() as one, one.compile(plain, name, input_ids=tokens, labels=tokens) as compiled:
        return _steps(compiled, tokens, begin)


def _steps(contestant: nn.Module, tokens: Tensor, begin: float) -> dict[str, float]:
    def run() -> None:
        contestant.zero_grad(set_to_none=True)
        contestant(input_ids=tokens, labels=tokens).loss.backward()

    run()
    if ON_GPU:
        torch.cuda.synchronize()
    first = time.perf_counter() - begin
    times = milliseconds(run, times=15)
    found = {"ms": statistics.median(times), "fastest": min(times), "slowest": max(times), "first s": first}
    if ON_GPU:
        contestant.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        found["GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    if not isinstance(contestant, torch._dynamo.OptimizedModule):
        tokens = tokens[:1, : tokens.shape[1] // 4].contiguous()
        found["few, ms"] = median(run)
    return found


PIECES: dict[str, Callable[[], dict]] = {
    "facts": facts, "copy": copy, "right kernels": right_kernels, "timed kernels": timed_kernels,
    **{f"step {name}": partial(step, name) for name in ("grouped_mm", "moefx", "moefx islands", "compiled grouped_mm")},
    **{f"right {name}": partial(right_model, name) for name in ("moefx", "moefx islands")}, "layers": layers,
    "products": products, **{f"step {name}": partial(step, name) for name in ("moefx triton", "moefx aten", "eager")},
    "overlap": overlap,
    **{f"right {name}": partial(right_model, name) for name in ("moefx triton", "moefx aten")},
}  # fmt: skip
