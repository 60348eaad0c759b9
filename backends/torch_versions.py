"""PyTorch's releases: which ones were tested, and where they differ.

Every difference stands here once. The code asks :func:`has`, ``shadow-cache env`` prints the table, and
``docs/internals/torch_api.md`` shows it. This file imports no torch, so that the command line can read it.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

Release = tuple[int, int]
LOWEST, LAST = (2, 11), (2, 15)
"""The first and the last release on which all tests ran."""
TESTED_TORCH = f">={LOWEST[0]}.{LOWEST[1]},<{LAST[0]}.{LAST[1] + 1}"


@dataclass(frozen=True, slots=True)
class Difference:
    """A rule that differs between releases. Some are for people alone: the code looks at what PyTorch has.

    Attributes:
        since: the first release that has the rule.
        what: the rule, for people.
        where: the file in PyTorch's sources.
        test: the test file that runs on both sides of ``since``.
    """

    since: Release
    what: str
    where: str
    test: str


@functools.lru_cache(16)  # every `enable` and every comparison of Inductor's settings asks
def release(version: str) -> Release:
    """Return the release of ``torch.__version__``, such as ``(2, 13)``; ``(0, 0)`` if it begins with no two numbers."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (0, 0) if found is None else (int(found[1]), int(found[2]))


def is_tested(version: str) -> bool:
    """Return whether all tests ran on the release of ``version``; builds before a release count as that release."""
    return LOWEST <= release(version) <= LAST


def has(name: str, version: str) -> bool:
    """Return whether the rule of :data:`DIFFERENCES` with a name holds in a version of torch."""
    return DIFFERENCES[name].since <= release(version)


def runs_own_loop(version: str) -> bool:
    """Return whether the own loop is on by default in a version of torch."""
    return has("own_loop", version) and is_tested(version)


DIFFERENCES: dict[str, Difference] = {
    "device_guard": Difference(
        (2, 12),
        "Fake tensors on a CUDA build without a device no longer bind a guard to the first thread that uses them.",
        "c10/core/impl/DeviceGuardImplInterface.cpp",
        "tests/test_background.py",
    ),
    "cumprod_in_bulk": Difference(
        (2, 12),
        "The backward of cumprod runs a few operators under fake tensors too, not seven for each index.",
        "aten/src/ATen/native/ReduceOps.cpp",
        "tests/test_partition.py",
    ),
    "settings_of_a_thread": Difference(
        (2, 12),
        "Each thread has Inductor's settings for itself, in context variables.",
        "torch/utils/_config_module.py",
        "tests/test_environment_key.py",
    ),
    "own_loop": Difference(
        (2, 12),
        "The own loop is on by default: its tests ran on these releases.",
        "torch/csrc/autograd/engine.cpp",
        "tests/test_own_loop_default.py",
    ),
    "leaf_takes_result": Difference(
        (2, 13),
        "The engine passes a leaf's `.grad` to `accumulate_grad`, and takes the result for the new one.",
        "torch/csrc/dynamo/python_compiled_autograd.cpp",
        "tests/test_capture.py",
    ),
    "aot_generated_wrappers": Difference(
        (2, 13),
        "AOTAutograd generates the prologue and epilogue of each compiled backward.",
        "torch/_functorch/_aot_autograd/runtime_wrappers.py",
        "tests/test_aot.py",
    ),
    "decompositions_of_mode": Difference(
        (2, 13),
        "The mode that records operators has its table of decompositions itself.",
        "torch/fx/experimental/proxy_tensor.py",
        "tests/test_tracing.py",
    ),
    "unused_input_index": Difference(
        (2, 13),
        "The error for an input without a gradient says the index of the input.",
        "torch/csrc/autograd/python_engine.cpp",
        "tests/test_engine.py",
    ),
    "convolution_lowering": Difference(
        (2, 13),
        "Inductor has a lowering of its own for the backward of convolutions.",
        "torch/_inductor/kernel/conv.py",
        "tests/test_dynamic_strides.py",
    ),
    "casts_kept": Difference(
        (2, 13),
        "Inductor keeps a cast to 16 bits and back, if it is set to round as eager.",
        "torch/_inductor/fx_passes/joint_graph.py",
        "tests/test_workarounds.py",
    ),
    "intrusive_nodes": Difference(
        (2, 13),
        "Nodes of the tape are owned by `c10::intrusive_ptr`, before by `std::shared_ptr` (decided in C++).",
        "torch/csrc/autograd/function.h",
        "tests/test_native_walk.py",
    ),
    "clamp_at_bounds": Difference(
        (2, 14),
        "At a bound, the gradient of `clamp` is 0 if the bound is a number, and 0.5 if it is a tensor; "
        "before 2.14 it was 1.",
        "tools/autograd/derivatives.yaml",
        "tests/test_proving.py",
    ),
    "node_creation_hook": Difference(
        (2, 14),
        "`torch.autograd.graph.node_creation_hook` sees the nodes that its thread makes.",
        "torch/autograd/graph.py",
        "tests/test_node_creation_hook.py",
    ),
    "output_grad_dtype": Difference(
        (2, 14),
        "A Python function declares the dtypes of its gradients with `ctx.set_output_grad_dtype`.",
        "torch/csrc/autograd/python_function.cpp",
        "tests/test_output_grad_dtypes.py",
    ),
    "outer_loops_sound": Difference(
        (2, 14),
        "Inductor fuses no outer loops that take several rows where the buffer between them holds one.",
        "torch/_inductor/codegen/cpp.py",
        "tests/test_workarounds.py",
    ),
    "sizes_read_where_asserted": Difference(
        (2, 14),
        "Inductor's code reads a tensor's size into a symbol only where it asserts sizes.",
        "torch/_inductor/codegen/wrapper.py",
        "tests/test_frontend.py",
    ),
    "input_grad_buffers": Difference(
        (2, 15),
        "A Python function may add to the engine's sums, `ctx.input_grad_buffers`.",
        "torch/csrc/autograd/input_buffer.h",
        "tests/test_input_grad_buffers.py",
    ),
    "kernels_with_scratch": Difference(
        (2, 15),
        "Inductor launches Triton kernels that need global scratch memory without Triton.",
        "torch/_inductor/runtime/static_triton_launcher.py",
        "tests/test_cuda_artifacts.py",
    ),
    "products_of_two_sizes": Difference(
        (2, 15),
        "A trace multiplies two sizes at a time, so that each product can be run.",
        "torch/fx/experimental/proxy_tensor.py",
        "tests/test_workarounds.py",
    ),
}
"""By name. Rows of one release stand together, in the order of releases."""


def described(version: str) -> list[tuple[str, str]]:
    """Return name and text of each row of :data:`DIFFERENCES`, for the installed ``version`` of torch."""
    return [
        (name, f"since {'.'.join(map(str, row.since))}{'' if has(name, version) else ' (not here)'}: {row.what}")
        for name, row in DIFFERENCES.items()
    ]
