"""A callback for the ``Trainer`` of Hugging Face's transformers (5.x)."""

from __future__ import annotations

import sys
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .summary import MISSES, InSession


class CompiledAutogradCallback(InSession, TrainerCallback):
    """Runs each backward of a training compiled, as ``with compiled_autograd.enable(**settings):`` does.

    Use it as ``Trainer(..., callbacks=[CompiledAutogradCallback()])``. The trainer's log, and the services in
    ``report_to``, then also get :data:`MISSES` and :meth:`Session.metrics`. A summary is printed when the training
    ends. A training that raises leaves the session entered in its thread until the next training begins there.

    Args:
        settings: the settings of :func:`compiled_autograd.enable`.

    Raises:
        UnknownSettingError, InvalidSettingError: see :func:`compiled_autograd.enable`.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Create and enter a session for this training."""
        self._come_first()
        self._trainings.begin()
        self._trainings.enter()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Add misses and metrics to the log entry, and to its copy in the trainer's history."""
        session = self.session
        if not self._trainings.is_on or logs is None or session is None:
            return
        more = session.metrics()
        more[MISSES] = logs.get(MISSES, 0) + self._trainings.new_misses()  # a trainer may have the callback twice
        logs.update(more)
        if state.log_history:
            state.log_history[-1].update(more)

    def _come_first(self) -> None:
        """Move this callback to the front of its trainer's callbacks. Those of ``report_to`` come before a user's, and
        would get the log without the metrics. A callback has no access to its trainer: the list of callbacks belongs to
        ``self`` in a frame above (``CallbackHandler.call_event`` in ``trainer_callback.py``, transformers 5.24).
        """
        frame = sys._getframe(1).f_back
        while frame is not None:
            callbacks = getattr(frame.f_locals.get("self"), "callbacks", None)
            if isinstance(callbacks, list) and self in callbacks:
                callbacks.remove(self)
                callbacks.insert(0, self)
                return
            frame = frame.f_back

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Leave the session, and print the summary."""
        self._trainings.leave_all()
        summary = self._trainings.summary()
        if summary is not None and state.is_world_process_zero:
            print(summary.line)  # noqa: T201  the trainer prints its log too
