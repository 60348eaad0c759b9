"""Two processes on gloo: DDP's reducer is told of every gradient, by bypass; FSDP2 and hooks in Python compile.

The silent error to be found here is a gradient that is not averaged over the ranks. So each rank has data of its own,
and what both are left with is compared with eager, bit for bit, and with the mean of what unwrapped models compute.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed, nn

import compiled_autograd as ca

from .helpers import GradientsDifferError, assert_same, expect, mlp
from .pair import Pair, RankFailedError

if not (distributed.is_available() and distributed.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

from torch.distributed._composable import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

Tensors = dict[str, torch.Tensor | None]

DISABLED_STEPS = 2
"""Steps that each training ends with, inside ``disable()``."""


# ---- training, in the processes ------------------------------------------------------------------------------------


def own_batch(step: int, rank: int) -> tuple[torch.Tensor]:
    """Other data at each step and on each rank."""
    return (torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + rank)),)


def same_batch(step: int, rank: int) -> tuple[torch.Tensor]:
    """Other data at each step, the same on both ranks."""
    return own_batch(step, 0)


def unwrapped(model: nn.Module) -> nn.Module:
    """No communication."""
    return model


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        wrap: makes the model a distributed one.
        build: makes the model.
        inputs: of the forward, for a step and a rank.
        batches: how many are accumulated for one step of the optimizer; only the last is synchronised.
        steps: of the optimizer, enabled.
        backend: of the enabled steps.
    """

    wrap: Callable[[nn.Module], nn.Module]
    build: Callable[[], nn.Module] = mlp
    inputs: Callable[[int, int], tuple[Any, ...]] = own_batch
    batches: int = 1
    steps: int = 3
    backend: str = "eager"


@dataclass
class Run:
    """What a training left on one rank: gradients after each backward, and parameters after each step."""

    grads: list[Tensors] = field(default_factory=list)
    weights: list[Tensors] = field(default_factory=list)


@dataclass
class Record:
    """One rank's account of a case."""

    eager: Run
    compiled: Run
    local: Tensors
    """Gradients of the first step, of the unwrapped model on this rank's data."""
    stats: ca.Stats
    hint: str
    """Of the last reason, where there was a bypass."""


def without_extension(rank: int, case: Case) -> Record:
    """As :func:`record`, where nothing calls the hooks of the reducer from compiled code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPILED_AUTOGRAD_EXTENSION", "off")
        return record(rank, case)


def record(rank: int, case: Case) -> Record:
    """Train on eager and compiled."""
    session = ca.enable(backend=case.backend)
    warnings.simplefilter("ignore")  # of DDP, about our models
    local = train(replace(case, wrap=unwrapped, steps=1), rank, None)
    eager = train(case, rank, None)
    compiled = train(case, rank, session)
    reasons = session.last.reasons if session.last is not None else ()
    hint = getattr(reasons[0], "hint", "") if reasons else ""
    return Record(eager, compiled, local.grads[case.batches - 1], session.stats(), hint)


def train(case: Case, rank: int, session: ca.Session | None) -> Run:
    """All steps of a case, and some more inside ``disable()``."""
    torch.manual_seed(0)
    model = case.wrap(case.build())
    parameters = {name.removeprefix("module."): each for name, each in model.named_parameters()}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    run = Run()
    for step in range(case.steps + DISABLED_STEPS):
        disabled = ca.disable() if step >= case.steps else contextlib.nullcontext()
        with session or contextlib.nullcontext(), disabled:
            for batch in range(case.batches):
                with _synchronised(model, batch + 1 == case.batches):
                    model(*case.inputs(case.batches * step + batch, rank)).square().mean().backward()
                run.grads.append({name: _whole(each.grad) for name, each in parameters.items()})
            optimizer.step()
            optimizer.zero_grad()
            run.weights.append({name: _whole(each) for name, each in parameters.items()})
    return run


def _grads(parameters: Iterable[nn.Parameter]) -> Tensors:
    return {str(index): _whole(each.grad) for index, each in enumerate(parameters)}


@contextlib.contextmanager
def _synchronised(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Whether the backward of the forward inside ends in communication, as each way of wrapping has it."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(wanted)
        yield
    elif wanted or not hasattr(model, "no_sync"):
        yield
    else:
        with model.no_sync():
            yield


def _whole(value: torch.Tensor | None) -> torch.Tensor | None:
    """A copy; of what is in parts, the whole."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return None if value is None else value.detach().clone()


