"""When the own loop runs what is left to eager: settings, its self-check, tapes that it was refused for, trials."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compiled_autograd as ca
from compiled_autograd.engine import backward, decide
from compiled_autograd.engine.own_loop import running, self_check
from compiled_autograd.engine.own_loop.self_check import NOT_NOW, why_wrong
from compiled_autograd.native import library as native_library
from compiled_autograd.native.library import BEING_BUILT, Library
from compiled_autograd.policies import ledger
from compiled_autograd.policies import own_loop as policy
from compiled_autograd.policies.decision import State
from compiled_autograd.policies.ledger import LEDGER
from compiled_autograd.policies.own_loop import OWN_LOOPS
from compiled_autograd.torch_api import version_differences

from .both_walks import library_of
from .helpers import trials_of_two_rows
from .own_loops import extension, looking_on, raised, session  # noqa: F401
from .test_overridden_attributes import _on_every_tensor, _overrides

pytestmark = pytest.mark.usefixtures("extension")


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a version of PyTorch that it was checked on."""
    monkeypatch.setattr(policy, "why_own_loop_is_unchecked", lambda: "")


def _backward(used: ca.Session, steps: int = 1) -> int:
    """How many of some backwards the own loop ran."""
    before = used.stats().own_loop
    for _ in range(steps):
        x = torch.ones(3, requires_grad=True)
        with used:
            x.exp().sin().sum().backward()
        assert x.grad is not None
    return used.stats().own_loop - before


def test_it_is_on_where_there_is_an_extension() -> None:
    by_default = ca.enable(backend="eager", on_miss="eager", cache_dir=False, extension="auto")
    assert _backward(by_default) == 1 and by_default.own_loop == "on"


@pytest.mark.parametrize("value", ["hits", "off"])
def test_settings_that_turn_it_off(value: str) -> None:
    used = session(extension=value)
    assert _backward(used) == 0 and used.own_loop == f"off: extension={value!r}"


def test_a_torch_that_it_was_not_checked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "why_own_loop_is_unchecked", version_differences.why_own_loop_is_unchecked)
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    used, asked = session(extension="auto"), session(extension="all")
    assert _backward(used) == 0 and "its tests ran on torch 2.12 to 2.15, not on 2.11.0" in used.own_loop
    assert _backward(asked) == 1 and asked.own_loop == "on"


def test_it_warns_once_where_it_was_asked_for_and_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(Path("nowhere"))
    library.reason = "there is no C++ compiler"
    monkeypatch.setattr(running.NATIVE_HITS, "library", library)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert _backward(session(), 3) == 0
        assert _backward(session(extension="auto"), 3) == 0
    assert [str(each.message) for each in told] == [
        "compiled_autograd: extension='all' has no effect: there is no C++ compiler."
    ]
    assert session(extension="auto").own_loop == "off: there is no C++ compiler"


def test_it_has_the_extension_built_once_much_was_left_to_eager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    class Watched(Library):
        def module(self, build: bool = True) -> Any:
            asked.append(build)
            return None

    monkeypatch.setattr(running, "LEFT_WORTH_LOADING", 2)
    monkeypatch.setattr(running, "LEFT_WORTH_BUILDING", 5)
    monkeypatch.setattr(running.NATIVE_HITS, "library", Watched(Path("nowhere")))
    used = session(extension="auto", cache_dir=tmp_path)
    monkeypatch.setattr(running, "NOT_THERE", 0)  # looked for each time
    for _ in range(6):
        _backward(used)
    assert asked == [False, False, True, True], "the first two are not worth loading it"
    assert used.own_loop == f"off: {BEING_BUILT}"


# ---- the self-check -------------------------------------------------------------------------------------------------


def _module() -> Any:
    module = running.NATIVE_HITS.module(session().settings)
    assert module is not None
    return module


@dataclasses.dataclass
class _Faulty:
    """An extension with a fault in its own loop."""

    module: Any
    fault: Callable[[Any, Any, bool], tuple[Any, Any, bool]]

    def in_own_loop(self, outputs: Any, grads: Any, keep: bool, least: int) -> Any:
        return self.module.in_own_loop(*self.fault(outputs, grads, keep), least)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


