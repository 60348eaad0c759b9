"""Settings: their values, their environment variables, and the errors for the wrong ones."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import sys
import typing
from typing import Any

import pytest
import torch

import compiled_autograd as ca
from backends import UnknownBackendError
from compiled_autograd.settings import FROM_ENVIRONMENT, Settings, allowed, resolve

from .helpers import in_subprocess


def test_defaults() -> None:
    assert resolve({}, {}) == Settings("inductor", None, "background", "eager", "new", None, ())


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("backnd", "backend"), ("dynamics", "dynamic"), ("on_unsuported", "on_unsupported"), ("cachedir", "cache_dir")],
)
def test_a_misspelt_setting_suggests_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(ca.UnknownSettingError, match=f"'{wrong}'.*Did you mean '{right}'") as raised:
        ca.enable(**{wrong: None})
    assert isinstance(raised.value, TypeError) and isinstance(raised.value, ca.CompiledAutogradError)


def test_the_help_of_a_setting_says_what_its_error_says() -> None:
    for name in FROM_ENVIRONMENT:
        with pytest.raises(ca.InvalidSettingError) as raised:
            resolve({name: object()}, {})
        assert str(raised.value).endswith(f"{name} is {allowed(name)}.")


def test_a_setting_like_no_other_lists_the_known() -> None:
    with pytest.raises(ca.UnknownSettingError, match="Known: backend, cache_dir, check"):
        ca.enable(zzzzzz=1)


def test_settings_are_keyword_only() -> None:
    with pytest.raises(ca.WrongUseError, match=r"write enable\(backend='eager'\)") as raised:
        ca.enable("eager")  # type: ignore[call-arg]
    assert isinstance(raised.value, TypeError)
    with pytest.raises(ca.WrongUseError, match=r"write compile_step\(function\)"):
        ca.enable(lambda: None)  # type: ignore[call-arg]
    for model in (_Module(), torch.nn.Linear(2, 2)):
        with pytest.raises(ca.WrongUseError, match=r"no model. Write `with enable\(\):` around loss"):
            ca.enable(model)  # type: ignore[call-arg]
    with pytest.raises(ca.WrongUseError, match=r"write enable\(name=value\)"):
        ca.enable(3)  # type: ignore[call-arg]


def _by_name(function: Any) -> dict[str, tuple[Any, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name: (each.default, each.annotation) for each in parameters if each.kind is each.KEYWORD_ONLY}


def test_signatures_have_the_settings_with_their_defaults_and_types() -> None:
    given = [each for each in dataclasses.fields(Settings) if each.init and each.name not in ("turned_off", "former")]
    fields = {each.name: (each.default, each.type) for each in given}
    assert _by_name(ca.enable) == _by_name(ca.compile_step) == fields
    assert set(inspect.signature(ca.enable).parameters) == set(fields)
    if sys.version_info >= (3, 11):
        assert _by_name(typing.get_overloads(ca.compile_step)[1]) == fields
    documented = inspect.getdoc(ca.enable)
    assert documented is not None and all(f"\n    {name}: " in documented for name in fields)


class _Module(torch.nn.Module):
    pass


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (_Module(), "this is a module.*    def step"),
        (_Module, "this is a class. Decorate the method"),
        ("inductor", r"write compile_step\(backend='inductor'\)"),
        (3, "this is of type int"),
    ],
)
def test_what_is_no_step_is_an_error_that_says_what_to_write(wrong: Any, text: str) -> None:
    for decorate in (ca.compile_step, ca.compile_step(backend="eager")):
        with pytest.raises(ca.WrongUseError, match=f"(?s){text}"):
            decorate(wrong)


def test_a_wrong_setting_of_a_decorator_is_an_error_in_its_line() -> None:
    with pytest.raises(ca.UnknownSettingError, match="Did you mean 'backend'"):
        ca.compile_step(backnd="eager")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backend", 3),
        ("backend", None),
        ("dynamic", "perhaps"),
        ("on_miss", "explode"),
        ("on_unsupported", "compile"),
        ("on_unsupported", None),
        ("check", "maybe"),
        ("check", "3"),
        ("cache_dir", 3),
        ("cache_dir", True),
        ("cache_dir", b"folder"),
        ("extension", "yes"),
        ("compile_budget", -1),
        ("compile_budget", "much"),
        ("compile_budget", "3"),
        ("compile_budget", 10**400),
        ("compile_budget", float("nan")),
        ("compile_budget", True),
        ("passes", 3),
        ("passes", ["not a function"]),
    ],
)
def test_impossible_values_say_what_is_possible(name: str, value: Any) -> None:
    with pytest.raises(ca.InvalidSettingError) as raised:
        ca.enable(**{"backend": "eager", name: value})
    text = str(raised.value)
    assert f"{name}={value!r}" in text and f"{name} is " in text and "enable()" in text
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize(
    "given",
    [
        {"dynamic": None},
        {"dynamic": False},
        {"on_miss": "compile"},
        {"on_unsupported": "raise"},
        {"check": False},
        {"check": "new"},
        {"check": True},
        {"check": 7},
        {"cache_dir": None},
        {"cache_dir": False},
        {"extension": "auto"},
        {"extension": "off"},
        {"compile_budget": None},
        {"compile_budget": 12.5},
        {"compile_budget": float("inf")},
        {"passes": []},
        {"passes": (print,)},
    ],
)
def test_possible_values_are_taken(given: dict[str, Any]) -> None:
    (name, value), *_ = given.items()
    found = getattr(ca.enable(backend="eager", **given).settings, name)
    assert found == (tuple(value) if name == "passes" else value)


def test_environment_variables() -> None:
    environ = {
        "COMPILED_AUTOGRAD_BACKEND": "eager",
        "COMPILED_AUTOGRAD_DYNAMIC": "False",
        "COMPILED_AUTOGRAD_ON_MISS": "compile",
        "COMPILED_AUTOGRAD_ON_UNSUPPORTED": "raise",
        "COMPILED_AUTOGRAD_CHECK": "0",
        "COMPILED_AUTOGRAD_CACHE_DIR": "none",
        "HOME": "/nowhere",
    }
    assert resolve({}, environ) == Settings("eager", False, "compile", "raise", False, None)


@pytest.mark.parametrize(
    ("text", "value"), [("0", 0.0), ("1", 1.0), ("12.5", 12.5), ("inf", float("inf")), ("None", None)]
)
def test_seconds_in_the_environment(text: str, value: float | None) -> None:
    budget = resolve({}, {"COMPILED_AUTOGRAD_COMPILE_BUDGET": text}).compile_budget
    assert budget == value and type(budget) is type(value)


def test_what_follows_from_settings_follows_from_copies() -> None:
    settings = resolve({"mode": "reduce-overhead", "check": True, "dynamic": False}, {})
    for same in (copy.copy(settings), copy.deepcopy(settings), pickle.loads(pickle.dumps(settings))):
        assert same == settings and hash(same) == hash(settings) and same.key == settings.key
        assert (same.backend_in_mode, same.check_every) == (settings.backend_in_mode, 1)
    other = dataclasses.replace(settings, mode="default", check=5, dynamic=None)
    assert other == resolve({"check": 5}, {}) and other.key == resolve({}, {}).key != settings.key
    assert (other.backend_in_mode, other.check_every) == ("inductor", 5)


def test_arguments_come_before_the_environment() -> None:
    environ = {"COMPILED_AUTOGRAD_BACKEND": "inductor", "COMPILED_AUTOGRAD_ON_UNSUPPORTED": "nonsense"}
    assert resolve({"backend": "eager", "on_unsupported": "raise"}, environ).on_unsupported == "raise"


def test_a_wrong_environment_variable_is_named() -> None:
    with pytest.raises(
        ca.UnknownSettingError, match=r"COMPILED_AUTOGRAD_BACKND.*Did you mean 'COMPILED_AUTOGRAD_BACKEND"
    ):
        resolve({}, {"COMPILED_AUTOGRAD_BACKND": "eager"})
    with pytest.raises(ca.InvalidSettingError, match="COMPILED_AUTOGRAD_CHECK: check='perhaps'"):
        resolve({}, {"COMPILED_AUTOGRAD_CHECK": "perhaps"})


@pytest.mark.parametrize(
    ("text", "value", "every"), [("new", "new", 0), ("1", True, 1), ("25", 25, 25), ("false", False, 0)]
)
def test_how_often_compiled_code_is_compared(text: str, value: Any, every: int) -> None:
    settings = resolve({}, {"COMPILED_AUTOGRAD_CHECK": text})
    assert settings.check == value and settings.check_every == every


@pytest.mark.parametrize("value", [0, -1, 1.5, "all", None])
def test_a_number_of_runs_is_above_zero(value: Any) -> None:
    with pytest.raises(ca.InvalidSettingError, match="also every Nth run"):
        ca.enable(backend="eager", check=value)


def test_passes_have_no_environment_variable() -> None:
    with pytest.raises(ca.UnknownSettingError, match="COMPILED_AUTOGRAD_PASSES"):
        resolve({}, {"COMPILED_AUTOGRAD_PASSES": "x"})


def test_the_environment_is_read_by_enable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILED_AUTOGRAD_BACKEND", "eager")
    assert ca.enable().settings.backend == "eager"
    monkeypatch.setenv("COMPILED_AUTOGRAD_BACKEND", "eagre")
    with pytest.raises(UnknownBackendError, match="Did you mean 'eager'"):
        ca.enable()


def test_the_environment_in_a_fresh_process() -> None:
    code = "import compiled_autograd as ca; print(ca.enable().settings.backend)"
    done = in_subprocess(code, COMPILED_AUTOGRAD_BACKEND="eager")
    assert done.stdout.strip() == "eager", done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "dynamic",
    ],
)
@pytest.mark.parametrize("value", [1, 1.0])
def test_numbers_that_equal_true_are_as_true(name: str, value: Any) -> None:
    """``1`` is in ``(None, True, False)``, so it passes the first check; it must not pass for False or None."""
    with pytest.raises(ca.CompiledAutogradError):
        ca.enable(backend="eager", **{name: value})


def test_settings_that_share_graphs_have_one_key() -> None:
    assert resolve({"backend": "eager"}, {}).key == resolve({"backend": "eager", "on_unsupported": "raise"}, {}).key
    assert resolve({"backend": "eager"}, {}).key != resolve({"backend": "inductor"}, {}).key
    assert resolve({"backend": "eager"}, {}).key != resolve({"backend": "eager", "passes": [print]}, {}).key


def test_an_unhashable_value_is_an_error_that_names_it() -> None:
    with pytest.raises(ca.InvalidSettingError, match="on_miss"):
        ca.enable(backend="eager", on_miss=["compile"])