# ---- comparing, in the test ----------------------------------------------------------------------------------------


def _same(found: Sequence[Tensors], wanted: Sequence[Tensors], **how: Any) -> None:
    assert len(found) == len(wanted)
    for index, (some, others) in enumerate(zip(found, wanted, strict=True)):
        names = [f"of {name}, #{index}" for name in others]
        assert_same([some[name] for name in others], others.values(), names, **how)


def assert_as_eager(records: Sequence[Record], bitwise: bool = True) -> None:
    """On each rank, every gradient and every parameter of every step."""
    for each in records:
        _same(each.compiled.grads, each.eager.grads, bitwise=bitwise)
        _same(each.compiled.weights, each.eager.weights, bitwise=bitwise)


def assert_averaged(records: Sequence[Record], case: Case, low: bool = False) -> None:
    """All ranks have the same, and at the first step it is the mean of what each computed by itself."""
    first, *others = records
    for other in others:
        _same(first.compiled.weights, other.compiled.weights)
    grads = {name: [each.local[name] for each in records] for name in first.local}
    unlike = any(not torch.allclose(each, found[0], rtol=0.1) for found in grads.values() for each in found[1:])
    assert unlike, "too like to tell the ranks apart"
    mean = {name: sum(found) / len(found) for name, found in grads.items()}
    for each in records:
        _same([each.compiled.grads[case.batches - 1]], [mean], bitwise=False, low=low)


# ---- DDP's reducer: bypass -----------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Uses one of its layers only where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, use_branch: bool) -> torch.Tensor:
        x = self.first(x).tanh()
        return self.last(x + self.branch(x) if use_branch else x)


def branch_used_by_some(step: int, rank: int) -> tuple[torch.Tensor, bool]:
    """By both ranks; by one; by none."""
    return *own_batch(step, rank), step % 3 == 0 or (step % 3 == 1 and rank == 0)


def branch_used_in_turn(step: int, rank: int) -> tuple[torch.Tensor, bool]:
    """By both ranks or by none."""
    return *own_batch(step, rank), step % 2 == 0


class Checkpointed(nn.Module):
    """Computes a layer anew in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self._inner, self.first(x), use_reentrant=self.reentrant))

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).tanh()


def with_batch_norm() -> nn.Module:
    """A module with buffers, which DDP broadcasts."""
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def ddp_with_hook(model: nn.Module, hook: Callable[..., Any]) -> nn.Module:
    """DDP whose communication is a hook's."""
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, hook)
    return wrapped


def mean_of_signs(state, bucket):
    """A communication hook that leaves something else than a mean of gradients.

    DDP compares a hook's annotations with types, and in this file they are strings.
    """
    signs = bucket.buffer().sign().div_(2)
    return distributed.all_reduce(signs, async_op=True).get_future().then(lambda future: future.value()[0])


def static_after_one_step(model: nn.Module) -> nn.Module:
    """A static graph whose first backward is in ``no_sync`` makes DDP itself fail, on eager."""
    wrapped = DistributedDataParallel(model, static_graph=True)
    wrapped(*own_batch(0, distributed.get_rank())).square().mean().backward()
    wrapped.zero_grad()
    return wrapped


def replicated(model: nn.Module) -> nn.Module:
    """DDP without a wrapper."""
    return replicate(model)


DDP = {
    "plain": Case(DistributedDataParallel),
    "static_graph": Case(partial(DistributedDataParallel, static_graph=True)),
    "find_unused_parameters": Case(
        partial(DistributedDataParallel, find_unused_parameters=True), Branches, branch_used_by_some
    ),
    "no_sync": Case(DistributedDataParallel, batches=3),
    "no_sync_static_graph": Case(static_after_one_step, batches=2),
    "gradient_as_bucket_view": Case(partial(DistributedDataParallel, gradient_as_bucket_view=True), batches=2),
    "small_buckets": Case(partial(DistributedDataParallel, bucket_cap_mb=1e-4)),
    "buffers": Case(DistributedDataParallel, with_batch_norm),
    "allreduce_hook": Case(partial(ddp_with_hook, hook=default_hooks.allreduce_hook), batches=2),
    "checkpoint": Case(DistributedDataParallel, partial(Checkpointed, reentrant=False)),
    "replicate": Case(replicated, batches=2),
}


