"""DDP with its reducer in C++, compiled: two processes on gloo, bit for bit as eager DDP.

The hooks of the reducer are moved aside while the engine is asked, and called where the leaves are written.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

import compiled_autograd as ca
from compiled_autograd.engine.native_hits import NATIVE_HITS
from shadow_cache import Bypass

from . import both_walks
from .helpers import expect, mlp
from .pair import Pair

if not (distributed.is_available() and distributed.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from .test_distributed import (
    DDP,
    Case,
    Checkpointed,
    Record,
    Tensors,
    _grads,
    _same,
    assert_as_eager,
    assert_averaged,
    ddp_with_hook,
    own_batch,
    record,
)


@pytest.fixture(scope="module")
def builds(request: pytest.FixtureRequest) -> Path:
    return both_walks.library_of(request.config)._folder


@contextlib.contextmanager
def extension(builds: Path) -> Iterator[None]:
    """With the extension, in a process whose settings have none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPILED_AUTOGRAD_EXTENSION", "auto")
        patch.setattr(NATIVE_HITS, "library", both_walks.library_in(builds))
        yield


def compiled(rank: int, builds: Path, case: Case) -> Record:
    """As :func:`record`, with the extension."""
    with extension(builds):
        return record(rank, case)


def with_power_sgd(model: nn.Module) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Flatten(), nn.Linear(12, 3))


def words(step: int, rank: int) -> tuple[torch.Tensor]:
    return (torch.randint(20, (5, 3), generator=torch.Generator().manual_seed(10 * step + rank)),)


def wide() -> nn.Module:
    """Gradients of more than the first bucket."""
    return nn.Sequential(nn.Linear(8, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 3))


CASES = {
    **DDP,
    "power_sgd": Case(with_power_sgd, steps=5),
    "sparse": Case(DistributedDataParallel, sparse, words),
    "several_regions": Case(DistributedDataParallel, wide),
}


@pytest.mark.parametrize("name", CASES)
def test_it_compiles_and_is_bit_for_bit_eagers(pair: Pair, builds: Path, name: str) -> None:
    case = CASES[name]
    records = pair.run(compiled, builds, case)
    assert_as_eager(records)
    if name not in ("power_sgd", "sparse"):  # which is no mean; which cannot be compared with allclose
        assert_averaged(records, case)
    _expect_compiled(records, case.steps * case.batches)


def _expect_compiled(records: Sequence[Record], backwards: int) -> None:
    for each in records:
        assert not each.stats.bypasses, each.stats
        assert each.stats.hits and each.stats.backwards == backwards


def test_a_hook_that_compresses(pair: Pair, builds: Path) -> None:
    case = Case(partial(ddp_with_hook, hook=default_hooks.fp16_compress_hook))
    records = pair.run(compiled, builds, case)
    assert_as_eager(records)
    assert_averaged(records, case, low=True)
    _expect_compiled(records, case.steps)


def test_reentrant_checkpointing(pair: Pair, builds: Path) -> None:
    """The inner backward tells the reducer of its own leaves."""
    case = Case(partial(DistributedDataParallel, static_graph=True), partial(Checkpointed, reentrant=True), steps=6)
    records = pair.run(compiled, builds, case)
    assert_as_eager(records)
    assert_averaged(records, case)
    _expect_compiled(records, 2 * case.steps)


def test_inductor_is_close(pair: Pair, builds: Path) -> None:
    case = Case(DistributedDataParallel, wide, backend="inductor")
    records = pair.run(compiled, builds, case, seconds=240.0)
    assert_as_eager(records, bitwise=False)
    _expect_compiled(records, case.steps)


def _uneven(rank: int, builds: Path, enabled: bool) -> tuple[Tensors, Any]:
    with extension(builds):
        session = ca.enable(backend="eager")
        torch.manual_seed(0)
        model = DistributedDataParallel(mlp())
        with Join([model]):
            for step in range(2 + 2 * rank):
                loss = model(*own_batch(step, rank)).square().mean()
                with session if enabled else contextlib.nullcontext():
                    loss.backward()
        return _grads(model.parameters()), session.stats()


def test_ranks_with_uneven_inputs(pair: Pair, builds: Path) -> None:
    eager, found = (pair.run(_uneven, builds, enabled) for enabled in (False, True))
    _same([grads for grads, _ in found], [grads for grads, _ in eager])
    assert [(stats.backwards, stats.hits, sum(stats.bypasses.values())) for _, stats in found] == [(2, 0, 0), (4, 2, 0)]


