"""Dependencies of Inductor's code beside its graph and the versions of torch and Python (torch 2.13).

The compiler is not among them: a library either loads or does not, and the loader says so. The target is, since a wrong
processor shows only when it meets an unknown instruction.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..versions import settings_belong_to_a_thread, user_override

_VARIABLES = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE_", "INDUCTOR_")
"""Beginnings of the names of environment variables that ``torch/_inductor/config.py`` reads its defaults from."""
_FEATURES = re.compile(r"\s*(flags|features)\s*:", re.IGNORECASE)
_NO_CODE = ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_WORKER_START")
"""Variables that change where and how code is compiled, not the code."""
_NO_CODE_SETTINGS = ("trace.", "compile_threads", "worker_", "cpp.cxx")
"""As above: beginnings of settings."""
DEFAULTS = "as they come"
"""Text for settings none of which was changed."""


def environment() -> dict[str, str]:
    """Named parts, each a short text. Costs a millisecond, and does not import Inductor."""
    return {
        "machine": platform.machine(),
        # Inductor compiles with -march=native: any instruction of this processor may be in it.
        "instructions": _digest(_instructions()),
        # The set that ATen uses, as ATEN_CPU_CAPABILITY limits it; Inductor chooses its vectors by it.
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        # Loops are split for that many, and the number stands in the code.
        "threads": str(torch.get_num_threads()),
        # Kernels are linked against both. A library for another one would be refused; so each keeps its own.
        "libc": "-".join(platform.libc_ver()),
        "libtorch": _digest(f"{torch.version.git_version}\n{torch.__config__.show()}"),
        "inductor_settings": inductor_settings(),
        **_cuda(),
    }


CUDA = "cuda"
"""Prefix of the names of parts that exist only if CUDA is in use."""


def _cuda() -> dict[str, str]:
    """Return the dependencies of CUDA kernels: none in a process that has not initialised CUDA."""
    if torch.version.cuda is None or not torch.cuda.is_initialized():
        return {}
    return {
        CUDA: torch.version.cuda,
        f"{CUDA}_devices": _devices(),
        f"{CUDA}_driver": _driver(),
        f"{CUDA}_triton": _triton(),
    }


def _devices() -> str:
    """The devices that this process sees; each once, where all are alike: then it matters not how many there are."""
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    texts = [f"{each.name}, {each.major}.{each.minor}, {each.multi_processor_count} processors" for each in found]
    return texts[0] if len({*texts}) == 1 else "; ".join(f"{index}: {text}" for index, text in enumerate(texts))


@functools.cache
def _driver() -> str:
    """The version of CUDA that the driver has, as the driver counts: 13000. It has been loaded where CUDA is in use."""
    version = ctypes.c_int()
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        driver.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return "none"
    return str(version.value)


@functools.cache
def _triton() -> str:
    """Triton's version, without importing it: it is not needed to run what it compiled."""
    for name in ("triton", "pytorch-triton", "triton-windows"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"


def inductor_settings() -> str:
    """A digest of Inductor's settings that are not at their defaults, and of the variables that change the defaults.

    A process that has not imported Inductor has changed none of its settings: it need not be imported to see that.
    """
    variables = [each for each in os.environ.items() if each[0].startswith(_VARIABLES)]
    found = [each for each in variables if not each[0].startswith(_NO_CODE)]
    return _digest(repr(sorted([*found, *_changed(sys.modules.get("torch._inductor.config"))])))


_hash: Callable[[], bytes] | None = None
"""The settings' own method, once they are imported: this is asked at every backward."""


def chosen_settings() -> str:
    """Return the settings of Inductor that the user has changed in this thread: ``max_fusion_size=32``.

    If none was changed since the last call, this costs one query of the module of settings: half a microsecond. (Before
    2.12 settings belong to the process, and each compile changes some meanwhile: they are not read.)
    """
    global _hash
    if _hash is None:
        config = sys.modules.get("torch._inductor.config")
        if config is None or not settings_belong_to_a_thread() or not hasattr(config, "get_hash"):
            return DEFAULTS  # or it is being imported
        _hash = config.get_hash
    return _text(_hash())


def questions_about_settings() -> list[tuple[Any, str | None, Any]]:
    """Return questions with which C++ checks that :func:`chosen_settings` would still return the same: (function, None,
    answer), where a call must return an equal value.

    The module of settings keeps the hash, and whether something was set since it was made, in two variables of the
    context (``ConfigModule.get_hash`` in ``torch/utils/_config_module.py``, 2.13).
    """
    chosen, config = chosen_settings(), sys.modules.get("torch._inductor.config")
    is_dirty, digest = getattr(config, "_hash_dirty_var", None), getattr(config, "_hash_cache_var", None)
    if _hash is None or is_dirty is None or digest is None or is_dirty.get() or not digest.get():
        return [(chosen_settings, None, chosen)]
    return [(is_dirty.get, None, False), (digest.get, None, digest.get())]


@functools.lru_cache(256)
def _text(digest: bytes) -> str:
    """Return the text of :func:`chosen_settings` for the current settings, which have this hash."""
    changed = _changed(sys.modules["torch._inductor.config"])
    return ", ".join(f"{name}={value}" for name, value in changed) or DEFAULTS


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _instructions() -> str:
    """Return the processor's features: the kernel's list if there is one, else torch's, which is shorter."""
    try:
        with Path("/proc/cpuinfo").open() as lines:
            found = next(filter(_FEATURES.match, lines), None)  # of the first processor, without reading on
        if found is not None:
            return " ".join(sorted(found.partition(":")[2].split()))
    except OSError:
        pass  # other systems have no such file
    return repr(sorted(torch.cpu.get_capabilities().items()))


def is_chosen(name: str) -> bool:
    """Return whether the user has changed one of Inductor's settings."""
    config = sys.modules.get("torch._inductor.config")
    return config is not None and any(name == changed for changed, _ in _changed(config))


def _changed(config: Any) -> list[tuple[str, str]]:
    """Return the settings in a module that the user has set to another value than the default, or to None.

    The order of precedence is that of ``ConfigModule._get_dict``.
    """
    from torch.utils._config_module import _UNSET_SENTINEL as UNSET

    found = []
    entries: dict[str, Any] = getattr(config, "_config", {})
    for name, entry in sorted(entries.items()):
        if entry.alias is None and entry.env_value_force is UNSET and not name.startswith(_NO_CODE_SETTINGS):
            default = entry.default if entry.env_value_default is UNSET else entry.env_value_default
            value = user_override(entry)
            if value is not UNSET and value != default:
                found.append((name, repr(value)))
    return found
