"""Each warning of the package points at the line of the user's from which it came."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import compiled_autograd as ca
from compiled_autograd import untested, without_engine


def _fails(graph_module: fx.GraphModule, examples: Any) -> Any:
    raise ValueError("planted")


def _backward(**settings: Any) -> None:
    session = ca.enable(backend=_fails, cache_dir=False, **settings)
    with session:
        torch.ones(3, requires_grad=True).sin().sum().backward()  # here
    session.wait(60)


def _of_autograd() -> None:
    x = torch.ones(3, requires_grad=True)
    with ca.enable(backend=_fails, cache_dir=False):
        torch.autograd.grad(x.sin().sum(), x)  # here


def _inside_a_checkpoint() -> None:
    x = torch.ones(3, requires_grad=True)
    with ca.enable(backend=_fails, cache_dir=False):
        checkpoint(lambda x: x.sin(), x, use_reentrant=True).sum().backward()  # here


def _of_a_step() -> None:
    model = nn.Linear(3, 1)

    @ca.compile_step(backend=_fails, cache_dir=False)
    def step() -> None:
        model(torch.ones(2, 3)).sum().backward()  # here

    step()


def _in_a_thread() -> None:
    thread = threading.Thread(target=_backward)
    thread.start()
    thread.join()


def _by_code_without_a_module() -> None:
    loss = torch.ones(3, requires_grad=True).sin().sum()
    with ca.enable(backend=_fails, cache_dir=False):
        exec("loss.backward()", {"loss": loss})  # here


def _without_a_folder() -> None:
    with ca.enable(backend="eager", cache_dir=__file__):
        torch.ones(3, requires_grad=True).sin().sum().backward()  # here


def _again_and_again() -> None:
    with ca.enable(backend="eager", cache_dir=False):
        for power in range(2, 12):
            (torch.ones(3, requires_grad=True) ** power).sum().backward()  # here


def _on_an_untested_torch() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(untested, "is_tested", lambda version: False)
        ca.enable()  # here


def _without_the_engine() -> None:
    without_engine.names(ImportError("planted"))["enable"]()  # here


_CASES: list[Callable[[], None]] = [
    *(_backward, _of_autograd, _inside_a_checkpoint, _of_a_step, _in_a_thread, _by_code_without_a_module),
    *(_without_a_folder, _again_and_again, _on_an_untested_torch, _without_the_engine),
    lambda: _backward(on_miss="background"),
]


@pytest.mark.parametrize("case", _CASES)
def test_a_warning_points_at_the_users_line(case: Callable[[], None]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case()
    ours = [each for each in caught if str(each.message).startswith("compiled_autograd")]
    lines = inspect.getsource(inspect.getmodule(_backward)).splitlines()  # type: ignore[arg-type]
    assert ours and {each.filename for each in ours} == {__file__}
    assert all(lines[each.lineno - 1].endswith("# here") for each in ours)


def test_a_warning_may_be_an_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _again_and_again()
