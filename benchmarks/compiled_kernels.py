"""What Triton's compiler makes of every kernel, for sm_80 and sm_90, without a GPU.

    python benchmarks/compiled_kernels.py [--only combine linear] [--targets 80 90] [--out FOLDER]
    python benchmarks/compiled_kernels.py --one [--dtype float32]     # one token, one expert: does it compile?

Every runtime function is called on tensors without memory, with the sizes of a layer of Qwen3-30B-A3B (32,768 tokens,
width 2048, 128 experts of inner width 768, 8 per token, bf16), and what it would launch is compiled instead: with the
types, the alignments and the options of that launch. Registers, stack and shared memory are what cuobjdump says of the
binary, loads and stores are counted in the disassembly by their width per thread (LDGSTS are copies to shared memory).
Code that spills has a stack. Bytes are formulas: what the kernels of a function read and write, the least that any
could, and what ATen's form does in its passes; a row that K tokens' choices share counts once.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from torch._subclasses import FakeTensor, FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from moefx.runtime import triton_kernels as kernels  # noqa: E402
from moefx.runtime.glu import Glu  # noqa: E402
from moefx.runtime.triton_kernels import codecs, launch, layer  # noqa: E402

T, K, D, E, H = (1, 1, 8, 1, 8) if "--one" in sys.argv else (32768, 8, 2048, 128, 768)
N = T * K
SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes that a program may have


@dataclass(frozen=True)
class Case:
    """call: of tensors by name. moved, least, aten: bytes of the kernels, of any kernel, and of ATen's form."""

    name: str
    call: Callable[[dict[str, torch.Tensor]], Any]
    moved: float
    least: float
    aten: float
    why: str


@dataclass
class Code:
    """One kernel of a case, compiled. loads and stores: {bytes per thread: how many instructions}."""

    case: str
    kernel: str
    target: int
    registers: int
    stack: int
    shared: int
    warps: int
    loads: dict[str, int] = field(default_factory=dict)
    copies: dict[str, int] = field(default_factory=dict)
    stores: dict[str, int] = field(default_factory=dict)
    tensor_cores: int = 0


ROWS, GATES, HIDDEN, TOKENS = 2 * N * D, 4 * N * H, 2 * N * H, 2 * T * D  # bytes
CODED = N * (D + 4)
WEIGHTS, PERM, PLACES = 6 * E * H * D, 8 * N, 4 * N
SWIGLU, GPT_OSS = Glu(), Glu("clamped", interleaved=True)

