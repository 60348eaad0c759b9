"""Each kind of miss, caused by a real backward: the record, and what ``shadow-cache why --last`` says of it.

The golden texts are in ``tests/golden/misses``. To accept a new one, delete the file and run twice; read it in between.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import compiled_autograd as ca
import shadow_cache
from backends.eager import EagerBackend
from compiled_autograd import ir
from compiled_autograd.cache import disk, environment_key, graphs
from compiled_autograd.diagnostics.structure_misses import structure_miss
from compiled_autograd.diagnostics.variant_misses import STATE_HINTS, state_miss
from compiled_autograd.proving import refuted
from compiled_autograd.reproduction.writing import Kept
from shadow_cache import Failure, Miss, MissEntry, VariantKey, miss_kinds
from shadow_cache.cli import main

from .helpers import ROOT

GOLDEN = Path(__file__).parent / "golden" / "misses"
RAW = re.compile(
    r"%\d|\bops\.|\b(?:input|size|scalar|object|packed)_\d|\ba\[\d|<[\w ]|\bs\d+\b|DispatchKey|torch\.Size"
)
"""What only who wrote this package can read."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 3)
        self.fc2 = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.tanh(self.fc1(x)))


class Steps:
    """Backwards of one model, under the settings of the moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = Model()
        self.x = torch.randn(5, 4)
        self.session = self.again()

    def again(self, **settings: Any) -> ca.Session:
        """From now on under these settings."""
        self.session = ca.enable(**{"backend": "eager", "cache_dir": self.path, **settings})
        return self.session

    def new_process(self) -> None:
        """Forget what a process has in memory."""
        ca.reset()
        self.again()

    def run(self, loss: Callable[[Any], torch.Tensor], x: torch.Tensor | None = None, keep: bool = False) -> None:
        """One step: the model's output, ``loss`` of it, and the backward."""
        if not keep:
            self.model.zero_grad()
        x = self.x if x is None else x
        value = loss(self.model(x))
        with self.session:
            value.backward()

    def same_gradients(self, loss: Callable[[Any], torch.Tensor]) -> None:
        """The gradients that are there are eager's."""
        found = [parameter.grad for parameter in self.model.parameters()]
        wanted = torch.autograd.grad(loss(self.model(self.x)), list(self.model.parameters()))
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))  # type: ignore[arg-type]


def _exp(y: torch.Tensor) -> torch.Tensor:
    return y.exp().mean()


