"""Random generated code, run as Python and as a straight-line program: the same bits.

Whatever saves time in a program (sums in the memory of a term, memory that changes places, views that are never made,
kernels at their addresses) is crossed here with everything else that may happen to the same memory.
"""

from __future__ import annotations

import random
import types
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from backends.inductor.backend import InductorBackend
from backends.inductor.straight_line import program_library
from backends.inductor.straight_line.straight_line import StraightLine
from backends.inductor.straight_line.translation import translated

N = 6
ROWS, COLUMNS = (N, 1), (1, N)


@pytest.fixture(scope="module")
def make_program() -> Any:
    """The function of ``straight_line.cpp``."""
    library = program_library.begin().result()
    assert library is not None
    return library.make_program


@pytest.fixture(scope="module")
def kernels() -> dict[torch.dtype, Any]:
    """By dtype, a kernel of Inductor's: the third is made of the first and the second, element by element."""
    found = {}
    for dtype in (torch.float32, torch.float64):
        inputs = [torch.randn(N, N, dtype=dtype), torch.randn(N, N, dtype=dtype)]
        graph = make_fx(lambda x, y: [x * 0.5 + y * 0.25], tracing_mode="fake")(*inputs)
        compiled = InductorBackend().compile(graph, inputs)
        assert isinstance(compiled, StraightLine)
        namespace = compiled.compiled.current_callable.__func__.__globals__  # type: ignore[attr-defined]
        (found[dtype],) = [value for name, value in namespace.items() if name.startswith("cpp_fused")]
    return found


class _Writer:
    """Writes the statements of one function ``call``, and keeps account of what each name is.

    ``live`` has names of whole matrices: the memory that each lies in, and its strides; ``read_only`` those memories
    that were given.
    """

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.dtype = self.choose.choice((torch.float32, torch.float64))
        self.lines: list[str] = []
        self.live: dict[str, tuple[int, tuple[int, int]]] = {}
        self.read_only: set[int] = set()
        self._numbers = iter(range(10_000))

    def code(self) -> str:
        for name in ("a", "b", "w"):
            self.live[name] = (next(self._numbers), ROWS)
            self.read_only.add(self.live[name][0])
        for _ in range(self.choose.randint(3, 24)):
            self.choose.choices(
                (self.product, self.sum, self.kernel, self.reuse, self.alias, self.view, self.python, self.forget),
                (4, 10, 3, 4, 2, 2, 2, 3),
            )[0]()
        outputs = [self.read(name) for name in self.live if self.choose.random() < 0.7]
        head = ["def call(args):", "a, b, w = args", "args.clear()"]
        return "\n    ".join([*head, *self.lines, f"return ({', '.join([*outputs, 'None'])}, )"]) + "\n"

    # ---- what statements are made of

    def name(self) -> str:
        return f"buf{next(self._numbers)}"

    def any(self) -> str:
        return self.choose.choice(list(self.live))

    def read(self, name: str) -> str:
        """A whole matrix, in one of its forms."""
        _, strides = self.live[name]
        form = self.choose.choice(("name", "name", "same", "transposed"))
        if form == "name":
            return name
        turned = {ROWS: COLUMNS, COLUMNS: ROWS}[strides] if form == "transposed" else strides
        return f"reinterpret_tensor({name}, ({N}, {N}), {turned}, 0)"

    def factor(self, apart_from: int) -> str | None:
        """The more so of what was made last: that is the term of a sum."""
        names = [name for name, (memory, _) in self.live.items() if memory != apart_from]
        if not names:
            return None
        return self.read(self.choose.choice([*names, names[-1], names[-1]]))

    def written(self) -> tuple[str, tuple[int, tuple[int, int]]]:
        """New memory, or memory that may be written, and is overwritten."""
        own = [name for name, (memory, _) in self.live.items() if memory not in self.read_only]
        if own and self.choose.random() < 0.3:
            name = self.choose.choice(own)
            return name, self.live[name]
        name, strides = self.name(), self.choose.choice((ROWS, ROWS, ROWS, COLUMNS))
        self.lines.append(f"{name} = empty_strided_cpu(({N}, {N}), {strides}, {self.dtype})")
        return name, (next(self._numbers), strides)

    # ---- statements

    def product(self) -> None:
        out, what = self.written()
        first, second = self.factor(what[0]), self.factor(what[0])
        if first is None or second is None:
            self.live[out] = what
            self.lines.append(f"{out}.fill_(0.5)")
            return
        self.lines.append(f"extern_kernels.mm({first}, {second}, out={out})")
        self.live[out] = what

    def sum(self) -> None:
        term = self.choose.choice([self.any(), list(self.live)[-1]])
        out, what = self.written()
        given = self.live[term]
        same_name = given[0] != what[0] or given == what
        text = term if self.choose.random() < 0.8 and same_name else None
        if text is None and given[0] != what[0]:
            text = self.read(term)
        first, second = self.factor(what[0]), self.factor(what[0])
        if text is None or first is None or second is None:
            self.live[out] = what
            self.lines.append(f"{out}.fill_(0.25)")
            return
        numbers = self.choose.choice(("alpha=1, beta=1", "alpha=1, beta=1", "alpha=0.5, beta=2", "alpha=1, beta=0"))
        self.lines.append(f"extern_kernels.addmm({text}, {first}, {second}, {numbers}, out={out})")
        self.live[out] = what

    def kernel(self) -> None:
        one, other = self.any(), self.any()
        out, what = self.written()
        self.lines.append(f"cpp_fused({one}, {other}, {out})")
        self.live[out] = what

    def reuse(self) -> None:
        old = self.any()
        if self.live[old][0] in self.read_only:
            return
        new, what = self.name(), self.live.pop(old)
        if self.choose.random() < 0.3:
            what = (what[0], self.choose.choice((ROWS, COLUMNS)))
            self.lines.append(f"{new} = reinterpret_tensor({old}, ({N}, {N}), {what[1]}, 0); del {old}  # reuse")
        else:
            self.lines.append(f"{new} = {old}; del {old}  # reuse")
        self.live[new] = what

    def alias(self) -> None:
        old, new = self.any(), self.name()
        memory, strides = self.live[old]
        if self.choose.random() < 0.5:
            self.lines.append(f"{new} = {old}")
        else:
            strides = self.choose.choice((ROWS, COLUMNS))
            self.lines.append(f"{new} = reinterpret_tensor({old}, ({N}, {N}), {strides}, 0)")
        self.live[new] = memory, strides

    def view(self) -> None:
        """Half of a matrix, times the other half."""
        old, new = self.any(), self.name()
        half = N // 2
        self.lines.append(f"{new} = empty_strided_cpu(({half}, {half}), ({half}, 1), {self.dtype})")
        rows = f"({half}, {N}), ({N}, 1), {half * N if self.choose.random() < 0.5 else 0}"
        columns = f"({N}, {half}), {self.choose.choice((f'({N}, 1), {half}', f'(1, {N}), 0'))}"
        self.lines.append(
            f"extern_kernels.mm(reinterpret_tensor({old}, {rows}), reinterpret_tensor({old}, {columns}), out={new})"
        )
        whole = self.name()
        self.lines.append(f"{whole} = empty_strided_cpu(({N}, {N}), {ROWS}, {self.dtype})")
        self.lines.append(f"{whole}.fill_(0.125)")
        self.lines.append(f"reinterpret_tensor({whole}, ({half}, {half}), ({N}, 1), {half}).copy_({new})")
        self.lines.append(f"del {new}")
        self.live[whole] = (next(self._numbers), ROWS)

    def python(self) -> None:
        old, new = self.any(), self.name()
        if self.choose.random() < 0.5 and self.live[old][0] not in self.read_only:
            self.lines.append(f"{old}.mul_(0.5)")
            return
        self.lines.append(f"{new} = {self.read(old)} * 0.5")
        self.live[new] = (next(self._numbers), ROWS)  # strides of its own, but all that read it ask for no others
        self.lines.append(f"{new} = {new}.contiguous()")

    def forget(self) -> None:
        if len(self.live) > 2:
            old = self.any()
            del self.live[old]
            self.lines.append(f"del {old}")


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.uint8)