CASES = [
    Case("route", lambda t: kernels.route(t["idx"], None, None, E), 3 * PERM + PLACES + 12 * N // 128 * (E + 1),
         2 * PERM, 9 * PERM, "ids twice, order once, counts of blocks three times"),
    Case("dispatch", lambda t: kernels.dispatch(t["x"], t["perm"], K), TOKENS + ROWS + PERM + 2 * PLACES,
         TOKENS + ROWS + PERM, 2 * ROWS + 3 * PERM, "tokens once, rows once; ATen meets a token K times"),
    Case("combine", lambda t: kernels.combine(t["rows"], t["weights"], t["perm"], K),
         ROWS + TOKENS + PERM + 2 * PLACES + 2 * N, ROWS + TOKENS + PERM + 2 * N, 5 * ROWS + TOKENS + 3 * PERM,
         "rows once, tokens once; ATen orders, scales and sums in a pass each"),
    Case("combine_backward", lambda t: kernels.combine_backward(t["x"], t["rows"], t["weights"], t["perm"], K),
         TOKENS + 2 * ROWS + PERM + 2 * PLACES + 4 * N, TOKENS + 2 * ROWS + PERM + 4 * N, 8 * ROWS + 4 * PERM,
         "gradient of a token once, rows once, their gradient once"),
    Case("expert_rows", lambda t: kernels.expert_rows(t["bias"], t["counts"], N), ROWS, ROWS, ROWS,
         "biases stay in caches"),
    Case("expert_rows_backward", lambda t: kernels.expert_rows_backward(t["rows"], t["counts"]),
         ROWS + 8 * (N // 128 + E) * D, ROWS, 5 * ROWS, "rows once, partial sums twice; ATen widens first"),
    Case("finish_rows", lambda t: kernels.finish_rows(t["rows"], t["counts"], t["bias"]), 2 * ROWS, 2 * ROWS, 5 * ROWS,
         "rows read and written once"),
    Case("glu", lambda t: kernels.glu(t["gates"], SWIGLU, t["counts"]), GATES + HIDDEN, GATES + HIDDEN,
         GATES + 4 * HIDDEN, "gates and ups once, result once"),
    Case("glu_clamped", lambda t: kernels.glu(t["gates"], GPT_OSS), GATES + HIDDEN, GATES + HIDDEN,
         GATES + 14 * HIDDEN, "gates and ups once, result once; seven ops in ATen"),
    Case("glu_backward", lambda t: kernels.glu_backward(t["hidden"], t["gates"], SWIGLU, t["counts"], t["scale"]),
         2 * GATES + 2 * HIDDEN, 2 * GATES + 2 * HIDDEN, 3 * GATES + 8 * HIDDEN,
         "with the gradient of the weights and the scaled result"),
    *(Case(f"encode {name}", lambda t, name=name: kernels.encode(t["rows"], name), ROWS + CODED, ROWS + CODED,
           57 * N * D - (name != "int8") * 8 * N * D, "rows once, bytes and units once") for name in codecs.KINDS),
    *(Case(f"decode {name}", lambda t, name=name: kernels.decode(t["coded"], name, D, t["rows"].dtype), ROWS + CODED,
           ROWS + CODED, 27 * N * D, "bytes and units once, rows once") for name in codecs.KINDS),
    Case("grouped_linear", lambda t: kernels.grouped_linear(t["rows"], t["gate_up"], t["counts"]),
         ROWS + GATES + 2 * WEIGHTS // 3, ROWS + GATES + 2 * WEIGHTS // 3, ROWS + 3 * GATES + 2 * WEIGHTS // 3,
         "if what a tile reads again comes from the L2 cache"),
    Case("grouped_wgrad", lambda t: kernels.grouped_wgrad(t["rows"], t["gates"], t["counts"]),
         ROWS + GATES + 2 * WEIGHTS // 3, ROWS + GATES + 2 * WEIGHTS // 3, ROWS + GATES + 2 * WEIGHTS // 3,
         "if what a tile reads again comes from the L2 cache"),
    Case("layer forward", lambda t: layer.forward(
        t["x"], t["weights"], t["perm"], t["counts"], t["gate_up"], t["down"], SWIGLU),
         2 * TOKENS + GATES + 2 * HIDDEN + 2 * ROWS + WEIGHTS, 2 * TOKENS + GATES + WEIGHTS,
         8 * ROWS + 3 * GATES + 6 * HIDDEN + TOKENS + WEIGHTS, "the least keeps hidden rows and results on chip"),
    Case("layer backward", lambda t: layer.backward(
        t["x"], t["x"], t["weights"], t["counts"], t["gate_up"], t["down"], SWIGLU,
        layer.Kept(t["gates"], t["source"], t["source"], t["scale"])),
         4 * TOKENS + 4 * GATES + 4 * HIDDEN + 2 * ROWS + 3 * WEIGHTS, 3 * TOKENS + GATES + 2 * WEIGHTS,
         12 * ROWS + 6 * GATES + 12 * HIDDEN + 3 * WEIGHTS, "the least computes all from gates, tokens and gradients"),
]  # fmt: skip


def tensors(kind: torch.dtype) -> dict[str, torch.Tensor]:
    """By name; call in a FakeTensorMode."""

    def empty(*shape: int, dtype: torch.dtype = kind) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    return {
        "idx": empty(T, K, dtype=torch.int64), "perm": empty(N, dtype=torch.int64), "x": empty(T, D),
        "counts": empty(E, dtype=torch.int64), "rows": empty(N, D), "weights": empty(T, K), "bias": empty(E, D),
        "gates": empty(N, 2 * H), "hidden": empty(N, H), "scale": empty(N, dtype=torch.float32),
        "coded": empty(N, D + 4, dtype=torch.uint8),
        "source": empty(N, dtype=torch.int32), "gate_up": empty(E, 2 * H, D), "down": empty(E, D, H),
    }  # fmt: skip


def launches(case: Case, target: int, kind: torch.dtype) -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """What a case launches: kernels, their arguments by name, options. Nothing runs."""
    found = []

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        named = dict(zip(kernel.arg_names, args))
        named |= {name: options.pop(name) for name in list(options) if name in kernel.arg_names}
        found.append((kernel, named, options))

    with (FakeTensorMode(), mock.patch.object(FakeTensor, "is_cuda", True, create=True),
          mock.patch.object(triton.JITFunction, "run", note),
          mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(target, 10)),
          mock.patch.object(launch, "on_device", return_value=mock.MagicMock())):  # fmt: skip
        case.call(tensors(kind))
    return found


def compiled(kernel: Any, args: dict[str, Any], options: dict[str, Any], target: int) -> Any:
    """The kernel for a GPU of this capability, with types and alignments of the arguments, as a launch specializes."""
    signature, constants, attributes = {}, {}, {}
    for place, param in enumerate(kernel.params):
        value = args[param.name]
        if param.is_constexpr or (isinstance(value, int) and not isinstance(value, bool) and value == 1):
            signature[param.name], constants[place,] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[param.name] = "*" + TYPES[value.dtype]
        else:
            signature[param.name] = "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32",
         torch.uint8: "u8"}  # fmt: skip


