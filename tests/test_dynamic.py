"""Sizes that change: one variant for all of them, exactly the dimensions that changed, and guards that are kept."""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import compiled_autograd as ca
from compiled_autograd.engine.session import Session
from compiled_autograd.guards.shapes import Condition, Guard, Origin

from .helpers import assert_grads, assert_same, expect

Batch = tuple[torch.Tensor, ...]


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(20, 16), layer, nn.LayerNorm(16), nn.Linear(16, 20))


def _tokens(generator: random.Random) -> Batch:
    batch, length = generator.randint(2, 9), generator.randint(2, 17)
    return torch.randint(20, (batch, length)), torch.randint(20, (batch * length,))


def _token_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets)


def _cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
    )


def _images(generator: random.Random) -> Batch:
    size = generator.choice(range(12, 41, 2))
    return torch.randn(4, 3, size, size), torch.randint(5, (4,))


def _image_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    images, targets = batch
    return F.cross_entropy(model(images), targets)


def _train(
    make: Callable[[], nn.Module],
    draw: Callable[[random.Random], Batch],
    loss: Callable[[nn.Module, Batch], torch.Tensor],
    session: Session,
    steps: int = 30,
    bitwise: bool = True,
) -> None:
    """The same batches on eager and in the session; gradients are compared at each step."""
    torch.manual_seed(0)
    plain = make()
    model = make()
    model.load_state_dict(plain.state_dict())
    generator = random.Random(0)
    for _ in range(steps):
        batch = draw(generator)
        for each in (plain, model):
            each.zero_grad()
            value = loss(each, batch)
            with session if each is model else ca.disable():
                value.backward()
        assert_grads(model, plain, bitwise)


def test_random_batch_sizes_and_lengths_need_two_compiles() -> None:
    session = ca.enable(backend="eager")
    _train(_transformer, _tokens, _token_loss, session)
    expect(session.stats(), structure_misses=1, shape_misses=1, hits=28, captures=1, compiles=2)


def test_random_image_sizes_need_at_most_three_compiles() -> None:
    session = ca.enable(backend="eager")
    _train(_cnn, _images, _image_loss, session)
    stats = session.stats()
    assert stats.compiles <= 3
    expect(stats, structure_misses=1, shape_misses=stats.compiles - 1, captures=1, hits=30 - stats.compiles)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "draw", "loss"), [(_transformer, _tokens, _token_loss), (_cnn, _images, _image_loss)])
def test_the_same_with_inductor(
    make: Callable[[], nn.Module],
    draw: Callable[[random.Random], Batch],
    loss: Callable[[nn.Module, Batch], torch.Tensor],
) -> None:
    session = ca.enable(backend="inductor")
    _train(make, draw, loss, session, bitwise=False)
    stats = session.stats()
    assert stats.compiles <= 3
    expect(stats, structure_misses=1, shape_misses=stats.compiles - 1, captures=1, hits=30 - stats.compiles)


def test_a_list_of_another_length_is_another_structure_and_comes_back_as_a_hit() -> None:
    layer = nn.Linear(4, 4)
    session = ca.enable(backend="eager")
    for length in (1, 2, 3, 2, 1, 3):
        x = torch.randn(2, 4)
        losses = []
        for compiled in (False, True):
            layer.zero_grad()
            y = sum(layer(x * factor).tanh() for factor in range(1, length + 1))
            with session if compiled else ca.disable():
                y.sum().backward()
            losses.append([layer.weight.grad, layer.bias.grad])
        assert_same(*losses)
    expect(session.stats(), structure_misses=3, hits=3, compiles=3)


def _backward(session: Session, *shape: int, dims: tuple[int, ...] = ()) -> None:
    weight = nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
    x = torch.randn(*shape)
    for dim in dims:
        torch._dynamo.mark_dynamic(x, dim)
    expected = torch.autograd.grad((x @ weight).tanh().sum(), weight)
    with session:
        (x @ weight).tanh().sum().backward()
    assert_same([weight.grad], expected)


def _dims(session: Session) -> list[tuple[int | str, ...]]:
    """Of the newest variant, the dimensions of the lifted tensors; "s" where one changes."""
    (graph,) = session.graphs()
    return [tuple(d if isinstance(d, int) else "s" for d in spec) for spec in graph.variants[-1].shapes.tensors]


