"""What `benchmarks.backward` measures beside times, and what it makes of its results. No time is asserted."""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import compiled_autograd as ca
from benchmarks import backward, children, clients, floor, measure, models, picture, sides, tables, targets
from benchmarks.apart import Apart
from benchmarks.client_programs import PROGRAMS, Program
from benchmarks.memory import most_at_once, peak_of_backward

from .helpers import in_subprocess

# ---- the floor -------------------------------------------------------------------------------------------------------

PRODUCTS = """
mm addmm bmm baddbmm baddbmm_ mv dot _scaled_mm _grouped_mm convolution_backward mkldnn_convolution
cudnn_convolution_transpose _slow_conv2d_backward _conv_depthwise2d mkldnn_linear_backward_weights
_scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_efficient_attention_backward
_scaled_dot_product_cudnn_attention_backward _flash_attention_backward
"""
# Composite operators too: what they call is met by itself.
OTHERS = """
add mul addmul sum t native_layer_norm_backward matmul linear conv2d _convert_indices_from_coo_to_csr mm_extra
_scaled_dot_product_attention_math scaled_dot_product_attention _fused_sdp_choice
"""


def test_what_no_fusion_shortens() -> None:
    names = [*PRODUCTS.split(), *OTHERS.split()]
    assert [name for name in names if floor.is_product(f"aten::{name}")] == PRODUCTS.split()
    assert floor.is_product("mkldnn::_linear_pointwise")
    # What calls a product has its time, and more.
    assert not any(map(floor.is_product, ("mm", "MmBackward0", "autograd::engine::evaluate_function: MmBackward0")))


def test_the_products_of_a_known_backward() -> None:
    """Those of its forward, which are others, are not among them."""
    linear, convolution = nn.Linear(4, 4), nn.Conv2d(1, 2, 3)
    x, image = torch.randn(2, 3, 8, 4), torch.randn(1, 1, 8, 8)

    def make_loss() -> torch.Tensor:
        y = linear(x)
        attended = F.scaled_dot_product_attention(y, y, y)
        return torch.bmm(attended[0], attended[1].mT).sum() + convolution(image).exp().sum()

    found = floor.profiled_products(make_loss, "cpu")
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
    assert set(found) == {"aten::mm", "aten::bmm", "aten::convolution_backward", attention}
    assert min(found.values()) > 0


def _event(name: str, start: float, duration: float, parent: Any = None) -> Any:
    return SimpleNamespace(
        name=name,
        device_type=torch.autograd.DeviceType.CPU,
        time_range=SimpleNamespace(start=start),
        cpu_time_total=duration,
        device_time_total=10 * duration,
        cpu_parent=parent,
    )


def test_a_product_counts_once_and_with_what_it_calls() -> None:
    mark = _event(floor._BACKWARD, 10.0, 100.0)
    outer = _event("aten::_scaled_dot_product_flash_attention_for_cpu_backward", 20.0, 30.0)
    between = _event("aten::matmul", 21.0, 9.0, outer)
    inner = _event("aten::mm", 22.0, 8.0, between)
    events = [_event("aten::mm", 5.0, 4.0), mark, outer, between, inner, _event("aten::mm", 60.0, 2.0, mark)]
    kernel = _event("aten::mm", 70.0, 1.0)
    kernel.device_type = torch.autograd.DeviceType.CUDA  # its operator already has its time
    events.append(kernel)
    assert floor.seconds_by_product(events, "cpu") == pytest.approx({outer.name: 30e-6, "aten::mm": 2e-6})
    assert floor.seconds_by_product(events, "cuda") == pytest.approx({outer.name: 300e-6, "aten::mm": 20e-6})