@pytest.mark.parametrize("case", DDP.values(), ids=DDP)
def test_ddp_bypasses_and_averages(pair: Pair, case: Case) -> None:
    records = pair.run(without_extension, case)
    assert_as_eager(records)
    assert_averaged(records, case)
    _expect_bypasses(records, case.steps * case.batches)


def _expect_bypasses(records: Sequence[Record], count: int) -> None:
    for each in records:
        expect(each.stats, bypasses={"ddp_cpp_reducer": count})
        assert "fully_shard" in each.hint and "python_reducer" in each.hint


def test_ddp_with_a_hook_that_compresses(pair: Pair) -> None:
    case = Case(partial(ddp_with_hook, hook=default_hooks.fp16_compress_hook))
    records = pair.run(without_extension, case)
    assert_as_eager(records)
    assert_averaged(records, case, low=True)
    _expect_bypasses(records, case.steps)


def test_ddp_with_a_hook_of_the_users_own(pair: Pair) -> None:
    case = Case(partial(ddp_with_hook, hook=mean_of_signs))
    records = pair.run(without_extension, case)
    assert_as_eager(records)
    _expect_bypasses(records, case.steps)
    for grad in records[0].compiled.grads[0].values():
        assert grad is not None and set(grad.unique().tolist()) <= {-1.0, 0.0, 1.0}


def test_ddp_with_reentrant_checkpointing(pair: Pair) -> None:
    """The inner backward reaches hooks of the reducer too."""
    case = Case(partial(DistributedDataParallel, static_graph=True), partial(Checkpointed, reentrant=True))
    records = pair.run(without_extension, case)
    assert_as_eager(records)
    assert_averaged(records, case)
    _expect_bypasses(records, 2 * case.steps)


def test_a_branch_that_no_rank_uses_gets_no_gradient(pair: Pair) -> None:
    """So that the case above has what its name says."""
    for each in pair.run(record, DDP["find_unused_parameters"]):
        used = [grads["branch.weight"] is not None for grads in each.compiled.grads]
        assert used == [True, True, False, True, True]


def _outcomes_around_ddp(rank: int) -> list[str]:
    """A model's structure is known before DDP wraps it, and DDP goes away again."""
    session = ca.enable(backend="eager", extension="off")
    outcomes = []

    def backward(model: nn.Module) -> None:
        model.zero_grad()
        with session:
            model(*own_batch(0, rank)).square().mean().backward()
        assert session.last is not None
        outcomes.append(session.last.outcome)

    model = mlp()
    backward(model)
    local = _grads(model.parameters())
    wrapped = DistributedDataParallel(model)
    backward(wrapped)
    average = _grads(model.parameters())
    assert not any(torch.equal(local[name], average[name]) for name in local)
    backward(model)  # the reducer's hooks are on the parameters, whoever uses them; it waits for none now
    _same([_grads(model.parameters())], [local])
    del wrapped
    gc.collect()
    backward(model)
    _same([_grads(model.parameters())], [local])
    return outcomes


def test_a_structure_that_was_captured_does_not_serve_ddp(pair: Pair) -> None:
    for outcomes in pair.run(_outcomes_around_ddp):
        assert outcomes == ["structure_miss", "bypass", "bypass", "hit"]


def _refuse_then_train(rank: int) -> tuple[Tensors, Tensors]:
    found = []
    for refuse in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(mlp())
        for step in range(2):
            model.zero_grad()
            loss = model(*own_batch(step, rank)).square().mean()
            if refuse:
                with (
                    ca.enable(backend="eager", on_unsupported="raise", extension="off"),
                    pytest.raises(ca.UnsupportedBackwardError, match="ddp_cpp_reducer"),
                ):
                    loss.backward()
                assert all(parameter.grad is None for parameter in model.parameters())
            loss.backward()
        found.append(_grads(model.parameters()))
    return found[0], found[1]


def test_a_refused_backward_leaves_the_reducer_waiting(pair: Pair) -> None:
    """With ``on_unsupported="raise"`` nothing has run, and the same backward can be run on eager."""
    (wanted, found), (theirs, _) = pair.run(_refuse_then_train)
    _same([found, theirs], [wanted, wanted])


