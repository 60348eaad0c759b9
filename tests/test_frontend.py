"""Tapes that are not PyTorch's: structures, patterns of None, sizes, errors, and what the settings of a session do."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import compiled_autograd as ca
from compiled_autograd import frontend
from compiled_autograd.policies.ledger import LEDGER


@frontend.operation
def multiply_backward(gradients, a, b):
    return [gradients[0] * b, gradients[0] * a]


@frontend.operation
def power_backward(gradients, x, exponent):
    return [None if gradients[0] is None else gradients[0] * exponent * x ** (exponent - 1)]


@frontend.operation
def pair_backward(gradients, x):
    """Of (2x, x*x): None where neither has a gradient."""
    terms = [grad * factor for grad, factor in zip(gradients, (2.0, 2 * x), strict=True) if grad is not None]
    return [sum(terms) if terms else None]


@frontend.operation
def asks_for_values(gradients, x):
    return [gradients[0] * x.sum().item()]


@frontend.operation
def raises(gradients):
    raise ValueError("not mine")


@frontend.operation
def no_list(gradients):
    return gradients[0]


class Doubling(TorchDispatchMode):
    """Makes each product twice as large."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.mul.Tensor else result


@frontend.operation
def same(gradients):
    return [gradients[0]]


@pytest.fixture(params=["eager", "inductor"])
def session(request):
    return ca.enable(backend=request.param, cache_dir=False)


inductor_is_slow = pytest.mark.parametrize(
    "session", ["eager", pytest.param("inductor", marks=pytest.mark.slow)], indirect=True
)
"""For tests with several structures, each of which is compiled."""


def multiply(session, x, y, times=1):
    """Gradients of x * y, to be added ``times`` times."""
    tape = frontend.Tape()
    seed, a, b = map(tape.tensor, (torch.ones_like(x), x, y))
    pairs = [tape.call(multiply_backward, [seed], a, b, results=2) for _ in range(times)]
    return frontend.run(tape, [tape.add(*each) for each in zip(*pairs, strict=True)], session)


def equal(found, *wanted):
    assert len(found) == len(wanted)
    for ours, its in zip(found, wanted, strict=True):
        assert (ours is None) == (its is None)
        if its is not None:
            torch.testing.assert_close(ours, its)


def test_a_structure_is_compiled_once(session):
    for step in range(4):
        x, y = torch.randn(2, 5)
        equal(multiply(session, x, y, times=3), 3 * y, 3 * x)
        assert session.last.outcome == ("hit" if step else "structure_miss")
    stats = session.stats()
    assert (stats.backwards, stats.captures, stats.compiles, stats.hits, stats.failures) == (4, 1, 1, 3, 0)
    assert "multiply_backward" in session.last.graph.readable()


def test_sizes_that_change_become_symbols(session):
    for size in (5, 7, 9, 11):
        x, y = torch.randn(2, size)
        equal(multiply(session, x, y), y, x)
    stats = session.stats()
    assert (stats.captures, stats.shape_misses, stats.compiles, stats.hits, stats.failures) == (1, 1, 2, 2, 0)


@inductor_is_slow
def test_each_pattern_of_none_is_a_structure(session):
    x, seed = torch.randn(2, 4)
    for _ in range(2):
        for first, second in ((True, False), (False, True), (True, True), (False, False)):
            tape = frontend.Tape()
            given = tape.tensor(seed)
            grads = [given if asked else None for asked in (first, second)]
            (of_x,) = tape.call(pair_backward, grads, tape.tensor(x), results=1)
            wanted = sum(term for term, asked in ((2 * seed, first), (2 * x * seed, second)) if asked)
            equal(frontend.run(tape, [of_x], session), wanted if first or second else None)
    stats = session.stats()
    assert (stats.structure_misses, stats.hits, len(session.graphs())) == (4, 4, 4)


