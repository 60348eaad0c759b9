"""``ca.inspect`` of tapes, models and hooks that are odd: nothing of the user's runs, and nothing is told wrongly."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import compiled_autograd as ca
from compiled_autograd.inspection.nodes import SavedTensor


def _shown(*outputs: torch.Tensor) -> ca.TapeView:
    """A view, all forms of which have been made."""
    view = ca.inspect(*outputs)
    for form in (view.__str__, view.readable, view._repr_html_, view.to_networkx, view.memory().__str__):
        assert form()
    for by in ("node", "module"):
        assert view.to_dot(by) and view.to_mermaid(by)  # type: ignore[arg-type]
    return view


def _saved(view: ca.TapeView) -> dict[str, SavedTensor]:
    return {f"{node.name}.{each.name}": each for node in view.nodes for each in node.saved}


# ---- what must not run -----------------------------------------------------------------------------------------------


class _Watched(torch.Tensor):
    calls: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_is_not_asked() -> None:
    linear = nn.Linear(3, 3)
    linear.weight = nn.Parameter(torch.randn(3, 3).as_subclass(_Watched))
    x = torch.randn(3).as_subclass(_Watched).requires_grad_()
    loss = (linear(x.exp()) * x.sin()).sum()
    _Watched.calls.clear()
    view = _shown(loss, x)
    assert _Watched.calls == [] and view.models == ("Linear",)


def test_modes_see_nothing() -> None:
    seen: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.randn(3, 2, requires_grad=True)
    loss = torch.sparse.mm(torch.eye(3).to_sparse(), x).exp().sum()
    with Functions(), Operators():
        view = ca.inspect(loss, x)
    assert seen == [] and len(view.nodes) == 4


def test_methods_of_a_model_are_not_called() -> None:
    class Model(nn.Linear):
        def named_modules(self, *args: Any, **more: Any) -> Iterator[Any]:
            raise AssertionError("it was called")

        def parameters(self, recurse: bool = True) -> Any:
            raise AssertionError("it was called")

        buffers = parameters  # type: ignore[assignment]

    model = Model(2, 2)
    view = _shown(model(torch.ones(1, 2)).sum())
    assert {node.parameter for node in view.nodes} == {None, "weight", "bias"}


class _Hook:
    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"it was asked for {name}")

    def __call__(self, gradient: torch.Tensor) -> None:
        return None

    def method(self, gradient: torch.Tensor) -> None:
        return None


def test_hooks_are_not_asked_for_their_names() -> None:
    x = torch.randn(3, requires_grad=True)
    for hook in (_Hook(), functools.partial(print, 1), _Hook().method, nn.Identity()):
        x.register_hook(hook)
    names = [each.removeprefix("on the gradient: ") for each in _shown(x.sum()).nodes[-1].hooks]
    assert names == ["_Hook", "print", "_Hook.method", "Identity"]


class _Pretends:
    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise AssertionError("it was asked for its class")


class _Keeps(torch.autograd.Function):
    """Keeps what it is given, as it is given it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: Any) -> torch.Tensor:
        ctx.kept, ctx.odd = kept, _Pretends()
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 2, None


def test_in_a_compiled_function_it_runs_as_it_is() -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        loss = x.sin().sum()
        return loss, len(ca.inspect(loss).nodes)

    graphs: list[Any] = []
    compiled: Any = torch.compile(step, backend=lambda module, _: (graphs.append(module), module.forward)[1])
    _, count = compiled(torch.randn(3, requires_grad=True))
    assert (count, len(graphs)) == (3, 1)


# ---- tapes on which something can be asked no more -------------------------------------------------------------------


def test_a_view_whose_base_was_written_since() -> None:
    base = torch.randn(2, 3, requires_grad=True) * 1
    part, _ = base.unbind(0)
    part.register_hook(_Hook())
    loss = part.sin().sum()
    base.add_(1)
    with pytest.raises(RuntimeError, match="is a view and its base"):
        _ = part.grad_fn
    assert [node.name for node in _shown(loss).nodes][1:3] == ["SinBackward0", "UnbindBackward0"]


def test_a_leaf_in_inference_mode() -> None:
    x = torch.randn(3, requires_grad=True)
    with torch.inference_mode():
        view = _shown(x)
    assert [node.name for node in view.nodes] == ["AccumulateGrad"]


def test_sizes_that_are_symbols() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.randn(5, 3, requires_grad=True), symbolic_context=context)
    with mode:
        loss = x.exp().sin().sum()
        view = _shown(loss)
    size = str(x.shape[0])
    assert size.startswith("s") and mode.shape_env is not None and mode.shape_env.guards == []
    assert view.nodes[1].gradients[0].shape == (size, 3) == _saved(view)["ExpBackward0.result"].shape


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(layout: torch.layout) -> None:
    given = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout, requires_grad=True)
    view = _shown(torch.nested.to_padded_tensor(torch.relu(given), 0.0).sum())
    saved = _saved(view)["ReluBackward0.result"]
    assert saved.dtype is torch.float32 and str(saved).startswith("result f32[")
    assert saved.bytes == 6 * 3 * 4  # offsets are the leaf's


# ---- names -----------------------------------------------------------------------------------------------------------


def test_names_that_are_nearly_numbers() -> None:
    model = nn.Module()
    for name in ("²", "٣", "9" * 5000, "0"):
        model.add_module(name, nn.Linear(2, 2))
    x = torch.ones(1, 2)
    for each in model.children():
        x = each(x)
    assert "²: 4 nodes" in str(_shown(x.sum())).replace("5 nodes", "4 nodes")


