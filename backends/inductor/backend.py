"""Compiles a region with Inductor, below Dynamo and AOTAutograd: the graph that comes here needs neither."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..artifacts import ArtifactBackend, CannotStoreError, Stored, link, tensors_from_bytes
from ..eager import EagerBackend
from ..modes import DEFAULT, name_in
from ..protocol import Compiled
from ..versions import plain_convolution_backward
from . import instruction_sets
from .batch import together
from .cuda.capture import Device, cuda_device
from .cuda.channels_last import convolve_in_channels_last
from .cuda.direct import Direct
from .cuda.graphs import Replayed
from .cuda.kernels import Aligned, alignment_of, launched_here, load_launches
from .cuda.recurrent_cells import CELLS
from .cuda.shared_products import sum_shared_products
from .digits import DIGITS
from .environment import environment, is_chosen
from .kernels import ENTRY, load_kernels
from .memory import keep_freed_memory
from .on_cpu import DECOMPOSITIONS, sum_rows_with_aten
from .randomness import FALLBACK, decompositions, draws, generators_kept
from .rounding import SETTING, noting_where_to_round, rounds
from .straight_line.program_library import begin
from .straight_line.straight_line import StraightLine
from .workarounds.complex_scatters import keep_complex_scatters
from .workarounds.grad_of_tensors import grad_read_past_python
from .workarounds.narrowing_casts import all_casts_kept
from .workarounds.outer_loops import sound_outer_loops
from .workarounds.sizes_of_tensors import sizes_read_from_tensors
from .wrappers import namespace_of, store

LEAST_WORK = "cpp.min_chunk_size", "TORCHINDUCTOR_CPP_MIN_CHUNK_SIZE", 4096
"""The setting of Inductor's for how many elements of a kernel are worth a thread, the variable that it may come from,
and ours: with Inductor's own, 512, waking a second thread takes longer than most kernels that get one
(``benchmarks/threads.py``)."""
_CUDA_GRAPHS = "triton.cudagraphs"
"""The setting of Inductor's that asks for CUDA graphs. They are ours then: Inductor's copy each input in."""
_CALL = "def call("
"""The beginning of the entry in Inductor's generated code; without calls, the graph's own code is used."""
_PROGRAMS = "straight line"
"""Name of the library that makes straight-line programs, among an artifact's kernels; no kernel can have this name."""


class MissingCompilerError(RuntimeError):
    """There is no C++ compiler, which Inductor needs for kernels on the CPU."""

    def __init__(self, tried: Sequence[str]) -> None:
        super().__init__(f"no C++ compiler found (tried {', '.join(tried)}): install g++ or clang++, or set CXX to one")


