"""Programs that train one model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from benchmarks.client_programs.plain import batch, classifier
from benchmarks.models import GPT
from benchmarks.ordinary import networks

VOCABULARY = 64


def train(
    model: nn.Module, losses: Iterable[Tensor], lr: float = 1e-3, accumulate: int = 1, clip: bool = False
) -> None:
    """The loop that most programs have; a loss is drawn when its turn comes."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for number, loss in enumerate(losses, 1):
        (loss / accumulate).backward()
        if number % accumulate == 0:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def _tiny() -> tuple[nn.Module, Callable[[], Tensor]]:
    net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
    x, y = torch.randn(8, 10), torch.randint(3, (8,))
    return net, lambda: F.cross_entropy(net(x), y)


def tiny(here: Any) -> None:
    net, loss = _tiny()
    train(net, (loss() for _ in range(100)))


def tiny_accumulated(here: Any) -> None:
    net, loss = _tiny()
    train(net, (loss() for _ in range(100)), accumulate=2, clip=True)


def classifier_with_evaluation(here: Any) -> None:
    """Epochs of ten batches and a smaller one, then an evaluation and a second of saving."""
    model = classifier(features=256, hidden=512)
    whole, rest = batch(256, features=256), batch(100, features=256)

    def losses() -> Iterable[Tensor]:
        for _ in range(12):
            for x, y in [whole] * 10 + [rest]:
                yield F.cross_entropy(model(x), y)
            with torch.no_grad():
                model.eval()(whole[0])
            model.train()
            here.pause(1.0)

    train(model, losses())


def accumulated_smaller_last(here: Any) -> None:
    """Four batches a step; the last one of an epoch is smaller."""
    model = classifier(features=128, hidden=256)
    whole, rest = batch(128, features=128), batch(52, features=128)
    train(model, (F.cross_entropy(model(x), y) for x, y in ([whole] * 15 + [rest]) * 10), accumulate=4, clip=True)


def convolutions(here: Any) -> None:
    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]

    model = nn.Sequential(*block(3, 16), *block(16, 32), *block(32, 32), nn.Flatten(), nn.Linear(512, 10))
    x, y = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    train(model, (F.cross_entropy(model(x), y) for _ in range(60)))


def _gpt(steps: int) -> None:
    model = GPT(VOCABULARY, 64, 2, 64, 4)
    text = torch.randint(VOCABULARY, (8, 65))
    losses = (F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()) for _ in range(steps))
    train(model, losses, clip=True)


def gpt(here: Any) -> None:
    _gpt(100)


def ten_steps_of_gpt(here: Any) -> None:
    _gpt(10)


def masked_language_model(here: Any) -> None:
    """A different number of symbols is hidden each time; labels of others are left out."""
    model = networks.BERT(VOCABULARY, 32, 64, 4, 2)

    def losses() -> Iterable[Tensor]:
        for _ in range(60):
            tokens = torch.randint(2, VOCABULARY, (8, 32))
            hidden = torch.rand(8, 32) < 0.15
            logits = model(tokens.masked_fill(hidden, 1))
            yield F.cross_entropy(logits[hidden], tokens[hidden])

    train(model, losses())


def diffusion(here: Any) -> None:
    model = networks.UNet(8)
    images = torch.randn(2, 3, 16, 16)
    train(model, (F.mse_loss(model(images, torch.randint(1000, (2,))), images) for _ in range(50)), clip=True)


def variational(here: Any) -> None:
    to, back = nn.Sequential(nn.Linear(196, 128), nn.ReLU(), nn.Linear(128, 16)), nn.Linear(8, 196)
    x = torch.rand(64, 196)

    def loss() -> Tensor:
        mean, log = to(x).chunk(2, 1)
        made = back(mean + torch.randn_like(mean) * (0.5 * log).exp())
        apart = -0.5 * (1 + log - mean.square() - log.exp()).sum()
        return F.binary_cross_entropy_with_logits(made, x, reduction="sum") + apart

    train(nn.ModuleList([to, back]), (loss() for _ in range(150)))


