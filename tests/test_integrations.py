"""Callbacks for trainers of others, with the real libraries, beside the same training without them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compiled_autograd as ca
from compiled_autograd.engine.session import current
from compiled_autograd.integrations.summary import Summary, misses

from .helpers import assert_same, expect, mlp


def test_the_summary_of_a_session() -> None:
    model, session = mlp(), ca.enable(backend="eager", cache_dir=False, tune=False)
    x = torch.randn(3, 8)
    for step in range(4):
        model.zero_grad()
        loss = model(x).sum() if step < 3 else model(x).sum().square()
        with session:
            loss.backward()
        torch.autograd.grad(model(x).sum(), [*model.parameters()])
    with session:
        torch.autograd.grad(model(x).sum(), [*model.parameters()], create_graph=True)
    summary = Summary.of(session)
    assert misses(summary.stats) == 3 and (summary.timed, summary.variants) == (0, 2)
    words = str(summary)
    assert words.startswith(
        "compiled_autograd: 5 backwards: 2 hits, 2 misses, 1 left to eager (create_graph); 2 regions"
    )
    assert words.endswith("; not timed against eager yet")


def test_the_summary_of_timed_hits() -> None:
    model, session = mlp(), ca.enable(backend="eager", cache_dir=False, tune=True)
    x = torch.randn(3, 8)
    for _ in range(60):
        model.zero_grad()
        with session:
            model(x).sum().backward()
    (graph,) = session.graphs()
    (variant,) = graph.variants
    assert variant.timing is not None
    summary = Summary.of(session)
    saved = variant.hits * (variant.timing.eager - variant.timing.compiled) / 1e3
    assert summary.timed == 1 and summary.seconds_saved == (0 if variant.timing.on_eager else saved)
    assert " s of backward " in str(summary)


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
    from compiled_autograd.integrations.transformers import MISSES, CompiledAutogradCallback

    wanted, _ = _by_transformers(tmp_path / "eager", [])
    callback = CompiledAutogradCallback(backend="eager", cache_dir=False, tune=False)
    for _ in range(2):  # a trainer may be used twice, and a callback by two
        found, history = _by_transformers(tmp_path / "compiled", [callback])
        assert_same([*found.parameters()], [*wanted.parameters()])
        assert callback.session is not None and current() is None
        assert callback.session.stats().backwards == 12 and not callback.session.stats().bypasses
        logged = [each[MISSES] for each in history if "loss" in each]
        assert sum(logged) == misses(callback.session.stats()) and logged[-1] == 0
        assert str(Summary.of(callback.session)) in capsys.readouterr().out
    assert callback.session is not None and callback.session.stats().hits == 12
    with pytest.raises(ca.UnknownSettingError):
        CompiledAutogradCallback(backends="eager")


@pytest.mark.slow
def test_the_trainer_of_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from compiled_autograd.integrations.lightning import MISSES, CompiledAutogradCallback

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, model: nn.Module, raises: bool = False) -> None:
            super().__init__()
            self.model, self.raises = model, raises

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss = self.model(batch).square().mean()
            if self.raises:
                loss.register_hook(lambda gradient: 1 / 0)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def train(model: nn.Module, callbacks: list[Any], raises: bool = False) -> Any:
        torch.manual_seed(1)
        batches = [torch.randn(3, 8) for _ in range(8)]
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            callbacks=callbacks,
            default_root_dir=tmp_path,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(model, raises), torch.utils.data.DataLoader(batches, batch_size=None))
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
