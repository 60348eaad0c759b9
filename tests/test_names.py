"""What ``import compiled_autograd`` gives: public names, and the packages that had other names until 0.2."""

from __future__ import annotations

import subprocess
import sys

import pytest

import compiled_autograd as ca


def _run(code: str) -> str:
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_dir_has_the_public_names_alone() -> None:
    assert dir(ca) == sorted(ca.__all__) and all(hasattr(ca, name) for name in ca.__all__)


@pytest.mark.parametrize("name", ["enabel", "cache_dir", "__wrapped__"])
def test_there_is_no_other_name(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'compiled_autograd' has no attribute '{name}'"):
        getattr(ca, name)


def test_torch_is_imported_with_the_first_name_that_needs_it() -> None:
    """The command line is a package below this one, and does without."""
    code = "import sys, compiled_autograd.shadow_cache.cli as _, compiled_autograd as ca; print('torch' in sys.modules)"
    assert _run(f"{code}; ca.enable; print('torch' in sys.modules)").split() == ["False", "True"]


@pytest.mark.parametrize(
    "first",
    [
        "compiled_autograd",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("backends, shadow_cache", "shadow_cache.store, backends.eager")
        ),
    ],
)
def test_old_names_are_the_same_modules(first: str) -> None:
    _run(
        f"import {first}\n"
        "import backends, shadow_cache, compiled_autograd.backends.modes\n"
        "import backends.modes, shadow_cache.store, compiled_autograd as ca\n"
        "from backends.inductor import rounding\n"
        "assert backends is ca.backends and backends.modes is ca.backends.modes\n"
        "assert rounding is ca.backends.inductor.rounding and backends.Backend is ca.backends.Backend\n"
        "assert shadow_cache is ca.shadow_cache and shadow_cache.Store is ca.shadow_cache.store.Store\n"
    )


@pytest.mark.parametrize("first", ["compiled_autograd.backends.modes", "sys"])
def test_an_old_name_warns_where_it_is_imported(first: str) -> None:
    """The folders of this repository are found without the finder."""
    code = f"import {first}, warnings\nwith warnings.catch_warnings(record=True) as found:\n"
    code += " warnings.simplefilter('always')\n import backends.modes, shadow_cache\n from backends import registry\n"
    assert _run(f"{code}for each in found: print(each.filename, each.lineno, each.message)").splitlines() == [
        f"<string> 4 '{name}' is 'compiled_autograd.{name}' since 0.3.0; the old name goes with the release after that."
        for name in ("backends", "shadow_cache")
    ]


def test_the_old_command_runs() -> None:
    command = [sys.executable, "-m", "shadow_cache", "--help"]
    assert b"Usage" in subprocess.run(command, capture_output=True, check=True, timeout=300).stdout