def sharpness_aware(here: Any) -> None:
    """Two backwards a step: at the weights, and where the loss is sharpest."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = batch()
    for _ in range(100):
        F.cross_entropy(model(x), y).backward()
        moves = [0.05 * (each.grad if each.grad is not None else 0.0 * each.detach()) for each in model.parameters()]
        with torch.no_grad():
            for each, move in zip(model.parameters(), moves, strict=True):
                each.add_(move)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for each, move in zip(model.parameters(), moves, strict=True):
                each.sub_(move)
        optimizer.step()
        optimizer.zero_grad()


def lbfgs(here: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.randn(200, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x.prod(1, keepdim=True))
        loss.backward()
        return loss

    for _ in range(20):
        optimizer.step(closure)


def one_image_attacked(here: Any) -> None:
    """Five gradients of an image: a script that ends soon."""
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    image = torch.rand(1, 3, 96, 96)
    for _ in range(5):
        image = image.detach().requires_grad_()
        net(image).square().sum().backward()
        assert image.grad is not None
        image = image + 0.01 * image.grad.sign()


# ---- lengths ---------------------------------------------------------------------------------------------------------


def _reader() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    embedding, out = nn.Embedding(VOCABULARY, 64), nn.Linear(64, VOCABULARY)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.ModuleList([embedding, layer, out])
    return model, lambda text: F.cross_entropy(out(layer(embedding(text))).flatten(0, 1), text.flatten())


def random_lengths(here: Any) -> None:
    """Each batch is as long as its longest text."""
    model, loss = _reader()
    lengths = torch.randint(8, 64, (150,)).tolist()
    train(model, (loss(torch.randint(VOCABULARY, (8, length))) for length in lengths))


def bucketed_lengths(here: Any) -> None:
    """The same, padded to multiples of 16."""
    model, loss = _reader()
    lengths = torch.randint(8, 64, (150,)).tolist()
    train(model, (loss(torch.randint(VOCABULARY, (8, 16 * -(-length // 16)))) for length in lengths))


def growing_lengths(here: Any) -> None:
    """A curriculum: longer texts after each 40 steps."""
    model, loss = _reader()
    train(model, (loss(torch.randint(VOCABULARY, (8, 8 + 8 * (step // 40)))) for step in range(200)))


def packed_gru(here: Any) -> None:
    """A GRU over packed rows of random lengths: nearly each tape has another structure."""
    embedding, gru, out = nn.Embedding(20, 8), nn.GRU(8, 24, batch_first=True), nn.Linear(24, 3)

    def loss() -> Tensor:
        lengths = torch.randint(3, 12, (6,))
        rows = torch.randint(20, (6, int(lengths.max())))
        packed = pack_padded_sequence(embedding(rows), lengths, batch_first=True, enforce_sorted=False)
        return F.cross_entropy(out(gru(packed)[1][-1]), torch.zeros(6, dtype=torch.long))

    train(nn.ModuleList([embedding, gru, out]), (loss() for _ in range(150)))


def graph_batches(here: Any) -> None:
    """Batches of graphs: nodes and edges in other numbers each time."""
    first, second, out = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def loss() -> Tensor:
        nodes, edges = int(torch.randint(100, 200, ())), int(torch.randint(400, 800, ()))
        x, (source, end) = torch.randn(nodes, 16), torch.randint(nodes, (2, edges))
        for layer in (first, second):
            sent = layer(x)
            x = torch.zeros_like(sent).index_add(0, end, sent[source]).relu()
        graph = torch.arange(nodes) * 8 // nodes
        return F.cross_entropy(out(torch.zeros(8, 32).index_add(0, graph, x)), torch.randint(4, (8,)))

    train(nn.ModuleList([first, second, out]), (loss() for _ in range(150)))


def metric_learning(here: Any) -> None:
    """A triplet loss with a margin over the triplets that are hard; later there are none in some batches."""
    model = classifier(features=16, classes=8)
    middles = 3.0 * torch.randn(4, 16)

    def loss() -> Tensor:
        labels = torch.randint(4, (24,))
        embedded = F.normalize(model(middles[labels] + torch.randn(24, 16)))
        apart = torch.cdist(embedded, embedded)
        same = labels[:, None] == labels
        triples = (same & ~torch.eye(24, dtype=torch.bool))[:, :, None] & ~same[:, None]
        a, p, n = triples.nonzero(as_tuple=True)
        hard = (apart[a, p] - apart[a, n] + 0.2) > 0
        return F.relu(apart[a[hard], p[hard]] - apart[a[hard], n[hard]] + 0.2).sum() / max(1, int(hard.sum()))

    train(model, (loss() for _ in range(150)), lr=3e-3)


# ---- structures ------------------------------------------------------------------------------------------------------


def _layers(count: int, width: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(count))


def stochastic_depth(here: Any) -> None:
    """Each of four layers is left out with a probability of 0.2."""
    layers, out = _layers(4, 64), nn.Linear(64, 10)
    x, y = batch()

    def loss() -> Tensor:
        hidden = x
        for layer in layers:
            if torch.rand(()) > 0.2:
                hidden = hidden + layer(hidden)
        return F.cross_entropy(out(hidden), y)

    train(nn.ModuleList([layers, out]), (loss() for _ in range(150)))


def random_heads(here: Any) -> None:
    """Several tasks: some of four heads have labels in a batch."""
    body, heads = nn.Sequential(nn.Linear(64, 128), nn.ReLU()), nn.ModuleList(nn.Linear(128, 10) for _ in range(4))
    x, y = batch()

    def loss() -> Tensor:
        hidden = body(x)
        which = [head for head in heads if torch.rand(()) < 0.5] or [heads[0]]
        return torch.stack([F.cross_entropy(head(hidden), y) for head in which]).sum()

    train(nn.ModuleList([body, heads]), (loss() for _ in range(200)))


def experts(here: Any) -> None:
    """Each row goes to one of four experts: their shares change with each batch."""
    route, out = nn.Linear(64, 4), nn.Linear(64, 10)
    parts = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(4))

    def loss() -> Tensor:
        x, y = batch()
        shares = route(x).softmax(1)
        chosen = shares.argmax(1)
        mixed = torch.zeros_like(x)
        for number, part in enumerate(parts):
            rows = (chosen == number).nonzero().flatten()
            mixed = mixed.index_add(0, rows, part(x[rows]) * shares[rows, number, None])
        return F.cross_entropy(out(mixed), y)

    train(nn.ModuleList([route, parts, out]), (loss() for _ in range(120)))


def unfreezing(here: Any) -> None:
    """Fine-tuning: one layer more is trained after each 30 steps."""
    layers, out = _layers(6, 128), nn.Linear(128, 10)
    x, y = batch(features=128)
    layers.requires_grad_(False)
    optimizer = torch.optim.Adam([*layers.parameters(), *out.parameters()])
    for step in range(180):
        if step % 30 == 0:
            layers[-1 - step // 30].requires_grad_(True)
        hidden = x
        for layer in layers:
            hidden = hidden + layer(hidden)
        F.cross_entropy(out(hidden), y).backward()
        optimizer.step()
        optimizer.zero_grad()
