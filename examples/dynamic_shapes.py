"""Batches of random sizes and lengths: how often is something compiled, and why?

A small transformer is trained on 30 batches, each of another size and length. By default the first one is compiled for
its own sizes, the second one shows which of them change, and what is compiled then serves all others. The reasons that
are printed name the sizes. `backend="eager"` compiles at once, and counts as Inductor does; its gradients are eager's
bit for bit.

    python examples/dynamic_shapes.py
"""

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compiled_autograd as ca

WORDS, WIDTH, STEPS = 50, 32, 30
Batch = tuple[Tensor, Tensor]


def batches() -> list[Batch]:
    """Tokens [batch, length] and targets [batch * length], both int64, with 2 to 7 rows of 9 to 40 tokens."""
    torch.manual_seed(0)
    sizes = random.Random(0)
    drawn = [(sizes.randint(2, 7), sizes.randint(9, 40)) for _ in range(STEPS)]
    return [(torch.randint(WORDS, shape), torch.randint(WORDS, (shape[0] * shape[1],))) for shape in drawn]


def transformer() -> nn.Module:
    """Tokens [batch, length] -> logits [batch, length, WORDS]."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), layer, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))


def train(name: str, model: nn.Module, data: list[Batch], session: ca.Session) -> None:
    """Compares each gradient with eager's on the same weights, and says why something was compiled."""
    parameters = list(model.parameters())
    for step, (tokens, targets) in enumerate(data):
        model.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets)
        wanted = torch.autograd.grad(loss, parameters, retain_graph=True)
        with session:
            loss.backward()
        if session.last.outcome != "hit":
            print(f"{name}, batch {step}: {session.last.outcome}, {session.last.reasons[0]}")
        with torch.no_grad():
            for parameter, grad in zip(parameters, wanted, strict=True):
                assert torch.equal(parameter.grad, grad)
                parameter -= 0.1 * grad


def main() -> None:
    data = batches()
    # For exact counts. `tune=False`: else, after 4 hits, some backwards would run on eager, to see whether that is
    # faster. No `compile_budget`: else a slow computer might leave to eager what is new.
    settings = {"backend": "eager", "on_miss": "compile", "compile_budget": float("inf")}
    settings |= {"cache_dir": False, "tune": False}

    # The default, `dynamic=None`: what is seen to change becomes a symbol. Two compiles for all batches.
    session = ca.enable(**settings)
    model = transformer()
    train("batches", model, data, session)
    stats = session.stats()
    assert (stats.compiles, stats.structure_misses, stats.shape_misses, stats.hits) == (2, 1, 1, STEPS - 2)
    shapes = len({tokens.shape for tokens, _ in data})
    print(f"{STEPS} batches of {shapes} shapes: {stats.compiles} compiles, {stats.hits} hits")

    # Operators do other things for sizes of 0 and 1, so these are never symbols. With one row, this model has another
    # tape, in which only the length changes: again two compiles. What was compiled before stays.
    train("one row", model, [(tokens[:1], targets[: tokens.shape[1]]) for tokens, targets in data], session)
    train("batches", model, data, session)
    stats = session.stats()
    assert (stats.compiles, stats.captures, stats.hits) == (4, 2, 3 * STEPS - 4)
    print(f"{STEPS} of one row, and all batches again: {stats.compiles} compiles in all, {stats.hits} hits")

    # `dynamic=False` compiles for each set of sizes by itself. Each of these three batches has another.
    session = ca.enable(dynamic=False, **settings)
    train("dynamic=False", model, data[:3], session)
    assert (session.stats().compiles, session.stats().hits) == (3, 0)


if __name__ == "__main__":
    main()
