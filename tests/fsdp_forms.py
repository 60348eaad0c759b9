"""Ways to share a model out with FSDP2, and models whose backward tells what of it runs when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint

from .helpers import Squares, mlp

if not (distributed.is_available() and distributed.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as FSDPState
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .test_distributed import Case, _mesh

STEPS = 20
WIDTHS = (8, 12, 16, 20, 3)
"""Of layers, so that each is told by the size of its communication."""

Event = tuple[str, int]
EVENTS: list[Event] = []
"""What was called, and for how many elements, numbers or layers."""


class Block(nn.Module):
    """A layer with a hook, or with a function of Python, or with what checkpointing computes anew."""

    def __init__(self, index: int, checkpointed: bool) -> None:
        super().__init__()
        self.index, self.checkpointed = index, checkpointed
        self.linear = nn.Linear(WIDTHS[index], WIDTHS[index + 1])

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self._inner, x, use_reentrant=False) if self.checkpointed else self._inner(x)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).tanh()
        if self.index == 1:
            y.register_hook(lambda grad: EVENTS.append(("hook", self.index)))
        squared: torch.Tensor = Squares.apply(y) if self.index == 2 else y * y.sigmoid()
        return squared


class Blocks(nn.Module):
    """Four of them, and a parameter of the root."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTHS[0]))
        self.blocks = nn.ModuleList(Block(index, checkpointed) for index in range(len(WIDTHS) - 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x


class Twice(nn.Module):
    """Each block's parameters are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Blocks()
        self.blocks = self.inner.blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        once: torch.Tensor = self.inner(x)
        return once + self.inner(2 * x)


class Tied(nn.Module):
    """The embedding's weight is that of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x).tanh()
        return self.last(x)


def words(step: int, rank: int) -> tuple[torch.Tensor]:
    return (torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(10 * step + rank)),)


def changing_sizes(step: int, rank: int) -> tuple[torch.Tensor]:
    """Of one rank only after its tenth step; then the ranks' batches differ."""
    return _batch(5 if step < STEPS // 2 or rank == 0 else 6 + step % 3, step, rank)


def sizes(step: int, rank: int) -> tuple[torch.Tensor]:
    return _batch(3 + step % 4 + rank, step, rank)


def _batch(size: int, step: int, rank: int) -> tuple[torch.Tensor]:
    return (torch.randn(size, 8, generator=torch.Generator().manual_seed(10 * step + rank)),)


def shared_out(
    model: Any, shape: tuple[int, ...] = (2,), then: Callable[[Any], object] = lambda model: None, **how: Any
) -> nn.Module:
    """Each block, and the rest with the root."""
    mesh = _mesh(shape)
    for block in model.blocks if hasattr(model, "blocks") else model.children():
        fully_shard(block, mesh=mesh, **how)
    model = fully_shard(model, mesh=mesh, **how)
    then(model)
    return model


def in_pairs(model: Any) -> nn.Module:
    mesh, blocks = _mesh((2,)), model.blocks
    fully_shard([blocks[0], blocks[1]], mesh=mesh)
    fully_shard([blocks[2], blocks[3]], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def of_root_alone(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=_mesh((2,)))


def frozen(model: Any) -> nn.Module:
    """A weight, a whole block, and all that is first in the model."""
    for each in (model.scale, model.blocks[1].linear.weight, *model.blocks[0].parameters()):
        each.requires_grad_(False)
    return shared_out(model)


def checkpointed_outside(model: Any) -> nn.Module:
    mesh = _mesh((2,))
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(fully_shard(block, mesh=mesh))
    return fully_shard(model, mesh=mesh)


def checkpointed_inside(model: Any) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    return shared_out(model)


def stepped_in_backward(model: Any) -> nn.Module:
    """Each parameter has an optimizer, which steps as soon as its gradient is there."""
    model = shared_out(model)
    for each in model.parameters():
        steps = torch.optim.SGD([each], lr=0.05).step

        def step(leaf: torch.Tensor, steps: Callable[[], object] = steps) -> None:
            EVENTS.append(("leaf", leaf.numel()))
            steps()

        each.register_post_accumulate_grad_hook(step)
    return model


def compiled_blocks(model: Any) -> nn.Module:
    """Each block's forward is ``torch.compile``'s."""
    for block in model:
        block.compile(backend="aot_eager")
        fully_shard(block, mesh=_mesh((2,)))
    return fully_shard(model, mesh=_mesh((2,)))


def in_parts_too(model: nn.Module) -> nn.Module:
    """Tensor parallel in one dimension of a mesh, sharded in the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in model.children():
        fully_shard(layer, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def batch_of_two(step: int, rank: int) -> tuple[torch.Tensor]:
    """The same of two ranks."""
    return _batch(5, step, rank // 2)


def prefetches_two(model: Any) -> None:
    blocks = model.blocks
    for index, block in enumerate(blocks):
        block.set_modules_to_backward_prefetch([blocks[each] for each in (index - 1, index - 2) if each >= 0])


def keeps_after_forward(model: Any) -> None:
    model.set_reshard_after_forward(False)


def keeps_after_backward(model: Any) -> None:
    model.set_reshard_after_backward(False)


def now_and_then(model: Any) -> None:
    """Whether parameters are let go of after the forward is another thing every three forwards."""
    forwards = [0]

    def change(module: Any, args: object) -> None:
        forwards[0] += 1
        module.set_reshard_after_forward(forwards[0] % 6 < 3)

    model.register_forward_pre_hook(change, prepend=True)


def without_all_reduce(model: Any) -> None:
    model.set_requires_all_reduce(False)


def hooked_all_reduce(model: Any) -> None:
    model.set_all_reduce_hook(lambda grad: EVENTS.append(("all-reduce hook", grad.numel())))


def fsdp1(model: nn.Module) -> nn.Module:
    """The older FSDP, each block with one flat parameter."""
    wrapping = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), auto_wrap_policy=wrapping, use_orig_params=True
    )


LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)

FORMS = {
    "plain": Case(shared_out, Blocks),
    "root_alone": Case(of_root_alone, Blocks),
    "in_pairs": Case(in_pairs, Blocks),
    "reshard": Case(partial(shared_out, reshard_after_forward=True), Blocks),
    "set_reshard_after_forward": Case(partial(shared_out, then=keeps_after_forward), Blocks),
    "reshard_now_and_then": Case(partial(shared_out, then=now_and_then), Blocks),
    "set_reshard_after_backward": Case(partial(shared_out, then=keeps_after_backward), Blocks, batches=2),
    "backward_prefetch": Case(partial(shared_out, then=prefetches_two), Blocks),
    "no_sync": Case(shared_out, Blocks, batches=3),
    "mixed_precision": Case(partial(shared_out, mp_policy=LOW), Blocks),
    "mixed_precision_no_sync": Case(partial(shared_out, mp_policy=LOW), Blocks, batches=2),
    "replicated": Case(partial(shared_out, shape=(2, 1)), Blocks, batches=2),
    "no_all_reduce": Case(partial(shared_out, shape=(2, 1), then=without_all_reduce), Blocks, batches=2),
    "all_reduce_hook": Case(partial(shared_out, shape=(2, 1), then=hooked_all_reduce), Blocks),
    "checkpoint": Case(shared_out, partial(Blocks, checkpointed=True)),
    "checkpoint_inside": Case(checkpointed_inside, Blocks),
    "checkpoint_outside": Case(checkpointed_outside, Blocks),
    "frozen": Case(frozen, Blocks),
    "stepped_in_backward": Case(stepped_in_backward, Blocks),
    "twice": Case(shared_out, Twice),
    "tied": Case(shared_out, Tied, words),
    "compiled_blocks": Case(compiled_blocks, mlp),
    "fsdp1": Case(fsdp1, Blocks),
    "fsdp1_no_sync": Case(fsdp1, Blocks, batches=2),
}
FORMS = {name: replace(case, steps=STEPS) for name, case in FORMS.items()}

OF_FOUR = {
    "sharded": Case(partial(shared_out, shape=(4,)), Blocks),
    "resharded_by_two": Case(partial(shared_out, shape=(4,), reshard_after_forward=2), Blocks),
    "replicated": Case(partial(shared_out, shape=(2, 2)), Blocks, batches=2),
    "in_parts_too": Case(in_parts_too, partial(mlp, depth=1), batch_of_two),
}
OF_FOUR = {name: replace(case, steps=STEPS) for name, case in OF_FOUR.items()}