class InductorBackend(ArtifactBackend):
    """``torch._inductor.compile_fx.compile_fx_inner``, written against torch 2.13.

    Args:
        mode: as ``torch.compile`` has it, one of :data:`backends.modes.MODES`.
    """

    slow = True
    allocates = True  # a CUDA graph runs again only when nobody holds what it gave

    def __init__(self, mode: str = DEFAULT) -> None:
        self.mode = mode
        self.name = name_in(mode)

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        """Inductor's own table, where random numbers are drawn as eager draws them, and recurrent cells on CUDA."""
        return _decompositions()

    def prepare(self) -> None:
        """Begin what takes long and needs no graph."""
        instruction_sets.ask()
        begin()

    def tracing(self, example_inputs: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
        """Note where 16-bit numbers are rounded, in graphs for CUDA."""
        return noting_where_to_round(example_inputs)

    def compile(self, graph_module: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Compiled:
        """Compile, keeping the strides of every output: a gradient's layout is part of what it is.

        Raises:
            MissingCompilerError: a region for the CPU, and no C++ compiler on the machine.
        """
        from torch._dynamo.utils import get_runtime_metrics_context
        from torch._guards import detect_fake_mode
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes

        if any(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in example_inputs):
            require_cpp_compiler()
            begin()
            keep_freed_memory()
        keep_complex_scatters(graph_module)
        output = graph_module.graph.find_nodes(op="output")[0]
        output.meta["user_visible_output_idxs"] = [
            index for index, value in enumerate(output.args[0]) if isinstance(value, fx.Node)
        ]
        device = cuda_device(graph_module)
        chosen = _settings(self.mode, graph_module, device is not None)
        replays = device is not None and chosen.pop(_CUDA_GRAPHS, config.triton.cudagraphs)
        settings = config.patch({**chosen, _CUDA_GRAPHS: False})
        sound = sound_outer_loops(graph_module)
        has_symbols = any(type(number) is not int for value in example_inputs for number in _numbers(value))
        symbols = _with_symbols() if has_symbols else contextlib.nullcontext()
        more: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        with torch.no_grad(), generators_kept(device), settings, together(), sound, symbols, grad_read_past_python():
            casts = all_casts_kept() if getattr(config, SETTING) else contextlib.nullcontext()
            with detect_fake_mode(example_inputs) or contextlib.nullcontext(), casts:
                joint_graph_passes(graph_module)  # as AOTAutograd does: one makes a tensor whose size is a symbol
                sum_rows_with_aten(graph_module)
                if device is not None and not has_symbols:
                    sum_shared_products(graph_module)
                    if convolve_in_channels_last(graph_module):
                        # Unneeded buffers are freed. Else each is kept for a later buffer of its size, which
                        # PyTorch's allocator would find as well, and of feature maps that is more memory than eager's.
                        more = config.patch(allow_buffer_reuse=False)
            if not any(node.op.startswith("call") for node in graph_module.graph.nodes):
                return EagerBackend().compile(graph_module, example_inputs)  # as Inductor does, but it can be stored
            # The mode's settings are read only here: the code that runs later contains them.
            with more:
                compiled = compile_fx_inner(graph_module, list(example_inputs), is_backward=True)
            get_runtime_metrics_context().finish()  # takes some milliseconds: of a step that runs the code, otherwise
        if device is None:
            return compiled if has_symbols else _straight(compiled)
        direct = Direct(compiled, self._launched_directly)
        if replays and not has_symbols and _can_be_replayed(compiled, graph_module):
            return Replayed(direct, Device(device))
        return direct

    def stored(self, compiled: Any) -> Stored:
        """The generated Python code and its compiled kernels, for the CPU and for one CUDA device.

        Of several forms of a kernel for CUDA, Inductor takes the fastest when it first runs: then it can be stored.
        """
        from torch._inductor.output_code import CompiledFxGraph

        if isinstance(compiled, StraightLine):
            stored = self.stored(compiled.compiled)
            digest = hashlib.sha256(compiled.library).hexdigest()
            stored.kernels[_PROGRAMS] = digest, ENTRY
            stored.libraries[digest] = compiled.library
            return stored
        if isinstance(compiled, Direct):
            return self.stored(compiled.compiled)
        if isinstance(compiled, Replayed):
            stored = self.stored(compiled.compiled)
            stored.replayed_on = compiled.device.index
            return stored
        if isinstance(getattr(compiled, "__self__", None), fx.GraphModule):
            return EagerBackend().stored(compiled)
        if not isinstance(compiled, CompiledFxGraph):
            raise CannotStoreError(
                f"it is of type {type(compiled).__name__}, not what Inductor made (or was loaded itself)"
            )
        return self._stored_with(compiled)[0]

    def _stored_with(self, compiled: Any) -> tuple[Stored, Mapping[str, Any]]:
        """Return the artifact's content for Inductor's result, and the namespace of its code."""
        _check_devices(compiled)
        for kind in ("frozen_param_names", "torchbind_constants", "opaque_value_type_classes"):
            if getattr(compiled, kind):
                raise CannotStoreError(f"it has {kind}: {', '.join(getattr(compiled, kind))}")
        call, aligned, written = alignment_of(compiled.current_callable)
        if written:
            raise CannotStoreError(f"its code writes into its inputs {written}")
        namespace = namespace_of(call)
        if namespace is None:
            raise CannotStoreError(f"Inductor has put {call!r} around its generated code")
        parts = getattr(getattr(call, "__self__", None), "partitions", ())  # of a `Runner`
        if any(part is not namespace.get(getattr(part, "__name__", "")) for part in parts):
            raise CannotStoreError("Inductor has put something around the parts of its generated code")
        stored = store(compiled.source_code, namespace, compiled.constants or {})
        stored.aligned = aligned
        return stored, namespace

    def _launched_directly(self, compiled: Any) -> Compiled:
        """Return the code that another process would load, with the kernels that this process has loaded already."""
        stored, namespace = self._stored_with(compiled)
        kernels = {name: namespace[name] for name in stored.kernels}
        launches = launched_here(stored.launches, namespace)
        return _aligned(link(stored, {**(compiled.constants or {}), **kernels, **launches}), stored)

    def loaded(self, stored: Stored) -> Compiled:
        """The code with its kernels. Neither Inductor is imported nor a compiler looked for."""
        if _CALL not in stored.source:
            return EagerBackend().loaded(stored)
        kernels = load_kernels(stored.libraries, stored.kernels.values())
        constants = tensors_from_bytes(stored.constants)
        given = {name: kernels[place] for name, place in stored.kernels.items()}
        make_program = given.pop(_PROGRAMS, None)
        launches = load_launches(stored.libraries, stored.launches)
        keep_freed_memory()
        namespace = link(stored, {**constants, **given, **launches})
        call = _aligned(namespace, stored)
        if stored.replayed_on is not None:
            return Replayed(call, Device(stored.replayed_on))
        return call if make_program is None else StraightLine(call, stored.source, namespace, make_program)

    def environment(self) -> dict[str, str]:
        """Processor, threads, C library, how torch was built, Inductor's settings; devices where CUDA is in use."""
        return environment()


@functools.cache
def _decompositions() -> Mapping[Any, Callable[..., Any]]:
    return {**decompositions(), **CELLS, **DECOMPOSITIONS, **DIGITS}


def _aligned(namespace: Mapping[str, Any], stored: Stored) -> Compiled:
    """Return the entry of linked code."""
    call: Compiled = namespace["call"]
    return Aligned(call, stored.aligned) if stored.aligned else call


def _can_be_replayed(compiled: Any, graph_module: fx.GraphModule) -> bool:
    """Return whether a region draws no random numbers, and writes into no input, which may be a copy."""
    if any(draws(node.target) for node in graph_module.graph.nodes):
        return False
    return not getattr(compiled, "mutated_input_idxs", ())


def _check_devices(compiled: Any) -> None:
    """Check that code is for devices that artifacts support.

    Raises:
        CannotStoreError: it is for other devices.
    """
    others = sorted(compiled.device_types - {"cpu", "cuda"})
    if "cuda" in compiled.device_types and torch.version.hip:
        others.append("ROCm")
    if others:
        raise CannotStoreError(f"it has code for {', '.join(others)}, and only code for the CPU and CUDA is stored")
    if len(indices := sorted(getattr(compiled, "device_idxs", ()))) > 1:
        raise CannotStoreError(f"it has code for several devices: {indices}")


def _settings(mode: str, graph_module: fx.GraphModule, on_cuda: bool) -> dict[str, Any]:
    """Return the settings of Inductor for the compile of a region."""
    from torch._inductor import list_mode_options

    # Whoever calls us has checked sizes and strides; the generated code need not do it once more at each call.
    chosen: dict[str, Any] = {"size_asserts": False, "alignment_asserts": False, **list_mode_options(mode)}
    work, variable, elements = LEAST_WORK
    if variable not in os.environ and not is_chosen(work):
        chosen[work] = elements
    if any(draws(node.target) for node in graph_module.graph.nodes):
        chosen[FALLBACK] = True  # eager's operators, from eager's generators
    if on_cuda and rounds(graph_module):
        chosen[SETTING] = True
    convolution = torch.ops.aten.convolution_backward.default
    if not on_cuda and graph_module.graph.find_nodes(op="call_function", target=convolution):
        # A sum that several kernels need is made once. Else each adds the terms anew, and as long as one of them is to
        # come all terms are held: of feature maps, more memory than eager's, and no time is won.
        chosen["realize_reads_threshold"] = 2
    return chosen


@contextlib.contextmanager
def _with_symbols() -> Iterator[None]:
    """While a graph is compiled whose sizes are symbols."""
    with _convolutions_of_any_size(), sizes_read_from_tensors():
        yield


@contextlib.contextmanager
def _convolutions_of_any_size() -> Iterator[None]:
    """Make the backward of a convolution a plain call if sizes are symbols.

    Inductor's lowering of it (``_inductor/kernel/conv.py``, 2.13) reads the input's strides as numbers, which fixes the
    image's height and width. Without Triton it ends in that plain call anyway.
    """
    plain = plain_convolution_backward()
    if plain is None:
        yield
        return
    from torch._inductor import lowering

    overload = torch.ops.aten.convolution_backward.default
    before = lowering.lowerings[overload]
    lowering.lowerings[overload] = plain
    try:
        yield
    finally:
        lowering.lowerings[overload] = before


def _numbers(example: Any) -> Sequence[Any]:
    """A tensor's sizes and strides; a size stands for itself."""
    if not isinstance(example, torch.Tensor):
        return (example,)
    return (*example.shape, *example.stride()) if example.layout is torch.strided else example.shape


def _straight(compiled: Any) -> Compiled:
    """Wrap code whose sizes are numbers, to run as a straight-line program if all of it is on the CPU."""
    if getattr(compiled, "device_types", None) != {"cpu"}:
        return compiled
    namespace = namespace_of(compiled.current_callable)
    if namespace is None or (programs := begin().result()) is None:
        return compiled
    return StraightLine(compiled, compiled.source_code, namespace, programs.make_program, programs.content)


def require_cpp_compiler() -> None:
    """Raise :class:`MissingCompilerError` unless one of the compilers that Inductor would try is there."""
    from torch._inductor import config

    configured = config.cpp.cxx
    tried = [name for name in (configured if isinstance(configured, (list, tuple)) else [configured]) if name]
    if not any(shutil.which(name) for name in tried):
        raise MissingCompilerError(tried)
