"""``backends`` and ``shadow_cache``, the names until 0.2 of packages of ours, where nothing else has these names."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

_OLD = ("backends", "shadow_cache")


class _OldNames(MetaPathFinder, Loader):
    """Gives our modules for their old names: the same objects, so that there is one of each class."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Find what is ours. A top-level module of the user's wins, wherever it is on ``sys.path``."""
        top, _, below = name.partition(".")
        if top not in _OLD or below == "__main__":  # runpy wants code, from the file
            return None
        if below:
            ours = sys.modules.get(top) is sys.modules.get(f"{__package__}.{top}")
        else:
            others = (each for each in sys.meta_path if each is not self and hasattr(each, "find_spec"))
            found = next(filter(None, (each.find_spec(name, path, target) for each in others)), None)
            ours = found is None or (found.origin is not None and Path(found.origin).resolve() == _file(top))
        return spec_from_loader(name, self) if ours else None

    def create_module(self, spec: ModuleSpec) -> None: ...

    def exec_module(self, module: ModuleType) -> None:
        take_over(module.__name__)


def _file(top: str) -> Path:
    return (Path(__file__).parent / top / "__init__.py").resolve()


def take_over(name: str) -> None:
    """Have the import of ``name`` that is under way give our module of that name, and warn of a top-level one."""
    if name in _OLD:
        text = f"{name!r} is {__package__ + '.' + name!r} since 0.3.0; the old name goes with the release after that."
        warnings.warn(text, DeprecationWarning, stacklevel=3)
    sys.modules[name] = import_module(f"{__package__}.{name}")


def install() -> None:
    """Look for old names first from now on: a submodule would be found in its folder, and made twice."""
    sys.meta_path.insert(0, _OldNames())