def test_the_floor_is_the_median_of_the_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "STEPS", 3)
    products = iter([{"warm": 9.0}, {"a": 1.0, "b": 1.0}, {"a": 3.0}, {"a": 2.0, "b": 2.0}])
    monkeypatch.setattr(floor, "profiled_products", lambda *_: next(products))
    wholes = iter([4.0, 4.0, 16.0])
    assert floor.measure(lambda: next(wholes), lambda: torch.ones(()), "cpu") == {
        "floor": 0.5,
        "floor_ms": {"a": 2000.0, "b": 1000.0},
    }


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_most_at_once() -> None:
    changes = [(1, 100, 50), (2, 200, 30), (3, 200, -30), (5, 300, 20), (6, 100, -50), (7, 400, 10), (8, 400, -10)]
    assert most_at_once(changes, begin=4) == 70
    assert most_at_once(changes, begin=0) == 80
    assert most_at_once(changes, begin=6) == 70, "what is alive when it begins counts"
    assert most_at_once(changes, begin=9) == 20
    assert most_at_once([(1, 100, 50), (2, 999, -40), (3, 300, 5)], begin=0) == 55, "999 was not the step's"
    assert most_at_once([], begin=0) == 0


def test_what_an_earlier_profile_saw_is_not_taken_off() -> None:
    """The profiler reports the release of what an earlier profile saw allocated: of the gradient, here."""
    x = torch.randn(1000, requires_grad=True)

    def make_loss() -> torch.Tensor:
        x.grad = None
        return x.exp().sum()

    first, second = (peak_of_backward(make_loss, contextlib.nullcontext()) for _ in range(2))
    assert first == second >= 2 * 4000


# ---- the whole -------------------------------------------------------------------------------------------------------


def test_what_one_process_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    def tiny() -> tuple[nn.Module, models.MakeLoss]:
        x = torch.randn(64, 32)
        return nn.Linear(32, 32), lambda module: module(x).exp().sum()

    monkeypatch.setitem(models.FACTORIES, "tiny", tiny)
    monkeypatch.setattr(floor, "STEPS", 1)

    class Here(Apart):
        """In this process: the other one knows no such model."""

        def __enter__(self) -> Apart:
            self.side = sides.eager_side("tiny", 0, "cpu")
            return self

        def step(self) -> float:
            return self.side.step()

        def rest(self) -> None:
            """It keeps nothing."""

        def __exit__(self, *error: object) -> None:
            """Nothing to end."""

    monkeypatch.setattr(measure, "Apart", Here)
    result = measure.run("steady", measure.What("tiny", "ours-eager", pairs=1))
    assert result["counts"].pop("hits") > 5 and result["counts"] == {
        "captures": 1,
        "structure_misses": 1,
        "compiles": 1,
    }
    assert set(result["floor_ms"]) == {"aten::mm"} and result["floor"] > 0
    # At once: what exp saved, its gradient, and the gradient of its input.
    assert 2 * 64 * 32 * 4 <= result["eager_allocated_bytes"] < 4 * 64 * 32 * 4
    assert "gpu" not in result and result["eager_held_bytes"] is result["runner_held_bytes"] is None
    (row,) = targets.rows([{"model": "tiny", "runner": "ours-eager"} | result])
    assert row["allocated_ratio"] == result["runner_allocated_bytes"] / result["eager_allocated_bytes"]
    assert row["floor"] == result["floor"] and row["hit_ms"] is None