@inductor_is_slow
def test_a_constant_is_part_of_the_structure(session):
    x = torch.rand(3) + 1
    for exponent in (2, 3.0, 2, 3.0):
        tape = frontend.Tape()
        grads = tape.call(power_backward, [tape.tensor(torch.ones(3))], tape.tensor(x), exponent, results=1)
        equal(frontend.run(tape, grads, session), exponent * x ** (exponent - 1))
    assert (session.stats().structure_misses, session.stats().hits) == (2, 2)
    assert session.graphs()[1].variants and len(session.graphs()) == 2


def test_what_reads_values_stays_opaque(session):
    for step in range(3):
        x = torch.randn(4)
        tape = frontend.Tape()
        (grad,) = tape.call(asks_for_values, [tape.tensor(torch.ones(4))], tape.tensor(x), results=1)
        equal(frontend.run(tape, [grad], session), x.sum() * torch.ones(4))
        assert session.last.outcome == ("hit" if step else "structure_miss")


def test_what_is_handed_through(session):
    x = torch.randn(3)
    tape = frontend.Tape()
    given = tape.tensor(x)
    (again,) = tape.call(same, [given], results=1)
    found = frontend.run(tape, [given, again, None, tape.add(None, None), tape.add(None, given)], session)
    equal(found, x, x, None, None, x)


def test_a_tape_goes_on_after_a_run(session):
    x = torch.randn(3)
    tape = frontend.Tape()
    first = tape.call(power_backward, [tape.tensor(torch.ones(3))], tape.tensor(x), 2, results=1)
    equal(frontend.run(tape, first, session), 2 * x)
    second = tape.call(power_backward, first, tape.tensor(x), 2, results=1)
    for _ in range(2):
        equal(frontend.run(tape, second, session), 4 * x * x)
    assert (session.stats().structure_misses, session.stats().hits) == (2, 1)


@inductor_is_slow
def test_an_operation_that_is_declared_again_is_another(session):
    def declared(factor):
        @frontend.operation
        def scale(gradients):
            return [gradients[0] * factor]

        return scale

    x = torch.randn(3)
    for factor in (2.0, 5.0):
        tape = frontend.Tape()
        grads = tape.call(declared(factor), [tape.tensor(x)], results=1)
        equal(frontend.run(tape, grads, session), factor * x)
    assert session.stats().structure_misses == 2


def test_on_miss():
    x, y = torch.randn(2, 5)
    refused = ca.enable(backend="eager", cache_dir=False, on_miss="raise")
    with pytest.raises(ca.CacheMissError, match="first_seen"):
        multiply(refused, x, y)
    assert refused.stats().bypasses == {"on_miss": 1}
    left = ca.enable(backend="eager", cache_dir=False, on_miss="eager")
    equal(multiply(left, x, y), y, x)
    assert left.stats().bypasses == {"on_miss": 1} and not left.stats().compiles
    multiply(ca.enable(backend="eager", cache_dir=False), x, y)
    for on_miss in ("eager", "raise"):
        session = ca.enable(backend="eager", cache_dir=False, on_miss=on_miss)
        equal(multiply(session, x, y), y, x)
        assert session.stats().hits == 1
    with pytest.raises(ca.CacheMissError, match="5 -> 6"):
        multiply(ca.enable(backend="eager", cache_dir=False, on_miss="raise"), torch.ones(6), torch.ones(6))


def test_in_the_background():
    session = ca.enable(backend="eager", cache_dir=False, on_miss="background")
    for _ in range(3):
        x, y = torch.randn(2, 5)
        equal(multiply(session, x, y), y, x)
        assert session.wait(60)
    assert session.last.outcome == "hit"


def test_it_is_not_stored_and_says_why(tmp_path):
    x, y = torch.randn(2, 5)
    session = ca.enable(backend="eager", cache_dir=tmp_path)
    multiply(session, x, y)
    (variant,) = session.last.graph.variants
    assert "front end" in variant.not_stored and "multiply_backward" in variant.not_stored


