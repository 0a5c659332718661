"""What a device waits for while the host goes on, by works that are over when a test says so: no GPU is needed."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
from torch.distributed.device_mesh import init_device_mesh

from moefx.errors import CollectiveError
from moefx.runtime import groups
from moefx.runtime.groups import GroupSet
from moefx.runtime.handles import Handle
from moefx.runtime.overdue import Overdue
from moefx.runtime.session import Session
from tests.support.ranks import one_rank


class Work:
    """Of NCCL: to wait for it holds up the device alone."""

    is_over = False

    def is_completed(self) -> bool:
        return self.is_over

    def wait(self) -> bool:
        return True


def until(condition, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_what_holds_the_device_up_is_named_once():
    told = []
    overdue = Overdue(lambda *what: told.append(what), lambda: 0.2, 0.02)
    works = [Work() for _ in range(3)]
    for number, work in enumerate(works):
        overdue.add(work, f"exchange {number}", "ep")
    works[0].is_over = True
    assert until(lambda: told)
    time.sleep(0.3)
    ((doing, axes, error),) = told
    assert (doing, axes) == ("exchange 1", "ep")
    assert str(error) == "the device has waited for it for 0.2 s"


def test_a_device_that_gets_on_has_time():
    told = []
    overdue = Overdue(lambda *what: told.append(what), lambda: 0.4, 0.02)
    works = [Work() for _ in range(4)]
    for work in works:
        overdue.add(work, "exchange", "ep")
    for work in works:
        time.sleep(0.2)
        work.is_over = True
    assert not until(lambda: told, 0.6)
    overdue.close()


def _held_up(session: Session, abort: mock.Mock) -> None:
    assert Handle(session, "all_to_all of mlp", "ep", lambda: 7, work=Work()).wait() == 7
    assert until(lambda: abort.called)
    time.sleep(0.1)


def test_a_session_gives_up_and_says_so_in_whatever_comes_next():
    """Its groups are aborted, so that the host, which may be held up by the device, goes on."""
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        session = Session(mesh, "model", timedelta(seconds=0.2), watch_period_s=0.05)
        session.view = replace(session.view, device_type="cuda")
        with mock.patch.object(GroupSet, "abort") as abort, pytest.warns(RuntimeWarning, match="of mlp: the device"):
            _held_up(session, abort)
        for next_use in (lambda: session.group("ep", "tokens", alone=True), lambda: session.begin_call(None)):
            with pytest.raises(CollectiveError, match="Rank 0 failed in all_to_all of mlp: the device has waited"):
                next_use()
        session.close()


@pytest.mark.parametrize("has_failed", [False, True])
def test_groups_of_nccl_are_aborted_behind_a_failure_alone(has_failed):
    """To destroy them would wait for what is under way in them."""
    with one_rank():
        session = Session(init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)), "model", timedelta(seconds=5))
        session.group("ep", "tokens", alone=True)
        session._groups._backend, session.has_failed = "nccl", has_failed
        made = [*session._groups._groups.values()]
        with mock.patch.object(groups, "abort_groups") as abort:
            session.close()
        assert abort.mock_calls == ([mock.call(made)] if has_failed else [])
        assert len(made) == 1


def test_aborts_are_one_for_nccl():
    """Or one group would wait for another that is not yet told."""
    log = []
    backend = SimpleNamespace(_group_start=lambda: log.append("start"), _group_end=lambda: log.append("end"))
    made = [mock.Mock(**{"_get_backend.return_value": backend}) for _ in range(2)]
    with mock.patch("torch.distributed.distributed_c10d._abort_process_group", log.append):
        groups.abort_groups(made)
        assert log == ["start", *made, "end"]
        groups.abort_groups([])
    assert len(log) == 4
