"""Only tested versions of PyTorch are run on."""

from __future__ import annotations

import pytest
import torch

import compiled_autograd as ca
from compiled_autograd.versions import check_torch

from .helpers import in_subprocess


@pytest.mark.parametrize(
    "version", ["2.11.0+cu130", "2.12.1", "2.13.0", "2.13.5+cpu", "2.13.1a0+git123", torch.__version__]
)
def test_tested_versions_pass(version: str) -> None:
    assert check_torch(version) is None


@pytest.mark.parametrize("version", ["1.13.1", "2.10.0", "2.14.0", "2.14.0.dev20270101", "3.0", "13.2", "unknown", ""])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(ca.UnsupportedTorchError) as raised:
        check_torch(version)
    text = str(raised.value)
    assert ca.TESTED_TORCH in text and f"torch {version}" in text and "pip install" in text


def test_the_error_is_an_import_error() -> None:
    assert issubclass(ca.UnsupportedTorchError, ImportError)


@pytest.mark.parametrize("version", [pytest.param("2.10.0", marks=pytest.mark.slow), "2.14.0+cpu"])
def test_import_fails_on_another_version(version: str) -> None:
    done = in_subprocess(f"import torch; torch.__version__ = {version!r}; import compiled_autograd")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "UnsupportedTorchError" in last and ">=2.11,<2.14" in last and version in last


def test_import_passes_on_the_installed_version() -> None:
    done = in_subprocess("import compiled_autograd as ca; assert ca.TESTED_TORCH == '>=2.11,<2.14'")
    assert done.returncode == 0, done.stderr


def test_import_alone_changes_nothing_in_torch() -> None:
    code = """
from torch.autograd import Variable
before = Variable._execution_engine
import compiled_autograd
assert Variable._execution_engine is before
"""
    done = in_subprocess(code)
    assert done.returncode == 0, done.stderr
