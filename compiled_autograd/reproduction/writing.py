"""Write a reproduction of a backward, or of one of its regions."""

from __future__ import annotations

import itertools
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .. import ir
from ..backends.signal_handlers import raise_what_a_handler_raised
from ..process_state import PROCESS
from .files import write_file
from .recording import Kinds, Sample, record_of
from .records import About, TensorRecord
from .tensors import Unusual, records_of, stored_bytes

if TYPE_CHECKING:
    from ..steps.steps import RegionStep

_MAX_KEPT = 20
"""Maximum number of reproductions that a process writes on its own."""
_numbers = PROCESS.register(itertools.count())
_log = logging.getLogger(__name__)


def write(
    path: str | os.PathLike[str],
    tape: ir.TapeGraph,
    given: Mapping[str, Sequence[Any]],
    *,
    about: About,
    values: bool = False,
    known: Mapping[fx.Node, Any] | None = None,
) -> None:
    """Write one backward to a file.

    Args:
        given: the inputs of the tape graph by kind of placeholder: ``input`` (tensors), ``size``, ``scalar``. Objects
            are not kept.
        values: keep the values of the tensors; else only the statistics of each, and the values of small integer
            tensors.
        known: the results of users' code by node of the tape graph, as far as available.

    Raises:
        ReproductionError: an input is a tensor that cannot be made up, such as a sparse one.
        OSError: the file cannot be written.
    """
    gave = known or {}

    def kinds(node: fx.Node) -> TensorRecord | str | None:
        value = gave.get(node, "")
        if not isinstance(value, torch.Tensor):
            return None if value is None else ""
        (found,) = records_of([value])
        return "" if isinstance(found, Unusual) else found

    write_sample(path, tape, Sample.of(given), kinds, about, given["input"] if values else None)


def write_sample(
    path: str | os.PathLike[str],
    tape: ir.TapeGraph,
    sample: Sample,
    kinds: Kinds,
    about: About,
    tensors: Sequence[torch.Tensor] | None = None,
) -> None:
    """Write a backward that is over to a file, from a sample of its inputs.

    Args:
        kinds: the kinds of the results of users' code.
        tensors: the tensors of the sample, to keep their values; None to keep none.

    Raises:
        ReproductionError, OSError: see :func:`write`.
    """
    record = record_of(tape, sample, kinds, about)
    record.real = tensors is not None
    write_file(path, record, {} if tensors is None else stored_bytes(tensors, record.tensors))


@dataclass(frozen=True)
class Kept:
    """The result of :func:`keep`: the path of the reproduction, None if none was written; and the result in words."""

    path: str | None
    text: str


def keep(
    tape: ir.TapeGraph,
    given: Mapping[str, Sequence[Any]],
    *,
    about: About,
    values: bool = False,
    known: Mapping[fx.Node, Any] | None = None,
) -> Kept:
    """Write a reproduction into a new folder that only this user can enter; see :func:`write`. Raises nothing."""
    if next(_numbers) >= _MAX_KEPT:
        return Kept(None, f"no reproduction was written: this process has written {_MAX_KEPT}, the maximum")
    try:
        path = Path(tempfile.mkdtemp(prefix="compiled-autograd-")) / "reproduction.zip"
        write(path, tape, given, about=about, values=values, known=known)
    except Exception as error:  # noqa: BLE001  the mismatch is reported without a reproduction
        raise_what_a_handler_raised(error)
        _log.debug("no reproduction", exc_info=True)
        return Kept(None, f"a reproduction could not be written ({error})")
    return Kept(str(path), f"{path} is a reproduction")


def region_tape(
    tape: ir.TapeGraph, step: RegionStep, slots: Sequence[Any]
) -> tuple[ir.TapeGraph, dict[str, list[Any]]]:
    """Return a region, with the leaves that receive its gradients, as a tape graph of its own, and its inputs.

    Args:
        tape: the tape graph of the region.
        slots: the slots of the run, with the region's inputs and leaves.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node | None] = {}
    given: dict[str, list[Any]] = {"input": [], "size": [], "scalar": [], "object": []}

    def take(node: fx.Node, value: Any) -> None:
        if value is None or node in copies:
            copies.setdefault(node, None)
            return
        kind = node.meta["lifted"].kind if node.op == "placeholder" else "input"
        lifted = ir.Lifted(kind, len(given[kind]))
        given[kind].append(value)
        copies[node] = copy = graph.placeholder(str(lifted))
        copy.meta["lifted"] = lifted

    for node, slot in zip(step.region.inputs, step.inputs, strict=True):
        take(node, slots[slot])
    for fresh in step.fresh:
        take(fresh.call.args[0], slots[fresh.leaf])  # type: ignore[arg-type]
    nodes = [node for node in step.region.nodes if node.target is not ir.check_nan]
    nodes += [fresh.call for fresh in step.fresh]
    calls = sorted({0, *(node.meta["call"] for node in nodes)})
    numbers = {call: number for number, call in enumerate(calls)}
    for node in nodes:
        args = fx.map_arg(node.args, copies.__getitem__)
        copies[node] = copy = graph.create_node("call_function", node.target, args)
        copy.meta["call"] = numbers[node.meta["call"]]
    inside = {*step.region.nodes, *(fresh.call for fresh in step.fresh)}
    graph.output([copies[node] for node in step.region.outputs if not inside.issuperset(node.users)])
    titles = [_numbered(tape.calls[call], numbers) for call in calls]
    inputs = []
    for index, tensor in enumerate(given["input"]):
        dtype = str(tensor.dtype).removeprefix("torch.")
        inputs.append(ir.LiftedTensor(index, dtype, str(tensor.device), tensor.requires_grad))
    order = list(range(len(calls)))
    return ir.TapeGraph(graph, titles, inputs, accumulates=bool(step.fresh), order=order), given


def _numbered(call: ir.TapeCall, numbers: Mapping[int, int]) -> ir.TapeCall:
    edges = None if call.edges is None else [numbers[edge] for edge in call.edges if edge in numbers]
    named = ir.Named(call.parameter, call.module)
    return ir.TapeCall(numbers[call.index], call.name, call.sequence, edges, named, call.source)