@inductor_is_slow
def test_beside_pytorchs_own_tapes(session):
    """The two share the cache of the process, and neither takes the other's."""
    for _ in range(3):
        x, y = (each.requires_grad_() for each in torch.randn(2, 5))
        with session:
            (x * y).sum().backward()
        equal([x.grad, y.grad], y.detach(), x.detach())
        equal(multiply(session, x.detach(), y.detach()), y.detach(), x.detach())
    assert (session.stats().structure_misses, session.stats().hits) == (2, 4)


def test_anomaly_mode_is_of_pytorchs_tapes(session):
    """And of the process: it is never turned off, which other threads would see."""
    x, y = torch.tensor([torch.nan, 1.0]), torch.ones(2)
    with torch.autograd.set_detect_anomaly(True):
        for _ in range(2):
            found = multiply(session, x, y)
        assert found[1].isnan().tolist() == [True, False] and session.last.outcome == "hit"
        with pytest.raises(ValueError, match="not mine"):
            tape = frontend.Tape()
            frontend.run(tape, tape.call(raises, [tape.tensor(x)], results=1), session)


def test_tensors_that_nothing_uses_are_no_part_of_a_tape(session):
    x, y = torch.randn(2, 3)
    for unused in (
        [],
        [torch.ones(2)],
        [torch.ones(2, 2), torch.ones(4, dtype=torch.int64)],
        [torch.eye(2).to_sparse()],
    ):
        tape = frontend.Tape()
        for each in unused:
            tape.tensor(each)
        seed, a, b = map(tape.tensor, (torch.ones(3), x, y))
        equal(frontend.run(tape, tape.call(multiply_backward, [seed], a, b, results=2), session), y, x)
    assert (session.stats().structure_misses, session.stats().hits, session.stats().failures) == (1, 3, 0)


def test_structures_that_give_back_what_they_were_given(session):
    """What differs from the structures before is told of these too."""
    x, y = torch.randn(2, 3)
    for size, take in ((3, (0, 1)), (3, (1, 0)), (3, (0, 0)), (4, (0, 1))):
        tape = frontend.Tape()
        given = [tape.tensor(each[:1].expand(size).clone()) for each in (x, y)]
        (grad,) = tape.call(same, [given[0]], results=1)
        wanted = [(x, y)[index][:1].expand(size) for index in take]
        equal(frontend.run(tape, [*(given[index] for index in take), grad], session), *wanted, x[:1].expand(size))
        assert session.last.reasons or session.last.outcome == "hit"
    assert session.stats().backwards == 4 and not session.stats().failures


def test_what_transforms_and_modes_see(session):
    """Such a tape runs as Python would run it, also where it was compiled before."""

    def tripled(x):
        tape = frontend.Tape()
        return frontend.run(tape, tape.call(power_backward, [tape.tensor(x)], tape.tensor(x), 2, results=1), session)[0]

    x = torch.rand(3) + 1
    for _ in range(4):
        equal([tripled(x)], 2 * x * x)
    assert session.stats().hits == 3
    with forward_ad.dual_level():
        dual = tripled(forward_ad.make_dual(x, torch.ones(3)))
        equal([forward_ad.unpack_dual(dual).tangent], 4 * x)
    assert session.last.outcome == "bypass" and session.last.reasons[0].kind == "forward_ad"
    equal([torch.func.grad(lambda x: tripled(x).sum())(x)], 4 * x)
    equal([torch.func.vmap(tripled)(torch.stack([x, x]))], torch.stack([2 * x * x, 2 * x * x]))
    traced = make_fx(tripled, tracing_mode="real")(x)
    equal([traced(3 * x)], 18 * x * x)
    with FakeTensorMode() as mode:
        assert isinstance(tripled(mode.from_tensor(x)), FakeTensor)
    with Doubling():
        found = tripled(x)
    equal([found], 8 * x * x)
    assert session.stats().bypasses == {"forward_ad": 1, "batched_grads": 2, "dispatch_mode": 3}
    with pytest.raises(ca.UnsupportedBackwardError, match="dispatch_mode"), Doubling():
        session = ca.enable(backend="eager", cache_dir=False, on_unsupported="raise")
        tripled(x)
    assert session.stats().backwards == 1