def test_a_name_of_several_lines_is_one_line() -> None:
    model = nn.Module()
    model.add_module("a\n#0 Fake\x1b[31m", nn.Linear(2, 2))
    (linear,) = model.children()
    view = _shown(linear(torch.ones(1, 2)).exp().sum())
    for text in (str(view), view.readable(), str(view.memory()), view.to_dot("node"), view.to_mermaid("node")):
        assert "\x1b" not in text and not any(line.startswith("#0 Fake") for line in text.splitlines())
    assert "\x1b" not in view._repr_html_() and len(view.readable().splitlines()) == len(view.nodes)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_subclass_that_wraps_tensors_has_their_bytes() -> None:
    one = torch.randn(4)
    x = TwoTensor(one, one.clone()).requires_grad_()
    view = _shown(x.exp().sin().sum())
    assert _saved(view)["ExpBackward0.result"].bytes == 2 * 4 * 4 == view.memory().bytes


def test_tensors_in_lists_of_a_functions_attributes() -> None:
    x = torch.randn(8, requires_grad=True)
    kept = [x.detach() * 2, {"a": (x.detach() * 3,)}]
    loss = _Keeps.apply(x, kept).sum()
    kept = []
    view = _shown(loss)
    assert list(_saved(view)) == ["_KeepsBackward.ctx.kept[0]", "_KeepsBackward.ctx.kept[1]['a'][0]"]
    assert view.memory().bytes == 2 * 8 * 4


@pytest.mark.parametrize("held", [False, True])
def test_what_several_functions_keep_is_not_held_by_the_program(held: bool) -> None:
    x = torch.randn(8, requires_grad=True)
    mask = x > 0
    loss = _Keeps.apply(_Keeps.apply(x, mask), mask).masked_fill(mask, 0).sum()
    only_kept = (x > 1) if held else None
    loss = _Keeps.apply(loss, [x > 1, only_kept])
    if not held:
        del mask
    kinds = {name: each.kind for name, each in _saved(_shown(loss)).items()}
    assert kinds["MaskedFillBackward0.mask"] == kinds["_KeepsBackward.ctx.kept"] == ("input" if held else "kept")
    assert kinds["_KeepsBackward.ctx.kept[0]"] == "kept"
    assert kinds.get("_KeepsBackward.ctx.kept[1]") == ("input" if held else None)


def test_parts_that_several_tensors_share_count_once() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    one = torch.eye(3).to_sparse()
    other = torch.sparse_coo_tensor(one.indices(), one.values() * 2, (3, 3), is_coalesced=True)
    loss = torch.sparse.mm(one, x).sum() + torch.sparse.mm(other, x).sum()
    del one, other
    assert _shown(loss).memory().bytes == 2 * 3 * 8 + 2 * 3 * 4

    def pack(tensor: torch.Tensor) -> Any:
        return tensor.detach(), shared

    shared = torch.ones(100)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[0]):
        hidden = x.exp().sin()
    assert _shown(hidden.sum()).memory().bytes == 24 + 400


@pytest.mark.parametrize(
    "make", [torch.Tensor.to_sparse_csc, lambda t: t.to_sparse_bsr(2), lambda t: t.to_sparse_bsc(2)]
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_every_sparse_layout_has_the_bytes_of_its_parts(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    sparse = make(torch.eye(4))
    by_columns = sparse.layout in (torch.sparse_csc, torch.sparse_bsc)
    names = ("ccol_indices", "row_indices") if by_columns else ("crow_indices", "col_indices")
    expected = sum(getattr(sparse, name)().untyped_storage().nbytes() for name in (*names, "values"))
    loss = _Keeps.apply(torch.ones(2, requires_grad=True), (sparse,)).sum()
    del sparse
    memory = _shown(loss).memory()
    assert (memory.bytes, memory.unknown) == (expected, 0)


# ---- what is folded --------------------------------------------------------------------------------------------------


class _Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        x = self.blocks[1](torch.cat([x, x, x])[:2])  # what it saves keeps three times as much alive
        return self.blocks[2](x)


def test_layers_that_keep_different_amounts_are_told_apart() -> None:
    model = _Sliced()
    text = str(_shown(model(torch.randn(2, 4, requires_grad=True).exp()).sum()))
    assert "3 times" not in text and "blocks.1: " in text and "mat1 f32[2,4] 96 B" in text


def test_html_has_no_more_modules_than_nodes() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2 + number % 2 * 0) for number in range(1_200)))
    x = torch.ones(1, 2)
    for number, layer in enumerate(model):
        x = layer(x).exp() if number * number % 7 == 2 else layer(x)
    page = _shown(x.sum())._repr_html_()
    assert page.count("<details>") <= 1_000 and "more nodes are not shown" in page


# ---- what is no tape -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [3, None, [torch.ones(1, requires_grad=True)], nn.Linear(1, 1)])
def test_what_is_no_tensor_is_named(given: Any) -> None:
    with pytest.raises(TypeError, match=rf"output 1 is of type {type(given).__name__}; inspect takes tensors"):
        ca.inspect(torch.ones(1, requires_grad=True).sum(), given)


def test_nothing_is_no_tape() -> None:
    with pytest.raises(ValueError, match="inspect was called without outputs"):
        ca.inspect()


def test_no_name_is_sought_by_running_a_metaclass() -> None:
    """Among all objects may be some whose type cannot be hashed, or compared."""

    class Meta(type):
        def __eq__(cls, other: object) -> bool:
            raise AssertionError("it was compared")

        __hash__ = None  # type: ignore[assignment]

    odd = Meta("Odd", (), {})()
    model = nn.Linear(2, 2)
    view = _shown(F.relu(model(torch.ones(1, 2))).sum())
    assert view.models == ("Linear",) and sys.getrefcount(odd) > 0
