"""A callback for the ``Trainer`` of Hugging Face's transformers (5.x)."""

from __future__ import annotations

import sys
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .summary import MISSES, InSession


class CompiledAutogradCallback(InSession, TrainerCallback):
    """Runs each backward of a training compiled, as ``with compiled_autograd.enable(**settings):`` does.

    ``Trainer(..., callbacks=[CompiledAutogradCallback()])``. What the trainer logs, and what ``report_to`` names gets,
    has :data:`MISSES` and :meth:`Session.metrics` then. A summary is printed when the training ends. A training that
    raises leaves the session on in its thread until the next one begins there.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Turn it on."""
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
        """Add misses and metrics to what is logged, and to the trainer's history, which has it already."""
        session = self.session
        if not self._trainings.is_on or logs is None or session is None:
            return
        more = session.metrics()
        more[MISSES] = logs.get(MISSES, 0) + self._trainings.new_misses()  # a trainer may have the callback twice
        logs.update(more)
        if state.log_history:
            state.log_history[-1].update(more)

    def _come_first(self) -> None:
        """Go before the other callbacks of the trainer that calls this one: those of ``report_to`` come before a
        user's, and would get a log without the metrics. A callback is given no trainer: the handler of callbacks is the
        ``self`` of a frame above (``CallbackHandler.call_event`` in ``trainer_callback.py``, transformers 5.24).
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
        """Turn it off, and say what it was worth."""
        self._trainings.leave_all()
        summary = self._trainings.summary()
        if summary is not None and state.is_world_process_zero:
            print(summary.line)  # noqa: T201  as the trainer prints what it logs