def tool(name: str) -> str:
    """A program that comes with Triton."""
    own = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return str(own) if own.exists() else name


def read(case: str, kernel: str, target: int, binary: Any) -> Code:
    """What the tools say of a binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = _said(tool("cuobjdump"), "--dump-resource-usage", file.name)
        code = _said(tool("nvdisasm"), "-c", file.name)
    number = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    found = Code(case, kernel, target, number["REG"], number["STACK"] + number["LOCAL"], binary.metadata.shared,
                 binary.metadata.num_warps)  # fmt: skip
    for names, into in (("LDG", found.loads), ("LDGSTS", found.copies), ("STG", found.stores)):
        widths = collections.Counter(
            _bytes(more) for more in re.findall(rf"\b{names}\.([A-Z0-9.]+)", code))
        into.update({str(width): count for width, count in sorted(widths.items())})
    found.tensor_cores = len(re.findall(r"\b(?:HMMA|HGMMA)\.", code))
    return found


def _bytes(suffixes: str) -> int:
    """Per thread, of an instruction's suffixes: E.128 -> 16, E.U16 -> 2, E -> 4."""
    return next((int(size) // 8 for size in re.findall(r"(?:^|\.)[US]?(128|64|16|8)(?:\.|$)", suffixes)), 4)


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def codes(case: Case, target: int, kind: torch.dtype) -> list[Code]:
    found = {}
    for kernel, args, options in launches(case, target, kind):
        binary = compiled(kernel, args, options, target)
        found[kernel.__name__, binary.hash] = read(case.name, kernel.__name__, target, binary)
    return list(found.values())


def page(found: list[Code]) -> str:
    """As Markdown."""
    lines = ["# Compiled kernels", "", *__doc__.strip().splitlines(), "",
             f"triton {triton.__version__}, torch {torch.__version__}.", "",
             "| function | moved, MB | least, MB | moved / least | ATen, MB | |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for case in CASES:
        megabytes = [f"{size / 1e6:.0f}" for size in (case.moved, case.least, case.aten)]
        lines.append(f"| {case.name} | {megabytes[0]} | {megabytes[1]} | {case.moved / case.least:.2f} | "
                     f"{megabytes[2]} | {case.why} |")  # fmt: skip
    lines += ["", "Loads and stores: instructions by bytes per thread.", "",
              "| function | kernel | sm | registers | stack | KiB shared | warps | loads | copies | stores | mma |",
              "|---|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for each in found:
        loads, copies, stores = (" ".join(f"{count} x {width}" for width, count in widths.items()) or "-"
                                 for widths in (each.loads, each.copies, each.stores))  # fmt: skip
        lines.append(f"| {each.case} | {each.kernel} | {each.target} | {each.registers} | {each.stack} | "
                     f"{each.shared / 1024:.1f} | {each.warps} | {loads} | {copies} | {stores} | "
                     f"{each.tensor_cores or '-'} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="functions, by name")
    parser.add_argument("--targets", nargs="*", type=int, default=[80, 90])
    parser.add_argument("--out", type=Path, help="a folder for compiled_kernels.json and .md")
    parser.add_argument("--one", action="store_true", help="one token and one expert")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    args = parser.parse_args()
    found: list[Code] = []
    for case in CASES:
        if args.only is None or case.name in args.only:
            for target in args.targets:
                found += codes(case, target, getattr(torch, args.dtype))
            print(f"{case.name}: {', '.join(f'{c.kernel} {c.registers}' for c in found if c.case == case.name)}",
                  file=sys.stderr, flush=True)  # fmt: skip
    wrong = [f"{each.kernel} on sm_{each.target}: {each.shared} bytes of shared memory, {each.stack} of stack"
             for each in found if each.stack or each.shared > SHARED.get(each.target, 1 << 20)]  # fmt: skip
    if args.out is None:
        print(json.dumps([asdict(each) for each in found]))
    else:
        (args.out / "compiled_kernels.json").write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
        (args.out / "compiled_kernels.md").write_text(page(found))
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