_FAULTS: dict[str, Callable[[Any, Any, bool], tuple[Any, Any, bool]]] = {
    "gradient": lambda outputs, grads, keep: (outputs, tuple(each * (1 + 1e-6) for each in grads), keep),
    "root": lambda outputs, grads, keep: (outputs[:1], grads[:1], keep),
    "kept": lambda outputs, grads, keep: (outputs, grads, True),
    "freed": lambda outputs, grads, keep: (outputs, grads, False),
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_what_is_planted_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is run with it, whoever asks for it, which is told once."""
    faulty = _Faulty(_module(), _FAULTS[fault])
    assert why_wrong(faulty.module) == ""  # type: ignore[arg-type]
    monkeypatch.setattr(running.NATIVE_HITS, "module", lambda settings, build=True: faulty)
    used = session()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert _backward(used, 3) == 0
    assert "own loop" in str(told[0].message) and len(told) == 1
    assert used.own_loop.startswith("off: it has ")


def test_an_error_of_the_engines_own_in_the_check_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks may have run a backward, and is to give its gradients."""

    def tape(log: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(self_check, "_TAPES", {"planted": tape})
    assert why_wrong(_module()) == f"{NOT_NOW}: planted"


@pytest.mark.parametrize("state", [*looking_on(lambda *given: None), "default dtype"])
def test_the_thread_may_be_in_any_state(state: str) -> None:
    """The check runs all the same, shows nothing of itself, and leaves nothing behind."""
    seen: list[Any] = []
    module = _module()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if state == "default dtype" else before)
    generator = torch.random.get_rng_state()
    try:
        with looking_on(seen.append).get(state, contextlib.nullcontext)() as looker:
            state_before = _state_of_thread()
            assert why_wrong(module) == ""
            assert _state_of_thread() == state_before
    finally:
        torch.set_default_dtype(before)
    assert not seen and torch.equal(generator, torch.random.get_rng_state()) and torch.is_grad_enabled()
    if state == "profiler":
        assert not [event.key for event in looker.key_averages() if "Backward" in event.key or "embedding" in event.key]


def _state_of_thread() -> list[Any]:
    return [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch._C._autograd._profiler_enabled(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch._C._is_multithreading_enabled(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch._C._functorch.peek_interpreter_stack() is None,
    ]


def test_it_asks_no_property_that_a_library_puts_in_the_place_of_grad() -> None:
    with _on_every_tensor(_overrides("grad")):
        assert why_wrong(_module()) == ""


def test_anomaly_mode_puts_it_off() -> None:
    """The mode is the process's."""
    module = _module()
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        assert why_wrong(module).startswith(NOT_NOW)
    assert why_wrong(module) == ""


@pytest.mark.parametrize("check", ["own loop", "extension"])
def test_what_a_handler_raises_meanwhile_comes_out(
    check: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ``TimeoutError`` is an ``OSError``, as is what says that there is no thread."""

    def alarmed(*given: Any) -> Any:
        signal.raise_signal(signal.SIGALRM)

    def handler(number: int, frame: Any) -> None:
        raise TimeoutError("a time is up")

    module, library = _module(), Library(library_of(request.config)._folder)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with monkeypatch.context() as patch, pytest.raises(TimeoutError, match="a time is up"):
            if check == "own loop":
                patch.setattr(self_check, "_TAPES", {"alarmed": alarmed})
                why_wrong(module)
            else:
                patch.setattr(native_library, "why_wrong", lambda module: module.apart(alarmed))
                library.module()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert why_wrong(module) == ""
    monkeypatch.setattr(native_library, "_SECONDS_BETWEEN_LOOKS", 0.0)
    assert library.module() is not None, "it is loaded later"


def test_without_a_thread_to_ask_it_is_put_off() -> None:
    class Alone:
        def apart(self, function: Any) -> Any:
            raise OSError("no thread could be started")

    assert why_wrong(Alone()) == f"{NOT_NOW}: no thread could be started"  # type: ignore[arg-type]


# ---- tapes that it was refused for ----------------------------------------------------------------------------------


def test_refusals_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The own loop is asked ever more seldom."""
    monkeypatch.setattr(backward, "decide", lambda call, settings: decide.ON_MISS)
    asked: list[int] = []
    number = running._number
    monkeypatch.setattr(running, "_number", lambda *given: asked.append(step) or number(*given))
    monkeypatch.setattr(running, "LEAST_NODES", 100)
    used = session()
    for step in range(200):  # noqa: B007  read above
        _backward(used)
    gaps = [after - before for before, after in itertools.pairwise(asked)]
    assert asked[0] == 0 and gaps == [1, 2, 3, 5, 9, 17, 33, 65]
    monkeypatch.setattr(running, "LEAST_NODES", 0)
    assert 0 < _backward(used, 300) < 300


def test_it_runs_what_is_not_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `tune` leaves to eager goes there without a look: in the own loop, unless that has refused it for long."""
    trials_of_two_rows(monkeypatch)
    monkeypatch.setattr(ledger, "WORTH", 1e-9)
    used = ca.enable(backend="eager", cache_dir=False, tune=True, extension="all")
    _backward(used, 60)
    assert "not_worth_it" in used.stats().bypasses
    assert _backward(used, 600) > 580
    asked: list[int] = []
    number = running._number
    monkeypatch.setattr(running, "_number", lambda *given: asked.append(1) or number(*given))
    monkeypatch.setattr(running, "LEAST_NODES", 100)
    assert _backward(used, 1000) == 0 and 5 <= len(asked) <= 12
    monkeypatch.setattr(running, "LEAST_NODES", 0)
    assert _backward(used, 1400) > 200, "it is asked again"


# ---- trials ---------------------------------------------------------------------------------------------------------


def test_tapes_are_timed_again_once_the_own_loop_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager has become faster."""
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    used = ca.enable(backend="eager", cache_dir=False, tune=True, extension="hits")
    for _ in range(100):
        with used:
            model(x).sum().backward()
    (record,) = LEDGER._records.values()
    assert record.state in (State.COMPILED, State.EAGER) and OWN_LOOPS.module is None
    assert running.find(session().settings) is not None
    assert record.state is State.TIMING
