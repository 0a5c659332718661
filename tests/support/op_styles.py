"""Experts that are made of custom autograd functions, einsums and products with vectors, or read their weights by other
indices than their own numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.styles import INNER, Chunks, D, E, K, Layer, Stacked
from tests.support.weight_styles import Listed


class SwiGlu(torch.autograd.Function):
    """With a backward of its own, as fused ones have."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        return grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid


class Rounded(torch.autograd.Function):
    """A gradient that passes straight through, but for its size."""

    @staticmethod
    def forward(ctx, x, steps):
        return (x * steps).round() / steps

    @staticmethod
    def backward(ctx, grad):
        return 0.5 * grad, None


class Ternary(torch.autograd.Function):
    """Of all weights of an expert."""

    @staticmethod
    def forward(ctx, weight):
        return weight.sign() * weight.abs().mean()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, INNER), nn.Linear(D, INNER), nn.Linear(INNER, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(SwiGlu.apply(self.gate(Rounded.apply(x, 8)), self.up(x)))


class OwnFunctions(Listed):
    """Of rows."""

    leaves_out_idle = True

    def expert(self) -> nn.Module:
        return Gated()


class TernaryLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Ternary.apply(self.weight), self.bias)


class FunctionsOfWeights(Listed):
    def expert(self) -> nn.Module:
        return nn.Sequential(TernaryLinear(D, INNER), nn.SiLU(), TernaryLinear(INNER, D))


class StackedLoop(Stacked):
    """A loop over experts whose weights are stacked."""

    def expert(self, e: int, rows: Tensor) -> Tensor:
        return F.silu(rows @ Ternary.apply(self.up[e])) @ Ternary.apply(self.down[e])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e in range(E):
            token, choice = torch.where(chosen == e)
            out = out.index_add(0, token, self.expert(e, rows[token]) * weights[token, choice, None])
        return out.view_as(x)


class OwnFunctionsOfSorted(Stacked):
    """Between grouped matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(E, D, INNER) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        offs = torch.bincount(chosen.flatten(), minlength=E).cumsum(0).to(torch.int32)
        mine = Rounded.apply(rows[order // K], 8)
        hidden = SwiGlu.apply(F.grouped_mm(mine, self.gate, offs=offs), F.grouped_mm(mine, self.up, offs=offs))
        out = F.grouped_mm(hidden, self.down, offs=offs) * weights.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, order // K, out).view_as(x)


class EinsumLoop(StackedLoop):
    """Einsums of two and three operands, with "..." and without a result."""

    def expert(self, e: int, rows: Tensor) -> Tensor:
        hidden = F.silu(torch.einsum("... d, d h -> ... h", rows, self.up[e]))
        gate = torch.einsum("td,d", rows, self.up[e][:, 0])
        return torch.einsum("th,hd,t->td", hidden, self.down[e], gate.tanh())


class EinsumOfAllTokens(Stacked):
    """Every expert computes all tokens [B, S, D]."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(x)
        for e in range(E):
            y = torch.einsum("hd,bsh->bsd", self.down[e], F.silu(torch.einsum("bsd,dh->bsh", x, self.up[e])))
            out = out + y * (weights * (chosen == e)).sum(-1)[..., None]
        return out


class OwnGates(StackedLoop):
    """A product with a vector of every expert."""

    def expert(self, e: int, rows: Tensor) -> Tensor:
        gate = (rows @ self.up[e][:, 0]).sigmoid() + torch.mv(rows, self.down[e][1]).sigmoid()
        return F.silu(rows @ self.up[e]) * gate[:, None] @ self.down[e]


class LastAxis(StackedLoop):
    """W[:, :, e]"""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(D, INNER, E) * 0.3)

    def expert(self, e: int, rows: Tensor) -> Tensor:
        return F.silu(rows @ self.up[..., e]) @ self.down[e]