def test_only_the_dimension_that_changed_is_a_symbol() -> None:
    session = ca.enable(backend="eager")
    _backward(session, 5, 2, 3)
    _backward(session, 5, 7, 3)
    changing = {spec for spec in _dims(session) if "s" in spec}
    assert changing == {(5, "s", 4), ("s", 3)}  # what tanh saved; the input, which matmul folds
    for size in (9, 4, 100):
        _backward(session, 5, size, 3)
    expect(session.stats(), structure_misses=1, shape_misses=1, hits=3, compiles=2)
    _backward(session, 6, 8, 3)  # the other one
    for first, second in ((7, 9), (3, 5), (5, 3)):
        _backward(session, first, second, 3)
    expect(session.stats(), structure_misses=1, shape_misses=2, hits=6, compiles=3)


def test_a_miss_names_the_dimension_and_says_that_it_is_free_now() -> None:
    session = ca.enable(backend="eager")
    _backward(session, 5, 3)
    _backward(session, 6, 3)
    assert session.last is not None
    (miss,) = session.last.reasons
    hint = "now dynamic: 5 -> 6, in 2 tensors; other such sizes are hits"
    assert (miss.kind, miss.old, miss.new, miss.hint) == ("shape", "5", "6", hint)
    assert "dimension 0" in miss.where and "Backward0" in miss.where and miss.seconds > 0


def test_sizes_of_zero_and_one_are_never_symbols() -> None:
    session = ca.enable(backend="eager")
    for size in (4, 5, 1, 6, 1, 0, 7, 0):
        _backward(session, size, 3)
    stats = session.stats()
    assert stats.structure_misses == 1 and stats.compiles == 4 and stats.hits == 4


def test_dynamic_false_never_makes_symbols() -> None:
    session = ca.enable(backend="eager", dynamic=False)
    for size in (4, 5, 6, 4, 5, 6):
        _backward(session, size, 3)
    expect(session.stats(), structure_misses=1, shape_misses=2, hits=3, compiles=3)
    assert not any(variant.shapes.dynamic for graph in session.graphs() for variant in graph.variants)


def test_dynamic_true_makes_symbols_at_once_but_not_of_parameters() -> None:
    session = ca.enable(backend="eager", dynamic=True)
    for size in (5, 6, 17):
        _backward(session, size, 3)
    expect(session.stats(), structure_misses=1, hits=2, compiles=1)
    assert (3, 4) in _dims(session) or (4, 3) in _dims(session)


def test_mark_dynamic_is_respected() -> None:
    session = ca.enable(backend="eager")
    for size in (5, 6, 17):
        _backward(session, size, 3, dims=(0,))
    expect(session.stats(), structure_misses=1, hits=2, compiles=1)


