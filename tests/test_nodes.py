"""Nodes of every kind that a tape can have, each against eager: Python and C++ functions, custom operators, views,
compiled forwards, checkpoints, sparse and complex gradients, tensor subclasses, autocast."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import compiled_autograd as ca

from .helpers import Result, assert_same, both, compare, expect


def _leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


# ---- saved tensors that were packed ----------------------------------------------------------------------------------


def _asks(
    save: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]],
) -> tuple[Any, list[Any]]:
    """A function that notes which of its saved tensors require grad, and the notes."""
    notes: list[Any] = []

    class Asks(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            out = x * y.sum()
            ctx.save_for_backward(*save(x, y, out))
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            notes.append([each.requires_grad for each in ctx.saved_tensors])
            return grad * 2, grad.sum().expand(5)

    return Asks, notes


@pytest.mark.parametrize("y_requires_grad", [False, True])
@pytest.mark.parametrize(
    "save", [lambda x, y, out: (x, y), lambda x, y, out: (out,), lambda x, y, out: (y, torch.ones(3), x)]
)
def test_packed_tensors_require_grad_as_those_that_were_saved(save: Any, y_requires_grad: bool) -> None:
    """Users' hooks give tensors without history; the engine knows which had one."""
    asks, notes = _asks(save)
    session = ca.enable(backend="eager")
    for context in (ca.disable(), session, session):
        y = torch.randn(5, requires_grad=y_requires_grad)
        with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
            loss = asks.apply(_leaf(4).exp(), y).sum()
        with context:
            loss.backward()
    assert notes == [notes[0]] * 3 and any(notes[0])
    expect(session.stats(), structure_misses=1, hits=1)


@pytest.mark.parametrize("function", [torch.linalg.solve, torch.linalg.solve_triangular, torch.matmul])
def test_packed_tensors_of_built_in_nodes_require_grad(function: Callable[..., torch.Tensor]) -> None:
    """Some nodes leave out the gradient of a saved tensor that requires none."""
    settings = {"upper": True} if function is torch.linalg.solve_triangular else {}

    def make() -> Any:
        a, b = _leaf(3, 3), _leaf(3, 2)
        with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
            return function(a.triu(), b.exp(), **settings).sin().sum(), [a, b]

    expect(both(make), structure_misses=1, hits=1, captures=1)


def _raises(tensor: Any) -> Any:
    raise ValueError("gone")


@pytest.mark.parametrize(
    "unpack",
    [_raises, lambda tensor: 3, lambda tensor: tensor.double(), lambda tensor: tensor.to_sparse().to_dense()],
    ids=["raises", "a number", "another dtype", "made anew"],
)
def test_what_an_unpack_hook_gives_is_taken_as_eager_takes_it(unpack: Callable[[Any], Any]) -> None:
    """Values, errors and their words."""

    def run() -> Any:
        torch.manual_seed(0)
        x = _leaf(4)
        with saved_tensors_hooks(lambda tensor: tensor, unpack):
            loss = (x.exp() * x).sin().sum()
        try:
            return torch.autograd.grad(loss, x)[0]
        except (ValueError, TypeError) as error:
            return type(error), str(error)

    wanted = run()
    session = ca.enable(backend="eager")
    for _ in range(2):
        with session:
            found = run()
        if isinstance(wanted, torch.Tensor):
            assert_same([found], [wanted])
        else:
            assert found == wanted
    expect(session.stats(), structure_misses=1, hits=1, captures=1)


# ---- checkpointing ---------------------------------------------------------------------------------------------------


def _layers() -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


def _train(loss: Callable[[Any, torch.Tensor], Any], **settings: Any) -> Result:
    """Three steps of four layers, beside eager."""
    x = torch.randn(4, 8)
    return compare(_layers, lambda model: loss(model, x), counts=False, **settings)


@pytest.mark.parametrize(
    ("outer", "inner", "backwards"), [(True, True, 3), (True, False, 2), (False, True, 2), (False, False, 1)]
)
def test_nested_checkpoints(outer: bool, inner: bool, backwards: int) -> None:
    """Each reentrant one has a backward of its own."""

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        def block(h: torch.Tensor) -> torch.Tensor:
            inside = checkpoint(lambda h: F.dropout(model[1](h).tanh(), 0.3), h.sin(), use_reentrant=inner)
            return model[2](inside).sigmoid()

        return model[3](checkpoint(block, model[0](x), use_reentrant=outer)).square().mean()

    expect(_train(loss).stats, structure_misses=backwards, hits=2 * backwards, captures=backwards)


@pytest.mark.parametrize("early_stop", [False, True])
def test_early_stop(early_stop: bool) -> None:
    """What is recomputed after the last saved tensor is seen from the forward's side: it is counted."""
    counts: list[int] = []

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        def block(layer: Any, h: torch.Tensor) -> torch.Tensor:
            h = F.dropout(layer(h).tanh().exp(), 0.3).cumsum(0)  # the last of them saves nothing
            counts[-1] += 1
            return h

        counts.append(0)
        h = model[0](x)
        with set_checkpoint_early_stop(early_stop):
            for layer in model[1:3]:
                h = checkpoint(block, layer, h, use_reentrant=False)
        return model[3](h).square().mean()

    expect(_train(loss).stats, structure_misses=1, hits=2, captures=1)
    assert counts == [2 if early_stop else 4] * 6


