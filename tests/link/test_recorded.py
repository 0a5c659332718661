"""Streams that note who uses which memory: what is right goes through, and every edge that is dropped is found.

One layer in two chunks on two ranks, whose exchanges and host reads are beside its computation; the runtime is damaged,
not the code, whose damage tests/test_emitted_faults.py does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from moefx.compiler.pipeline import Pipeline
from moefx.errors import VerifyError
from moefx.link import rehearsal
from moefx.link.emit import load
from moefx.link.recorded import RecordedStreams
from moefx.options import Options
from moefx.runtime.handles import Handle
from moefx.runtime.streams import HostCopy
from tests.support.graphs import context, graph
from tests.support.linking import code_of
from tests.support.small import CAPTURED

# ---- single streams


@pytest.fixture
def streams():
    found = RecordedStreams()
    with found:
        yield found


def test_what_waits_is_behind(streams):
    x, out = torch.ones(4), torch.empty(4)
    mark = streams.collective("tokens", "all_to_all", [x], [out])
    assert (x + 1).tolist() == [2.0] * 4, "two reads meet"
    other = torch.zeros(8)
    second = streams.collective("tokens", "all_to_all", [x], [other[:4]])
    other[4:].add_(1)
    mark.wait()
    out.add_(x)
    second.wait()
    other.add_(1)
    assert streams.left() is None


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda x, out: out + 1, "aten.add.Tensor on the stream 'compute' reads memory that a sum on 'group' w"),
        (lambda x, out: x.add_(1), "'compute' writes to memory that a sum on 'group' reads"),
        (lambda x, out: torch.add(x, 1, out=out[1:5]), "'compute' writes to memory that a sum on 'group' writes to"),
        (lambda x, out: out[3:].t(), None),
        (lambda x, out: torch.empty_like(out), None),
    ],
    ids=["read", "write to the source", "write to the result", "a view", "a shape"],
)
def test_what_does_not_wait_is_found(streams, use, said):
    x, out = torch.ones(4), torch.empty(6)
    mark = streams.collective("group", "a sum", [x], [out])
    assert streams.left() == "a sum"
    if said is None:
        use(x, out)
    else:
        with pytest.raises(VerifyError, match=said):
            use(x, out)
    mark.wait()
    use(x, out)


def test_lanes_wait_for_what_they_are_behind(streams):
    x, host = torch.ones(4), torch.empty(4)
    out = streams.begin("out", lambda: host.copy_(x))
    with pytest.raises(VerifyError, match=r"'back' reads memory that aten.copy_.default on 'out' writes to"):
        streams.begin("back", lambda: x.clone().copy_(host))
    streams.begin("back", lambda: x.clone().copy_(host), behind=out)


def test_memory_is_there_until_somebody_waits(streams):
    held = [torch.ones(4)]
    mark = streams.begin("out", lambda: torch.empty(4).copy_(held[0]))
    held.clear()
    with pytest.raises(VerifyError, match=r"a copy \(out\) uses was given back before anybody waited"):
        mark.wait()


def test_the_host_reads_what_is_there(streams):
    copy = HostCopy(streams, torch.arange(3))
    with pytest.raises(AssertionError, match="nobody has waited"):
        copy.host.tolist()
    copy.wait()
    assert copy.host.tolist() == [0, 1, 2]


# ---- a program, and damage to what runs it


@pytest.fixture(scope="module")
def linked():
    gm, mode = graph(CAPTURED)
    run = Pipeline(context(mode, Options.named(chunks=2, scheduler="optsche", verify=2), dp=1, ep=2))
    step = run.run(gm)
    return run.checks, *code_of(gm, step)


def check(linked: Any) -> None:
    checks, step, code = linked
    functions = {name: load(text, name) for name, text in code.items()}
    checks.emitted(step, lambda graph, inputs: rehearsal.run(functions[graph], inputs, checks.ctx.mesh.root))


def test_a_program_goes_through(linked):
    check(linked)


def without_edge(self: RecordedStreams, stream: str, what: str, reads: Any, writes: Any) -> Any:
    """A collective that does not wait for the current stream when it begins."""
    self._use(stream, what, reads, writes)
    return self._mark(stream, what, [*reads, *writes])


def owns_nothing(original: Callable) -> Callable:
    def init(self: Handle, *args: Any, owned: Any = (), **kwargs: Any) -> None:
        original(self, *args, **kwargs)

    return init


FAULTS = {
    "a wait without its edge": (Handle, "_block", lambda self, work: None,
                                "'host reads' reads memory that all_gather on 'counts .*' writes to"),
    "a collective begins too early": (RecordedStreams, "collective", without_edge,
                                      "all_gather on the stream 'counts .*' reads memory that aten.* writes to"),
    "a copy begins too early": (RecordedStreams, "join", lambda self, stream, clock: None,
                                "on the stream 'counts .*' reads memory that aten.* on 'compute' writes to"),
    "a handle that owns nothing": (Handle, "__init__", owns_nothing(Handle.__init__),
                                   r"memory that \w+ uses was given back before anybody waited"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_damage_is_found(linked, name):
    where, method, damage, said = FAULTS[name]
    with mock.patch.object(where, method, damage), pytest.raises(VerifyError, match=said) as caught:
        check(linked)
    assert "at: `" in str(caught.value), "no line of the code is named"