# ---- hooks in Python: compiled -------------------------------------------------------------------------------------


@contextlib.contextmanager
def python_reducer() -> Iterator[None]:
    """DDP that is made inside communicates from hooks in Python, parameter by parameter."""
    import torch._dynamo

    before = torch._dynamo.config.optimize_ddp
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        yield
    finally:
        torch._dynamo.config.optimize_ddp = before


def python_ddp(model: nn.Module, hook: Callable[..., Any] | None = None) -> nn.Module:
    """DDP with its reducer in Python."""
    with python_reducer():
        wrapped = DistributedDataParallel(model)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    return wrapped


def reduce_at_once(state, bucket):
    """A communication hook for the reducer in Python, which gives a gradient and its parameter, and does not wait."""
    grad, _ = bucket
    distributed.all_reduce(grad.div_(2))


def hooks_on_leaves(model: nn.Module) -> nn.Module:
    """Averages each gradient when its leaf has it."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda leaf: distributed.all_reduce(leaf.grad.div_(2)))
    return model


def hooks_on_gradients(model: nn.Module) -> nn.Module:
    """Averages each gradient before its leaf gets it."""

    def average(grad: torch.Tensor) -> torch.Tensor:
        mean = grad / 2
        distributed.all_reduce(mean)
        return mean

    for parameter in model.parameters():
        parameter.register_hook(average)
    return model


HOOKS = {
    "python_reducer": Case(python_ddp),
    "python_reducer_with_a_hook": Case(partial(python_ddp, hook=reduce_at_once)),
    "hooks_on_leaves": Case(hooks_on_leaves),
    "hooks_on_gradients": Case(hooks_on_gradients),
}


@pytest.mark.parametrize("case", HOOKS.values(), ids=HOOKS)
def test_hooks_in_python_compile(pair: Pair, case: Case) -> None:
    records = pair.run(record, case)
    assert_as_eager(records)
    assert_averaged(records, case)
    _expect_hits(records, case)


def _expect_hits(records: Sequence[Record], case: Case, misses: int = 1, backwards: int = 1) -> None:
    for each in records:
        hits = backwards * case.steps * case.batches - misses
        expect(each.stats, structure_misses=misses, hits=hits, captures=misses)
        assert each.stats.compiles > 0


def test_the_reducer_in_python_accumulates_without_sync(pair: Pair) -> None:
    case = Case(python_ddp, batches=3)
    records = pair.run(record, case)
    assert_as_eager(records)
    assert_averaged(records, case)
    _expect_hits(records, case, misses=2)  # with .grad and without


def test_the_reducer_in_python_computes_what_the_other_does(pair: Pair) -> None:
    (found, _), (wanted, _) = (pair.run(record, Case(wrap)) for wrap in (python_ddp, DistributedDataParallel))
    _same(found.compiled.grads, wanted.compiled.grads)


# ---- FSDP2: compiled -----------------------------------------------------------------------------------------------


def sharded(model: nn.Module, shape: tuple[int, ...] = (2,), **settings: Any) -> nn.Module:
    """Every module with parameters by itself, and the whole."""
    mesh = _mesh(shape)
    for module in list(model.children()):
        if next(module.parameters(), None) is not None:
            fully_shard(module, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("replicate", "shard") if len(shape) == 2 else ("shard",)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def kept_after_backward(model: nn.Module) -> nn.Module:
    """Parameters stay whole from one backward to the next."""
    model = sharded(model)
    model.set_reshard_after_backward(False)
    return model


FSDP2 = {
    "reshard_after_forward": Case(partial(sharded, reshard_after_forward=True)),
    "no_reshard_after_forward": Case(partial(sharded, reshard_after_forward=False)),
    "no_reshard_after_backward": Case(kept_after_backward),
    "replicate_mesh": Case(partial(sharded, shape=(2, 1))),
    "checkpoint": Case(sharded, partial(Checkpointed, reentrant=False)),
}


@pytest.mark.parametrize("case", FSDP2.values(), ids=FSDP2)
def test_fsdp2_compiles(pair: Pair, case: Case) -> None:
    records = pair.run(record, case)
    assert_as_eager(records)
    assert_averaged(records, case)
    _expect_hits(records, case)


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2_accumulates_without_sync(pair: Pair, reshard: bool) -> None:
    case = Case(partial(sharded, reshard_after_forward=reshard), batches=3)
    records = pair.run(record, case)
    assert_as_eager(records)
    assert_averaged(records, case)
    _expect_hits(records, case, misses=2)  # with .grad and without


def test_fsdp2_with_mixed_precision(pair: Pair) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    case = Case(partial(sharded, mp_policy=policy))
    records = pair.run(record, case)
    assert_as_eager(records)
    assert_averaged(records, case, low=True)
    _expect_hits(records, case)


def test_fsdp2_with_reentrant_checkpointing(pair: Pair) -> None:
    """The backward inside the backward compiles too."""
    case = Case(sharded, partial(Checkpointed, reentrant=True))
    records = pair.run(record, case)
    assert_as_eager(records)
    assert_averaged(records, case)
    _expect_hits(records, case, misses=2, backwards=2)


def test_fsdp2_with_a_branch_that_is_used_in_turn(pair: Pair) -> None:
    case = Case(sharded, Branches, branch_used_in_turn, steps=4)
    records = pair.run(record, case)
    assert_as_eager(records)
    assert_averaged(records, case)
    _expect_hits(records, case, misses=2)


def fsdp1(model: nn.Module) -> nn.Module:
    """The older FSDP, with one flat parameter."""
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def tensor_parallel(model: nn.Module) -> nn.Module:
    """The first layer's columns and the last one's rows are shared out."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, _mesh((2,)), plan)