def test_a_guard_that_does_not_hold_is_not_served() -> None:
    """The view makes the product of two sizes a third; another sum of sizes with the same product is no hit."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x.reshape(-1, 2).exp() * x.reshape(-1, 2).sum(0)).sum()

    session = ca.enable(backend="eager")
    for rows, columns in ((3, 4), (5, 6), (2, 10), (10, 4), (7, 8)):
        x = torch.randn(rows, columns, requires_grad=True)
        expected = torch.autograd.grad(loss(x), x)
        with session:
            assert_same(torch.autograd.grad(loss(x), x), expected)
    expect(session.stats(), structure_misses=1, shape_misses=1, hits=3)


_CHANNELS_LAST = {"memory_format": torch.channels_last}


@pytest.mark.parametrize(
    ("layout", "loss"),
    [
        (_CHANNELS_LAST, lambda x: x.softmax(1).pow(2).sum()),
        (_CHANNELS_LAST, lambda x: F.conv2d(x, torch.ones(3, x.shape[1], 3, 3), padding=1).pow(2).sum()),
        ({}, lambda x: x.to(memory_format=torch.channels_last).pow(2).sum()),
        ({}, lambda x: x.sum()),
    ],
    ids=["channels last, softmax", "channels last, convolution", "made channels last", "sum"],
)
def test_strides_that_are_products_of_three_sizes(
    layout: dict[str, torch.memory_format], loss: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    session = ca.enable(backend="eager")
    for shape in ((3, 5, 4, 6), (2, 3, 7, 3), (6, 5, 2, 5), (4, 6, 5, 7)):
        gradients = []
        for around in (ca.disable(), session):
            torch.manual_seed(0)
            x = torch.randn(shape).to(**layout).requires_grad_()
            with around:
                loss(x).backward()
            gradients.append(x.grad)
        assert_same(gradients[1:], gradients[:1])
    stats = session.stats()
    assert stats.hits and not stats.failures and not stats.bypasses and stats.compiles < 4


class _FusedProjection(nn.Module):
    """Attention as GPT-2 has it: queries, keys and values are pieces of one projection, and lie in its memory."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.projection = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        pieces = self.projection(x).split(16, 2)
        query, key, value = (each.view(batch, length, 2, 8).transpose(1, 2) for each in pieces)
        if not self.causal:  # products of matrices, with a mask that is expanded
            mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None].expand(batch, 1, length, length)
            return (query @ key.transpose(2, 3)).masked_fill(~mask, -1e9).softmax(-1) @ value
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.parametrize(
    ("backend", "causal"),
    [
        pytest.param("eager", True, id="eager-in one operator"),
        pytest.param("eager", False, id="eager-written out"),
        pytest.param("inductor", True, id="inductor-in one operator", marks=pytest.mark.slow),
        pytest.param("inductor", False, id="inductor-written out", marks=pytest.mark.slow),
    ],
)
def test_pieces_of_a_fused_projection_need_two_compiles_for_all_lengths(backend: str, causal: bool) -> None:
    """Their strides are no products of their own sizes alone: ``(48 * T, 8, 48, 1)`` of ``(B, 2, T, 8)``."""
    model = _FusedProjection(causal)
    other = copy.deepcopy(model)
    session = ca.enable(backend=backend)
    lengths = (22, 18, 25, 27, 11, 31, 13, 22, 18)
    for length in lengths:
        x = torch.randn(3, length, 16)
        for each in (model, other):
            each.zero_grad()
        loss = model(x).square().mean()
        with session:
            loss.backward()
        other(x).square().mean().backward()
        assert_grads(model, other, bitwise=backend == "eager")
    expect(session.stats(), structure_misses=1, shape_misses=1, hits=len(lengths) - 2, captures=1)


def test_a_piece_of_a_buffer_keeps_its_stride_as_a_number() -> None:
    """It is no product of sizes, also where the first length is that of the buffer."""
    buffer, session = torch.randn(3, 16, 4), ca.enable(backend="eager")
    weight = torch.randn(4, requires_grad=True)
    for length in (16, 9, 12, 7, 16, 5):
        weight.grad, x = None, buffer[:, :length]
        with session:
            (x * weight).sin().sum().backward()
        assert_same([weight.grad], torch.autograd.grad((x * weight).sin().sum(), [weight]), bitwise=False)
    assert session.stats().hits >= 3 and session.stats().shape_misses <= 2


def test_arithmetic_of_many_sizes_is_made_binary() -> None:
    from compiled_autograd.guards.symbolic import made_binary

    graph = torch.fx.Graph()
    sizes = [graph.placeholder(name) for name in "abcd"]
    for node, value in zip(sizes, (2, 3, 4, 5), strict=True):
        node.meta["val"] = value
    made = [
        graph.call_function(operator.mul, (3, *sizes)),
        graph.call_function(operator.mul, tuple(sizes[:2])),
        graph.call_function(torch.sym_sum, (sizes,)),
        graph.call_function(torch.sym_sum, tuple(sizes[1:])),
    ]
    graph.output(made)
    made_binary(graph)
    graph.lint()
    calls = graph.find_nodes(op="call_function", target=operator.mul)
    calls += graph.find_nodes(op="call_function", target=operator.add)
    assert len(calls) == len([node for node in graph.nodes if node.op == "call_function"]) == 10
    assert all(len(node.args) == 2 for node in calls)
    module = torch.fx.GraphModule({}, graph)
    assert module(2, 3, 4, 5) == [360, 6, 14, 12] == [node.meta.get("val", 6) for node in graph.output_node().args[0]]