class OtherPlaces(StackedLoop):
    """Two matrices of an expert beside each other, or in one parameter with two axes; weights in the opposite order,
    and for two experts each."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2 * E, D, INNER) * 0.3)
        self.both = nn.Parameter(torch.randn(2, E, INNER, D) * 0.3)
        self.few = nn.Parameter(torch.randn(E // 2, D, D) * 0.3)

    def expert(self, e: int, rows: Tensor) -> Tensor:
        hidden = F.silu(rows @ self.few[e // 2] @ self.up[2 * e]) * (rows @ self.up[2 * e + 1])
        return hidden @ (self.both[0, e] - self.both[1, e, :, :]) @ self.down[-1 - e, :D]


class Vectors(StackedLoop):
    """Rows that are matrices in themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(E, 4, 6) * 0.3)
        self.shift, self.back = nn.Parameter(torch.randn(E, 6) * 0.3), nn.Parameter(torch.randn(E, 4, 6) * 0.3)
        self.norm, self.scale = nn.Parameter(torch.randn(E, 4)), nn.Parameter(torch.randn(E, 4, 1))

    def expert(self, e: int, rows: Tensor) -> Tensor:
        heads = F.layer_norm(rows.view(-1, 4, 4), (4,), self.norm[e]) * self.scale[e]
        heads = F.silu(F.linear(heads, self.mix[e].t(), self.shift[e]))
        heads = torch.einsum("nhi,oi->nho", heads.transpose(1, 2).transpose(1, 2), self.back[e]) + heads[..., :4]
        return F.silu(heads.flatten(1).unsqueeze(1) @ self.up[e]).squeeze(1) @ self.down[e]


