"""What tests of the own loop share: a session that leaves all to eager, and the same program with and without it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import compiled_autograd as ca
from compiled_autograd.engine.own_loop import running

from .both_walks import own_plans
from .helpers import same_bits

Program = Callable[[Any], Any]
"""Runs backwards inside of the context manager that it is given; gives what can be seen of them."""


@pytest.fixture
def extension(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It is there, and used for the smallest tapes too."""
    monkeypatch.setattr(running, "LEAST_NODES", 0)
    monkeypatch.setattr(running, "LEFT_WORTH_LOADING", 0)
    monkeypatch.setattr(running, "NATIVE_HITS", own_plans(request.config, monkeypatch))
    yield
    ca.reset()


def session(**settings: Any) -> ca.Session:
    """One that leaves all to eager."""
    given = {"backend": "eager", "on_miss": "eager", "cache_dir": False, "extension": "all"}
    return ca.enable(**{**given, **settings})


def leaf(*sizes: int, **more: Any) -> torch.Tensor:
    """Some numbers that want a gradient."""
    return torch.randn(sizes, **more).requires_grad_()


def node_of(tensor: torch.Tensor) -> Any:
    """What has made a tensor, of which types know too little."""
    assert tensor.grad_fn is not None
    return tensor.grad_fn


def alike(found: Any, wanted: Any) -> bool:
    """The same in every bit, whatever holds it."""
    if isinstance(wanted, torch.Tensor) and wanted.layout is torch.sparse_coo:
        return isinstance(found, torch.Tensor) and alike(_parts(found), _parts(wanted))
    if isinstance(wanted, torch.Tensor):
        return isinstance(found, torch.Tensor) and same_bits(found, wanted)
    if isinstance(wanted, list | tuple):
        return type(found) is type(wanted) and len(found) == len(wanted) and all(map(alike, found, wanted))
    if isinstance(wanted, dict):
        return isinstance(found, dict) and alike([*found.items()], [*wanted.items()])
    return bool(found == wanted)


def _parts(tensor: torch.Tensor) -> list[Any]:
    if tensor.layout is not torch.sparse_coo:
        return [tensor]
    return [tensor.shape, tensor.is_coalesced(), tensor._indices(), tensor._values()]


def beside(program: Program, loops: int | None = None, **settings: Any) -> Any:
    """Run a program on the eager engine and with the own loop: the same is seen. Gives it.

    Args:
        loops: how many backwards are to run in the loop; None for all that there are, at least one.
    """
    torch.manual_seed(1)
    wanted = program(contextlib.nullcontext())
    torch.manual_seed(1)
    used = session(**settings)
    found = program(used)
    assert alike(found, wanted), f"eager: {wanted}\nown loop: {found}"
    stats = used.stats()
    assert stats.own_loop == (stats.backwards if loops is None else loops), stats
    assert stats.own_loop or loops == 0
    return wanted


def raised(act: Callable[[], Any]) -> tuple[type[BaseException], str] | None:
    """What something raises, in its words."""
    try:
        act()
    except BaseException as error:  # noqa: BLE001  Ctrl-C is one of them
        return type(error), str(error)
    return None


def looking_on(see: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
    """Makers of contexts that change what the calling thread records or runs, or show it to ``see``, by name."""

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            see(function)
            return function(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            see(function)
            return function(*args, **(kwargs or {}))

    contexts: dict[str, Callable[[], Any]] = {
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "no grad": torch.no_grad,
        "functions": Functions,
        "operators": Operators,
        "packed": lambda: torch.autograd.graph.saved_tensors_hooks(see, see),
        "not packed": lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here"),
        "nested": torch.autograd.forward_ad.dual_level,
        "one thread": lambda: torch.autograd.set_multithreading_enabled(False),
        "device": lambda: torch.device("meta"),
        "profiler": torch.profiler.profile,
    }
    if hasattr(torch.autograd.graph, "node_creation_hook"):  # since 2.14
        contexts["created"] = lambda: torch.autograd.graph.node_creation_hook(see)
    return contexts