def _sees_at_end(rank: int, builds: Path, enabled: bool) -> tuple[list[Tensors], Any]:
    """A hook queues a look at the gradients, which eager takes before the reducer's waiting for its communication."""
    with extension(builds):
        session = ca.enable(backend="eager")
        torch.manual_seed(0)
        model, seen = DistributedDataParallel(mlp()), []

        def queue(grad: torch.Tensor) -> None:
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: seen.append(_grads(model.parameters())))

        for step in range(3):
            model.zero_grad()
            output = model(*own_batch(step, rank))
            output.register_hook(queue)
            with session if enabled else contextlib.nullcontext():
                output.square().mean().backward()
            seen.append(_grads(model.parameters()))
        return seen, session.stats()


def test_callbacks_come_in_the_order_in_which_they_were_queued(pair: Pair, builds: Path) -> None:
    eager, found = (pair.run(_sees_at_end, builds, enabled) for enabled in (False, True))
    for (wanted, _), (seen, stats) in zip(eager, found, strict=True):
        assert any(not torch.equal(wanted[0][name], reduced) for name, reduced in wanted[1].items())
        _same(seen, wanted)
        assert (stats.backwards, stats.hits, stats.bypasses) == (3, 2, {})


class _GivesNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, batch: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return batch * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Undefined(nn.Module):
    """The gradient of ``scale`` is undefined."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = mlp(), nn.Parameter(torch.ones(3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return _GivesNone.apply(self.inner(batch), self.scale)


def test_a_leaf_whose_gradient_is_undefined(pair: Pair, builds: Path) -> None:
    case = Case(DistributedDataParallel, Undefined)
    records = pair.run(compiled, builds, case)
    assert_as_eager(records)
    _expect_compiled(records, case.steps)


class _Summed(torch.autograd.Function):
    """Its backward communicates, as that of tensor-parallel layers and of ``SyncBatchNorm`` does."""

    @staticmethod
    def forward(ctx: Any, batch: torch.Tensor) -> torch.Tensor:
        return batch.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone()
        distributed.all_reduce(total)
        return total


class Communicates(nn.Module):
    """Layers, each followed by something whose backward communicates."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            batch = _Summed.apply(layer(batch).tanh())
        return batch


def _communicates(rank: int, builds: Path, compiling: tuple[int, ...], by_hook: bool) -> tuple[list[Tensors], Any]:
    with extension(builds):
        session = ca.enable(backend="eager", tune=False)
        torch.manual_seed(0)
        inner = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))) if by_hook else Communicates()
        model, found = DistributedDataParallel(inner, bucket_cap_mb=1e-4), []
        for leaf in model.parameters() if by_hook else ():
            leaf.register_post_accumulate_grad_hook(lambda leaf: distributed.all_reduce(leaf.grad.clone()))
        for step in range(4):
            model.zero_grad()
            loss = model(*own_batch(step, rank)).square().mean()
            with session if rank in compiling else contextlib.nullcontext():
                loss.backward()
            found.append(_grads(model.parameters()))
        return found, session.stats()


@pytest.mark.parametrize("by_hook", [False, True])
def test_users_code_that_communicates_while_one_rank_alone_is_compiled(pair: Pair, builds: Path, by_hook: bool) -> None:
    """Gloo matches by order alone, so buckets are communicated between users' calls as under eager."""
    wanted, found = (pair.run(_communicates, builds, ranks, by_hook) for ranks in ((), (0,)))
    for (grads, _), (others, _) in zip(found, wanted, strict=True):
        _same(grads, others)
    assert (found[0][1].backwards, found[0][1].hits, found[0][1].bypasses) == (4, 3, {})


def _comes_and_goes(rank: int, builds: Path, enabled: bool) -> tuple[list[Tensors], Any, list[int]]:
    """The same tape with the reducer's hooks on its leaves, without them, and with those of another one."""
    with extension(builds):
        session = ca.enable(backend="eager", tune=False)
        torch.manual_seed(0)
        inner, found, walked = mlp(), [], []
        for wraps in (True, False, True):
            model: nn.Module = DistributedDataParallel(inner) if wraps else inner
            before = NATIVE_HITS.hits
            for step in range(5):
                inner.zero_grad()
                output = model(*own_batch(step, rank))
                loss = output.square().mean()
                with session if enabled else contextlib.nullcontext():
                    if step == 4:
                        output.retain_grad()  # refused in C++, so the engine walks
                    loss.backward()
                found.append(_grads(inner.parameters()))
            walked.append(NATIVE_HITS.hits - before)
            del model, output, loss
            gc.collect()
        return found, session.stats(), walked


def test_hooks_that_come_and_go_are_seen_by_the_walk_in_c(pair: Pair, builds: Path) -> None:
    """A plan of a tape says which of its leaves have such hooks: without them nothing is communicated."""
    eager, found = (pair.run(_comes_and_goes, builds, enabled) for enabled in (False, True))
    for (wanted, _, _), (grads, _, walked) in zip(eager, found, strict=True):
        _same(grads, wanted)
        assert walked == [1, 2, 4]  # a tape is met, learnt when it comes again, and known from then on
    alone = [grads[5:10] for grads, _, _ in found]
    assert all(not torch.equal(one["0"], other["0"]) for one, other in zip(*alone, strict=True))
    for _, stats, _ in found:
        assert (stats.backwards, stats.bypasses) == (15, {}), stats


