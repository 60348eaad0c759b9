"""What a new structure is compared with: those of its own program and model; and whether it is another loss."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compiled_autograd as ca
from compiled_autograd.capture import parameter_names
from shadow_cache import Miss

Loss = Callable[[], torch.Tensor]


@pytest.fixture(params=["memory", "store"])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], ca.Session]]:
    """A session that knows what the one before it met: in the same process, or by the store."""

    def begin() -> ca.Session:
        if request.param == "store":
            ca.reset()
        return ca.enable(backend="eager", cache_dir=tmp_path if request.param == "store" else False)

    yield begin


def _miss(session: ca.Session, loss: torch.Tensor) -> Miss:
    with session:
        loss.backward()
    assert session.last is not None and session.last.outcome == "structure_miss"
    (miss,) = session.last.reasons
    assert isinstance(miss, Miss)
    return miss


def _net(activation: type[nn.Module], width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), activation(), nn.Linear(width, 1))


def _other_models() -> list[Any]:
    return [
        (_net(nn.Tanh), nn.Sequential(nn.Conv1d(4, 1, 1))),
        (_net(nn.Tanh), _net(nn.ReLU, 5)),
        (_net(nn.Tanh, 5), nn.Sequential(_net(nn.Tanh), nn.Tanh())),
    ]


@pytest.mark.parametrize("number", range(3))
def test_the_first_backward_of_another_model_is_first_seen(number: int, session: Callable[[], ca.Session]) -> None:
    model, other = _other_models()[number]
    assert _miss(session(), model(torch.randn(3, 4)).mean()).kind == "first_seen"
    x = torch.randn(2, 4, 3) if isinstance(other[0], nn.Conv1d) else torch.randn(3, 4)
    miss = _miss(session(), other(x).square().mean())
    assert (miss.kind, miss.hint) == ("first_seen", "") and "of Sequential" in miss.where


def test_models_of_one_shape_in_one_process_are_two() -> None:
    session, models = ca.enable(backend="eager", cache_dir=False), [_net(each) for each in (nn.Tanh, nn.ReLU, nn.ELU)]
    for model in models:
        assert _miss(session, model(torch.randn(3, 4)).mean()).kind == "first_seen"


@pytest.mark.parametrize("file", ["/home/me/other.py", None])
def test_another_program_is_compared_with_nothing_of_this_one(
    file: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = ca.enable(backend="eager", cache_dir=tmp_path)
    models, x = [_net(each) for each in (nn.Tanh, nn.ReLU, nn.Sigmoid)], torch.randn(3, 4)
    _miss(session, models[0](x).mean())
    ca.reset()
    monkeypatch.setattr(sys.modules["__main__"], "__file__", file, raising=False)
    assert _miss(session, models[1](x).mean()).kind == "first_seen"
    ca.reset()
    kind = _miss(session, models[2](x).mean()).kind
    assert kind == ("first_seen" if file is None else "new_node")


def test_another_way_through_the_model(session: Callable[[], ca.Session]) -> None:
    model, x = _net(nn.Tanh), torch.randn(3, 4)

    def forward(way: int) -> torch.Tensor:
        model.zero_grad()
        hidden = model[0](x)
        return model[2](hidden.tanh() if way == 0 else hidden if way == 1 else hidden.sin()).mean()

    hints = [_miss(session(), forward(way)).hint for way in range(3)]
    assert hints[0] == "" and all("the forward took another branch" in hint for hint in hints[1:])


def test_another_way_is_no_other_loss_though_it_is_called_elsewhere() -> None:
    """As in a step of a validation, without dropout."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)), torch.randn(3, 4)
    session = ca.enable(backend="eager", cache_dir=False)
    with session:
        model(x).mean().backward()
        model.zero_grad()
        model.eval()(x).mean().backward()
    assert session.last is not None
    (miss,) = session.last.reasons
    assert isinstance(miss, Miss) and miss.kind == "new_node" and "the forward took another branch" in miss.hint


def _standard(real: torch.Tensor, fake: torch.Tensor) -> tuple[Loss, Loss]:
    ones, zeros = torch.ones(3, 1), torch.zeros(3, 1)
    return (
        lambda: F.binary_cross_entropy_with_logits(real, ones) + F.binary_cross_entropy_with_logits(fake, zeros),
        lambda: F.binary_cross_entropy_with_logits(fake, ones),
    )


_GANS: dict[str, Callable[..., tuple[Loss, Loss]]] = {
    "standard": _standard,
    "wasserstein": lambda real, fake: (lambda: fake.mean() - real.mean(), lambda: -fake.mean()),
    "least squares": lambda real, fake: (
        lambda: (real - 1).square().mean() + fake.square().mean(),
        lambda: (fake - 1).square().mean(),
    ),
    "hinge": lambda real, fake: (lambda: F.relu(1 - real).mean() + F.relu(1 + fake).mean(), lambda: -fake.mean()),
    "one shape": lambda real, fake: (lambda: fake.square().mean(), lambda: fake.square().mean()),
}


@pytest.mark.parametrize("gan", _GANS)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_the_two_losses_of_a_gan(gan: str, frozen: bool, together: bool) -> None:
    """Of two models, or of two parts of one; with the discriminator's parameters frozen for the generator's, or not."""
    critic, maker = _net(nn.Tanh), nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 4))
    both = nn.ModuleDict({"critic": critic, "maker": maker}) if together else None
    noise, x = torch.randn(3, 2), torch.randn(3, 4)
    session = ca.enable(backend="eager", cache_dir=False)
    loss, _ = _GANS[gan](critic(x), critic(maker(noise).detach()))
    with session:
        loss().backward()
    critic.zero_grad()
    critic.requires_grad_(not frozen)
    _, loss = _GANS[gan](critic(x), critic(maker(noise)))
    with session:
        loss().backward()
    assert session.last is not None and session.last.outcome == "structure_miss"
    (miss,) = session.last.reasons
    assert isinstance(miss, Miss) and "took another branch" not in str(miss)
    if miss.kind == "new_node":
        assert "another loss on the same model" in miss.hint
    assert miss.kind in ("new_node", "first_seen" if frozen and not together else "node_attribute")
    del both


@pytest.mark.parametrize("second", [lambda y: y.tanh().mean(), lambda y: y.abs().sum(), lambda y: F.l1_loss(y, y + 1)])
def test_another_loss_on_the_same_line(second: Any, session: Callable[[], ca.Session]) -> None:
    model, x = _net(nn.Tanh), torch.randn(3, 4)
    for loss, hint in ((lambda y: y.square().mean(), ""), (second, "another loss on the same model")):
        model.zero_grad()
        miss = _miss(session(), loss(model(x)))
        assert miss.kind == ("new_node" if hint else "first_seen") and hint in miss.hint
        assert "took another branch" not in miss.hint


def test_without_names_the_nearest_of_all_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where looking for names takes long, there are none at first."""
    monkeypatch.setattr(parameter_names, "_searched", lambda: None)
    session = ca.enable(backend="eager", cache_dir=False)
    models = [_net(each) for each in (nn.Tanh, nn.ReLU)]
    kinds = [_miss(session, each(torch.randn(3, 4)).mean()).kind for each in models]
    assert kinds == ["first_seen", "new_node"]