def test_a_region_that_symbols_cannot_describe_is_compiled_for_each_set_of_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from compiled_autograd.lowering import region_compiler

    right = region_compiler.lower

    def no_symbols(*args: object) -> object:
        if args[3]:
            raise RuntimeError("symbols are not for me")
        return right(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(region_compiler, "lower", no_symbols)
    session = ca.enable(backend="eager")
    with pytest.warns(UserWarning, match="symbols are not for me"):
        for size in (4, 5, 6, 4, 5, 6):
            _backward(session, size, 3)
    expect(session.stats(), structure_misses=1, compiles=3, hits=3, shape_misses=2, failures=1)


def test_a_call_that_symbols_cannot_describe_stays_opaque_and_logs_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    session = ca.enable(backend="eager")
    for size in (4, 6, 9, 11):
        x = torch.randn(1, 2, size, size, requires_grad=True)
        gradients = []
        for around in (ca.disable(), session):
            loss = F.interpolate(x * 2, scale_factor=2.0, mode="bilinear").exp().sum()
            with around:
                gradients.append(torch.autograd.grad(loss, x))
        assert_same(*gradients)
    (graph,) = session.graphs()
    untraceable = graph.variants[-1].program.schedule.untraceable
    assert [node.target.__name__ for node in untraceable] == ["UpsampleBilinear2DBackward0"]
    assert session.stats().failures == 0 and session.stats().hits > 0
    assert "Traceback" not in "".join(capfd.readouterr())


shapes = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=6)


@pytest.mark.parametrize("examples", [8, pytest.param(25, marks=pytest.mark.slow)])
def test_whatever_the_shapes_gradients_are_those_of_eager(examples: int) -> None:
    """Shapes that pass the guards are served rightly, and those that do not are not served by them."""
    losses: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "matmul": lambda x: (x @ x.t()).tanh().sum(),
        "view": lambda x: (x.reshape(-1).exp() * x.t().reshape(-1)).sum(),
        "cat": lambda x: torch.cat([x, x.exp()], 0).pow(2).mean(0).sum(),
        "norm": lambda x: F.layer_norm(x, x.shape[1:]).sin().sum(),
    }

    @settings(max_examples=examples)
    @given(shapes, st.sampled_from([*losses]))
    def check(sizes: list[tuple[int, int]], what: str) -> None:
        ca.reset()
        session = ca.enable(backend="eager")
        for size in sizes:
            x = torch.randn(*size, dtype=torch.float64, requires_grad=True)
            expected = torch.autograd.grad(losses[what](x), x)
            with session:
                assert_same(torch.autograd.grad(losses[what](x), x), expected)
        assert session.stats().bypasses == {} and session.stats().failures == 0

    check()


# ---- guards ----------------------------------------------------------------------------------------------------------


def test_each_condition_of_a_guard_must_hold() -> None:
    """Also where one of them is an ``or``, as sympy prints it."""
    either = Condition("{s0} == 2 or {s0} > 4", ("s0",))
    guard = Guard([("s0", Origin(0))], [Condition("1", (), Origin(1)), either, Condition("3", (), Origin(2))])
    assert guard.function([2, 1, 3]) and guard.function([5, 1, 3])
    assert not any(guard.function(values) for values in ([2, 0, 3], [5, 0, 3], [5, 1, 2], [3, 1, 3], [2, 1, 4]))
    assert str(guard.broken([5, 0, 3])) == "a[1] == 1" and str(either) == "s0 == 2 or s0 > 4"


def test_a_copy_for_a_leaf_whose_strides_are_products_of_symbols() -> None:
    """A trace knows no product of three sizes, nor a power of one: it has to do without."""

    def run(size: int) -> list[Any]:
        torch.manual_seed(0)
        x = torch.randn(2, size, size, size + 1).permute(3, 2, 1, 0).requires_grad_()
        (x * x.detach().sin()).sum().backward()  # its gradient shares memory with nothing, and is laid out as x
        x.register_hook(lambda grad: None)
        y = torch.randn(size, size, size + 1, size, 2).permute(4, 3, 2, 1, 0).requires_grad_()
        torch.stack([y, y.flip(0)], 1).sin().sum().backward()
        return [x.grad, y.grad]

    wanted = [run(size) for size in (4, 5, 6)]
    with ca.enable(backend="eager", dynamic=True, tune=False) as session:
        for size, expected in zip((4, 5, 6), wanted, strict=True):
            assert_same(run(size), expected)
    expect(session.stats(), structure_misses=2, hits=4, compiles=2)


