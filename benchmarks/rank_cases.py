"""What `gpu_ranks.py` runs on every rank: a small model, its parity with one device, and what befalls ranks."""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import moefx
from moefx.errors import CollectiveError, MoefxError
from moefx.runtime.agreement import gather
from moefx.runtime.order import deadlock

D, H, E, K, V = 64, 96, 8, 2, 64
TOLERANCE = 1e-5  # in fp32, of max|a - b| / max|b|
PATIENCE_S = 8.0  # of ranks that wait for one that is gone


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.up, self.glu, self.down = (
            nn.Parameter(torch.randn(E, *shape) * shape[0] ** -0.5) for shape in ((D, H), (D, H), (H, D))
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, ids = self.gate(rows).softmax(-1).topk(K, -1)
        out = torch.zeros_like(rows)
        for e in range(E):
            token, choice = torch.where(ids == e)
            hidden = F.silu(rows[token] @ self.glu[e]) * (rows[token] @ self.up[e])
            out = out.index_add(0, token, (hidden @ self.down[e]) * weights[token, choice, None])
        return out.view_as(x)


class Blocks(Moe):
    """Every expert takes as many rows: a GShard layer with a capacity."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, ids = self.gate(rows).softmax(-1).topk(K, -1)
        capacity = max(rows.shape[0] * K // E, 1)
        hot = F.one_hot(ids, E)
        places = ((hot.view(-1, E).cumsum(0) - 1).view_as(hot) * hot).sum(-1)
        mask = (hot * (places < capacity)[..., None]).to(x.dtype)
        block = mask[..., None] * F.one_hot(places.clamp(max=capacity - 1), capacity).to(x.dtype)[..., None, :]
        sent = torch.einsum("tkec,td->ecd", block, rows)
        hidden = F.silu(torch.bmm(sent, self.glu)) * torch.bmm(sent, self.up)
        return torch.einsum("tkec,tk,ecd->td", block, weights, torch.bmm(hidden, self.down)).view_as(x)


class Block(nn.Module):
    def __init__(self, moe: type[Moe]) -> None:
        super().__init__()
        self.first, self.second, self.moe = nn.LayerNorm(D), nn.LayerNorm(D), moe()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.first(x)
        q, k, v = (each(h).view(batch, length, 4, D // 4).transpose(1, 2) for each in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, D)
        x = x + self.o(h)
        return x + self.moe(self.second(x))


class Net(nn.Module):
    """Two layers, since exchanges of one meet those of the other."""

    def __init__(self, moe: type[Moe] = Moe) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.blocks = nn.ModuleList(Block(moe) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(frozen=True)
class Rank:
    """One of `world`. steps: of training behind the one that is compared."""

    rank: int
    world: int
    device: str
    steps: int

    def mesh(self, dims: str, device: str | None = None) -> Any:
        """dims: "ep={n}", or of h = n / 2."""
        found = dict(each.split("=") for each in dims.format(n=self.world, h=self.world // 2).split(","))
        sizes = tuple(map(int, found.values()))
        return init_device_mesh(device or self.device, sizes, mesh_dim_names=tuple(found))

    def batch(self, reader: int, step: int = 0, length: int = 16, ids: int = V) -> Tensor:
        """For the ranks that read this one. ids: so many different ones, of which few choose few experts."""
        generator = torch.Generator().manual_seed(1000 * step + reader)
        return torch.randint(0, ids, (2, length + 1), generator=generator).to(self.device)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def difference(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12)).item()


def train(compiled: nn.Module, batches: list[Tensor]) -> float:
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-3)
    last = torch.zeros(())
    for ids in batches:
        optimizer.zero_grad()
        last = loss_of(compiled, ids)
        last.backward()
        nn.utils.clip_grad_norm_(compiled.parameters(), 1.0)
        optimizer.step()
    return last.item()


def parity(here: Rank, dims: str, moe: type[Moe] = Moe, tolerance: float = TOLERANCE, **options: Any) -> dict[str, Any]:
    """Loss and all gradients of a step beside the plain model's, the mean over the batches of all ranks; then steps of
    other sizes and routings."""
    plain, mesh = Net(moe).to(here.device), here.mesh(dims)
    compiled = moefx.compile(copy.deepcopy(plain), mesh, **options)
    reader, readers = compiled.data_mesh.get_local_rank(), compiled.data_mesh.size()
    losses = [loss_of(plain, here.batch(each)) for each in range(readers)]
    (sum(losses) / readers).backward()
    loss = loss_of(compiled, here.batch(reader))
    loss.backward()
    errors = {"the loss": difference(loss.detach(), losses[reader].detach())}
    for (name, wanted), found in zip(plain.named_parameters(), compiled.parameters()):
        errors[name] = difference(whole(found.grad), wanted.grad)
    worst = max(errors, key=errors.get)
    last = train(compiled, [here.batch(reader, step, 8 + 4 * (step % 4)) for step in range(1, here.steps + 1)])
    compiled.close()
    is_right = errors[worst] < tolerance and last == last
    return {"status": "passed" if is_right else "wrong", "error": errors[worst], "said": "" if is_right else worst}


def order(here: Rank) -> dict[str, Any]:
    """Many steps of very uneven routing, other sizes on every rank, with exchanges of all purposes on several groups:
    they end, and ranks have begun all collectives in orders that fit together."""
    options = {"chunks": 2, "scheduler": "optsche", "shard_dense": True, "placement": "exact"}
    compiled = moefx.compile(Net().to(here.device), here.mesh("ep={n}"), **options)
    session = compiled._session
    session.begun = []
    draw = torch.Generator().manual_seed(here.rank)
    number = lambda high: int(torch.randint(1, high, (), generator=draw))  # noqa: E731
    count = 20 * here.steps
    last = train(compiled, [here.batch(here.rank, step, number(24), number(8)) for step in range(count)])
    begun, session.begun = session.begun, None
    complaint = deadlock(dict(enumerate(gather(session, ("ep",), begun, "comparing orders"))))
    compiled.close()
    is_right = complaint is None and last == last
    groups = len({(each.ranks, each.purpose) for each in begun})
    said = f"{count} steps, {len(begun)} collectives on {groups} groups" if is_right else complaint or "no number"
    return {"status": "passed" if is_right else "wrong", "said": said}


def checkpoints(here: Rank) -> dict[str, Any]:
    """What ranks save on the device, ranks on CPU load: parameters, optimizer, and the next step."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    compiled = moefx.compile(Net().to(here.device), here.mesh("ep={n}"), shard_dense=True)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-3)
    loss_of(compiled, here.batch(here.rank)).backward()
    optimizer.step()
    moefx.checkpoint.save(folder[0], compiled, optimizer, step=1)
    wanted = [whole(each.detach()).cpu() for each in compiled.parameters()]
    wanted_loss = loss_of(compiled, here.batch(here.rank, 1)).item()
    compiled.close()
    dims = "ep={h},esp=2" if here.world > 1 else "ep=1"
    loaded = moefx.compile(Net(), here.mesh(dims, "cpu"))
    moefx.checkpoint.load(folder[0], loaded, torch.optim.AdamW(loaded.parameters(), lr=1e-3))
    same = all(torch.equal(whole(each.detach()), other) for each, other in zip(loaded.parameters(), wanted))
    error = abs(loss_of(loaded, here.batch(here.rank, 1).cpu()).item() / wanted_loss - 1)
    loaded.close()
    return {"status": "passed" if same and error < TOLERANCE else "wrong", "error": error}


# ---- what befalls the last rank in its second step, and what the others say of it


class RunsOut(TorchDispatchMode):
    """No memory is left for a matrix product behind the first exchange of tokens."""

    def __init__(self, session: Any) -> None:
        super().__init__()
        self.session = session
        session.trace = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        is_product = func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        if is_product and any(each.kind == "all_to_all" for each in self.session.trace):
            raise torch.OutOfMemoryError("out of memory")
        return func(*args, **(kwargs or {}))


def dies(here: Rank, compiled: Any, step: Callable[[], None]) -> None:
    os._exit(9)


def stalls(here: Rank, compiled: Any, step: Callable[[], None]) -> None:
    time.sleep(3 * PATIENCE_S)
    os._exit(9)


def leaves(here: Rank, compiled: Any, step: Callable[[], None]) -> None:
    compiled.close()
    os._exit(9)


def runs_out(here: Rank, compiled: Any, step: Callable[[], None]) -> None:
    with RunsOut(compiled._session):
        step()


def befalls(here: Rank, fault: Callable, own: str, others: str) -> dict[str, Any]:
    """own: what the rank says itself. others: what all others say of it."""
    compiled = moefx.compile(Net().to(here.device), here.mesh("ep={n}"))
    last = here.world - 1

    def step() -> None:
        loss_of(compiled, here.batch(here.rank)).backward()

    step()
    compiled._session.timeout = timedelta(seconds=PATIENCE_S)
    start, said = time.monotonic(), "nothing"
    try:
        if here.rank == last:
            fault(here, compiled, step)
        else:
            step()
            if here.device == "cuda":
                torch.cuda.synchronize()
    except (MoefxError, torch.OutOfMemoryError) as error:
        said = f"{type(error).__name__}: {error}"
    waited = time.monotonic() - start
    start = time.monotonic()
    compiled.close()
    closed = time.monotonic() - start
    wanted = own if here.rank == last else others.format(last=last)
    is_named = here.rank == last or CollectiveError.__name__ in said
    is_right = is_named and wanted in said and waited < 3 * PATIENCE_S and closed < 2 * PATIENCE_S
    return {"status": "passed" if is_right else "wrong",
            "said": f"after {waited:.0f} s, closed in {closed:.0f} s" if is_right else said[:400]}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """worlds: numbers of ranks that it is for. lost: whether the last rank gives no answer."""

    run: Callable[[Rank], dict[str, Any]]
    worlds: tuple[int, ...] = (2, 4)
    lost: bool = False


_OVERLAP = {"chunks": 4, "scheduler": "optsche"}
CASES: dict[str, Case] = {
    "direct": Case(partial(parity, dims="ep={n}"), (1, 2, 4)),
    "chunks": Case(partial(parity, dims="ep={n}", **_OVERLAP), (1, 2, 4)),
    "order": Case(order, (1, 2, 4)),
    "1dh": Case(partial(parity, dims="ep={n}", alltoall="1dh", ranks_per_node=2)),
    "2dh": Case(partial(parity, dims="ep={n}", alltoall="2dh", ranks_per_node=2, chunks=2)),
    "pipe": Case(partial(parity, dims="ep={n}", alltoall="pipe", ranks_per_node=2)),
    "dedup": Case(partial(parity, dims="ep={n}", alltoall="dedup", ranks_per_node=2)),
    "saa": Case(partial(parity, dims="dp={h},mp=2", moe=Blocks, split="s2", ep=2)),
    "s1": Case(partial(parity, dims="dp={h},mp=2", split="s1", ep=2)),
    "s2": Case(partial(parity, dims="dp={h},mp=2", split="s2-tokens", ep=2)),
    "s3": Case(partial(parity, dims="ep={h},esp=2", split="s3")),
    "gradients": Case(partial(parity, dims="dp={n}")),
    "gradients of both": Case(partial(parity, dims="dp=2,ep=2"), (4,)),
    "shard_dense": Case(partial(parity, dims="ep={n}", shard_dense=True), (1, 2, 4)),
    "exact": Case(partial(parity, dims="ep={n}", placement="exact")),
    "auto": Case(partial(parity, dims="ep={n}", placement="auto", machine="h100-8x400g")),
    "r": Case(partial(parity, dims="ep={h},esp=2", r=1)),
    "offload": Case(partial(parity, dims="ep={n}", keep="mpipemoe-s1", **_OVERLAP), (1, 2, 4)),
    "checkpoints": Case(checkpoints, (1, 2, 4)),
    "killed": Case(partial(befalls, fault=dies, own="", others="rank {last}: silent since"), lost=True),
    "stalled": Case(partial(befalls, fault=stalls, own="", others="rank {last}: not waiting for anyone"), lost=True),
    "leaves early": Case(partial(befalls, fault=leaves, own="", others="rank {last}: closed its session"), lost=True),
    "out of memory": Case(partial(befalls, fault=runs_out, own="OutOfMemory", others="rank {last}: raised an error")),
}
