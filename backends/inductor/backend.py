"""Compiles a region with Inductor, below Dynamo and AOTAutograd: the graph that comes here needs neither."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..artifacts import CannotStoreError, Stored, from_bytes, link, tensors_from_bytes, to_bytes
from ..eager import EagerBackend, run_graph, store_graph
from ..modes import CUDA_GRAPHS, DEFAULT, name_in, options_of
from ..protocol import Backend, Compiled
from ..versions import plain_convolution_backward
from . import instruction_sets
from .batch import together
from .cuda_graphs import CopiedOut, cuda_device, made_by_inductor, running_backward
from .kernels import ENTRY, load_kernels
from .memory import keep_freed_memory
from .outer_loops import sound_outer_loops
from .randomness import FALLBACK, draws, eagers_draws
from .straight_line.program_library import begin, library
from .straight_line.straight_line import StraightLine

_CALL = "def call("
"""What Inductor's generated code has; that of a graph without calls is the graph's own."""
_PROGRAMS = "straight line"
"""Where an artifact has what makes straight-line programs, among its kernels; no kernel can be called so."""


class MissingCompilerError(RuntimeError):
    """There is no C++ compiler, which Inductor needs for kernels on the CPU."""

    def __init__(self, tried: Sequence[str]) -> None:
        super().__init__(
            f"no C++ compiler found (tried {', '.join(tried)}): install g++ or clang++, or set CXX to one; "
            'until then use backend="eager"'
        )


class InductorBackend(Backend):
    """``torch._inductor.compile_fx.compile_fx_inner``, written against torch 2.13.

    Args:
        mode: as ``torch.compile`` has it, one of :data:`backends.modes.MODES`.
    """

    slow = True
    allocates = True  # what CUDA graphs give is copied

    def __init__(self, mode: str = DEFAULT) -> None:
        self.mode = mode
        self.name = name_in(mode)

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        """Inductor's own table, where random numbers are drawn as eager draws them."""
        from torch._inductor import config
        from torch._inductor.decomposition import select_decomp_table

        with config.patch({FALLBACK: True}):
            return eagers_draws(select_decomp_table())

    def prepare(self) -> None:
        """Begin what takes long and needs no graph."""
        instruction_sets.ask()
        begin()

    def compile(self, graph_module: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Compiled:
        """Compile, keeping the strides of every output: a gradient's layout is part of what it is.

        Raises:
            MissingCompilerError: a region for the CPU, and no C++ compiler on the machine.
        """
        from torch._guards import detect_fake_mode
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes

        if any(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in example_inputs):
            require_cpp_compiler()
            begin()
            keep_freed_memory()
        output = graph_module.graph.find_nodes(op="output")[0]
        output.meta["user_visible_output_idxs"] = [
            index for index, value in enumerate(output.args[0]) if isinstance(value, fx.Node)
        ]
        device = cuda_device(graph_module)
        settings = config.patch(_settings(self.mode, graph_module, device is not None))
        sound = sound_outer_loops(graph_module)
        with torch.no_grad(), settings, together(), sound, _convolutions_of_any_size(example_inputs):
            with detect_fake_mode(example_inputs) or contextlib.nullcontext():
                joint_graph_passes(graph_module)  # as AOTAutograd does: one makes a tensor whose size is a symbol
            if not any(node.op.startswith("call") for node in graph_module.graph.nodes):
                return EagerBackend().compile(graph_module, example_inputs)  # as Inductor does, but it can be stored
            # The mode's settings are read here alone: what runs later has them in its code.
            if device is None or not config.triton.cudagraphs:
                compiled = compile_fx_inner(graph_module, list(example_inputs), is_backward=True)
                return _straight(compiled) if _of_numbers_on_cpu(compiled, example_inputs) else compiled
            boxed = running_backward(device)
            inputs = list(example_inputs)
            compiled = compile_fx_inner(graph_module, inputs, is_backward=True, boxed_forward_device_index=boxed)
            return CopiedOut(compiled, device)

    def save(self, compiled: Compiled) -> bytes | None:
        """The generated Python code and its compiled kernels, where all of it runs on the CPU."""
        try:
            return to_bytes(_store(compiled), self.name)
        except CannotStoreError:
            return None

    def why_not_saved(self, compiled: Compiled) -> str | None:
        """Why :meth:`save` gives None."""
        try:
            _store(compiled)
        except CannotStoreError as error:
            return str(error)
        return None

    def load(self, data: bytes) -> Compiled:
        """Run the code with its kernels. Neither Inductor is imported nor a compiler looked for."""
        stored = from_bytes(data, self.name)
        if _CALL not in stored.source:
            return run_graph(stored)
        kernels = load_kernels(stored.libraries, stored.kernels.values())
        constants = tensors_from_bytes(stored.constants)
        given = {name: kernels[place] for name, place in stored.kernels.items()}
        make_program = given.pop(_PROGRAMS, None)
        keep_freed_memory()
        namespace = link(stored, {**constants, **given})
        call = namespace["call"]
        return call if make_program is None else StraightLine(call, stored.source, namespace, make_program)

    def environment(self) -> dict[str, str]:
        """Processor, threads, C library, how torch was built, Inductor's settings."""
        from .environment import environment

        return environment()


def _settings(mode: str, graph_module: fx.GraphModule, on_cuda: bool) -> dict[str, Any]:
    """What is set of Inductor's settings while a region is compiled."""
    # Whoever calls us has checked sizes and strides; the generated code need not do it once more at each call.
    chosen = {"size_asserts": False, "alignment_asserts": False, **options_of(mode)}
    if any(draws(node.target) for node in graph_module.graph.nodes):
        chosen[FALLBACK] = True  # eager's operators, from eager's generators
    if not on_cuda:
        chosen.pop(CUDA_GRAPHS, None)  # Inductor would find out in the end
        if graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default):
            # A sum that several kernels need is made once. Else each adds the terms anew, and as long as one of them is
            # to come all terms are held: of feature maps, more memory than eager's, and no time is won.
            chosen["realize_reads_threshold"] = 2
    return chosen