def test_another_distributions_examples_are_not_taken_for_ours(tmp_path: Path) -> None:
    """Opacus, e3nn and pytorch-forecasting install a package of that name."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "__init__.py").touch()
    ended = in_subprocess(f"import sys; sys.path.append({str(tmp_path)!r}); import benchmarks.models")
    assert ended.returncode == 0, ended.stderr


def test_reading_the_help_loads_neither_torch_nor_matplotlib() -> None:
    ended = in_subprocess(
        "import sys, benchmarks.backward, benchmarks.picture; print(sys.modules.keys() & {'torch', 'matplotlib'})"
    )
    assert ended.stdout == "set()\n", ended.stderr


# ---- models ----------------------------------------------------------------------------------------------------------


def test_sizes_for_a_gpu_are_sizes_of_the_model() -> None:
    assert set(models.ON_CUDA) <= set(models.FACTORIES)
    for name, given in models.ON_CUDA.items():
        sizes = inspect.signature(models.FACTORIES[name]).parameters
        assert given.items() != {each: sizes[each].default for each in given}.items(), "some are others"


@pytest.mark.parametrize("name", [*models.ON_CUDA, "gpt-100m"])
def test_a_step_in_sizes_for_a_gpu(name: str) -> None:
    """Without the memory, and without computing anything."""
    with torch.device("meta"):
        module, make_loss = models.FACTORIES[name](**models.ON_CUDA.get(name, {}))
    loss = make_loss(module)
    loss.backward()
    assert loss.shape == () and loss.dtype == torch.float32
    assert all(parameter.grad is not None and parameter.grad.is_meta for parameter in module.parameters())


def test_a_model_that_is_built_on_a_gpu_has_the_sizes_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, int]] = []
    monkeypatch.setitem(models.FACTORIES, "pinn", lambda **given: found.append(given))
    for device in ("cpu", "cuda"):
        models.build("pinn", 0, device)
    assert found == [{}, models.ON_CUDA["pinn"]]


def test_forces_are_fitted() -> None:
    """A sum over pairs is the same wherever the atoms are, so no force is left over; and a compiled backward of the
    loss, which has gradients of gradients, gives eager's gradients."""
    eager, make_loss = models.build("force-matching", 0, "cpu")
    positions = torch.randn(2, 5, 3, requires_grad=True)
    (forces,) = torch.autograd.grad(eager(positions).sum(), positions)
    assert forces.abs().max() > 0.01 and forces.sum(1).abs().max() < 1e-5
    other, _ = models.build("force-matching", 0, "cpu")
    make_loss(eager).backward()
    loss = make_loss(other)
    with ca.enable(backend="eager") as session:
        loss.backward()
    assert session.stats().captures == 1 and not session.stats().bypasses
    assert measure.gradient_difference(eager, other) == 0.0


def test_a_floor_is_measured_once_in_a_quick_run() -> None:
    floors = {"floor": 0.5, "floor_ms": {"aten::mm": 1.0}}
    earlier = [{"model": "gpt", "floor": 0.1}, {"model": "mlp", **floors}]
    assert backward.with_floor({"model": "mlp"}, earlier) == {"model": "mlp", **floors}
    assert backward.with_floor({"model": "mlp", "floor": 0.2}, earlier)["floor"] == 0.2
    assert backward.with_floor({"model": "pinn"}, earlier) == {"model": "pinn"}
    args = SimpleNamespace(runners=["aot", "eager"], pairs=1, seed=0, device="cpu", beside="eager", quick=True)
    commands = [backward.command("steady", "mlp", runner, args) for runner in args.runners]  # type: ignore[arg-type]
    assert [command[-1] for command in commands] == ["--floor", "--no-floor"]


# ---- children --------------------------------------------------------------------------------------------------------

_CHILD = """
import json, sys, time
from benchmarks.children import alone
name, compiling = sys.argv[1], float(sys.argv[2])
time.sleep(compiling)
compiled = time.monotonic()
with alone():
    begun = time.monotonic()
    time.sleep(0.1)
    ended = time.monotonic()
    print("noise")
    print(json.dumps({"name": name, "compiled": compiled, "begun": begun, "ended": ended}))
"""


def _command(name: str, compiling: float) -> list[str]:
    return [sys.executable, "-c", _CHILD, name, str(compiling)]


def test_children_compile_together_and_measure_in_turn() -> None:
    fails = [sys.executable, "-c", "raise SystemExit('no such thing')"]
    *found, failed = children.run_together([_command("a", 0.0), _command("b", 0.5), _command("c", 0.2), fails], 60.0)
    assert failed == {"failed": "no such thing"}
    assert [result["name"] for result in found] == ["a", "b", "c"]
    in_turn = sorted(found, key=lambda result: result["begun"])
    assert max(result["compiled"] for result in found) <= in_turn[0]["begun"]
    for first, second in itertools.pairwise(in_turn):
        assert first["ended"] <= second["begun"]