@pytest.mark.parametrize("which", ["a policy", "a list of operators"])
def test_selective_checkpointing(which: str) -> None:
    """Products of matrices are kept and the rest is computed anew, under dispatch modes of the checkpoint's own."""
    kept = [torch.ops.aten.addmm.default]

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy if which == "a policy" else kept)

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        h = model[0](x)
        for layer in model[1:3]:
            h = checkpoint(lambda layer, h: layer(h).tanh().exp(), layer, h, use_reentrant=False, context_fn=contexts)
        return model[3](h).square().mean()

    expect(_train(loss).stats, structure_misses=1, hits=2, captures=1)


def test_checkpoint_sequential_with_gradients_kept() -> None:
    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint_sequential(nn.Sequential(*model), 2, x, use_reentrant=False).square().mean()

    expect(_train(loss, keep_grads=True).stats, structure_misses=2, hits=1, captures=2)


def test_a_checkpoint_differentiated_twice() -> None:
    """With the tape kept, it is recomputed for each."""

    def loss(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
        h = checkpoint(lambda h: model[1](h).tanh(), model[0](x), use_reentrant=False)
        loss = model[2](h).square().mean()
        return [loss, loss * 2]

    expect(_train(loss).stats, structure_misses=2, hits=4, captures=2)


def test_a_function_inside_a_checkpoint() -> None:
    class Swish(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x.sigmoid()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            s = x.sigmoid()
            return grad * (s + x * s * (1 - s))

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(lambda h: Swish.apply(model[1](h)) + h, model[0](x), use_reentrant=False)
        return model[2](h).square().mean()

    expect(_train(loss).stats, structure_misses=1, hits=2, captures=1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_under_autocast(reentrant: bool) -> None:
    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = checkpoint(lambda h: model[1](h).tanh(), model[0](x), use_reentrant=reentrant)
            return model[2](h).float().square().mean()

    stats = _train(loss).stats
    assert stats.hits == 2 * stats.structure_misses and not stats.bypasses and not stats.failures


def test_a_checkpoint_that_is_not_the_same_again_is_answered_in_eagers_words() -> None:
    def message(context: Any) -> str:
        calls: list[int] = []

        def changes(h: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return h.sin().exp() if len(calls) == 1 else h.sin()

        loss = checkpoint(changes, _leaf(4) * 2, use_reentrant=False).sum()
        with context, pytest.raises(torch.utils.checkpoint.CheckpointError) as raised:
            loss.backward()
        return str(raised.value)

    with ca.disable():
        wanted = message(ca.disable())
    assert message(ca.enable(backend="eager")) == wanted


# ---- functions written in Python -------------------------------------------------------------------------------------


class _OldStyle(Function):
    """``forward`` with ctx; a list, a dict and a callable among its arguments."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scales: list[float], options: dict[str, Any], then: Any) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scales[0] * options["times"]
        return then(x) * ctx.scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * x.cos() * ctx.scale, None, None, None


class _NewStyle(Function):
    """The same with ``setup_context``, and two outputs of which the second is not differentiable."""

    @staticmethod
    def forward(x: torch.Tensor, scale: float) -> Any:
        return x.sin() * scale, x > 0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.scale = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, output[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, unused: torch.Tensor) -> Any:
        x, positive = ctx.saved_tensors
        return torch.where(positive, grad * x.cos() * ctx.scale, 0), None


class _WithVmapRule(_NewStyle):
    """With a rule for vmap, written out; here only its plain backward."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, scale: float) -> Any:
        raise AssertionError("not under vmap")


class _WithGeneratedRule(_NewStyle):
    generate_vmap_rule = True


@pytest.mark.parametrize(
    "apply",
    [
        lambda x: _OldStyle.apply(x, [2.0], {"times": 3}, torch.sin),
        lambda x: _NewStyle.apply(x, 3.0)[0],
        lambda x: _WithVmapRule.apply(x, 3.0)[0],
        lambda x: _WithGeneratedRule.apply(x, 3.0)[0],
    ],
    ids=["old style", "setup_context", "vmap", "generate_vmap_rule"],
)
def test_functions_of_every_style(apply: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def make() -> Any:
        x = _leaf(5)
        return (apply(apply(x.exp())) * x).sum(), [x]

    expect(both(make), structure_misses=1, hits=1, captures=1)


def test_once_differentiable_refuses_a_second_time_in_eagers_words() -> None:
    class Once(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    def message() -> str:
        x = _leaf(4)
        (first,) = torch.autograd.grad(Once.apply(x).pow(2).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError) as raised:
            first.sum().backward()
        return str(raised.value)

    wanted = message()
    with ca.enable(backend="eager") as session:
        assert message() == wanted
    assert session.stats().bypasses.pop("create_graph") == 1
    assert session.stats().backwards == 2


def _misuse(save: Callable[[Any, torch.Tensor, torch.Tensor], None], load: Callable[[Any], torch.Tensor]) -> Any:
    class Misuse(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            root = x.exp()
            save(ctx, x, root)
            return root.sin()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            root = load(ctx)
            return grad * root.cos() * root

    return Misuse


@pytest.mark.parametrize(
    ("save", "load"),
    [
        (lambda ctx, x, root: ctx.save_for_backward(root), lambda ctx: ctx.saved_tensors[0]),
        (lambda ctx, x, root: setattr(ctx, "root", root), lambda ctx: ctx.root),
        (lambda ctx, x, root: setattr(ctx, "x", x), lambda ctx: ctx.x.exp()),
        (lambda ctx, x, root: ctx.save_for_backward(x, x, root), lambda ctx: ctx.saved_tensors[1].exp()),
        (lambda ctx, x, root: ctx.save_for_backward(x[:2], x[2:]), lambda ctx: torch.cat(ctx.saved_tensors).exp()),
    ],
    ids=["an intermediate", "an intermediate on ctx", "an input on ctx", "twice", "views"],
)
def test_what_a_function_should_not_save(save: Any, load: Any) -> None:
    misuse = _misuse(save, load)

    def make() -> Any:
        x = _leaf(4)
        return misuse.apply(x * 2).sum(), [x]

    expect(both(make), structure_misses=1, hits=1, captures=1)


@pytest.mark.parametrize("saved", ["input", "output"])
def test_a_tensor_that_was_changed_after_it_was_saved_is_answered_in_eagers_words(saved: str) -> None:
    class Saves(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            out = x.exp()
            ctx.save_for_backward(x if saved == "input" else out)
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * ctx.saved_tensors[0]

    def message() -> str:
        x = _leaf(4) * 1
        y = Saves.apply(x)
        (x if saved == "input" else y).detach().mul_(2)
        with pytest.raises(RuntimeError) as raised:
            y.sum().backward()
        return str(raised.value)

    wanted = message()
    assert "modified by an inplace operation" in wanted
    with ca.enable(backend="eager") as session:
        assert message() == wanted
    assert session.stats().backwards == 1


class _Product(Function):
    """A matrix product that computes what is needed, and notes what that was."""

    needed: list[Any] = []  # noqa: RUF012  a test's notebook

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        _Product.needed.append(ctx.needs_input_grad)
        of_x = grad @ w.t() if ctx.needs_input_grad[0] else None
        return of_x, x.t() @ grad if ctx.needs_input_grad[1] else None


@pytest.mark.parametrize("which", ["x", "w"])
def test_a_function_is_told_what_is_needed_as_under_eager(which: str) -> None:
    _Product.needed.clear()

    def make() -> Any:
        x, w = _leaf(3, 4), _leaf(4, 5)
        x, w = (x.detach(), w) if which == "w" else (x, w.detach())
        return _Product.apply(x, w).sin().sum(), [x if which == "x" else w]

    expect(both(make), structure_misses=1, hits=1, captures=1)
    assert _Product.needed == [(which == "x", which == "w")] * 3


def test_a_function_is_told_what_is_needed_where_the_call_asks_for_less() -> None:
    """Eager goes by the forward: what requires grad is needed, asked for or not."""
    _Product.needed.clear()

    def make() -> Any:
        x, w = _leaf(3, 4), _leaf(4, 5)
        return _Product.apply(x, w).sin().sum(), [x]

    expect(both(make), structure_misses=1, hits=1, captures=1)
    assert _Product.needed == [_Product.needed[0]] * 3


def _count(session: ca.Session, name: str) -> int:
    assert session.last is not None and session.last.graph is not None
    graphs = session.last.graph.aten
    return sum(str(node.target).startswith(f"aten.{name}.") for graph in graphs for node in graph.graph.nodes)


@pytest.mark.parametrize(
    ("ask", "products"), [("x", 1), ("w", 1), ("xwb", 2), ("b", 0)], ids=["input", "weight", "all", "bias"]
)
def test_what_the_call_does_not_ask_for_is_not_computed(ask: str, products: int) -> None:
    leaves = {"x": _leaf(3, 4), "w": _leaf(5, 4), "b": _leaf(5)}
    inputs = [leaves[name] for name in ask]
    session = ca.enable(backend="eager")

    def loss() -> torch.Tensor:
        return F.linear(leaves["x"], leaves["w"], leaves["b"]).sin().sum()

    wanted = torch.autograd.grad(loss(), inputs)
    for _ in range(2):
        with session:
            assert_same(torch.autograd.grad(loss(), inputs), wanted)
        assert _count(session, "mm") == products
    expect(session.stats(), structure_misses=1, hits=1)


def test_backward_into_a_frozen_layer_computes_no_weight_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4).requires_grad_(False))
    x = torch.randn(3, 4)
    result = compare(lambda: model, lambda model: model(x).square().mean())
    assert _count(result.session, "mm") == 2  # through the frozen layer, and the weight of the first


# ---- functions written in C++ ----------------------------------------------------------------------------------------


_CPP = r"""
#include <torch/extension.h>
#include <torch/csrc/autograd/functions/utils.h>

using namespace torch::autograd;

template <bool traceable>
struct Cube : public Function<Cube<traceable>> {
  static constexpr bool is_traceable = traceable;
  static torch::Tensor forward(AutogradContext* ctx, torch::Tensor x, double scale) {
    ctx->save_for_backward({x});
    ctx->saved_data["scale"] = scale;
    return x * x * x * scale;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    auto x = ctx->get_saved_variables()[0];
    return {grads[0] * 3 * x * x * ctx->saved_data["scale"].toDouble(), torch::Tensor()};
  }
};

torch::Tensor cube(torch::Tensor x, double scale, bool traceable) {
  return traceable ? Cube<true>::apply(x, scale) : Cube<false>::apply(x, scale);
}

struct Doubled : public Node {
  variable_list apply(variable_list&& grads) override { return {grads[0] * 2}; }
  std::string name() const override { return "Doubled"; }
};

torch::Tensor doubled(torch::Tensor x) {
  auto out = x.detach() * 2;
  auto node = c10::make_intrusive<Doubled>();
  node->set_next_edges(collect_next_edges(x));
  set_history(out, node);
  return out;
}
"""


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from torch.utils import cpp_extension

    if shutil.which("ninja") is None or shutil.which(cpp_extension.get_cxx_compiler()) is None:
        pytest.skip("needs ninja and a C++ compiler")
    folder = str(tmp_path_factory.mktemp("extension"))
    name = "compiled_autograd_test_nodes"
    return cpp_extension.load_inline(name, _CPP, functions=["cube", "doubled"], build_directory=folder)


@pytest.mark.slow
@pytest.mark.parametrize("traceable", [True, False])
def test_cpp_functions(traceable: bool, extension: Any) -> None:
    """The scale is a number of the step: another is another variant."""
    session = ca.enable(backend="eager")
    for scale in (2.0, 3.0, 2.0):
        x = _leaf(4)
        wanted = torch.autograd.grad(extension.cube(x.sin(), scale, traceable).exp().sum(), x)
        with session:
            found = torch.autograd.grad(extension.cube(x.sin(), scale, traceable).exp().sum(), x)
        assert_same(found, wanted)
    regions = 1 if traceable else 2
    expect(session.stats(), structure_misses=1, shape_misses=1, hits=1, captures=1, compiles=2 * regions)


@pytest.mark.slow
def test_a_node_that_cannot_describe_itself_is_left_to_eager(extension: Any) -> None:
    def make() -> Any:
        x = _leaf(4)
        return extension.doubled(x.sin()).exp().sum(), [x]

    reason = "unsupported(NotImplementedError: compiled_args not implemented: Doubled)"
    expect(both(make), bypasses={reason: 2})


def test_nodes_of_cpp_that_are_no_operators() -> None:
    """Copies to another dtype, and an output whose gradient the engine is told to be undefined."""

    def make() -> Any:
        x = _leaf(4)
        y = torch._C._functions.UndefinedGrad()(x.exp())
        return (x.double().sin() * x.half()).sum() + (y * x).sum(), [x]

    expect(both(make), structure_misses=1, hits=1, captures=1)


def test_a_node_that_only_raises_is_answered_in_eagers_words() -> None:
    """``DelayedError``: what a function that is differentiable once leaves behind."""

    def message() -> str:
        error = torch._C._functions.DelayedError("not again", 1)
        with pytest.raises(RuntimeError) as raised:
            error(_leaf(4).exp()).sum().backward()
        return str(raised.value)

    wanted = message()
    with ca.enable(backend="eager") as session:
        assert message() == wanted
    assert session.stats().backwards == 1


# ---- operators of torch.library --------------------------------------------------------------------------------------


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("compiled_autograd_test_nodes", "FRAGMENT") as each:
        yield each


@pytest.mark.parametrize("registered_with", ["setup_context", "needs_input_grad"])
def test_custom_operators_with_register_autograd(library: Any, registered_with: str) -> None:
    """Their backward is a Python function, which may call custom operators in turn."""
    name = f"compiled_autograd_test_nodes::power_{registered_with}"

    def power(x: torch.Tensor, y: torch.Tensor, n: int) -> torch.Tensor:
        return x.pow(n) * y

    operator = torch.library.custom_op(name, power, mutates_args=(), schema="(Tensor x, Tensor y, int n) -> Tensor")
    operator.register_fake(lambda x, y, n: torch.empty_like(x))

    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        x, y, ctx.n = inputs
        ctx.save_for_backward(x, y)

    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        of_x = ctx.n * operator(x, y, ctx.n - 1) * grad
        if registered_with == "needs_input_grad" and not ctx.needs_input_grad[1]:
            return of_x, None, None
        return of_x, grad * x.pow(ctx.n), None

    operator.register_autograd(backward, setup_context=setup_context)

    def make() -> Any:
        x, y = _leaf(4), _leaf(4)
        return operator(x.exp(), y.sin() if registered_with == "setup_context" else y.detach(), 3).sum(), [x]

    expect(both(make), structure_misses=1, hits=1, captures=1)


@pytest.mark.parametrize("kernel", ["of operators", "of its own"])
def test_operators_without_an_autograd_formula_are_left_to_eager(library: Any, kernel: str) -> None:
    """It warns in the backward, from a hook in C++ or from a node of its own, neither of which can be reported."""
    library.define("bare(Tensor x) -> Tensor")
    library.impl("bare", lambda x: x * 3 if kernel == "of operators" else torch.full((4,), 3.0), "CPU")

    def make() -> Any:
        x = _leaf(4)
        return (torch.ops.compiled_autograd_test_nodes.bare(x) * x).sum(), [x]

    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        (reason,) = both(make).bypasses
    assert reason.startswith("unsupported(NotImplementedError: compiled_args")
    assert ("CppFunctionTensorPreHook" if kernel == "of operators" else "WarnNotImplemented") in reason


def test_a_custom_operator_that_writes_into_its_argument(library: Any) -> None:
    @torch.library.custom_op("compiled_autograd_test_nodes::scale_into", mutates_args={"out"})
    def scale_into(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * 3)

    class Scaled(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            scale_into(x, out)
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(grad)
            scale_into(grad, out)
            return out

    def make() -> Any:
        x = _leaf(4)
        return Scaled.apply(x.exp()).sin().sum(), [x]

    expect(both(make), structure_misses=1, hits=1, captures=1)


# ---- views and writes into them --------------------------------------------------------------------------------------


def _of_a_detached_leaf(x: torch.Tensor) -> torch.Tensor:
    """The leaf's memory is written through a view that has no tape, before it is used."""
    x.detach()[0].mul_(2)
    return x * x


def _of_a_leaf_under_no_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x.view(-1)[1:3].zero_()
    return x * x


def _chain_of_views(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    inner = y.t()[1:].view(-1) if y.t()[1:].is_contiguous() else y[1:].view(-1)[2:]
    inner[::2].mul_(3)
    y[0].add_(inner[:4].clone())
    return y * x


def _a_view_written_into_its_base(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[0].copy_(y[1])
    y[1] = y[0].clone() * y[2].clone()
    return y


def _a_view_used_after_its_base_was_written(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    row = y[1]
    y.mul_(x)
    return y.sum(0) * row


def _a_leaf_written_into_a_buffer(x: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros(4, 4)
    buffer[1:3] = x[:2]
    buffer[0].copy_(x[3] * 2)
    return buffer * 3


def _unsafe_split(x: torch.Tensor) -> torch.Tensor:
    """No views by its own account, so its outputs may be written."""
    first, second = (x * 1).unsafe_split(2)
    first.mul_(2)
    return first * second


def _detached_view_in_the_middle(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y.detach()[1:].mul(3)
    y[1:] = z
    return y * x


@pytest.mark.parametrize(
    "write",
    [
        _of_a_detached_leaf,
        _of_a_leaf_under_no_grad,
        _chain_of_views,
        _a_view_written_into_its_base,
        _a_view_used_after_its_base_was_written,
        _a_leaf_written_into_a_buffer,
        _unsafe_split,
        _detached_view_in_the_middle,
    ],
)
def test_writes_and_views(write: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def make() -> Any:
        x = _leaf(4, 4)
        return write(x).sin().sum(), [x]

    expect(both(make), structure_misses=1, hits=1, captures=1)


@pytest.mark.parametrize("used", [(0,), (1,), (1, 0)])
@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x.unbind(0),
        lambda x: x.mT.unbind(-1),
        lambda x: torch.unbind_copy(x, 0),
        lambda x: x.split(3),
        lambda x: torch.split_copy(x, 3),
        lambda x: x.unsafe_split(3),
        lambda x: x.chunk(2),
        lambda x: x.split_with_sizes([3, x.shape[0] - 3]),
    ],
)
def test_the_number_of_unused_pieces_follows_from_the_sizes(cut: Any, used: tuple[int, ...]) -> None:
    """The engine takes tapes for the same that differ in nothing but how many pieces there are that nobody used."""
    ca.reset()
    for rows in (5, 7, 4, 11):

        def make(rows: int = rows) -> Any:
            x = _leaf(rows, 4)
            pieces = cut(x * 1)
            return sum((i + 2) * pieces[i].sin().sum() for i in used), [x]

        stats = both(make)
        misses = stats.shape_misses + stats.structure_misses
        assert misses <= 1 and (misses + stats.hits, stats.bypasses) == (2, {})


@pytest.mark.parametrize("kind", ["register_prehook", "register_hook"])
def test_a_hook_that_sees_the_unused_pieces_is_left_to_eager(kind: str) -> None:
    seen = []
    session = ca.enable(backend="eager")
    for rows in (5, 3):
        x = _leaf(rows, 4)
        piece = (x * 1).unbind(0)[0]
        getattr(piece.grad_fn, kind)(lambda *grads: seen.append(len(grads[-1])))
        with session:
            piece.sum().backward()
    assert seen == [5, 3]
    assert list(session.stats().bypasses.values()) == [2]


@pytest.mark.parametrize("name", ["unbind", "split", "chunk"])
def test_several_views_of_one_tensor(name: str) -> None:
    """Written before they are taken, as eager allows it; what eager forbids, it forbids in the forward."""

    def views(y: torch.Tensor) -> Any:
        return y.unbind(0) if name == "unbind" else getattr(y, name)(2)

    def make() -> Any:
        x = _leaf(4, 4)
        y = x * 1
        y[1:3].mul_(x[0])
        parts = views(y)
        return (parts[0].sin() * parts[-1]).sum() + views(x)[0].exp().sum(), [x]

    expect(both(make), structure_misses=1, hits=1, captures=1)
    with ca.enable(backend="eager"), pytest.raises(RuntimeError, match="multiple views"):
        views(_leaf(4, 4) * 1)[0].mul_(2)


def test_a_write_under_no_grad_into_one_of_several_views() -> None:
    """Allowed, and not on the tape; what saved the base's value is told by its version."""

    def make() -> Any:
        x = _leaf(4, 4)
        y = x * 1
        with torch.no_grad():
            y.unbind(0)[1].mul_(3)
        return y.sin().sum(), [x]

    expect(both(make), structure_misses=1, hits=1, captures=1)


def _complex_leaf() -> torch.Tensor:
    return _leaf(4, dtype=torch.complex64)


def _through_view_as_real(y: torch.Tensor) -> None:
    torch.view_as_real(y)[:, 0].mul_(3)


def _through_real(y: torch.Tensor) -> None:
    y.real.mul_(3)


def _through_conj(y: torch.Tensor) -> None:
    y.conj().mul_(3j)


@pytest.mark.parametrize("write", [_through_view_as_real, _through_real, _through_conj])
def test_a_write_that_strides_cannot_describe_is_left_to_eager(write: Callable[[torch.Tensor], None]) -> None:
    """CopySlices keeps a function that makes the view again; the engine cannot report it."""

    def make() -> Any:
        x = _complex_leaf()
        y = x * 2
        write(y)
        return y.abs().sum(), [x]

    reason = "unsupported(RuntimeError: view_fn not supported by compiled autograd)"
    expect(both(make), bypasses={reason: 2})


def test_views_made_again_are_left_to_eager_and_only_they() -> None:
    def make(replay: bool) -> Any:
        x = _leaf(4, 4)
        with torch.autograd._force_original_view_tracking(replay):
            y = x * 2
            y[1:].mul_(3)
        return y.sin().sum(), [x]

    reason = "unsupported(RuntimeError: view_fn not supported by compiled autograd)"
    expect(both(lambda: make(True)), bypasses={reason: 2})
    ca.reset()  # the names of the nodes are the same: for some backwards such tapes would be left to eager unasked
    expect(both(lambda: make(False)), structure_misses=1, hits=1)


# ---- sparse and complex gradients ------------------------------------------------------------------------------------


def _embedding() -> nn.Module:
    return nn.ModuleDict({"table": nn.Embedding(10, 4, sparse=True), "head": nn.Linear(4, 3)})


@pytest.mark.parametrize("keep", [False, True])
def test_a_sparse_embedding_below_a_dense_layer(keep: bool) -> None:
    words = torch.tensor([1, 3, 3, 7])

    def loss(model: Any) -> torch.Tensor:
        return model["head"](model["table"](words)).square().mean()

    result = compare(_embedding, loss, keep_grads=keep, counts=False)
    assert result.model["table"].weight.grad is None or result.model["table"].weight.grad.is_sparse
    misses = 2 if keep else 1
    expect(result.stats, structure_misses=misses, hits=3 - misses, captures=misses)


def test_a_hook_sees_a_sparse_gradient_and_may_change_it() -> None:
    words = torch.tensor([1, 3, 3, 7])
    seen: list[Any] = []

    def hook(grad: torch.Tensor) -> torch.Tensor:
        seen.append((grad.layout, grad.coalesce().values().sum().item()))
        return grad * 2

    def loss(model: Any) -> torch.Tensor:
        handle = model["table"].weight.register_hook(hook)
        total = model["head"](model["table"](words)).square().mean()
        model.handle = handle
        return total

    def make() -> Any:
        model = _embedding()
        total = loss(model)
        return total, [model["table"].weight, model["head"].weight]

    expect(both(make), structure_misses=1, hits=1, captures=1)
    assert seen == [seen[0]] * 3 and seen[0][0] is torch.sparse_coo


def test_products_with_a_sparse_matrix() -> None:
    pattern = torch.eye(4).to_sparse()

    def make() -> Any:
        x, values = _leaf(4, 3), _leaf(4)
        matrix = torch.sparse_coo_tensor(pattern.indices(), values.exp(), (4, 4), check_invariants=False)
        return (torch.sparse.mm(pattern, x).sin().sum() + torch.sparse.mm(matrix, x)).sum(), [x, values]

    expect(both(make), structure_misses=1, hits=1, captures=1)


def test_complex_gradients() -> None:
    """Real and complex leaves, conjugate views, a real part only, and a hook on a complex gradient."""
    seen: list[torch.Tensor] = []

    def make() -> Any:
        z, x = _complex_leaf(), _leaf(4)
        y = (z.conj() * x).exp()
        y.register_hook(lambda grad: seen.append(grad) or grad * 1j)
        return (y.real.sin() + y.imag * z.abs() + torch.fft.fft(x).angle()).sum(), [z, x]

    expect(both(make), structure_misses=1, hits=1, captures=1)
    assert_same(seen, [seen[0]] * 3)


def test_a_complex_gradient_for_a_real_leaf_is_cut() -> None:
    def loss(model: Any) -> torch.Tensor:
        return (model.weight * torch.randn(3, 3, dtype=torch.complex64)).abs().sum()

    compare(lambda: nn.Linear(3, 3, bias=False), loss)


# ---- tensor subclasses -----------------------------------------------------------------------------------------------


class _Wrapped(torch.Tensor):
    """A subclass around a tensor: every operator comes through it."""

    value: torch.Tensor

    @staticmethod
    def __new__(cls, value: torch.Tensor) -> _Wrapped:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[return-value]
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=value.device
        )

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda each: each.value, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, function(*args, **kwargs))


class _Counting(torch.Tensor):
    """A subclass that only sees what Python calls."""

    calls: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _Counting.calls.append(getattr(function, "__name__", str(function)))
        return super().__torch_function__(function, types, args, kwargs or {})


def _made(kind: type[torch.Tensor], *shape: int) -> torch.Tensor:
    value = torch.randn(*shape)
    return (_Wrapped(value) if kind is _Wrapped else value.as_subclass(kind)).requires_grad_()


def _plain(grad: torch.Tensor) -> torch.Tensor:
    return grad.value if isinstance(grad, _Wrapped) else grad.as_subclass(torch.Tensor)


def _one_leaf(kind: Any) -> Any:
    x = _made(kind, 3, 4)
    return (x * 2).sin().sum(), [x]


def _beside_a_plain_leaf(kind: Any) -> Any:
    x, w = _made(kind, 3, 4), _leaf(4, 4)
    return (x @ w).tanh().sum() + w.exp().sum(), [x, w]


def _as_a_weight(kind: Any) -> Any:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(_made(kind, 4, 4).detach())
    return layer(torch.randn(3, 4)).square().mean(), list(layer.parameters())


def _with_hooks(kind: Any) -> Any:
    x = _made(kind, 3, 4)
    y = x * 2
    y.register_hook(lambda grad: grad * 3)
    x.register_hook(lambda grad: grad * 2)
    return y.sin().sum(), [x]


def _through_a_function(kind: Any) -> Any:
    x = _made(kind, 4)
    return _NewStyle.apply(x.exp(), 2.0)[0].sum(), [x]


def _checkpointed(kind: Any) -> Any:
    x = _made(kind, 4)
    return checkpoint(lambda y: y.sin().exp(), x * 2, use_reentrant=False).sum(), [x]


def _with_a_grad(kind: Any) -> Any:
    x = _made(kind, 4)
    x.grad = _made(kind, 4).detach()
    return (x * 2).sin().sum(), [x]


_SUBCLASS_CASES = [
    _one_leaf,
    _beside_a_plain_leaf,
    _as_a_weight,
    _with_hooks,
    _through_a_function,
    _checkpointed,
    _with_a_grad,
]


@pytest.mark.parametrize("kind", [_Wrapped, _Counting], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("case", _SUBCLASS_CASES)
def test_tensor_subclasses(case: Callable[[Any], Any], kind: type[torch.Tensor]) -> None:
    """Captured; what touches them stays opaque. Gradients are of eager's class, with eager's values."""
    results, calls = [], []
    session = ca.enable(backend="eager")
    for context in (ca.disable(), session, session):
        torch.manual_seed(0)
        loss, leaves = case(kind)
        _Counting.calls.clear()
        with context:
            loss.backward()
        calls.append(list(_Counting.calls))
        results.append([leaf.grad for leaf in leaves])
    for found in results[1:]:
        assert [type(each) for each in found] == [type(each) for each in results[0]]
        assert_same([_plain(each) for each in found], [_plain(each) for each in results[0]])
    assert calls == [calls[0]] * 3
    expect(session.stats(), structure_misses=1, hits=1, captures=1)


class _Unwrap(Function):
    @staticmethod
    def forward(ctx: Any, x: _Wrapped) -> torch.Tensor:
        return x.value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _Wrapped(grad)


def test_a_subclass_below_leaves_what_is_above_to_the_backend() -> None:
    wrapped, layer = _made(_Wrapped, 4, 4), nn.Linear(4, 4)
    session = ca.enable(backend="eager")
    results = []
    for context in (ca.disable(), session, session):
        layer.zero_grad()
        wrapped.grad = None
        with context:
            layer(_Unwrap.apply(wrapped.exp())).tanh().sum().backward()
        results.append([layer.weight.grad, layer.bias.grad, _plain(wrapped.grad)])  # type: ignore[arg-type]
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])
    expect(session.stats(), structure_misses=1, hits=1, captures=1, compiles=1)
    assert _count(session, "mm") == 2 and _count(session, "tanh_backward") == 1


def test_other_classes_are_other_variants() -> None:
    session = ca.enable(backend="eager")
    for kind in (_Wrapped, _Counting, torch.Tensor, _Wrapped):
        torch.manual_seed(0)
        x = _made(kind, 4) if kind is not torch.Tensor else _leaf(4)
        with session:
            x.sin().sum().backward()
        assert type(x.grad) in (kind, torch.Tensor)
    assert session.stats().hits == 1 and session.stats().backwards == 4


# ---- compiled forwards -----------------------------------------------------------------------------------------------


@pytest.fixture
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class _CompiledForward(nn.Module):
    """A part that ``torch.compile`` compiled between two that it did not."""

    def __init__(self, compiled: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.middle = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))

    def forward(self, x: torch.Tensor, run: Any = None) -> torch.Tensor:
        """[batch, 4] -> [batch, 2]."""
        return self.last((run or self.middle)(self.first(x)).tanh())


def _compiled_middle(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Compiled for the model of each side on its own."""
    if "run" not in model.__dict__:
        model.__dict__["run"] = torch.compile(model.middle, backend="aot_eager")
    return model(x, model.run)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("keep", [False, True])
def test_the_backward_of_a_compiled_forward(keep: bool) -> None:
    """It is one Python function on the tape, called as it is."""
    x = torch.randn(3, 4)
    loss = compare(
        _CompiledForward, lambda model: _compiled_middle(model, x).square().mean(), keep_grads=keep, counts=False
    )
    misses = 2 if keep else 1
    expect(loss.stats, structure_misses=misses, hits=3 - misses, captures=misses)
    assert "CompiledFunctionBackward" in loss.graph.readable()


@pytest.mark.usefixtures("dynamo")
def test_hooks_around_a_compiled_forward() -> None:
    x = torch.randn(3, 4)
    seen: list[Any] = []

    def loss(model: Any) -> torch.Tensor:
        if "hooked" not in model.__dict__:
            model.__dict__["hooked"] = True
            model.middle[0].weight.register_hook(lambda grad: seen.append(grad) or grad * 2)
            model.middle[2].bias.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))
        out = _compiled_middle(model, x)
        out.register_hook(lambda grad: seen.append(grad) or grad.exp())
        return out.square().mean()

    result = compare(_CompiledForward, loss)
    assert len(seen) == 3 * 2 * 3 and result.stats.hits == 2


@pytest.mark.usefixtures("dynamo")
def test_a_compiled_forward_differentiated_twice() -> None:
    x = torch.randn(3, 4)

    def losses(model: Any) -> list[torch.Tensor]:
        loss = _compiled_middle(model, x).square().mean()
        return [loss, loss * 2]

    with torch._functorch.config.patch(donated_buffer=False):
        stats = compare(_CompiledForward, losses, counts=False).stats
    expect(stats, structure_misses=2, hits=4, captures=2)


@pytest.mark.usefixtures("dynamo")
def test_a_forward_compiled_inside_a_session() -> None:
    """``torch.compile`` differentiates it to compile its backward: that is no backward of the user's to refuse."""
    model, x = torch.compile(_CompiledForward(), backend="aot_eager"), torch.randn(3, 4)
    with ca.enable(backend="eager", on_unsupported="raise") as session:
        for _ in range(3):
            model.zero_grad()
            model(x).square().mean().backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(x).square().mean().backward()
    assert_same(found, [parameter.grad for parameter in model.parameters()])
    expect(session.stats(), structure_misses=1, hits=2, bypasses={"tracing": 1})


@pytest.mark.usefixtures("dynamo")
def test_a_compiled_forward_that_gave_its_buffers_away_says_so_in_eagers_words() -> None:
    """It asks the engine whether the tape is kept."""

    def message() -> str:
        model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), backend="aot_eager")
        x = torch.randn(3, 4)
        model(x).square().mean().backward()  # compiles the backward: for one use
        with pytest.raises(RuntimeError) as raised:
            model(x).square().mean().backward(retain_graph=True)
        return str(raised.value)

    wanted = message()
    assert "donated buffers" in wanted
    with ca.enable(backend="eager") as session:
        torch._dynamo.reset()
        assert message() == wanted
    expect(session.stats(), structure_misses=2, bypasses={"tracing": 1})


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_compiled_forward(reentrant: bool) -> None:
    x = torch.randn(3, 4)

    def loss(model: Any) -> torch.Tensor:
        return checkpoint(lambda h: _compiled_middle(model, h), x * model.first.bias, use_reentrant=reentrant).sum()

    stats = compare(_CompiledForward, loss, counts=False).stats
    assert stats.hits == 2 * stats.structure_misses and not stats.bypasses and not stats.failures


# ---- autocast --------------------------------------------------------------------------------------------------------


class _InBf16(Function):
    """A function that asks for a dtype in its forward, and has it again in its backward."""

    dtypes: list[torch.dtype] = []  # noqa: RUF012

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        of_x, of_w = grad @ w.t(), x.t() @ grad
        _InBf16.dtypes.append(of_w.dtype)
        return of_x, of_w


def test_a_function_with_autocast_of_its_own() -> None:
    """``custom_bwd`` puts the forward's autocast back, though the backward runs outside of it."""
    _InBf16.dtypes.clear()

    def make() -> Any:
        x, w = _leaf(3, 4), _leaf(4, 5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = _InBf16.apply(x, w)
            return F.layer_norm(y, (5,)).float().sin().sum(), [x, w]

    expect(both(make), structure_misses=1, hits=1, captures=1)
    assert _InBf16.dtypes == [torch.bfloat16] * 3


def test_autocast_casts_a_weight_once_for_two_uses() -> None:
    """Its cast is one node with two edges into it."""
    x = torch.randn(3, 4)

    def loss(model: Any) -> torch.Tensor:
        return (model(model(x).tanh()) * model(x)).float().square().mean()

    result = compare(lambda: nn.Linear(4, 4), loss, around=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    text = result.graph.readable()
    assert text.count("sum_gradients") >= 1 and "bfloat16" in text


def test_autocast_off_inside_autocast() -> None:
    x = torch.randn(3, 4)

    def loss(model: Any) -> torch.Tensor:
        h = model(x)
        with torch.autocast("cpu", enabled=False):
            h = model(h.float()).tanh()
        return model(h).float().square().mean()

    compare(lambda: nn.Linear(4, 4), loss, around=lambda: torch.autocast("cpu", dtype=torch.bfloat16))


def test_a_users_tensor_that_comes_back_from_a_checkpoint_is_the_same_object() -> None:
    seen: list[Any] = []

    class Keeps(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(y)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            seen.append(ctx.saved_tensors[0])
            return grad, None

    x, y = torch.tensor(1.0, requires_grad=True), torch.tensor(1.0)
    with ca.enable(backend="eager") as session:
        checkpoint(Keeps.apply, x, y, use_reentrant=False).backward()
    assert len(seen) == 1 and seen[0] is y
    expect(session.stats(), structure_misses=1)


@pytest.mark.filterwarnings("ignore:compiled_autograd")
@pytest.mark.parametrize("before", [False, True])
def test_a_hook_that_is_registered_while_its_node_is_about_to_run(before: bool) -> None:
    """As offloading of activations does it. The rest of the backward runs call by call, and is eager's to the bit."""
    calls: list[Any] = []

    def halves(outputs: Any, inputs: Any) -> Any:
        calls.append(("late", [each is None for each in inputs]))
        return tuple(None if output is None else output / 2 for output in outputs)

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        torch._C._current_autograd_node().register_hook(halves)
        return tensor

    def run(context: Any) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        x, y = _leaf(3), _leaf(3)
        with saved_tensors_hooks(lambda tensor: tensor, unpack):
            z = x.exp()
        z.register_hook(lambda grad: calls.append("tensor"))
        if before:
            z.grad_fn.register_hook(lambda outputs, inputs: calls.append("early"))  # type: ignore[union-attr]
        loss = (z * y.sin()).sum()
        with context:
            loss.backward()
        return [x.grad, y.grad]

    session = ca.enable(backend="eager")
    wanted = run(ca.disable())
    wanted_calls, calls[:] = list(calls), []
    for _ in range(2):
        assert_same(run(session), wanted)
        assert calls == wanted_calls
        calls.clear()
    stats = session.stats()
    assert stats.bypasses == {} and stats.failures == 2 and stats.captures == 1
