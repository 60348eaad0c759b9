"""Names that PyTorch's tests of 2.6 import and its later versions have no more: what they stood for, or nothing."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
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


def supply() -> None:
    """Put them where the tests look for them; what needs a module that is not there, or CUDA, is left out."""
    for name, values in _NAMES.items():
        with contextlib.suppress(ImportError):
            module = importlib.import_module(name)
            for attribute, make in values.items():
                if not hasattr(module, attribute):
                    setattr(module, attribute, make())