class VectorsOfAllTokens(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(x)
        for e in range(E):
            y = F.silu(x.unflatten(-1, (4, 4)) @ self.up[e, :4, :8]) @ self.down[e, :8, :4]
            out = out + y.flatten(-2) * (weights * (chosen == e)).sum(-1)[..., None]
        return out


class Apart(StackedLoop):
    """Rows are taken apart to rows of a quarter, and get an axis in front."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.shift = nn.Parameter(torch.randn(E, 4, 4) * 0.3), nn.Parameter(torch.randn(E, 4) * 0.3)

    def expert(self, e: int, rows: Tensor) -> Tensor:
        parts = F.silu(rows.reshape(-1, 4) @ self.mix[e] + self.shift[e]).softmax(1).view(-1, D)
        hidden = F.silu((rows + parts).unsqueeze(0) @ self.up[e])
        return (hidden.softmax(2)[0][None] @ self.down[e]).squeeze(0)


class ApartOfAllTokens(Listed):
    """Experts that flatten [B, S, D] themselves, and norms that do not."""

    def expert(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(D, INNER), nn.LayerNorm(INNER), nn.Linear(INNER, D)])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(x)
        for e, (up, norm, down) in enumerate(self.experts):
            hidden = norm(up(x.view(-1, D)).view(*x.shape[:2], INNER))
            gate, value = hidden.chunk(2, dim=2)
            y = down(torch.cat([F.silu(gate), value], dim=2)[:, :, :INNER].softmax(2).flatten(0, 1)).view(x.shape)
            out = out + y * (weights * (chosen == e)).sum(-1)[..., None]
        return out


class ScoresOfExperts(StackedLoop):
    """The best experts of every token out of scores [E, T]; the ids are turned to [T, K]."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = (self.router.weight @ rows.t()).softmax(0).topk(K, dim=0)
        weights, chosen = weights.t(), chosen.t()
        out = torch.zeros_like(rows)
        for e in range(E):
            token, choice = torch.where(chosen == e)
            out = out.index_add(0, token, self.expert(e, rows[token]) * weights[token, choice, None])
        return out.view_as(x)


class Scaled(nn.Linear):
    """A scale for every column, and one number for all of them."""

    def __init__(self) -> None:
        super().__init__(D, D)
        self.scale, self.gain = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale * self.gain


class ChunksScaled(Chunks):
    """In static blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Scaled() for _ in range(E))


class GatheredBuffers(Layer):
    """Frozen weights in buffers, with trained corrections, gathered for every token."""

    def __init__(self) -> None:
        super().__init__()
        del self.experts
        self.register_buffer("base", torch.randn(E, D, D) * 0.3)
        self.register_buffer("frozen", torch.randn(E, D, D) * 0.3)
        self.a, self.b = nn.Parameter(torch.randn(E, D, 2) * 0.3), nn.Parameter(torch.randn(E, 2, D) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, ids = self.router(rows).softmax(-1).topk(K, dim=-1)
        low = torch.einsum("td,tkdr,tkri->tki", rows, self.a[ids], self.b[ids])
        hidden = F.silu(torch.einsum("td,tkdi->tki", rows, self.base[ids]) + low)
        return (torch.einsum("tki,tkid->tkd", hidden, self.frozen[ids]) * weights[..., None]).sum(1).view_as(x)


class WithoutGradient(Layer):
    """Experts under no_grad, one by one: what comes of them has no gradient, but their weights in the sum have."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == e)
            with torch.no_grad():
                y = expert(rows[token])
            out = out.index_add(0, token, y * weights[token, choice, None])
        return out.view_as(x)


class Damped(torch.autograd.Function):
    """The gradient is scaled by a number."""

    @staticmethod
    def forward(ctx, x, number):
        ctx.save_for_backward(number)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (number,) = ctx.saved_tensors
        return grad * number, None


class FunctionsOfNumbers(StackedLoop):
    """A number for every expert: one out of a buffer, and by how many tokens it has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.linspace(0.5, 2.0, E))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        shares = 1.0 / F.one_hot(chosen, E).sum((0, 1)).clamp(min=1).to(rows.dtype)
        out = torch.zeros_like(rows)
        for e in range(E):
            token, choice = torch.where(chosen == e)
            mine = Damped.apply(self.expert(e, Damped.apply(rows[token], self.numbers[e])), shares[e])
            out = out.index_add(0, token, mine * weights[token, choice, None])
        return out.view_as(x)


OP_STYLES = (OwnFunctions, FunctionsOfWeights, StackedLoop, OwnFunctionsOfSorted, EinsumLoop, EinsumOfAllTokens,
             OwnGates, LastAxis, OtherPlaces, Vectors, VectorsOfAllTokens, Apart, ApartOfAllTokens,
             ScoresOfExperts, ChunksScaled, GatheredBuffers, WithoutGradient, FunctionsOfNumbers)  # fmt: skip


class Mixing(torch.autograd.Function):
    """The gradient of a row depends on those of others."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return grad / (grad.norm() + 1e-3)


class OwnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class MixesGradients(StackedLoop):
    def expert(self, e: int, rows: Tensor) -> Tensor:
        return Mixing.apply(F.silu(rows @ self.up[e])) @ self.down[e]


class OtherFunctions(StackedLoop):
    def expert(self, e: int, rows: Tensor) -> Tensor:
        return F.silu(Rounded.apply(rows, e + 1) @ self.up[e]) @ self.down[e]


class FunctionOfBoth(StackedLoop):
    def expert(self, e: int, rows: Tensor) -> Tensor:
        return F.silu(OwnLinear.apply(rows, self.up[e])) @ self.down[e]


class Heads(StackedLoop):
    def expert(self, e: int, rows: Tensor) -> Tensor:
        heads = torch.einsum("nhd,hdo->nho", rows.view(-1, 4, 4), self.up[e].view(4, 4, INNER))
        return F.silu(heads.sum(1)) @ self.down[e]


class Along(StackedLoop):
    """Mixes large values of several rows: random ones that are small would not tell."""

    def expert(self, e: int, rows: Tensor) -> Tensor:
        hidden = F.silu(rows @ self.up[e])
        return (hidden + self.mixed((hidden - 8).relu())) @ self.down[e]

    def mixed(self, large: Tensor) -> Tensor:
        return large.cumsum(0)


class AlongSorted(Along):
    def mixed(self, large: Tensor) -> Tensor:
        return large.sort(0).values


class AlongNormed(Along):
    def mixed(self, large: Tensor) -> Tensor:
        return F.normalize(large, dim=0)


class AlongTokens(Along):
    """Of [B, S, D], along S."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(x)
        for e in range(E):
            out = out + self.expert(e, x) * (weights * (chosen == e)).sum(-1)[..., None]
        return out

    def mixed(self, large: Tensor) -> Tensor:
        return large.softmax(1)


class GroupNormed(StackedLoop):
    """A scale for every head, on its own axis."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(E, 4))

    def expert(self, e: int, rows: Tensor) -> Tensor:
        heads = F.group_norm(rows.view(-1, 4, 4), 2, self.scale[e])
        return F.silu(heads.flatten(1) @ self.up[e]) @ self.down[e]


OP_REFUSALS = {
    Along: "cumsum along dim 0 mixes the rows", AlongSorted: "sort along dim 0 mixes the rows",
    AlongNormed: "normalize along dim 0 mixes the rows", AlongTokens: "softmax along dim 1 mixes the rows",
    GroupNormed: "group_norm takes a parameter",
    MixesGradients: "gradient of mlp_up differs", OtherFunctions: "custom autograd functions that do different things",
    FunctionOfBoth: "a custom autograd function takes a parameter of one expert",
    Heads: "einsum takes a parameter of one expert",
}  # fmt: skip