def _forgets(rank: int, builds: Path, enabled: bool) -> tuple[list[Tensors], Any]:
    """A hook has everything forgotten while the steps after it are still to tell the reducer."""
    with extension(builds):
        session = ca.enable(backend="eager", tune=False)
        torch.manual_seed(0)
        model, found = DistributedDataParallel(mlp()), []
        for step in range(6):
            model.zero_grad()
            output = model(*own_batch(step, rank))
            if step % 2:
                output.register_hook(lambda grad: ca.reset())
            with session if enabled else contextlib.nullcontext():
                output.square().mean().backward()
            found.append(_grads(model.parameters()))
        return found, session.stats()


def test_a_reset_in_the_midst_of_a_backward(pair: Pair, builds: Path) -> None:
    """The step ended in an AssertionError, with leaves written that were never communicated."""
    eager, found = (pair.run(_forgets, builds, enabled) for enabled in (False, True))
    for (wanted, _), (grads, stats) in zip(eager, found, strict=True):
        _same(grads, wanted)
        assert stats.backwards == 6 and not stats.bypasses, stats


def _stored(rank: int, builds: Path, folder: Path) -> tuple[Tensors, list[str]]:
    with extension(builds):
        ca.reset()
        session = ca.enable(backend="eager", cache_dir=folder)
        torch.manual_seed(0)
        model, outcomes = DistributedDataParallel(mlp()), []
        for step in range(2):
            model.zero_grad()
            loss = model(*own_batch(step, rank)).square().mean()
            with session:
                loss.backward()
            outcomes.append(session.last.outcome)
        return _grads(model.parameters()), outcomes


def test_a_second_start_finds_it_in_the_store(pair: Pair, builds: Path, tmp_path: Path) -> None:
    first, second = (pair.run(_stored, builds, tmp_path / "store") for _ in range(2))
    _same([grads for grads, _ in second], [grads for grads, _ in first])
    assert [outcomes[1:] for _, outcomes in [*first, *second]] == [["hit"]] * 4


def _one_misses(rank: int, builds: Path, enabled: bool) -> tuple[Tensors, list[str]]:
    """The batch of one rank has another size at each step, which compiles anew."""
    with extension(builds):
        session = ca.enable(backend="eager", dynamic=False)
        torch.manual_seed(0)
        model, outcomes = DistributedDataParallel(mlp()), []
        for step in range(4):
            model.zero_grad()
            loss = model(torch.randn(3 + step * rank, 8)).square().mean()
            with session if enabled else contextlib.nullcontext():
                loss.backward()
            if enabled and session.last is not None:
                outcomes.append(session.last.outcome)
        return _grads(model.parameters()), outcomes


def test_one_rank_misses_while_the_other_hits(pair: Pair, builds: Path) -> None:
    eager, found = (pair.run(_one_misses, builds, enabled) for enabled in (False, True))
    _same([grads for grads, _ in found], [grads for grads, _ in eager])
    assert [outcomes[1:] for _, outcomes in found] == [["hit"] * 3, ["shape_miss"] * 3]


def _of_inputs(rank: int, builds: Path, enabled: bool) -> tuple[list[Tensors], Any, list[str]]:
    """Of all parameters by their names, which is legal under DDP; then without."""
    with extension(builds):
        session = ca.enable(backend="eager", tune=False)
        torch.manual_seed(0)
        model, found, hints = DistributedDataParallel(mlp()), [], []
        for step in range(4):
            model.zero_grad()
            loss = model(*own_batch(step, rank)).square().mean()
            with session if enabled else contextlib.nullcontext():
                loss.backward(inputs=list(model.parameters()) if step % 2 else None)
            found.append(_grads(model.parameters()))
            if enabled and session.last is not None:
                hints += [each.hint for each in session.last.reasons if isinstance(each, Bypass)]
        return found, session.stats(), hints


def test_a_backward_of_inputs_is_left_to_eager_and_says_so(pair: Pair, builds: Path) -> None:
    eager, found = (pair.run(_of_inputs, builds, enabled) for enabled in (False, True))
    for (wanted, _, _), (grads, stats, hints) in zip(eager, found, strict=True):
        _same(grads, wanted)
        expect(stats, structure_misses=1, hits=1, bypasses={"ddp_cpp_reducer": 2})
        assert len(hints) == 2 and all(".backward(inputs=...)" in hint for hint in hints)
