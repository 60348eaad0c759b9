"""The former settings ``native`` and ``own_loop``: they work as before, and warn with what to write. Goes with 0.4."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import pytest
from click.testing import CliRunner

import compiled_autograd as ca
from compiled_autograd.__main__ import main
from compiled_autograd.runner import command
from compiled_autograd.runner.launch import environment
from compiled_autograd.settings import PREFIX, Settings, resolve

_WORDS = [
    ({"native": None}, "auto", (None, None)),
    ({"native": True}, "all", (True, None)),
    ({"native": False}, "off", (False, False)),
    ({"own_loop": None}, "auto", (None, None)),
    ({"own_loop": True}, "all", (None, True)),
    ({"own_loop": False}, "hits", (None, False)),
    ({"native": True, "own_loop": True}, "all", (True, True)),
    ({"native": True, "own_loop": False}, "hits", (True, False)),
    ({"native": False, "own_loop": True}, "off", (False, False)),
]


def _resolved(given: dict[str, Any], environ: dict[str, str]) -> tuple[Settings, str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        settings = resolve(given, environ)
    (warning,) = told
    assert warning.category is DeprecationWarning
    return settings, str(warning.message)


@pytest.mark.parametrize(("given", "word", "effect"), _WORDS)
def test_they_have_their_effect_and_say_what_to_write(
    given: dict[str, Any], word: str, effect: tuple[bool | None, bool | None]
) -> None:
    environ = {PREFIX + name.upper(): str(value) for name, value in given.items()}
    for names, (settings, told) in (given, _resolved(given, {})), (environ, _resolved({}, environ)):
        assert (settings.native, settings.own_loop) == effect and settings.extension == word
        assert f" extension='{word}' (COMPILED_AUTOGRAD_EXTENSION={word}, --extension {word})" in told
        assert all(f"{name}={value}" in told for name, value in names.items())
        now = resolve({"extension": word}, {})
        assert ((now.native, now.own_loop) == effect) == (now is settings)


@pytest.mark.parametrize("given", [{"native": False}, {"own_loop": True}])
def test_old_and_new_at_once_is_an_error(given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    text = f"{name}={value} is not possible; {name} is a former name of extension"
    with pytest.raises(ca.InvalidSettingError, match=rf"^enable\(\): {text}"):
        resolve({**given, "extension": "all"}, {})
    variable = PREFIX + name.upper()
    with pytest.raises(ca.InvalidSettingError, match=f"^{variable}: {text}"):
        resolve({}, {variable: str(value), "COMPILED_AUTOGRAD_EXTENSION": "all"})


def test_arguments_come_before_the_environment() -> None:
    environ = {"COMPILED_AUTOGRAD_NATIVE": "false", "COMPILED_AUTOGRAD_OWN_LOOP": "true"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve({"extension": "hits"}, environ) is resolve({"extension": "hits"}, {})
    assert _resolved({"native": None}, environ)[0].extension == "all"
    assert _resolved({"own_loop": False}, {"COMPILED_AUTOGRAD_EXTENSION": "all"})[0].extension == "hits"


def test_a_wrong_value_says_what_is_possible() -> None:
    for name in ("native", "own_loop"):
        with pytest.raises(ca.InvalidSettingError, match=f"{name}='yes'.*; {name} is None, True or False"):
            resolve({name: "yes"}, {})


def test_the_warning_is_at_the_line_that_calls() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        session = ca.enable(backend="eager", native=False)  # type: ignore[call-arg]
        ca.compile_step(backend="eager", own_loop=False)  # type: ignore[call-overload]
        ca.compile_step(print, backend="eager", own_loop=False)  # type: ignore[call-overload]
        ca.compare(lambda: None, seconds=1e-9, own_loop=False)
    assert session.native == "off: extension='off'"
    here = sys._getframe().f_lineno
    lines = {(each.filename, each.lineno) for each in told}
    assert lines == {(__file__, here - number) for number in (2, 3, 4, 5)}


@pytest.mark.parametrize(
    ("variables", "option", "value", "word"),
    [
        ({"NATIVE": "1"}, "extension", "off", "off"),
        ({"OWN_LOOP": "false"}, "extension", "all", "all"),
        ({"EXTENSION": "off"}, "native", "true", "all"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_option_of_the_runner_comes_before_variables(
    variables: dict[str, str], option: str, value: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COMPILED_AUTOGRAD_EXTENSION", raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(PREFIX + name, text)
    assert resolve({}, {**os.environ, **environment({option: value})}).extension == word


@pytest.mark.parametrize("options", [[], ["ignore"]])
def test_the_runner_shows_the_warning(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless options of python say otherwise."""
    monkeypatch.setattr(sys, "warnoptions", options)
    monkeypatch.delenv("COMPILED_AUTOGRAD_EXTENSION", raising=False)
    launched: list[dict[str, str]] = []
    monkeypatch.setattr(command, "launch", lambda program, variables, run: launched.append(variables))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("ignore")
        ran = CliRunner().invoke(main, ["--backend", "eager", "--native", "true", "--own-loop", "false", "-m", "train"])
    assert not ran.exit_code, ran.output
    assert launched[0]["COMPILED_AUTOGRAD_NATIVE"] == "true" and launched[0]["COMPILED_AUTOGRAD_OWN_LOOP"] == "false"
    says = "compiled_autograd: --native=True, --own-loop=False is now extension='hits' "
    assert [str(each.message).startswith(says) for each in told] == [True] * (not options)
    assert "--native" not in CliRunner().invoke(main, ["--help"]).output