def test_subclasses_keep_their_class(session):
    class Own(torch.Tensor):
        pass

    x = torch.rand(3).as_subclass(Own)
    for _ in range(2):
        found = multiply(session, x, x, times=2)
        assert all(type(each) is Own for each in found)
    assert session.stats().bypasses == {"unsupported(a tensor of the class Own)": 2}


def test_nothing_is_timed_and_nothing_grows():
    session = ca.enable(backend="eager", cache_dir=False, tune=True)
    x, y = torch.randn(2, 5)
    for _ in range(40):
        multiply(session, x, y)
    assert session.stats().hits == 39 and not LEDGER.watched


def test_given_tensors_live_as_long_as_their_tape(session):
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            x, y = torch.randn(2, 5).unbind()
            alive = weakref.ref(x)
            multiply(session, x, y)
            del x
            assert alive() is None
    finally:
        gc.enable()


def test_inside_what_torch_compile_compiles(session):
    @torch.compile(backend="eager")
    def step(x, y):
        return multiply(session, x * 1, y)[0] + 1

    for _ in range(3):
        x, y = torch.randn(2, 5)
        equal([step(x, y)], y + 1)
    assert session.stats().hits == 2 and not session.stats().failures


def test_gradients_are_off_inside(session):
    x, y = (each.requires_grad_() for each in torch.randn(2, 5))
    assert not any(each.requires_grad for each in multiply(session, x, y))


def test_threads(session):
    wrong = []

    def work():
        for _ in range(5):
            x, y = torch.randn(2, 5)
            first, second = multiply(session, x, y, times=2)
            if not (torch.equal(first, 2 * y) and torch.equal(second, 2 * x)):
                wrong.append((first, y))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and session.stats().backwards == 20 and len(session.graphs()) == 1


def test_bad_input():
    tape, other = frontend.Tape(), frontend.Tape()
    x = tape.tensor(torch.ones(3))
    assert tape.tensor(x_again := torch.ones(3)) is tape.tensor(x_again)
    with pytest.raises(TypeError, match="takes a tensor, not int"):
        tape.tensor(3)
    with pytest.raises(TypeError, match="is no operation; declare it with"):
        tape.call(torch.sin, [x], results=1)
    with pytest.raises(TypeError, match="a Tensor cannot be an argument on a tape; add it"):
        tape.call(same, [torch.ones(3)], results=1)
    with pytest.raises(TypeError, match="a dict cannot be an argument on a tape"):
        tape.call(same, [x], {}, results=1)
    with pytest.raises(ValueError, match="belongs to another tape"):
        other.call(same, [x], results=1)
    with pytest.raises(TypeError, match="a nested tensor cannot be on a tape"):
        tape.tensor(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    for wrong in (["a"], [3], "ab", [[x]], [torch.ones(3)]):
        with pytest.raises(TypeError, match="a result must be a value of the tape or None, not"):
            frontend.run(tape, wrong, ca.enable(backend="eager", cache_dir=False))
    with pytest.raises(TypeError, match="no_list returned a Tensor; it must return a list of gradients"):
        frontend.run(tape, tape.call(no_list, [x], results=1), ca.enable(backend="eager", cache_dir=False))
    with pytest.raises(ValueError, match="belongs to another tape"):
        frontend.run(other, [x], ca.enable(backend="eager", cache_dir=False))


def test_an_error_of_an_operation_is_the_users(session):
    tape = frontend.Tape()
    a, b = tape.tensor(torch.ones(3)), tape.tensor(torch.ones(4))
    grads = tape.call(multiply_backward, [a], b, b, results=2)
    with pytest.raises(RuntimeError, match="must match the size"):
        frontend.run(tape, grads, session)
    assert session.stats().backwards == 1
