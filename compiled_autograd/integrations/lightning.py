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

    Use it as ``Trainer(..., callbacks=[CompiledAutogradCallback()])``. Each time the trainer logs, it also logs
    :meth:`Session.metrics`; after a batch with misses it logs :data:`MISSES`. A summary is logged when the training
    ends. With manual optimization, ``self.manual_backward`` is compiled too.

    Args:
        settings: the settings of :func:`compiled_autograd.enable`.

    Raises:
        UnknownSettingError, InvalidSettingError: see :func:`compiled_autograd.enable`.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Create a session for this training."""
        self._trainings.begin()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Enter the session once. The previous backward may have raised and left it entered."""
        self._trainings.leave_all()
        self._trainings.enter()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the session."""
        self._trainings.leave()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the misses of the batch, if any, and the metrics, if the trainer logs after this batch."""
        session = self._trainings.session
        every = trainer.log_every_n_steps
        if session is not None and every and trainer.global_step % every == 0 and (metrics := session.metrics()):
            pl_module.log_dict(metrics, on_step=True, on_epoch=False)
        missed = self._trainings.new_misses()
        if missed:
            pl_module.log(MISSES, float(missed), on_step=True, on_epoch=False)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the session, also after a backward whose error was caught, and log the summary."""
        self._trainings.leave_all()
        summary = self._trainings.summary()
        if summary is not None:
            rank_zero_info(summary.line)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the session after an error."""
        self._trainings.leave_all()
