"""Work that is too small for several threads is done by one."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._inductor import config

from backends.inductor.backend import InductorBackend
from backends.inductor.straight_line import products, program_library
from backends.inductor.straight_line.translation import translated

_LIMIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
_needs_mkl = pytest.mark.skipif(not products.limit_threads(), reason="PyTorch is built without MKL")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _product(size: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A program that multiplies two square matrices, and these."""
    code = f"""def call(args):
    a, b = args
    args.clear()
    c = empty_strided_cpu(({size}, {size}), ({size}, 1), torch.float32)
    extern_kernels.mm(a, b, out=c)
    return (c, )
"""
    empty = torch._C._dynamo.guards._empty_strided_cpu
    namespace = {"torch": torch, "empty_strided_cpu": empty, "extern_kernels": torch}
    a, b = torch.randn(size, size), torch.randn(size, size)
    library = program_library.begin().result()
    assert library is not None
    return translated(code, namespace, [a, b]).made_by(library.make_program), a, b


@_needs_mkl
@pytest.mark.parametrize(("size", "limits"), [(64, [1, 7]), (65, [])])
def test_small_products_are_limited_to_one_thread(
    size: int, limits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    @_LIMIT
    def limit(threads: int) -> int:
        asked.append(threads)
        return 7  # what was the limit before

    address = ctypes.cast(limit, ctypes.c_void_p).value
    monkeypatch.setattr(products, "limit_threads", lambda: address)
    program, a, b = _product(size)
    torch.testing.assert_close(program([a, b])[0], a @ b)
    assert asked == limits


@_needs_mkl
def test_the_limit_is_put_back_and_is_that_of_one_thread() -> None:
    limit = _LIMIT(products.limit_threads())
    program, a, b = _product(16)
    wanted = a @ b
    found: list[int] = []

    def other() -> None:
        limit(5)
        program([a, b])
        found.append(limit(0))

    limit(3)
    try:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        torch.testing.assert_close(program([a, b])[0], wanted)
        found.append(limit(0))
    finally:
        limit(0)
    assert found == [5, 3]


def _generated_for(rows: int) -> str:
    def multiply(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        return (x * y,)

    inputs = [torch.randn(rows, 64), torch.randn(rows, 64)]
    graph = torch.fx.experimental.proxy_tensor.make_fx(multiply)(*inputs)
    compiled: Any = InductorBackend().compile(graph, inputs)
    torch.testing.assert_close(compiled([*inputs])[0], inputs[0] * inputs[1])
    return str(compiled.source)


@pytest.mark.usefixtures("two_threads")
def test_small_kernels_have_one_thread() -> None:
    assert "omp parallel" not in _generated_for(64)
    assert "omp parallel" in _generated_for(256)


@pytest.mark.usefixtures("two_threads")
def test_what_the_user_has_set_stays() -> None:
    with config.patch({"cpp.min_chunk_size": 1}):
        assert "omp parallel" in _generated_for(64)
    with config.patch({"cpp.min_chunk_size": 100_000}):
        assert "omp parallel" not in _generated_for(256)


@pytest.mark.usefixtures("two_threads")
def test_what_the_environment_sets_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CPP_MIN_CHUNK_SIZE", "512")  # its default: what was read when it was imported
    assert "omp parallel" in _generated_for(64)
