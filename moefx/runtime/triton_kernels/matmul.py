"""Products of rows with the matrix of their slot, whose sizes stay on the device.

R rows, S slots, I input width, O output width, T tokens, H inner width of a gated activation. A small kernel writes a
map of tiles, of which there are at most R // rows + S + 1: slot, first row and end of each. Programs past the last tile
end at once. The rows may be gathered from tokens while they are loaded; a bias, the weights of rows or a gated
activation are applied to the float32 sums before they are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from moefx.runtime import grouped
from moefx.runtime.glu import Glu, number_of
from moefx.runtime.triton_kernels.launch import as_rows, or_else
from moefx.runtime.triton_kernels.products import linear, map_tiles, wgrad
from moefx.runtime.triton_kernels.segments import finish_rows


@dataclass(frozen=True)
class Tiles:
    """One way to run a product. rows, columns and depth of a tile; warps; stages of the pipeline of loads; group: so
    many tiles of rows share the columns that they read."""

    rows: int
    columns: int
    depth: int
    warps: int = 8
    stages: int = 3
    group: int = 8


# Not measured yet: benchmarks/gpu.py times these and more, and its page says which is best.
SMALL = Tiles(32, 128, 64, warps=4, stages=4)
AMPERE = Tiles(128, 128, 64, warps=8, stages=3)
HOPPER = Tiles(128, 256, 64, warps=8, stages=3)
EXACT = Tiles(32, 32, 32, warps=4, stages=2)  # float32, which is multiplied as such
INTERPRETED = Tiles(32, 64, 64)  # few programs


def tiles_for(rows: Tensor, slots: int) -> Tiles:
    """What runs rows [R, I]: small tiles for few rows per slot."""
    if not rows.is_cuda:
        return INTERPRETED
    if rows.dtype == torch.float32:
        return EXACT
    if rows.shape[0] < 48 * slots:
        return SMALL
    return HOPPER if torch.cuda.get_device_capability(rows.device)[0] >= 9 else AMPERE


@or_else(grouped.grouped_linear)
def grouped_linear(
    rows: Tensor,
    weight: Tensor,
    counts: Tensor,
    *,
    transposed: bool = False,
    exact: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """What `runtime.grouped.grouped_linear` gives: rows [R, .., I], weight [S, O, I] ([S, I, O] if transposed), counts
    [S], bias [S, O] or None -> [R, .., O]. `exact` saves nothing here."""
    matrices = weight if transposed else weight.transpose(1, 2)
    inner = rows.shape[1:-1].numel()
    flat = rows.reshape(-1, rows.shape[-1])
    out = product(flat, matrices, counts if inner == 1 else counts * inner, bias=bias)
    return out.view(*rows.shape[:-1], matrices.shape[2])


@or_else(grouped.grouped_wgrad)
def grouped_wgrad(
    rows: Tensor, grad: Tensor, counts: Tensor, *, transposed: bool = False, out: Tensor | None = None
) -> Tensor:
    """What `runtime.grouped.grouped_wgrad` gives: rows [R, .., I], grad [R, .., O], counts [S] -> [S, O, I]
    ([S, I, O] if transposed), added to `out` if that is given."""
    inner = rows.shape[1:-1].numel()
    rows, grad = rows.reshape(-1, rows.shape[-1]), grad.reshape(-1, grad.shape[-1])
    left, right = (rows, grad) if transposed else (grad, rows)
    return weight_gradient(left, right, counts if inner == 1 else counts * inner, out=out)


@or_else(grouped.grouped_linear)
def finished_linear(
    rows: Tensor,
    weight: Tensor,
    counts: Tensor,
    *,
    transposed: bool = False,
    exact: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """`grouped_linear` by torch's product; one kernel adds the bias and writes the zeros, instead of a pass each."""
    out = grouped.grouped_linear(rows, weight, counts, transposed=transposed, exact=True)
    if bias is not None or not exact:
        inner = rows.shape[1:-1].numel()
        finish_rows(out.view(-1, out.shape[-1]), counts if inner == 1 else counts * inner, bias)
    return out