@contextlib.contextmanager
def _convolutions_of_any_size(example_inputs: Sequence[Any]) -> Iterator[None]:
    """Where sizes are symbols, let the backward of a convolution be a plain call.

    Inductor's lowering of it (``_inductor/kernel/conv.py``, 2.13) asks for the input's strides as numbers, which makes
    numbers of the image's height and width; without Triton it ends in that plain call anyhow.
    """
    dynamic = any(isinstance(size, torch.SymInt) for value in example_inputs for size in _sizes(value))
    plain = plain_convolution_backward() if dynamic else None
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


def _sizes(value: Any) -> Sequence[Any]:
    return value.shape if isinstance(value, torch.Tensor) else (value,)


def _of_numbers_on_cpu(compiled: Any, example_inputs: Sequence[Any]) -> bool:
    """Whether all sizes are numbers, and all that runs does so on the CPU."""
    numbers = all(type(size) is int for value in example_inputs for size in (*_sizes(value), *_strides(value)))
    return numbers and getattr(compiled, "device_types", None) == {"cpu"}


def _strides(value: Any) -> Sequence[Any]:
    return value.stride() if isinstance(value, torch.Tensor) and value.layout is torch.strided else ()


def _straight(compiled: Any) -> Compiled:
    """The same, to be run as a straight-line program."""
    call = compiled.current_callable
    namespace = getattr(getattr(call, "__func__", call), "__globals__", {})
    programs = library() if namespace.get("call") == call else None  # else there is something around it
    if programs is None:
        return compiled
    return StraightLine(compiled, compiled.source_code, namespace, programs.make_program, programs.content)


def _store(compiled: Any) -> Stored:
    """What is stored of a ``torch._inductor.output_code.CompiledFxGraph``.

    Raises:
        CannotStoreError: it has kernels for a GPU, or something around its generated code.
    """
    from torch._inductor.output_code import CompiledFxGraph

    from .wrappers import store

    if isinstance(compiled, StraightLine):
        stored = _store(compiled.compiled)
        digest = hashlib.sha256(compiled.library).hexdigest()
        stored.kernels[_PROGRAMS] = digest, ENTRY
        stored.libraries[digest] = compiled.library
        return stored
    compiled = made_by_inductor(compiled)
    if isinstance(getattr(compiled, "__self__", None), fx.GraphModule):
        return store_graph(compiled)
    if not isinstance(compiled, CompiledFxGraph):
        raise CannotStoreError(f"it is a {type(compiled).__name__}, not what Inductor made (or was loaded itself)")
    devices = sorted(compiled.device_types - {"cpu"})
    if devices:
        raise CannotStoreError(f"it has code for {', '.join(devices)}, and only code for the CPU is stored")
    for kind in ("frozen_param_names", "torchbind_constants", "opaque_value_type_classes"):
        if getattr(compiled, kind):
            raise CannotStoreError(f"it has {kind}: {', '.join(getattr(compiled, kind))}")
    call = compiled.current_callable
    live = getattr(getattr(call, "__func__", call), "__globals__", {})
    if live.get("call") != call:
        raise CannotStoreError(f"Inductor has put {call!r} around its generated code")
    return store(compiled.source_code, live, compiled.constants or {})


def require_cpp_compiler() -> None:
    """Raise :class:`MissingCompilerError` unless one of the compilers that Inductor would try is there."""
    from torch._inductor import config

    configured = config.cpp.cxx
    tried = [name for name in (configured if isinstance(configured, (list, tuple)) else [configured]) if name]
    if not any(shutil.which(name) for name in tried):
        raise MissingCompilerError(tried)
