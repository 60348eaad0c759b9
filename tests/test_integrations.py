"""Callbacks for trainers of others, with the real libraries, beside the same training without them."""

from __future__ import annotations

import contextlib
import copy
import csv
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compiled_autograd as ca
from compiled_autograd.engine.session import current
from compiled_autograd.integrations.summary import Trainings, misses

from .helpers import assert_same, expect, in_threads, mlp

_SETTINGS: dict[str, Any] = {"backend": "eager", "cache_dir": False, "tune": False}


def _train(trainings: Trainings, backwards: int) -> None:
    trainings.begin()
    trainings.enter()
    for _ in range(backwards):
        mlp()(torch.randn(3, 8)).sum().backward()


def test_each_thread_has_a_training_of_its_own() -> None:
    """One that raised in a thread that is gone hinders no other, and those at once count and leave their own."""
    trainings = Trainings(_SETTINGS)
    in_threads(lambda: _train(trainings, 1))  # leaves its session on, as one that raises does
    assert not trainings.is_on and trainings.summary() is None

    def both_at_once(backwards: int) -> tuple[int, int]:
        _train(trainings, backwards)
        barrier.wait()
        session, before = current(), trainings.new_misses()
        trainings.leave_all()
        summary = trainings.summary()
        assert session is not None and summary is not None and current() is None and not trainings.is_on
        assert summary.stats == session.stats() and misses(summary.stats) == before
        return summary.stats.backwards, trainings.new_misses()

    barrier = threading.Barrier(2)
    assert in_threads(lambda: both_at_once(3), lambda: both_at_once(5)) == [(3, 0), (5, 0)]
    _train(trainings, 2)
    assert trainings.session is current() and trainings.session is not None
    expect(trainings.session.stats(), hits=2)
    trainings.leave_all()
    assert current() is None


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_begins_anew(again: Callable[[Trainings], Trainings]) -> None:
    """Trainers are pickled where processes are spawned, and a training before leaves nothing that cannot be."""
    trainings = Trainings(_SETTINGS)
    _train(trainings, 1)
    other = again(trainings)
    assert other.session is None and not other.is_on and trainings.is_on
    _train(other, 2)
    assert other.session is not None and other.session is current() is not trainings.session
    assert other.session.settings == ca.enable(**_SETTINGS).settings and other.session.stats().backwards == 2
    other.leave_all()
    assert current() is trainings.session
    trainings.leave_all()
    assert current() is None


def _by_transformers(folder: Path, callbacks: list[Any]) -> tuple[nn.Module, list[dict[str, Any]]]:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(0, 32, (48, 12))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"input_ids": each, "labels": each} for each in tokens]
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
    trainer.train()
    return model, trainer.state.log_history


@pytest.mark.slow
def test_the_trainer_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import transformers

    from compiled_autograd.integrations.transformers import MISSES, CompiledAutogradCallback

    class Reports(transformers.TrainerCallback):
        """Stands where those of ``report_to`` do."""

        def on_log(self, *args: Any, logs: dict[str, Any], **more: Any) -> None:
            reported.append(dict(logs))

    reported: list[dict[str, Any]] = []
    wanted, _ = _by_transformers(tmp_path / "eager", [])
    callback = CompiledAutogradCallback(backend="eager", cache_dir=False, tune=False)
    for _ in range(2):  # a trainer may be used twice, and a callback by two
        found, history = _by_transformers(tmp_path / "compiled", [Reports(), callback])
        assert_same([*found.parameters()], [*wanted.parameters()])
        assert callback.session is not None and current() is None
        assert callback.session.stats().backwards == 12 and not callback.session.stats().bypasses
        logged = [each[MISSES] for each in history if "loss" in each]
        assert sum(logged) == misses(callback.session.stats()) and logged[-1] == 0
        steps = [each for each in reported if "loss" in each][-3:]
        assert [each[MISSES] for each in steps] == logged and all("compiled_autograd/hits" in each for each in history)
        assert [each["compiled_autograd/backwards"] for each in steps] == [4, 8, 12]
        assert callback.session.summary().line in capsys.readouterr().out
    assert callback.session is not None and callback.session.stats().hits == 12
    ca.reset()
    _, history = _by_transformers(tmp_path / "twice", [callback, callback])
    assert current() is None
    assert sum(each[MISSES] for each in history if "loss" in each) == misses(callback.session.stats()) > 0
    with pytest.raises(ca.UnknownSettingError):
        CompiledAutogradCallback(backends="eager")


@pytest.mark.slow
def test_the_trainer_of_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from compiled_autograd.integrations.lightning import MISSES, CompiledAutogradCallback

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, model: nn.Module, raises: bool = False, catches: bool = False) -> None:
            super().__init__()
            self.model, self.raises, self.automatic_optimization = model, raises, not catches

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor | None:
            loss = self.model(batch).square().mean()
            if self.raises:
                loss.register_hook(lambda gradient: 1 / 0)
            if self.automatic_optimization:
                return loss
            with contextlib.suppress(ZeroDivisionError):
                self.manual_backward(loss)
            return None

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def train(model: nn.Module, callbacks: list[Any], logger: Any = False, **module: bool) -> Any:
        torch.manual_seed(1)
        batches = [torch.randn(3, 8) for _ in range(8)]
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            callbacks=callbacks,
            default_root_dir=tmp_path,
            logger=logger,
            log_every_n_steps=4,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(model, **module), torch.utils.data.DataLoader(batches, batch_size=None))
        return trainer

    model = mlp()
    reference = copy.deepcopy(model)
    train(reference, [])
    callback = CompiledAutogradCallback(backend="eager", cache_dir=False, tune=False)
    trainer = train(model, [callback])
    assert_same([*model.parameters()], [*reference.parameters()])
    assert callback.session is not None
    expect(callback.session.stats(), structure_misses=1, hits=15, captures=1, compiles=1)
    assert MISSES in trainer.logged_metrics and trainer.logged_metrics[MISSES] == 1
    with pytest.raises(ZeroDivisionError):
        train(model, [callback], raises=True)
    assert current() is None
    train(model, [callback], raises=True, catches=True)
    assert current() is None and callback.session.stats().backwards == 16
    from lightning.pytorch.loggers import CSVLogger

    train(model, [callback], CSVLogger(tmp_path, version="csv"))
    rows = list(csv.DictReader((tmp_path / "lightning_logs" / "csv" / "metrics.csv").open()))
    assert [row["compiled_autograd/backwards"] for row in rows if row["compiled_autograd/backwards"]] == [
        "4.0",
        "8.0",
        "12.0",
        "16.0",
    ]
