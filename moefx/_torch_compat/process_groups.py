"""Process groups by names of one's own, and what `torch.distributed` has of them in private alone."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore  # the import makes the backend "fake" known


def default_store() -> dist.Store:
    """The store of the default process group: groups and watchdogs meet there before they have a connection."""
    return distributed_c10d._get_default_store()


def new_named_group(ranks: list[int], name: str, backend: str, timeout: timedelta, *,
                    urgent: bool = False) -> dist.ProcessGroup:  # fmt: skip
    """A process group of `ranks` (in this order), made by its members alone, under a name of the caller's choice.
    urgent: its kernels come before those of other streams, where the backend is NCCL.

    `dist.new_group(use_local_synchronization=True)` derives the name from the ranks and the number of groups that are
    open. A group made after an equal one was destroyed gets the same name, hence the old addresses in the store
    (gloo then fails to connect), and ranks with different numbers of open groups never meet.
    """
    world = distributed_c10d._world
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend(backend),
        default_store(),
        name,
        backend_options=_of_high_priority(timeout) if urgent and backend == "nccl" else None,
        timeout=timeout,
        group_desc=name,
    )
    world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


def _of_high_priority(timeout: timedelta) -> object:
    options = distributed_c10d.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # torch warns where it is another one than the group's
    return options


def abort_groups(groups: list[dist.ProcessGroup]) -> None:
    """End what is under way in groups of NCCL, and the groups. All at once, or one would wait for another."""
    backends = [group._get_backend(torch.device("cuda")) for group in groups]
    for backend in backends[:1]:
        backend._group_start()
    for group in groups:
        distributed_c10d._abort_process_group(group)
    for backend in backends[:1]:
        backend._group_end()


def is_group_open(group: dist.ProcessGroup) -> bool:
    """Whether the group is still registered: destroying the default group drops all others with it."""
    return group in distributed_c10d._world.pg_map


def all_gather_flat(output: Tensor, source: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Asynchronous all-gather of [N] to [n*N] (gloo takes no [n, N]): `all_gather_into_tensor` until torch 2.12, then
    deprecated in favour of a new name."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, source, group=group, async_op=True)


def all_gather_several(outputs: list[Tensor], sources: list[Tensor], group: dist.ProcessGroup) -> dist.Work:
    """Asynchronous all-gather of [N, ..] each to [n*N, ..] each, as one: `dist` has it as a context manager alone."""
    gather = getattr(group, "all_gather_single_coalesced", None) or group.allgather_into_tensor_coalesced
    return gather(outputs, sources)


def fake_store() -> dist.Store:
    """What `init_process_group("fake", store=..)` wants: a world of one process, whose peers are not there."""
    return FakeStore()