def product(
    rows: Tensor,
    matrices: Tensor,
    counts: Tensor,
    *,
    num_rows: int | None = None,
    source: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    kind: Glu | None = None,
    tiles: Tiles | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """rows [R, I], matrices [S, I, O], counts [S] int64 -> [R, O]; zeros past `sum(counts)`.

    source [R] int32 with `num_rows` R: row r is `rows[source[r]]` of any [T, I]. bias [S, O] is added; scale [R]
    multiplies what comes out. kind: of its gate and up, which are the result [R, 2H], the activation [R, H] is given,
    too.
    """
    rows, bias = as_rows(rows), None if bias is None else as_rows(bias)
    height = rows.shape[0] if num_rows is None else num_rows
    slots, depth, width = matrices.shape
    out = rows.new_empty(height, width)
    act = rows.new_empty(height, width // 2) if kind is not None else None
    if out.numel():
        tiles = tiles or tiles_for(out, slots)
        columns = tiles.columns if kind is None else tiles.columns // 2  # twice as many sums per column
        tile_map, bound = mapped(counts, height, tiles.rows)
        across = triton.cdiv(width if kind is None else width // 2, columns)
        linear[(bound * across,)](
            rows, matrices, tile_map, rows if source is None else source, rows if bias is None else bias,
            rows if scale is None else scale.contiguous(), out, out if act is None else act, bound, slots, width,
            rows.stride(0), *matrices.stride(), 0 if bias is None else bias.stride(0),
            0.0 if kind is None else kind.limit, 0.0 if kind is None else kind.alpha, depth, depth % tiles.depth == 0,
            tiles.rows, columns, tiles.depth, tiles.group, source is not None, bias is not None, scale is not None,
            -1 if kind is None else number_of(kind), kind is not None and kind.interleaved, not rows.is_cuda,
            **_options(tiles))  # fmt: skip
    return out if act is None else (out, act)


def weight_gradient(
    left: Tensor,
    right: Tensor,
    counts: Tensor,
    *,
    left_source: Tensor | None = None,
    right_source: Tensor | None = None,
    out: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """left [R, M], right [R, N], counts [S] int64 -> [S, M, N], the sum of outer products over a slot's rows; zeros for
    idle slots. With a source [R] int32, row r is `left[source[r]]`. With `out`, it is added to that in place."""
    left, right = as_rows(left), as_rows(right)
    slots, height, width = counts.numel(), left.shape[1], right.shape[1]
    adds = out is not None
    result = left.new_empty(slots, height, width) if out is None else out
    assert result.is_contiguous(), "gradients are added to in one piece"
    if result.numel():
        tiles = tiles or tiles_for(left if left_source is None else left_source[:, None].to(left.dtype), slots)
        across, down = triton.cdiv(width, tiles.columns), triton.cdiv(height, tiles.rows)
        wgrad[(down * across, slots)](
            left, right, counts.contiguous(), left if left_source is None else left_source,
            right if right_source is None else right_source, result, slots, height, width, left.stride(0),
            right.stride(0), tiles.rows, tiles.columns, tiles.depth, tiles.group,
            triton.next_power_of_2(max(slots, 2)), left_source is not None, right_source is not None, adds,
            not left.is_cuda, **_options(tiles))  # fmt: skip
    return result


def mapped(counts: Tensor, num_rows: int, rows: int) -> tuple[Tensor, int]:
    """int32 [3, bound]: slot, first row and end of every tile of so many rows, the rows past the counts as of a slot
    S, and -1 for no tile; and the bound."""
    slots = counts.numel()
    bound = num_rows // rows + slots + 1
    found = torch.empty(3, bound, dtype=torch.int32, device=counts.device)
    map_tiles[(triton.cdiv(bound, 16),)](
        counts.contiguous(), found, num_rows, bound, slots, rows, 16, triton.next_power_of_2(slots + 1))
    return found, bound


def _options(tiles: Tiles) -> dict[str, Any]:
    return {"num_warps": tiles.warps, "num_stages": tiles.stages}