OTHERS = {
    "fsdp1": Case(fsdp1),
    "tensor_parallel": Case(tensor_parallel, partial(mlp, depth=1), same_batch),
}


@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
def test_other_ways_to_distribute_compile(pair: Pair, case: Case) -> None:
    records = pair.run(record, case)
    assert_as_eager(records)
    _expect_hits(records, case)


def record_in_one_process(rank: int, case: Case) -> Record:
    """With an Inductor that starts no processes of its own."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1
    return without_extension(rank, case)


def test_inductor_under_ddp(pair: Pair) -> None:
    """Where the reducer is C++ nothing is compiled, and the bits are eager's."""
    case = Case(DistributedDataParallel, backend="inductor")
    records = pair.run(record_in_one_process, case)
    assert_as_eager(records)
    assert_averaged(records, case)
    _expect_bypasses(records, case.steps)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [python_ddp, sharded])
def test_inductor_compiles(pair: Pair, wrap: Callable[[nn.Module], nn.Module]) -> None:
    case = Case(wrap, partial(mlp, depth=1), backend="inductor", steps=2)
    records = pair.run(record_in_one_process, case, seconds=120.0)
    assert_as_eager(records, bitwise=False)
    assert_averaged(records, case)
    _expect_hits(records, case)


# ---- the checkers --------------------------------------------------------------------------------------------------


def never_synchronised(model: nn.Module) -> nn.Module:
    """What an engine that skips the reducer's hooks would make of DDP."""
    wrapped = DistributedDataParallel(model)
    wrapped.require_backward_grad_sync = False
    return wrapped


def test_gradients_that_are_not_averaged_are_seen(pair: Pair) -> None:
    case = Case(never_synchronised)
    records = pair.run(record, case)
    with pytest.raises(GradientsDifferError):
        assert_averaged(records, case)
    _same(records[0].compiled.weights[:1], records[0].eager.weights[:1])
    with pytest.raises(GradientsDifferError):
        _same(records[0].compiled.weights[:1], records[1].compiled.weights[:1])


def _hang_on_one(rank: int) -> None:
    if rank == 1:
        distributed.barrier()


def _raise_on_one(rank: int) -> int:
    if rank == 1:
        raise ValueError("of rank 1")
    return rank


@pytest.mark.slow
def test_a_rank_that_hangs_is_killed_with_its_stacks_shown(pair: Pair) -> None:
    starts = pair.starts
    with pytest.raises(RankFailedError, match=r"(?s)rank 1: did not answer.*_hang_on_one"):
        pair.run(_hang_on_one, seconds=1.0)
    with pytest.raises(RankFailedError, match="ValueError: of rank 1"):
        pair.run(_raise_on_one)
    assert pair.starts == max(starts, 1) + 1