def test_a_gradient_that_was_there_in_other_sizes_is_undefined_now() -> None:
    class At(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, defined: bool) -> torch.Tensor:
            ctx.defined = defined
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
            return grad * 2 if ctx.defined else None, None

    session = ca.enable(backend="eager")
    for size, defined in ((3, True), (4, True), (5, True), (6, False), (7, False), (8, True)):
        leaves = [torch.linspace(-1, 1, 4 * size).reshape(size, 4).requires_grad_() for _ in range(2)]
        for leaf, context in zip(leaves, (ca.disable(), session), strict=True):
            with context:
                At.apply(leaf.sin(), defined).cos().sum().backward()
        assert_same([leaves[1].grad], [leaves[0].grad])
    expect(session.stats(), structure_misses=1, shape_misses=2, hits=3, captures=1)


@pytest.mark.slow
def test_cross_entropy_with_inductor_over_any_number_of_tokens() -> None:
    """A pass of Inductor makes a tensor as long as there are tokens, which takes a fake mode."""
    torch.manual_seed(0)
    weight = torch.randn(8, 11, requires_grad=True)
    session = ca.enable(backend="inductor", dynamic=True)
    for tokens in (5, 6, 7):
        x, target = torch.randn(tokens, 8), torch.randint(0, 11, (tokens,))
        (wanted,) = torch.autograd.grad(F.cross_entropy(x @ weight, target), weight)
        weight.grad = None
        with session:
            F.cross_entropy(x @ weight, target).backward()
        torch.testing.assert_close(weight.grad, wanted)
    expect(session.stats(), structure_misses=1, hits=2, compiles=1)


@pytest.mark.parametrize("where", ["in the layout of the leaf", "in another layout"])
def test_sizes_of_a_leaf_are_symbols_that_the_trace_does_not_know(where: str) -> None:
    """A leaf's layout is compared with its gradient's; the leaf is none of the arguments of what is traced."""

    def run(channels: int) -> list[Any]:
        torch.manual_seed(0)
        x = torch.randn(2, channels, channels, channels)
        weight = torch.randn(2, channels, 3, 3, requires_grad=True)
        if where == "in another layout":
            weight = weight.detach().permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0).requires_grad_()
        torch.nn.functional.conv2d(x, weight, padding=1).sum().backward()
        return [weight.grad]

    wanted = [run(channels) for channels in (4, 5, 6)]
    with ca.enable(backend="eager", dynamic=True, tune=False) as session:
        for channels, expected in zip((4, 5, 6), wanted, strict=True):
            assert_same(run(channels), expected)
    stats = session.stats()
    assert not stats.failures and stats.compiles == 1 and stats.hits == 2


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("what", ["sum", "sin"])
def test_strides_of_a_leaf_may_change_where_its_sizes_do(dynamic: bool | None, what: str) -> None:
    """Where a graph does not take the leaf, no guard asks for the leaf's strides."""

    def run(size: int, lies: str) -> list[Any]:
        x = torch.linspace(-1, 1, size * (size + 1)).reshape(size, size + 1)
        if lies == "transposed":
            x = x.t().contiguous().t()
        elif lies == "with gaps":
            x = torch.cat([x, x], 1)[:, : size + 1]
        leaf = x.detach().requires_grad_()
        (leaf.sum() if what == "sum" else leaf.sin().cumsum(0).sum()).backward()
        return [leaf.grad]

    lying = ("dense", "dense", "transposed", "with gaps", "transposed", "dense", "with gaps")
    tapes = list(zip((3, 4, 5, 6, 5, 7, 8), lying, strict=True))
    wanted = [run(*tape) for tape in tapes]
    with ca.enable(backend="eager", dynamic=dynamic, tune=False) as session:
        for tape, expected in zip(tapes, wanted, strict=True):
            assert_same(run(*tape), expected)
    stats = session.stats()
    assert not stats.failures and stats.backwards == len(tapes) and not stats.bypasses


@pytest.mark.parametrize("inputs", [False, True])
def test_a_gradient_that_a_leaf_copies_keeps_its_strides_for_others(inputs: bool) -> None:
    """With ``inputs=`` it is a result too, and there has the strides of the real calls."""
    leaf = torch.randn(2, 3).t().requires_grad_()
    with ca.enable(backend="eager", dynamic=True, check=True) as session:
        leaf.sum().backward(inputs=[leaf] if inputs else None)
    assert leaf.grad is not None and leaf.grad.stride() == leaf.stride()
    expect(session.stats(), structure_misses=1, compiles=1, failures=0)
