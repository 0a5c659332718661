"""Handles of collectives under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Generic, TypeVar

from torch import Tensor

from moefx.errors import StaleStateError, warn
from moefx.runtime.groups import Axes
from moefx.runtime.session import Session, Work
from moefx.runtime.streams import HostCopy

T = TypeVar("T")


class Handle(Generic[T]):
    """A collective that was started. It owns its inputs and its output until it is waited for, exactly once.

    A second wait raises StaleStateError; a handle dropped without a wait warns, since its peers then disagree about
    what was received.
    """

    __slots__ = ("_axes", "_behind", "_finish", "_owned", "_session", "_text", "_timed", "_work")

    def __init__(
        self,
        session: Session,
        text: str,
        axes: Axes,
        finish: Callable[[], T],
        *,
        work: Work | None = None,
        owned: Sequence[Tensor] = (),
        behind: Handle | None = None,
        timed: tuple[str, str] | None = None,
    ) -> None:
        """finish: makes the result when `work` is done. owned: tensors that must live until then. behind: the handle
        that `finish` waits for, where this one is not the first. timed: (kind, region) under which the session adds up
        how long ranks stand still for it."""
        self._behind, self._timed = behind, timed
        self._session = session
        self._text = text
        self._axes = axes
        self._finish: Callable[[], T] | None = finish
        self._work = work
        self._owned = owned

    @property
    def owned(self) -> Sequence[Tensor]:
        """What must live until it is over."""
        return self._owned

    def wait(self) -> T:
        """The result, on the current stream. Raises CollectiveError naming the ranks if it fails or takes too long."""
        finish, work = self._finish, self._work
        if finish is None:
            raise StaleStateError(f"{self._text} was already waited for.", hint="keep the result, not the handle")
        self._finish = self._work = None
        try:
            if work is not None:
                timed = self._session.standing_still(*self._timed) if self._timed else nullcontext()
                with timed, self._session.guard(self._text, self._axes):
                    self._block(work)
            return finish()
        finally:
            self._owned = ()

    def on_done(self, callback: Callable[[], object]) -> bool:
        """Call back, perhaps from another thread, when the collective is done: at once where nothing is under way, on
        CUDA with a current stream that is behind it. False: this backend cannot, and there is no call."""
        work = self._work if self._behind is None else self._behind._work
        if work is None:
            callback()
            return True
        if isinstance(work, HostCopy):
            work.on_done(callback)
            return True
        try:
            work.get_future().add_done_callback(lambda _: callback())
        except (RuntimeError, NotImplementedError):
            return False
        return True

    def _block(self, work: Work) -> None:
        # With a timeout, NCCL would block the host; without one, it makes the current stream wait.
        on_device = self._session.view.device_type != "cpu" and not isinstance(work, HostCopy)
        if on_device or work.is_completed():
            work.wait()
            if on_device:
                self._session.awaits(work, self._text, self._axes)
        else:
            work.wait(self._session.timeout)

    def __del__(self) -> None:
        if self._finish is not None and not self._session.is_over:
            warn(f"{self._text} was started and never waited for", RuntimeWarning)
