"""What ranks send to single ranks, all of one exchange at once: tensors, any number for any other rank or none; rows of
one tensor, as an all-to-all; or parts of all ranks, as an all-gather.

gloo exchanges here by sends and receives, not by its own collectives. Its all-to-all sends before it receives, so that
the permission to answer waits behind the data on the connection of two ranks, and one direction of the link idles while
the other is used: an exchange took one to two times as long, by chance.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moefx._torch_compat import all_gather_several as torch_all_gather_several

TAGS = 2**20  # of `exchange`, from 0 on; what goes to all ranks has the next one

Parcel = tuple[int, Tensor]  # the place of the other rank on the axis, and contiguous memory to send or to fill


def exchange(group: dist.ProcessGroup, ranks: Sequence[int], send: Sequence[Parcel], receive: Sequence[Parcel],
             tag: int) -> Any:  # fmt: skip
    """Start to send and to receive; what is under way, None if nothing is. ranks: of the axis. tag: below TAGS, tells
    exchanges apart that are under way at once. What two ranks have for each other goes in order."""
    if dist.get_backend(group) == "threaded":
        places = {rank: place for place, rank in enumerate(dist.get_process_group_ranks(group))}
        send, receive = ([(places[ranks[place]], rows) for place, rows in each] for each in (send, receive))
        packed = Packed(send, receive, len(places))
        work = dist.all_to_all_single(packed.output, packed.source, packed.received, packed.sent, group, async_op=True)
        return InTurn([lambda: work], packed.unpack)
    ops = [dist.P2POp(dist.irecv, tensor, ranks[place], group, tag) for place, tensor in receive]
    ops += [dist.P2POp(dist.isend, tensor, ranks[place], group, tag) for place, tensor in send]
    if not ops:
        return None
    return (Alone if dist.get_backend(group) == "gloo" else Together)(dist.batch_isend_irecv(ops))


def all_to_all(output: Tensor, source: Tensor, received: Sequence[int], sent: Sequence[int],
               group: dist.ProcessGroup | None) -> Any:  # fmt: skip
    """Start to send rows [sum(sent), ...] -> output [sum(received), ...], both contiguous; what is under way. Two ranks
    that exchange several times at once do so in the order of their starts."""
    if dist.get_backend(group) != "gloo":
        return dist.all_to_all_single(output, source, list(received), list(sent), group=group, async_op=True)
    return _exchange_rows(output.split(list(received)), source.split(list(sent)), group)


def all_gather_several(gathered: list[Tensor], mine: list[Tensor], group: dist.ProcessGroup) -> Any:
    """Start to gather [N, ..] each -> [n * N, ..] each, by rank, as one; what is under way. Two ranks exchange; a ring
    of more sends to one and receives from another, and crosses between nodes as few times as it can."""
    if dist.get_backend(group) != "gloo" or dist.get_world_size(group) != 2:
        return torch_all_gather_several(gathered, mine, group)
    works = [_exchange_rows(whole.chunk(2), [part, part], group) for whole, part in zip(gathered, mine)]
    return works[0] if len(works) == 1 else Alone([each for work in works for each in work.works])


def _exchange_rows(output: Sequence[Tensor], source: Sequence[Tensor], group: dist.ProcessGroup | None) -> Alone:
    """Of every rank, for every rank; receives first."""
    n, me = len(source), dist.get_rank(group)
    output[me].copy_(source[me])
    others = [(me + step) % n for step in range(1, n)]
    works = [dist.irecv(output[other], group=group, group_src=other, tag=TAGS)
             for other in reversed(others) if output[other].numel()]  # fmt: skip
    works += [dist.isend(source[other], group=group, group_dst=other, tag=TAGS)
              for other in others if source[other].numel()]  # fmt: skip
    return Alone(works)


class Together:
    """Works that are over when all are."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            _wait(work, timeout)
        return True

    def get_future(self) -> torch.futures.Future:
        return torch.futures.collect_all([work.get_future() for work in self._works])


class Alone:
    """Sends and receives of gloo, which know that they are over only when one thread, and no other, waits for each."""

    def __init__(self, works: Sequence[Any]) -> None:
        self.works = works
        self._done: Future | None = None

    def is_completed(self) -> bool:
        """Of those that `get_future` watches alone: the others' end is unknown before the wait."""
        return not self.works or (self._done is not None and self._done.done())

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._done is None:
            for work in self.works:
                work.wait() if timeout is None else work.wait(timeout)
            return True
        try:
            return self._done.result(timeout and timeout.total_seconds())
        except concurrent.futures.TimeoutError as error:  # not Python's own until 3.11
            raise RuntimeError("Operation timed out!") from error

    def get_future(self) -> Future:
        """Done when all are: a thread waits for them from now on, for measurements only."""
        if self._done is None:
            self._done = done = Future()
            threading.Thread(target=self._watch, args=(done,), daemon=True).start()
        return self._done

    def _watch(self, done: Future) -> None:
        try:
            for work in self.works:
                work.wait()
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(True)


class InTurn:
    """Works of which each begins when the one before is over. begins: start them, or find nothing to do (None). then:
    called behind each.

    The first begins now and the others in the wait, also where a rank has nothing to do in the first: all ranks begin
    the same ones at the same places of a program, or two that have several for each other would mix them up.
    """

    def __init__(self, begins: Sequence[Callable[[], Any]], then: Callable[[], object] = lambda: None) -> None:
        self._begins, self._then = deque(begins), then
        self._go_on()

    def _go_on(self) -> None:
        self._is_over = not self._begins
        self._work = None if self._is_over else self._begins.popleft()()

    def is_completed(self) -> bool:
        return self._is_over

    def wait(self, timeout: timedelta | None = None) -> bool:
        while not self._is_over:
            if self._work is not None:
                _wait(self._work, timeout)
            self._then()
            self._go_on()
        return True

    def get_future(self) -> torch.futures.Future:
        raise NotImplementedError("it goes on only when somebody waits for it")


def _wait(work: Any, timeout: timedelta | None) -> None:
    if timeout is None or work.is_completed():  # ranks that are threads have no time-outs
        work.wait()
    else:
        work.wait(timeout)


class Packed:
    """The parcels of one rank as an all-to-all of bytes: what ranks that are threads can do. source and sent: what
    goes out, and how much to each of n ranks; output and received: the same of what comes in."""

    def __init__(self, send: Sequence[Parcel], receive: Sequence[Parcel], n: int) -> None:
        self._receive = sorted(receive, key=_place)
        self.sent, self.received = _sizes(send, n), _sizes(receive, n)
        parts = [_bytes(tensor) for _, tensor in sorted(send, key=_place)]
        self.source = torch.cat([torch.empty(0, dtype=torch.uint8), *parts])
        self.output = torch.empty(sum(self.received), dtype=torch.uint8)

    def unpack(self) -> None:
        """Put what came in where it belongs."""
        parts = self.output.split([tensor.nbytes for _, tensor in self._receive])
        for (_, tensor), part in zip(self._receive, parts):
            _bytes(tensor).copy_(part)


def _place(parcel: Parcel) -> int:
    return parcel[0]


def _sizes(parcels: Sequence[Parcel], n: int) -> list[int]:
    return [sum(tensor.nbytes for other, tensor in parcels if other == place) for place in range(n)]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