def _run_both(seed: int, make_program: Any, kernels: dict[torch.dtype, Any]) -> list[str]:
    writer = _Writer(seed)
    code = writer.code()
    extern = types.SimpleNamespace(mm=torch.mm, addmm=torch.addmm)
    guards = torch._C._dynamo.guards
    namespace: dict[str, Any] = {
        "torch": torch,
        "empty_strided_cpu": guards._empty_strided_cpu,
        "reinterpret_tensor": guards._reinterpret_tensor,
        "extern_kernels": extern,
        "cpp_fused": kernels[writer.dtype],
    }
    exec(compile(code, "<generated>", "exec"), namespace)
    torch.manual_seed(seed)
    translation = translated(code, namespace, [torch.randn(N, N, dtype=writer.dtype) for _ in range(3)])
    program = translation.made_by(make_program)
    for _ in range(2):
        inputs = [torch.randn(N, N, dtype=writer.dtype) / 2 for _ in range(3)]
        before = [each.clone() for each in inputs]
        expected = namespace["call"](list(inputs))
        result = program(list(inputs))
        for one, other in zip([*expected, *before], [*result, *inputs], strict=True):
            if one is None:
                assert other is None
                continue
            assert (one.shape, one.stride()) == (other.shape, other.stride()), code
            assert torch.equal(_bits(one), _bits(other)), f"seed {seed}:\n{code}"
    return [each[0] for each in translation.instructions]


@pytest.mark.parametrize("block", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in range(1, 4))])
def test_random_code_gives_the_same_bits(make_program: Any, kernels: Any, block: int) -> None:
    kinds = [kind for seed in range(block * 250, block * 250 + 250) for kind in _run_both(seed, make_program, kernels)]
    counted = {kind: kinds.count(kind) for kind in ("product", "copy", "kernel")}
    assert counted["product"] > counted["copy"] > 50
    assert counted["kernel"] > 100
