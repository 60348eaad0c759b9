"""Names that PyTorch's tests of 2.6 import and its later versions have no more: what they stood for, or nothing."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_NAMES: dict[str, dict[str, Callable[[], Any]]] = {
    "torch.testing._internal.common_cuda": {"tf32_is_not_fp32": lambda: lambda: False},
    "torch.testing._internal.inductor_utils": {"HAS_CUDA": lambda: False},
    "torch.autograd._functions.utils": {"check_onnx_broadcast": lambda: None},
    "torch.onnx.symbolic_opset9": {"_prepare_onnx_paddings": lambda: None},
    "torch.testing._internal.common_mkldnn": {"bf32_on_and_off": lambda: lambda *_, **__: lambda function: function},
    "torch.testing._internal.common_nn": {"new_module_tests": lambda: _new_module_tests()},
}


def _new_module_tests() -> Any:
    from torch.testing._internal import common_nn

    return common_nn.get_new_module_tests() if hasattr(common_nn, "get_new_module_tests") else []


class _Supplies(importlib.abc.MetaPathFinder):
    """Adds what is missing to a module as soon as it was imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name in _NAMES else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_add(module: ModuleType) -> None:
            execute(module)
            _add_to(module)

        spec.loader.exec_module = execute_and_add  # type: ignore[method-assign]
        return spec


def _add_to(module: ModuleType) -> None:
    for attribute, make in _NAMES[module.__name__].items():
        if not hasattr(module, attribute):
            setattr(module, attribute, make())


def supply() -> None:
    """Put them where the tests look for them, when they do: to import all of these modules takes seconds."""
    for name in _NAMES:
        if name in sys.modules:
            _add_to(sys.modules[name])
    sys.meta_path.insert(0, _Supplies())
