"""Attributes of users' tensors that Python lets a library override: the eager engine never asks them, nor do we.

Each attribute that :mod:`compiled_autograd.torch_api.attributes` reads, and some more, is overridden by one that
raises: on a class of parameters, on the class of the loss, and on ``torch.Tensor`` during the backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import compiled_autograd as ca
from backends.inductor import backend as inductor
from compiled_autograd.torch_api import attributes

from .helpers import assert_same

RAW: Any = torch._C.TensorBase
FIELDS = (
    *(
        "grad",
        "grad_fn",
        "requires_grad",
        "is_leaf",
        "shape",
        "dtype",
        "device",
        "layout",
        "output_nr",
        "data",
        "_base",
    ),
    *(
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
        "grad_dtype",
        "is_cuda",
        "is_nested",
        "is_quantized",
        "_version",
    ),
)
METHODS = (
    *("stride", "dim", "size", "numel", "is_contiguous", "is_conj", "is_neg", "_is_zerotensor", "_is_view", "data_ptr"),
    *("untyped_storage", "storage_offset", "view_as", "clone", "detach", "add_", "register_hook", "__eq__", "__bool__"),
    *(
        "__len__",
        "__iter__",
        "__repr__",
        "as_strided",
        "tolist",
        "element_size",
        "is_complex",
        "is_floating_point",
        "is_inference",
    ),
)
ASKED_OF_A_LOSS = ("requires_grad", "shape", "dtype", "is_nested", "numel")
"""``Tensor.backward`` itself asks these (``_make_grads`` in ``torch/autograd/__init__.py``, 2.11 to 2.15)."""
NOT_TRACED = (
    "grad",
    "grad_fn",
    "is_leaf",
    "output_nr",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
    "register_hook",
)
"""Tracing asks none of these: a tape compiles although ``torch.Tensor`` has others."""


def _raises(*_args: Any, **_kwargs: Any) -> Any:
    raise AssertionError("the eager engine asks Python for no attribute")


def _overrides(*names: str, getter: Any = _raises) -> dict[str, Any]:
    return {name: property(getter, _raises) if name in FIELDS else _raises for name in names}


@contextlib.contextmanager
def _on_every_tensor(overrides: Mapping[str, Any]) -> Iterator[None]:
    own = {name: vars(torch.Tensor)[name] for name in overrides if name in vars(torch.Tensor)}
    for name, override in overrides.items():
        setattr(torch.Tensor, name, override)
    try:
        yield
    finally:
        for name in overrides:
            delattr(torch.Tensor, name)
        for name, value in own.items():
            setattr(torch.Tensor, name, value)


def _gradients(
    parameter: Any = nn.Parameter, loss_class: Any = torch.Tensor, everywhere: Mapping[str, Any] | None = None
) -> list[torch.Tensor]:
    """Train for six steps of two sizes; ``.grad`` is accumulated, and set to None once."""
    torch.manual_seed(0)
    weights = [parameter(torch.randn(size)) for size in ((4, 3), (4,), (2, 4))]
    for step in range(6):
        with torch._C.DisableTorchFunctionSubclass():
            hidden = torch.tanh(torch.addmm(weights[1], torch.ones(2 + step % 2, 3), torch.t(weights[0])))
            loss = RAW.as_subclass(torch.sum(torch.mm(hidden, torch.t(weights[2]))), loss_class)
        with _on_every_tensor(everywhere or {}):
            torch.autograd.backward(loss)
        if step == 3:
            for weight in weights:
                RAW.grad.__set__(weight, None)
    return [RAW.clone(RAW.grad.__get__(weight)) for weight in weights]


def _both(**changes: Any) -> int:
    """Train on eager and with a session; compare, and return the session's hits."""
    wanted = _gradients(**changes)
    with ca.enable(backend="eager") as session:
        found = _gradients(**changes)
    assert_same(found, wanted)
    return session.stats().hits


def _class(base: type, *names: str) -> type:
    return type("Own", (base,), {"__hash__": object.__hash__, **_overrides(*names)})


def test_nothing_is_asked_of_a_class_of_parameters() -> None:
    assert _both(parameter=_class(nn.Parameter, *FIELDS, *METHODS)) == 3


def test_nothing_is_asked_of_the_class_of_a_loss() -> None:
    names = [name for name in (*FIELDS, *METHODS) if name not in ASKED_OF_A_LOSS]
    assert _both(loss_class=_class(torch.Tensor, *names)) == 3


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(one, other)
        ctx.name = "an attribute of the user's"
        return torch.mul(one, other)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        one, other = ctx.saved_tensors
        return torch.mul(grad, other), torch.mul(grad, one)


