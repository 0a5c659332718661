"""What the codecs cost: bytes, errors, and time on this machine.

    python benchmarks/codecs.py [--device cpu] [--rounds 15]      writes results/codecs.md

Rows of 1024 entries in fp32. gaussian: like rows behind a norm; heavy-tailed: Student's t with 2 degrees of freedom;
outliers: gaussian, and 1 entry of 97 is 50 times as large, the same in all rows; smooth: a random walk along the row,
which the entries of a token are not. Errors: the norm of the error over the norm of the rows, the median over entries
of error over entry, and the largest error of an entry over the largest entry of its row, beside what the codec states
of that. "ZFP itself" is the library (package zfpy, if installed) at 8 bits an entry, rows as pictures of width 4.

Rates count bytes of the rows, one thread; "copy" reads and writes them once. Codecs take turns in every round; median
and quartiles.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Callable
from pathlib import Path

import torch
from interleave import Spread, load
from torch import Tensor

from moefx.transport.codecs import codec_named, codec_names, decode, encode

WIDTH, ROWS = 1024, 512
OUT = Path(__file__).parent / "results" / "codecs.md"


def rows_of(kind: str) -> Tensor:
    """[ROWS, WIDTH]."""
    torch.manual_seed(0)
    if kind == "heavy-tailed":
        return torch.distributions.StudentT(2.0).sample((ROWS, WIDTH))
    rows = torch.randn(ROWS, WIDTH)
    if kind == "outliers":
        rows[:, ::97] *= 50
    return rows.cumsum(1) if kind == "smooth" else rows


KINDS = ("gaussian", "heavy-tailed", "outliers", "smooth")


def there_and_back(rows: Tensor, name: str) -> Tensor:
    return decode(encode(rows, name), name, rows.shape[1], rows.dtype)


def zfp_itself(rows: Tensor) -> Tensor:
    """Raises ImportError where it is not installed."""
    import zfpy

    pictures = rows.reshape(-1, 4).numpy()
    return torch.from_numpy(zfpy.decompress_numpy(zfpy.compress_numpy(pictures, rate=8))).view(rows.shape)


def errors(rows: Tensor, back: Tensor) -> list[str]:
    off = (back - rows).abs()
    largest = (off.amax(1) / rows.abs().amax(1)).max()
    return [f"{off.norm() / rows.norm():.4f}", f"{(off / rows.abs()).median():.4f}", f"{largest:.4f}"]


def table_of_errors() -> list[str]:
    lines = ["| rows | codec | bytes an entry | norm | median entry | largest | stated |", "|---" * 7 + "|"]
    for kind in KINDS:
        rows = rows_of(kind)
        for name in codec_names():
            codec = codec_named(name)
            row = [kind, name, f"{codec.row_bytes(WIDTH) / WIDTH:.3f}", *errors(rows, there_and_back(rows, name)),
                   f"{codec.relative_error:.4f}"]  # fmt: skip
            lines.append(f"| {' | '.join(row)} |")
        try:
            lines.append(f"| {' | '.join([kind, 'ZFP itself', '1.000', *errors(rows, zfp_itself(rows)), ''])} |")
        except ImportError:
            print("zfpy is not installed: ZFP itself is left out")
    return lines


def seconds_of(calls: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            _wait(device)
            start = time.perf_counter()
            call()
            _wait(device)
            if number:  # the first one warms up
                found[name].append(time.perf_counter() - start)
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table_of_rates(device: torch.device, rounds: int) -> list[str]:
    lines = ["| rows | codec | encode, GB/s | decode, GB/s |", "|---" * 4 + "|"]
    for count in (64, 4096):
        rows = torch.randn(count, WIDTH, device=device)
        coders: dict[str, Callable[[], object]] = {"copy": rows.clone}
        decoders: dict[str, Callable[[], object]] = {"copy": rows.clone}
        for name in codec_names():
            payload = encode(rows, name)
            coders[name] = lambda rows=rows, name=name: encode(rows, name)
            decoders[name] = lambda payload=payload, name=name: decode(payload, name, WIDTH, torch.float32)
        times = [seconds_of(calls, rounds, device) for calls in (coders, decoders)]
        for name in coders:
            rates = [Spread.of([rows.nbytes / s / 1e9 for s in each[name]]).text(2) for each in times]
            lines.append(f"| {count} | {name} | {' | '.join(rates)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device, before = torch.device(arguments.device), load()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    text = "\n".join([
        "# Codecs", "", f"Written by `python benchmarks/codecs.py`, {datetime.date.today().isoformat()}: torch "
        f"{torch.__version__}, {name}, {arguments.rounds} rounds; load before: {before}, after: LOAD.", "",
        __doc__.split("\n\n", 2)[2].strip(), "", "## Errors", "", *table_of_errors(), "", "## Time", "",
        *table_of_rates(device, arguments.rounds), "",
    ])  # fmt: skip
    text = text.replace("LOAD", load())
    OUT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