@pytest.mark.slow
def test_a_child_that_compiles_too_long_holds_up_none(tmp_path: Path) -> None:
    first, second = children.run_together([_command("a", 0.0), _command("b", 600.0)], 5.0)
    assert first["name"] == "a" and second == {"failed": "not compiled in 5 s"}


def test_a_child_by_itself_waits_for_nobody() -> None:
    assert children.run_apart(_command("a", 0.0), 60.0)["name"] == "a"
    assert children.run_apart(_command("a", 600.0), 0.2)["failed"].startswith("no answer in ")


@pytest.mark.slow
def test_a_quick_run_with_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was compiled beside others is not shown as a first backward."""
    written = tmp_path / "results.json"
    arguments = ["--models", "mlp", "--runners", "ours-eager", "--jobs", "2", "--quick", "--pairs", "1"]
    monkeypatch.setattr(sys, "argv", ["backward", *arguments, "--json", str(written)])
    monkeypatch.setattr(backward, "build_extension", lambda console: None)
    assert backward.main() == 0
    (result,) = json.loads(written.read_text())["results"]
    assert result["ratio"] > 0 and result["hit_ratio"] > 0 and result["ratio_here"] is None
    assert set(result["together"]) == set(backward.FIRST_STEP) and not set(backward.FIRST_STEP) & set(result)
    assert "| ours-eager | 1 of 1   |" in capsys.readouterr().out.replace("│", "|")


# ---- what is made of results -----------------------------------------------------------------------------------------


def _result(model: str, runner: str, ratio: float, first: float, hit: float | None, allocated: int) -> dict[str, Any]:
    result: dict[str, Any] = {
        "model": model,
        "runner": runner,
        "setup_seconds": 0.5,
        "first_forward_seconds": 0.25,
        "first_backward_seconds": first,
        "beside_ms": 4.0,
        "runner_ms": 4.0 * ratio,
        "ratio": ratio,
        "floor": 0.25,
        "gradient_difference": 1e-6,
        "eager_allocated_bytes": 2_000_000,
        "runner_allocated_bytes": allocated,
    }
    return result if hit is None else result | {"nodes": 401, "hit_ms": hit, "hit_us_per_node": 2.0, "hit_ratio": hit}


RESULTS = [
    _result("mlp", "ours-inductor", 0.5, 10.0, 0.8, 1_000_000),
    _result("mlp", "torch-ca-static", 0.75, 20.0, 0.4, 2_000_000),
    _result("mlp", "aot", 0.3, 0.1, None, 500_000),
    _result("gpt", "ours-inductor", 2.0, 8.0, 0.9, 4_000_000),
    {"model": "gpt", "runner": "torch-ca-static", "failed": "no answer in 600 s"},
]


def test_rows_against_the_targets() -> None:
    found = {(row["model"], row["runner"]): row for row in targets.rows(RESULTS)}
    assert found["mlp", "ours-inductor"] == {
        "model": "mlp",
        "runner": "ours-inductor",
        "ratio": 0.5,
        "floor": 0.25,
        "first_backward_seconds": 10.0,
        "first_to_reference": 0.5,
        "hit_ms": 0.8,
        "hit_to_reference": 2.0,
        "hit_to_eager": 0.8,
        "allocated_ratio": 0.5,
    }
    assert found["mlp", "torch-ca-static"]["first_to_reference"] == 1.0
    assert found["mlp", "aot"]["hit_to_reference"] is None
    assert found["mlp", "aot"]["first_to_reference"] is None, "most of its compiling is in the forward"
    assert found["gpt", "ours-inductor"]["first_to_reference"] is None, "the reference gave no answer"
    assert {value for name, value in found["gpt", "torch-ca-static"].items() if name not in ("model", "runner")} == {
        None
    }


def test_geometric_means() -> None:
    means = targets.geometric_means(targets.rows(RESULTS), "ours-inductor")
    assert means["ratio"] == pytest.approx(1.0) and means["allocated_ratio"] == pytest.approx(1.0)
    assert means["first_to_reference"] == pytest.approx(0.5), "of the one model that has it"
    assert targets.geometric_means(targets.rows(RESULTS), "eager")["ratio"] is None
    assert targets.geometric_mean([0.0, 1.0]) == 0.0


def _lines(table: Table) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=240)
    console.print(table)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line]


def test_the_table_of_targets() -> None:
    lines = _lines(tables.targets_table(RESULTS))
    assert lines[0] == ["mlp", "ours-inductor", "0.500", "0.250", "10.00", "0.50", "0.800", "2.00", "0.80", "0.500"]
    assert lines[4] == ["gpt", "torch-ca-static", *"-" * 8]
    assert lines[5] == ["geomean", "ours-inductor", "1.000", "0.250", "-", "0.50", "-", "2.00", "0.85", "1.000"]
    assert [line[1] for line in lines[5:]] == ["ours-inductor", "torch-ca-static", "aot"]


def test_the_other_tables() -> None:
    (ours, *_) = _lines(tables.model_table("mlp", RESULTS[:3]))
    assert ours[:11] == ["ours-inductor", "10.8", "10.00", "4.00", "2.00", "0.500", "-", "0.250", "0.800", "2.00", "-"]
    assert ours[12:15] == ["2.0", "1.0", "1.0e-06"]
    assert tables.model_table("mlp", [{**RESULTS[0], "gpu": "GPU 1"}]).title == "mlp, 401 nodes, on GPU 1"
    summary = _lines(tables.summary_table(RESULTS, ["ours-inductor", "torch-ca-static"]))
    assert summary[0] == ["ours-inductor", "2 of 2", "1.000", "2.000", "10.8", "1.0e-06"]
    assert summary[1][:2] == ["torch-ca-static", "1 of 2"]
    assert tables.problems(RESULTS[4]) == ["torch-ca-static: no answer in 600 s"]


# ---- the picture -----------------------------------------------------------------------------------------------------


def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn from what `--json` writes, twice alike."""
    pytest.importorskip("matplotlib")
    written = tmp_path / "results.json"
    backward.write_json(
        RESULTS,
        SimpleNamespace(json=written, beside="eager", pairs=2, timeout=1.0, device="cpu", seed=0, quick=False, jobs=1),
    )  # type: ignore[arg-type]
    assert json.loads(written.read_text())["targets"] == targets.rows(RESULTS)
    assert json.loads(written.read_text())["environment"]["gpu"] is None
    for name in ("one.svg", "two.svg", "three.png"):
        monkeypatch.setattr(sys, "argv", ["picture", str(written), str(tmp_path / name)])
        assert picture.main() == 0
    drawn = (tmp_path / "one.svg").read_text()
    for text in ("mlp", "gpt", "ours-inductor", "torch-ca-static", "0.75", "20.0", "floor"):
        assert text in drawn
    assert drawn == (tmp_path / "two.svg").read_text()
    assert (tmp_path / "three.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says so before anything is measured."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "argv", ["backward", "--picture", str(tmp_path / "out.svg")])
    with pytest.raises(SystemExit):
        backward.main()
    assert "pip install '.[benchmarks]'" in capsys.readouterr().err


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(picture.PictureError, match=r"out\.pdf: a picture's name ends in \.svg or \.png"):
        picture.draw(RESULTS, tmp_path / "out.pdf")
    with pytest.raises(picture.PictureError, match="there is no folder"):
        picture.draw(RESULTS, tmp_path / "nowhere" / "out.svg")
    with pytest.raises(picture.PictureError, match=r"none\.json: No such file"):
        picture.read(tmp_path / "none.json")
    other = tmp_path / "other.json"
    for content in ("{", "[]", '{"results": [{"model": "mlp"}]}', '{"results": 3}'):
        other.write_text(content)
        with pytest.raises(picture.PictureError, match="not a file that"):
            picture.read(other)
    other.write_text('{"results": []}')
    with pytest.raises(picture.PictureError, match="no results"):
        picture.read(other)