def _forward(leaf_class: type, inside_class: type) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a leaf, a tensor inside the tape, and the loss."""
    torch.manual_seed(0)
    leaf: Any = leaf_class(torch.randn(4, 3))
    with torch._C.DisableTorchFunctionSubclass():
        inside = RAW.as_subclass(torch.tanh(torch.mm(torch.ones(2, 3), torch.t(leaf))), inside_class)
        return leaf, inside, torch.sum(torch.mul(inside, inside))


def _by_function(leaf_class: type, inside_class: type) -> Any:
    leaf, inside, _ = _forward(leaf_class, inside_class)
    product = _Product.apply(inside, torch.mm(torch.ones(2, 3), torch.t(leaf)))
    with torch._C.DisableTorchFunctionSubclass():
        torch.autograd.backward(torch.sum(torch.add(product, torch.sum(_Product.apply(leaf, leaf)))))
    return [RAW.grad.__get__(leaf)]


def _hooked(leaf_class: type, inside_class: type) -> Any:
    """A hook gives back a gradient of the class."""
    leaf, inside, loss = _forward(leaf_class, inside_class)

    def hook(grad: torch.Tensor) -> torch.Tensor:
        return RAW.as_subclass(torch.mul(grad, 2), inside_class)

    RAW.grad_fn.__get__(inside).register_prehook(lambda grads: (hook(grads[0]),))
    torch.autograd.backward(loss)
    return [RAW.grad.__get__(leaf)]


def _packed(leaf_class: type, inside_class: type) -> Any:
    """Saved-tensor hooks give back tensors of the class."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: RAW.as_subclass(RAW.detach(x), inside_class)):
        leaf, _, loss = _forward(leaf_class, inside_class)
    torch.autograd.backward(loss)
    return [RAW.grad.__get__(leaf)]


def _asked(*which: int) -> Callable[[type, type], Any]:
    def asked(leaf_class: type, inside_class: type) -> Any:
        *ends, loss = _forward(leaf_class, inside_class)
        return torch.autograd.grad(loss, [ends[each] for each in which])

    return asked


@pytest.mark.parametrize(
    ("program", "is_hit"),
    [
        *[(_by_function, True), (_hooked, True), (_packed, True)],
        *[(_asked(0), True), (_asked(1), False), (_asked(0, 1), True)],
    ],
    ids=["function", "hook", "packed", "leaf", "inside", "both"],
)
def test_nothing_is_asked_where_more_is_done(program: Callable[[type, type], Any], is_hit: bool) -> None:
    classes = _class(nn.Parameter, *FIELDS, *METHODS), _class(torch.Tensor, *FIELDS, *METHODS)
    wanted = program(*classes)
    with ca.enable(backend="eager") as session:
        for _ in range(3):
            for one, other in zip(program(*classes), wanted, strict=True):
                assert_same([RAW.as_subclass(one, torch.Tensor)], [RAW.as_subclass(other, torch.Tensor)])
    assert bool(session.stats().hits) is is_hit


@pytest.mark.parametrize("answer", [_raises, lambda leaf: None, torch.zeros_like], ids=["raises", "none", "zeros"])
def test_nothing_is_asked_of_every_tensor(answer: Callable[..., Any]) -> None:
    assert _both(everywhere=_overrides(*NOT_TRACED, getter=answer)) == 3


@pytest.mark.parametrize(
    "answer", [_raises, lambda leaf: leaf.register_hook(lambda grad: grad)], ids=["raises", "hook"]
)
def test_no_property_for_grad_is_asked_while_inductor_compiles(answer: Callable[..., Any]) -> None:
    """nnsight's registers a hook, which Inductor's own tensors cannot have."""
    described = torch._subclasses.FakeTensorMode().from_tensor  # by Inductor: constants of its patterns
    with _on_every_tensor(_overrides("grad", getter=answer)):
        with inductor.grad_read_past_python():
            described(torch.ones(3))
        with pytest.raises((AssertionError, RuntimeError)):
            described(torch.zeros(3))  # as for anybody else


@pytest.mark.filterwarnings("ignore:compiled_autograd")
@pytest.mark.parametrize("name", ["device", "layout", "detach"])
def test_eager_runs_what_cannot_be_traced(name: str) -> None:
    _both(everywhere=_overrides(name))


def test_the_list_has_each_attribute_that_is_read() -> None:
    methods = {value.__name__ for value in vars(attributes).values() if type(value).__name__ == "method_descriptor"}
    slots = [value.__self__ for value in vars(attributes).values() if type(value).__name__ == "method-wrapper"]
    assert methods and methods <= {*METHODS}
    assert slots and {slot.__name__ for slot in slots} <= {*FIELDS}
