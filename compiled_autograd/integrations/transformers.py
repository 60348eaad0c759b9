"""A callback for the ``Trainer`` of Hugging Face's transformers (5.x)."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..api import enable
from ..engine.session import Session
from .summary import Summary, misses

MISSES = "backward_misses"
"""The name in the trainer's log: how many backwards were no hits since it last logged."""


class CompiledAutogradCallback(TrainerCallback):
    """Runs each backward of a training compiled, as ``with compiled_autograd.enable(**settings):`` does.

    ``Trainer(..., callbacks=[CompiledAutogradCallback()])``. What the trainer logs has :data:`MISSES` then, and a
    summary is printed when the training ends. A training that raises leaves the session on in its thread until the
    next one begins.

    Args:
        settings: those of :func:`compiled_autograd.enable`.

    Attributes:
        session: that of the last training; None before the first.

    Raises:
        UnknownSettingError, InvalidSettingError: as ``enable`` does.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._is_on = False
        self._logged = 0
        self.session: Session | None = None
        enable(**settings)  # says now what is wrong with them

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Turn it on."""
        self._leave()
        self.session, self._logged = enable(**self._settings), 0
        self.session.__enter__()
        self._is_on = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Add the misses to what is logged, and to the trainer's history, which has it already."""
        if not self._is_on or self.session is None or logs is None:
            return
        now = misses(self.session.stats())
        logs[MISSES], self._logged = now - self._logged, now
        if state.log_history:
            state.log_history[-1][MISSES] = logs[MISSES]

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Turn it off, and say what it was worth."""
        self._leave()
        if self.session is not None and state.is_world_process_zero:
            print(Summary.of(self.session))  # noqa: T201  as the trainer prints what it logs

    def _leave(self) -> None:
        if self._is_on and self.session is not None:
            self._is_on = False
            self.session.__exit__(None, None, None)
