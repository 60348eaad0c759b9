"""What compiled code depends on is in its key: our own sources, Python's ABI, Inductor's settings."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor import config

import compiled_autograd as ca
from backends.inductor import environment
from backends.inductor.environment import DEFAULTS, chosen_settings
from backends.versions import settings_belong_to_a_thread
from compiled_autograd.cache import environment_key
from compiled_autograd.cache.environment_key import digest_of_source

from .helpers import expect


def _package(root: Path) -> Path:
    (root / "inner" / "deeper").mkdir(parents=True)
    (root / "__init__.py").write_text("")
    (root / "inner" / "deeper" / "code.py").write_text("x = 1\n")
    (root / "line.cpp").write_text("int x;\n")
    (root / "inner" / "line.h").write_text("extern int x;\n")
    return root


@pytest.mark.parametrize("file", ["__init__.py", "inner/deeper/code.py", "line.cpp", "inner/line.h", "link/code.py"])
def test_a_change_of_any_source_file_changes_the_digest(tmp_path: Path, file: str) -> None:
    roots = [_package(tmp_path / "one"), _package(tmp_path / "two")]
    (roots[1] / "link").symlink_to(_package(tmp_path / "elsewhere") / "inner" / "deeper")
    before = digest_of_source(roots)
    assert digest_of_source(roots) == before
    path = roots[1] / file
    path.write_text(path.read_text() + " ")
    changed = digest_of_source(roots)
    path.rename(path.with_name(f"other{path.suffix}"))
    assert len({before, changed, digest_of_source(roots)}) == 3


def test_what_is_no_source_changes_nothing(tmp_path: Path) -> None:
    root = _package(tmp_path)
    before = digest_of_source([root])
    (root / "__pycache__").mkdir()
    (root / "__pycache__" / "code.cpython-311.pyc").write_bytes(b"0")
    (root / "notes.txt").write_text("")
    assert digest_of_source([root]) == before


def test_the_key_has_all_of_our_sources_and_pythons_abi(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(environment_key, "digest_of_source", lambda roots: asked.extend(roots) or "0" * 64)
    versions = environment_key.versions.__wrapped__()
    assert asked == [Path(str(ca.__file__)).parent] and (asked[0] / "backends" / "inductor").is_dir()
    assert versions["package"].endswith("000000000000")
    assert str(sysconfig.get_config_var("SOABI")) in versions["python"]


# ---- Inductor's settings ---------------------------------------------------------------------------------------------


_of_a_thread = pytest.mark.skipif(
    not settings_belong_to_a_thread(), reason="before 2.12 settings are the process's, and nobody looks at them"
)


@_of_a_thread
def test_settings_are_told_and_are_cheap_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_settings() == DEFAULTS
    with config.patch({"max_fusion_size": 3, "cpp.threads": 1}):
        assert chosen_settings() == "cpp.threads=1, max_fusion_size=3"
        monkeypatch.setattr(environment, "_changed", None)  # not asked again as long as nothing changes
        assert chosen_settings() == "cpp.threads=1, max_fusion_size=3"
    assert chosen_settings() == DEFAULTS


def _gradient(x: torch.Tensor) -> torch.Tensor:
    (result,) = torch.autograd.grad(x.sin().exp().sum(), x)
    return result


@_of_a_thread
def test_code_that_was_compiled_under_other_settings_does_not_serve() -> None:
    x = torch.randn(5, 7, requires_grad=True)
    expected = _gradient(x)
    with ca.enable(backend="inductor", cache_dir=False, tune=False) as session:
        for size, outcome in ((64, "structure_miss"), (64, "hit"), (2, "shape_miss"), (2, "hit"), (64, "hit")):
            with config.patch(max_fusion_size=size):
                torch.testing.assert_close(_gradient(x), expected)
            assert session.last is not None and session.last.outcome == outcome
            if outcome == "shape_miss":
                (reason,) = session.last.reasons
                assert (reason.kind, reason.where) == ("ambient_state", "inductor_settings")
                assert (reason.old, reason.new) == (DEFAULTS, "max_fusion_size=2")
    expect(session.stats(), structure_misses=1, shape_misses=1, hits=3, compiles=2)


def test_what_is_compiled_in_the_background_has_the_settings_of_the_thread_that_asked() -> None:
    seen: list[int] = []

    def backend(graph_module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        seen.append(config.max_fusion_size)
        return graph_module.forward

    x = torch.randn(5, 7, requires_grad=True)
    expected = _gradient(x)
    with config.patch(max_fusion_size=3), ca.enable(backend=backend, on_miss="background", tune=False) as session:
        for outcome in ("structure_miss", "hit"):
            assert torch.equal(_gradient(x), expected)
            assert session.last is not None and session.last.outcome == outcome
            assert session.wait(60)
    assert seen == [3]
    expect(session.stats(), structure_misses=1, hits=1, compiles=1)
