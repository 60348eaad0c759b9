"""A callback for the ``Trainer`` of Lightning (2.x), installed as ``lightning`` or as ``pytorch_lightning``."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities import rank_zero_info
except ImportError:
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.utilities import rank_zero_info

from .summary import MISSES, InSession


class CompiledAutogradCallback(InSession, Callback):
    """Runs each backward of ``fit`` compiled, as ``with compiled_autograd.enable(**settings):`` does.

    ``Trainer(..., callbacks=[CompiledAutogradCallback()])``. The trainer's log has :meth:`Session.metrics` then, as
    often as it is written, and :data:`MISSES` for batches that had any. A summary is logged when the training ends.
    With manual optimization, ``self.manual_backward`` is compiled too.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A session for this training."""
        self._trainings.begin()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Turn it on, once: the last one may have raised."""
        self._trainings.leave_all()
        self._trainings.enter()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Turn it off."""
        self._trainings.leave()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the misses of the batch, if there were any; and the metrics, if the log is written after this batch."""
        session = self._trainings.session
        every = trainer.log_every_n_steps
        if session is not None and every and trainer.global_step % every == 0 and (metrics := session.metrics()):
            pl_module.log_dict(metrics, on_step=True, on_epoch=False)
        missed = self._trainings.new_misses()
        if missed:
            pl_module.log(MISSES, float(missed), on_step=True, on_epoch=False)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what it was worth. A backward that raised, and whose error was caught, leaves nothing turned on."""
        self._trainings.leave_all()
        summary = self._trainings.summary()
        if summary is not None:
            rank_zero_info(summary.line)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """A backward that raised leaves nothing turned on."""
        self._trainings.leave_all()