# ---- eager in a process of its own -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_eager_steps_in_another_process() -> None:
    with Apart("eager", "pinn", 0, "cpu") as apart:
        assert apart._process.pid != os.getpid()
        assert all(seconds > 0 for seconds in (apart.step(), apart.step()))
        apart.rest()
        assert apart.step() > 0
    assert apart._process.returncode == 0


def test_a_process_that_ends_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"benchmarks.apart eager no_model 0 cpu ended with status 1"):
        Apart("eager", "no_model", 0, "cpu").__enter__()


def test_sides_take_turns_at_going_first() -> None:
    order: list[int] = []

    def side(number: int) -> Any:
        def step() -> float:
            order.append(number)
            return float(10 * number + len(order))

        return SimpleNamespace(step=step)

    times = measure.alternate([side(0), side(1), side(2)], 3)
    in_a_turn = measure.SETTLING_STEPS + measure.TURN_STEPS
    assert order[::in_a_turn] == [0, 1, 2, 1, 2, 0, 2, 0, 1]
    assert order == [number for number in order[::in_a_turn] for _ in range(in_a_turn)]
    # The mean of the last two of a turn's five steps, each of which took the number of steps before it and itself.
    assert times == [[4.5, 29.5, 39.5], [19.5, 29.5, 54.5], [34.5, 44.5, 54.5]]
    assert measure.compare([1.0, 2.0, 4.0], [2.0, 2.0, 2.0]) == (2000.0, 2000.0, 1.0)


