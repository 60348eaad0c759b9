"""A callback for the ``Trainer`` of Lightning (2.x), installed as ``lightning`` or as ``pytorch_lightning``."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities import rank_zero_info
except ImportError:
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.utilities import rank_zero_info

from ..api import enable
from ..engine.session import Session
from .summary import Summary, misses

MISSES = "backward_misses"
"""The name in the trainer's log: how many backwards of a batch were no hits."""


class CompiledAutogradCallback(Callback):
    """Runs each backward of ``fit`` compiled, as ``with compiled_autograd.enable(**settings):`` does.

    ``Trainer(..., callbacks=[CompiledAutogradCallback()])``. The trainer's log has :data:`MISSES` then, for batches
    that had any, and a summary is logged when the training ends. With manual optimization, ``self.manual_backward``
    is compiled too.

    Args:
        settings: those of :func:`compiled_autograd.enable`.

    Attributes:
        session: that of the last training; None before the first.

    Raises:
        UnknownSettingError, InvalidSettingError: as ``enable`` does.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._entered = 0
        self._logged = 0
        self.session: Session | None = None
        enable(**settings)  # says now what is wrong with them

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A session for this training."""
        self.session, self._logged = enable(**self._settings), 0

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Turn it on."""
        if self.session is not None:
            self.session.__enter__()
            self._entered += 1

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Turn it off."""
        self._leave()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the misses of the batch, if there were any."""
        if self.session is None:
            return
        now = misses(self.session.stats())
        if now != self._logged:
            pl_module.log(MISSES, float(now - self._logged), on_step=True, on_epoch=False)
            self._logged = now

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what it was worth."""
        if self.session is not None:
            rank_zero_info(str(Summary.of(self.session)))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """A backward that raised leaves nothing turned on."""
        while self._entered:
            self._leave()

    def _leave(self) -> None:
        if self._entered and self.session is not None:
            self._entered -= 1
            self.session.__exit__(None, None, None)