def _first_seen(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    steps.run(_exp)


def _new_node(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    steps.run(_exp)
    steps.run(lambda y: y.sin().mean())


def _node_attribute(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    steps.run(lambda y: (y**2).mean())
    steps.run(lambda y: (y**3).mean())


def _grad_state(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    steps.run(_exp)
    steps.run(_exp, keep=True)


def _hooks_changed(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    steps.run(_exp)
    steps.model.fc1.weight.register_hook(lambda grad: grad * 2)
    steps.run(_exp)


def _undefined_gradients(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    steps.run(lambda y: y.unbind(1)[0].mean())
    steps.run(lambda y: y.unbind(1)[1].mean())


def _shape(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    steps.run(_exp)
    steps.run(_exp, torch.randn(6, 4))


def _dtype(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    steps.run(_exp)
    steps.model.double()
    steps.run(_exp, steps.x.double())


def _layout(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    steps.run(_exp)
    steps.run(_exp, torch.randn(4, 5).t())


def _guard(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows in (5, 6, 1):
        steps.run(_exp, torch.randn(rows, 4))


def _variant_limit(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_VARIANTS", 2)
    steps.again(dynamic=False)
    for rows in (5, 6, 7):
        steps.run(_exp, torch.randn(rows, 4))


def _ambient_state(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    steps.run(_exp)
    loss = _exp(steps.model(steps.x))
    steps.model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16), steps.session:
        loss.backward()


def _backend_or_settings(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    steps.run(_exp)
    steps.again(dynamic=False)
    steps.run(_exp)


def _environment(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = environment_key.versions()
    with monkeypatch.context() as earlier:
        earlier.setattr(environment_key, "versions", lambda: {**versions, "torch": "2.12.1"})
        steps.run(_exp)
    monkeypatch.setattr(environment_key, "versions", lambda: {**versions, "torch": "2.13.0"})
    steps.new_process()
    steps.run(_exp)


def _evicted(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    steps.run(_exp)
    with shadow_cache.open(steps.path) as store:
        store.prune(max_size=0)
    steps.new_process()
    steps.run(_exp)


def _corrupt(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    steps.run(_exp)
    ca.reset()
    with shadow_cache.open(steps.path) as store:
        (entry,) = store.entries()
    (file,) = [file for file in steps.path.rglob(f"*{entry.regions[0].artifact[2:]}*") if file.is_file()]
    file.chmod(0o600)
    file.write_bytes(file.read_bytes()[:-1])
    steps.new_process()
    steps.run(_exp)


CAUSES = {
    name.removeprefix("_"): cause
    for name, cause in list(globals().items())
    if name.removeprefix("_") in miss_kinds.KINDS and callable(cause)
}
NUMBERED = {"variant_limit": 1}
"""Which of the reasons it is, where it is not the first."""


def test_every_kind_has_a_cause() -> None:
    assert {*CAUSES, "device", "mismatch"} == set(miss_kinds.KINDS)


@pytest.mark.parametrize("kind", CAUSES)
def test_a_backward_that_causes_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Steps(tmp_path)
    CAUSES[kind](steps, monkeypatch)
    assert steps.session.last is not None
    reasons = steps.session.last.reasons
    miss = reasons[NUMBERED.get(kind, 0)]
    assert isinstance(miss, Miss) and miss.kind == kind
    assert isinstance(reasons[0], Miss) and 0 < reasons[0].seconds < 100
    _expect_readable(miss)
    _golden(kind, miss, _why(tmp_path, monkeypatch, capsys))


def _on_cuda(key: ir.StructureKey) -> ir.StructureKey:
    """A key as it would be on a CUDA device."""
    (changed,) = ir.decode_keys(ir.encode_keys([key]).replace(b"\xa3cpu", b"\xa6cuda:0")) or [()]
    assert changed and changed != key
    return changed


def test_another_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """No second device here: one is written into the key of what was captured."""
    steps = Steps(tmp_path)
    steps.run(_exp)
    assert steps.session.last is not None and steps.session.last.graph is not None
    tape = steps.session.last.graph.tape
    keys = tape.structure()
    depth = next(index for index, call in enumerate(tape.calls) if call.name == "ExpBackward0")
    old = _on_cuda(keys[depth])
    miss = structure_miss(tape, keys, depth, old)
    _expect_readable(miss)
    with shadow_cache.open(tmp_path) as store:
        (entry,) = store.entries()
        store.record(MissEntry(entry.created, entry.structure, entry.id, entry.name, miss))
    _golden("device", miss, _why(tmp_path, monkeypatch, capsys))
    assert structure_miss(tape, keys, 0, _on_cuda(keys[0])) == Miss(
        "device", "the loss", "cuda:0", "cpu", "each device that occurs is compiled once"
    )


def _key(backend: str = "eager", threads: int = 2) -> VariantKey:
    return VariantKey((("backend", backend),), (("autocast", None), ("threads", threads)))


@pytest.mark.parametrize(
    ("known", "kind", "name", "old", "new"),
    [
        ([_key(threads=1)], "ambient_state", "threads", "1", "2"),
        ([_key("x")], "backend_or_settings", "backend", "x", "eager"),
        ([_key("x"), _key(threads=1), _key("y")], "ambient_state", "threads", "1", "2"),
        ([_key("x", 1), _key("y")], "backend_or_settings", "backend", "y", "eager"),
    ],
)
def test_what_differs_from_the_nearest_variant(
    known: list[VariantKey], kind: str, name: str, old: str, new: str
) -> None:
    assert state_miss(_key(), known) == Miss(kind, name, old, new, STATE_HINTS[kind])


def test_code_that_differs_from_the_real_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was loaded is wrong. The backward that finds it out has a ``Failure``; the store is told of a miss."""
    steps = Steps(tmp_path)
    steps.run(_exp)
    steps.new_process()
    load = EagerBackend.load

    def wrong(self: EagerBackend, data: bytes) -> Any:
        call = load(self, data)
        return lambda arguments: [torch.zeros_like(each) for each in call(arguments)]

    monkeypatch.setattr(EagerBackend, "load", wrong)
    monkeypatch.setattr(refuted, "reproduction_of", lambda *_: Kept(None, "reproduction.zip is a reproduction"))
    with pytest.warns(UserWarning, match="mismatch in"):
        steps.run(_exp)
    assert steps.session.last is not None
    (failure,) = steps.session.last.reasons
    assert isinstance(failure, Failure)
    with shadow_cache.open(tmp_path) as store:
        (told, *_) = store.misses(1)
    assert (told.miss.kind, told.miss.where, told.miss.new) == (failure.kind, failure.where, failure.error)
    _expect_readable(told.miss)
    _golden("mismatch", told.miss, _why(tmp_path, monkeypatch, capsys))
    steps.same_gradients(_exp)


def _expect_readable(miss: Miss) -> None:
    for text in (miss.where, miss.old, miss.new, miss.hint):
        assert not RAW.search(text) and "unknown" not in text.lower(), miss
    assert miss.kind == "first_seen" or miss.where, miss
    assert miss.old != miss.new or miss.kind in ("first_seen", "evicted"), miss


def _why(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    monkeypatch.delenv("COMPILED_AUTOGRAD_CACHE_DIR", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["why", "--last", "--cache-dir", str(path)])
    said = capsys.readouterr()
    assert ended.value.code == 0 and said.err == ""
    return said.out


def _golden(kind: str, miss: Miss, why: str) -> None:
    """The line that the log has, and what the command line says, without what differs from run to run."""
    lines = {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1] for line in why.splitlines() if line.startswith("  ")}
    assert lines["kind"] == kind
    if miss.old or miss.new:
        assert (lines["old"], lines["new"]) == (miss.old, miss.new)
    text = f"{msgspec.structs.replace(miss, seconds=0.023)}\n\n{why}"
    for pattern, replacement in (
        (
            r"\S*/test_misses\.py:\d+ in (\w+), .* ago|\S*/test_misses\.py:\d+ in (\w+), just now",
            "train.py:41 in step, just now",
        ),
        (r"(cost +)\d+ ms|(cost +)[\d.]+ s", r"\g<1>\g<2>23 ms"),
        (r"entry [0-9a-f]{6,}", "entry 3fa91c"),
        (r"structure [0-9a-f]{6,}", "structure 5e1fab90c2d4"),
        (r"file [0-9a-f]{12}", "file 9fb1c2e3d4f5"),
        (r"[\d.]+ kB", "4.8 kB"),
        (r"\d+ bytes", "4804 bytes"),
        (r"SHA-256 [0-9a-f]+", "SHA-256 2434aefd00c1"),
    ):
        text = re.sub(pattern, replacement, text)
    _compare(GOLDEN / f"{kind}.txt", text)


def _compare(file: Path, text: str) -> None:
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        pytest.fail(f"{file.name} was missing and has been written; read it, then run again")
    assert text == file.read_text()


# ---- many pairs of tapes: nothing that only we can read --------------------------------------------------------------


class Keeps(torch.autograd.Function):
    """Saves so many tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int) -> torch.Tensor:
        ctx.save_for_backward(*([x] * count))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * len(ctx.saved_tensors), None


class Gives(torch.autograd.Function):
    """Gives its gradient in one of several ways."""

    way = ""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor | None:
        ways = {"turned": grad.t(), "double": grad.double(), "nothing": None}
        return ways.get(Gives.way, grad.contiguous())


def _hooked(which: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        parts = (a * b).unbind(0)
        parts[which].register_hook(lambda grad: grad)
        return parts[0] + parts[1]

    return loss


def _on_node(kind: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = a * b
        assert y.grad_fn is not None
        if kind == "pre":
            y.grad_fn.register_prehook(lambda grads: None)
        elif kind == "post":
            y.grad_fn.register_hook(lambda given, taken: None)
        elif kind == "retain":
            y.retain_grad()
        elif kind == "leaf":
            a.register_post_accumulate_grad_hook(lambda leaf: None)
        elif kind == "twice":
            y.register_hook(lambda grad: grad)
            y.register_hook(lambda grad: grad)
        return y.exp()

    return loss


def _packed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return (a * b).sin()


def _written(where: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = a * b
        y[where] = 2.0
        return y

    return loss


def _gives(way: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        Gives.way = way
        return Gives.apply(a * b).exp() if way != "first" else Gives.apply((a * b).exp())

    return loss


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
PAIRS: dict[str, tuple[Loss, Loss]] = {
    "one tensor twice": (lambda a, b: a.exp() * b.exp(), lambda a, b: (lambda e: e * e)(a.exp())),
    "a tensor known": (lambda a, b: (lambda e: e * e)(a.exp()) + b, lambda a, b: a.exp() * a + b),
    "operands swapped": (lambda a, b: a.exp() - b.sin() * b, lambda a, b: b.sin() - a.exp() * a),
    "other leaves": (lambda a, b: a * 2 - a * 3, lambda a, b: a * 2 - b * 3),
    "shorter": (lambda a, b: a.exp().sin(), lambda a, b: a.exp()),
    "longer": (lambda a, b: a.exp(), lambda a, b: a.exp().sin() * b),
    "more dimensions": (lambda a, b: (a * b).exp(), lambda a, b: (a[None] * b[None]).exp()),
    "clamp": (lambda a, b: a.clamp(0.1, 0.5), lambda a, b: a.clamp(0.1, 0.6)),
    "clamp from None": (lambda a, b: a.clamp(min=0.1), lambda a, b: a.clamp(0.1, 0.6)),
    "softmax": (lambda a, b: a.softmax(0), lambda a, b: a.softmax(1)),
    "gelu": (lambda a, b: nn.functional.gelu(a), lambda a, b: nn.functional.gelu(a, approximate="tanh")),
    "leaky slope": (lambda a, b: nn.functional.leaky_relu(a, 0.1), lambda a, b: nn.functional.leaky_relu(a, 0.2)),
    "negative dim": (lambda a, b: a.cumsum(0).exp(), lambda a, b: a.cumsum(-1).exp()),
    "cat": (lambda a, b: torch.cat([a, b]), lambda a, b: torch.cat([a, b], 1)),
    "cat of three": (lambda a, b: torch.cat([a, b]), lambda a, b: torch.cat([a, b, a])),
    "sum": (lambda a, b: a.sum(0), lambda a, b: a.sum(1)),
    "keepdim": (lambda a, b: a.sum(0), lambda a, b: a.sum(0, keepdim=True)),
    "permute": (lambda a, b: a.permute(0, 1) * b, lambda a, b: a.permute(1, 0) * b),
    "index": (lambda a, b: a[torch.tensor([0, 1])], lambda a, b: a[torch.tensor([True, False, True, False])]),
    "requires_grad": (lambda a, b: a.exp() * b.detach(), lambda a, b: a.exp() * b),
    "to double": (lambda a, b: a.to(torch.bfloat16).to(torch.float32), lambda a, b: a.double().to(torch.float32)),
    "dtype within": (lambda a, b: a.float() * b.detach(), lambda a, b: a.float() * b.detach().double()),
    "hook on the other": (_hooked(0), _hooked(1)),
    "prehook": (_on_node(""), _on_node("pre")),
    "posthook": (_on_node(""), _on_node("post")),
    "retain_grad": (_on_node(""), _on_node("retain")),
    "leaf hook": (_on_node(""), _on_node("leaf")),
    "two hooks": (_on_node(""), _on_node("twice")),
    "saved-tensor hooks": (lambda a, b: (a * b).sin(), _packed),
    "write into a row": (_written(0), _written(slice(1, 3))),
    "write elsewhere": (_written(0), _written(2)),
    "a function saves more": (lambda a, b: Keeps.apply(a.exp(), 1), lambda a, b: Keeps.apply(a.exp(), 2)),
    "a function gives another layout": (_gives(""), _gives("turned")),
    "a function gives another dtype": (_gives("double"), _gives("")),
    "a function gives nothing": (_gives(""), _gives("nothing")),
    "conjugated": (
        lambda a, b: (a.to(torch.complex64) * b.detach()).abs(),
        lambda a, b: a.to(torch.complex64).conj().abs(),
    ),
    "an expanded tensor": (lambda a, b: a * b.detach(), lambda a, b: a * b.detach()[:1].expand(4, 4)),
    "dropout": (
        lambda a, b: nn.functional.dropout(a, 0.5),
        lambda a, b: nn.functional.dropout(a, 0.5, training=False) * 1,
    ),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), lambda a, b: torch.einsum("ij,kj->ik", a, b)),
    "a mask": (
        lambda a, b: nn.functional.scaled_dot_product_attention(a[None, None], b[None, None], b[None, None]),
        lambda a, b: nn.functional.scaled_dot_product_attention(
            a[None, None], b[None, None], b[None, None], attn_mask=torch.zeros(4, 4)
        ),
    ),
    "a weight": (
        lambda a, b: nn.functional.layer_norm(a, (4,)),
        lambda a, b: nn.functional.layer_norm(a, (4,), torch.ones(4)),
    ),
    "a sum with integers": (
        lambda a, b: a + torch.ones(4, 4),
        lambda a, b: a + torch.ones(4, 4, dtype=torch.int64),
    ),
    "norm": (lambda a, b: a.norm(2), lambda a, b: a.norm(3)),
}


def test_no_reason_is_in_our_own_words() -> None:
    lines = []
    for name, pair in PAIRS.items():
        ca.reset()
        session = ca.enable(backend="eager", dynamic=False)
        for loss in pair:
            a, b = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
            value = loss(a, b).sum()
            with session:
                value.backward()
        assert session.last is not None
        assert session.last.reasons, name
        miss = session.last.reasons[0]
        assert isinstance(miss, Miss), (name, miss)
        _expect_readable(miss)
        lines.append(f"{name}: {msgspec.structs.replace(miss, seconds=0.0, hint='')}\n")
    _compare(GOLDEN / "pairs.txt", "".join(lines))


def test_what_is_asked_for() -> None:
    """``backward`` and ``autograd.grad``, of other tensors."""
    texts = []
    session = ca.enable(backend="eager")
    for inputs in (None, "ab", "ba", "b"):
        a, b = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
        loss = (a * b).sum()
        with session:
            if inputs is None:
                loss.backward()
            else:
                torch.autograd.grad(loss, [{"a": a, "b": b}[each] for each in inputs])
        assert session.last is not None
        texts.append(str(msgspec.structs.replace(session.last.reasons[0], seconds=0.0, hint="")))  # type: ignore[type-var]
    assert texts[1:] == [
        "node_attribute at the call of autograd, for SumBackward0, 5 nodes: backward() -> autograd.grad()",
        "node_attribute at the inputs of autograd.grad(), of SumBackward0, 5 nodes: "
        "gradient 0 from #2 MulBackward0, gradient 1 from #2 MulBackward0 -> "
        "gradient 1 from #2 MulBackward0, gradient 0 from #2 MulBackward0",
        "node_attribute at #2 MulBackward0: which inputs get a gradient: yes, yes -> no, yes",
    ]


def test_the_line_of_the_forward_is_named_where_anomaly_mode_recorded_it() -> None:
    session = ca.enable(backend="eager")
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly(check_nan=False):
        for power in (2, 3):
            loss = (torch.randn(3, requires_grad=True) ** power).sum()
            with session:
                loss.backward()
    assert session.last is not None
    (miss,) = session.last.reasons
    assert isinstance(miss, Miss)
    name = test_the_line_of_the_forward_is_named_where_anomaly_mode_recorded_it.__name__
    assert re.fullmatch(rf"#2 PowBackward0, \S*test_misses\.py:\d+ in {name}: saved exponent", miss.where)


def test_lengths_that_ctc_loss_saves_as_numbers_have_a_hint() -> None:
    session = ca.enable(backend="eager")
    targets, frames = torch.randint(1, 5, (2, 8)), torch.tensor([9, 9])
    for lengths in ([4, 5], [7, 3]):
        log_probs = torch.randn(9, 2, 6, requires_grad=True).log_softmax(-1)
        loss = torch.nn.functional.ctc_loss(log_probs, targets, frames, torch.tensor(lengths))
        with session:
            loss.backward()
    assert session.last is not None
    (miss,) = session.last.reasons
    assert isinstance(miss, Miss)
    assert (miss.kind, miss.old, miss.new) == ("node_attribute", "[4, 5]", "[7, 3]")
    assert "CtcLossBackward0" in miss.where and "docs/troubleshooting.md" in miss.hint


def test_the_names_of_saved_values_run_no_hooks() -> None:
    packed: list[str] = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append("unpacked")
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        loss = torch.randn(3, requires_grad=True).exp().sum()
    with ca.enable(backend="eager"):
        loss.backward()
    assert packed == ["unpacked"]


# ---- another process -------------------------------------------------------------------------------------------------


def _other(first: Callable[[Steps], None], second: Callable[[Steps], None], path: Path) -> str:
    """Why the second process, with the store of the first, had to compile."""
    steps = Steps(path)
    first(steps)
    steps.new_process()
    second(steps)
    assert steps.session.last is not None
    (miss,) = steps.session.last.reasons
    assert isinstance(miss, Miss) and miss.seconds > 0
    _expect_readable(miss)
    return str(msgspec.structs.replace(miss, seconds=0.0, hint=""))


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (
            lambda steps: steps.run(lambda y: y.sin().mean()),
            "new_node at #2 SinBackward0 after fc2: ExpBackward0 -> SinBackward0",
        ),
        (
            lambda steps: (steps.run(_exp, torch.randn(7, 4)), None)[1],
            "shape at saved result of #2 ExpBackward0 after fc2, dimension 0: 5 -> 7",
        ),
        (
            lambda steps: steps.run(_exp, torch.randn(4, 5).t()),
            "layout at saved mat1 of #7 AddmmBackward0 of fc1.weight, strides: (4, 1) -> (1, 5)",
        ),
    ],
)
def test_the_first_capture_of_a_process_is_compared_with_the_store(
    second: Callable[[Steps], None], reason: str, tmp_path: Path
) -> None:
    assert _other(lambda steps: steps.run(_exp), second, tmp_path) == reason


def test_gradients_kept_in_one_process_and_not_in_another(tmp_path: Path) -> None:
    def keeps(steps: Steps) -> None:
        for parameter in steps.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        steps.run(_exp, keep=True)

    reason = _other(lambda steps: steps.run(_exp), keeps, tmp_path)
    assert reason == "grad_state at .grad of fc2.weight: None -> f32[2,3]"


def test_what_breaks_an_explanation_breaks_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(tmp_path)
    steps.run(_exp)
    steps.new_process()

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(disk.Disk, "explain", broken)
    with pytest.warns(UserWarning, match="ZeroDivisionError: planted"):
        steps.run(lambda y: y.sin().mean())
    assert steps.session.last is not None
    assert [reason.kind for reason in steps.session.last.reasons] == ["first_seen", "explain"]
    steps.same_gradients(lambda y: y.sin().mean())


# ---- the guide -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", miss_kinds.KINDS)
def test_the_guide_has_what_is_really_printed(kind: str) -> None:
    guide = (ROOT / "docs" / "misses.md").read_text()
    _, _, section = guide.partition(f"## `{kind}`\n")
    section = section.partition("\n## ")[0]
    explained = miss_kinds.explain(kind)
    line = (GOLDEN / f"{kind}.txt").read_text().splitlines()[0]
    assert f"```\n{line}\n```" in section
    assert explained.means in section and explained.do in section