# ---- other people's libraries ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_program_and_a_library_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one needs plain torch alone; of the other it is said that it is missing, and the run goes on."""
    monkeypatch.setitem(PROGRAMS, "no-such-library", Program("no-such-library", "plain", "train_no_such_library"))
    monkeypatch.setattr(clients, "WAYS", ("eager", "one_by_one"))  # Inductor takes its time
    monkeypatch.setattr(clients, "build_extension", lambda console: None)
    written, drawn = tmp_path / "results.json", tmp_path / "results.md"
    arguments = ["--only", "no-such-library", "torch", "--steps", "4", "--json", str(written), "--markdown", str(drawn)]
    monkeypatch.setattr(sys, "argv", ["clients", *arguments])
    assert clients.main() == 0
    missing, plain = json.loads(written.read_text())["results"]
    assert missing["missing"] == "pip install no-such-library" and missing["version"] is None
    counts = plain["one_by_one"]["counts"]
    assert (counts["hits"], counts["captures"], counts["compiles"], counts["bypasses"]) == (3, 1, 1, {})
    assert plain["same_one_by_one"] is True and plain["failed"] == {}
    assert 0 < plain["difference_nudged"] < 1e-3
    heading, _, first, second = drawn.read_text().splitlines()
    assert heading.startswith("| library | same bits one by one |")
    assert first.startswith("| no-such-library | - |") and first.endswith("| not installed |")
    assert second.startswith(f"| torch {torch.__version__.partition('+')[0]} | yes |")
    assert "not installed" in capsys.readouterr().out


def test_what_the_remarks_say() -> None:
    result = {
        "library": "some",
        "version": "1.0",
        "failed": {"one_by_one": "ValueError: no"},
        "same_eager": False,
        "eager": {"warnings": ["old"]},
        "default": {
            "counts": {"bypasses": {"create_graph": 3}, "failures": 1},
            "reasons": {"create_graph": 3, "shape": 2},
            "later_bypasses": {"not_worth_it": 5},
            "warnings": ["old", "new"],
        },
    }
    assert [*clients.remarks(result)] == [
        "failed (one_by_one): ValueError: no",
        "eager differs between two processes",
        "shape 2",
        "later not_worth_it 5",
        "failures (default) 1",
        "warns: new",
    ]
