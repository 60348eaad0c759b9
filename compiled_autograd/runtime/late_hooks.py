"""Hooks that come or go while a backward runs. The engine looks at a node's hooks as it comes to the node; the tape
graph has those of the walk.

The rules are those of ``Engine::evaluate_function`` and ``call_function`` (``torch/csrc/autograd/engine.cpp``) and of
``_call_hooks`` (``python_hook.cpp``, 2.13): what a dict of hooks has when its turn comes is called.
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .. import ir
from ..torch_api import attributes
from ..torch_api.hook_handles import ON_LEAF, ON_NODE, REMOVED, HookChange, hooks_of_node
from ..user_code.hooks import post_accumulate_hook, post_hook, pre_hook, tensor_hook
from .hook_places import HOOKS, UNDEFINED, HookPlaces, at, chain, entering, put
from .running_backward import Ends

_WHILE_IT_RAN = 1
_Late = tuple[int, Any, HookChange]
"""For a tensor's hook, the index of the gradient that enters the node. For a hook after a node, whether it was
registered while the node ran. Then the hook, and its change."""


class LateHooks:
    """Changes to the hooks of calls that have not run yet, in one run of a tape graph.

    Args:
        places: of the tape graph.
        ends: of the tape; its nodes are read only when something has changed.
        value_of: returns the result of a call, or the value of a placeholder.
    """

    def __init__(self, places: HookPlaces, ends: Ends, value_of: Callable[[fx.Node], Any]) -> None:
        self.value_of = value_of
        self._places, self._ends = places, ends
        self._added: dict[tuple[int, Any], list[_Late]] = {}
        self._outputs: dict[int, list[_Late]] = {}  # by place, of those whose nodes do not run
        self._given: dict[int, Any] = {}
        self._removed: set[fx.Node] = set()
        self._entered: dict[int, list[Any]] = {}  # by call, what enters its node where that is not what the graph says
        self._last = next(iter(places.place))
        self._dicts: dict[int, tuple[int, Any]] | None = None

    # ---- changes -----------------------------------------------------------------------------------------------------

    def take(self, changes: list[HookChange], last: fx.Node) -> bool:
        """Take the changes that users' code in a call has made, and empty the list.

        Returns:
            True if a call after ``last`` must run otherwise than the tape graph says.

        Raises:
            RuntimeError: a hook was removed, and it is unknown which of several.
        """
        self._last, matters = last, False
        for change in changes:
            found = self._remove(change) if change.kind == REMOVED else self._add(change)
            matters = matters or found
        changes.clear()
        return matters

    def _add(self, change: HookChange) -> bool:
        hook = change.hooks.get(change.number)
        if hook is None:  # it was removed again
            return False
        if change.kind == ON_NODE:
            (call, kind), index = self._of_node(change.hooks), 0
        else:
            assert change.tensor is not None
            call, index = self._of_tensor(change.tensor)
            kind = post_accumulate_hook if change.kind == ON_LEAF else tensor_hook
            if kind is tensor_hook and not self._places.accumulates and call not in self._places.functions:
                asked_for = [place for place, each in enumerate(self._ends.inputs) if each is change.tensor]
                found = [place for place in asked_for if self._is_output_to_come(place)]
                for place in found:
                    self._outputs.setdefault(place, []).append((0, hook, change))
                return bool(found)
        if call is None or not self._is_to_come(call, kind, index):
            return False
        if kind is post_hook and self._has_begun(call):
            index = _WHILE_IT_RAN
        self._added.setdefault((call, kind), []).append((index, hook, change))
        return True

    def _remove(self, change: HookChange) -> bool:
        for group, late in (*self._added.items(), *self._outputs.items()):
            for each in late:
                if each[2].hooks is change.hooks and each[2].number == change.number:
                    if not self._is_looked_at(group, each[0]):
                        late.remove(each)
                    return True
        same = [node for node in self._places.hooks if node not in self._removed and self._is_after_last(node)]
        same = [node for node in same if self.value_of(node.args[0]) is change.hook]  # type: ignore[arg-type]
        inside = any(self._is_of_inner_tensor(node) for node in same)
        tensors = _tensors_with(change.hooks) if inside else []  # that takes long
        found = [node for node in same if self._may_be_in(node, change.hooks, tensors)]
        if len({self._places.group(node) for node in found}) > 1:
            raise RuntimeError(
                f"the hook {change.hook!r} is registered on several tensors of a running backward, and was removed "
                "from one of them that no longer exists, so that it is unknown which one. Keep a reference to the "
                "tensor, register a separate function on each, or run this backward inside compiled_autograd.disable()"
            )
        self._removed.update(found[:1])
        return bool(found)

    def _has_begun(self, call: int) -> bool:
        """Return whether a node of the tape has begun to run on eager. Here, hooks that unpack its saved tensors may
        run before others."""
        last, function = self._last, self._places.functions.get(call)
        if function is None or self._places.place[function] <= self._places.place[last]:
            return True
        return last.target is ir.unpack_hook and last.meta["call"] == call

    def _is_looked_at(self, late: Any, index: int) -> bool:
        """Return whether a dict belongs to the hook that has just run. Such a dict was read, and all of its hooks are
        called."""
        last, places = self._last, self._places
        if ir.hook_kind(last.target) not in HOOKS:
            return False
        if isinstance(late, tuple):
            return places.group(last) == (*late, index)
        return last in chain(places.given[late])

    def _is_output_to_come(self, place: int) -> bool:
        """Return whether the engine has yet to read the hooks of a requested gradient whose node does not run. The
        engine comes to such a node once all nodes that lead to it have run."""
        last, places = self._last, self._places
        return last not in chain(places.given[place]) and not places.is_made(place, before=last)

    def _is_after_last(self, node: fx.Node) -> bool:
        """Return whether the engine has yet to read the dict of a hook."""
        last, places = self._last, self._places
        if places.place[node] <= places.place[last]:
            return False
        return ir.hook_kind(last.target) not in HOOKS or places.group(node) != places.group(last)

    def _is_to_come(self, call: int, kind: Any, index: int) -> bool:
        """Return whether the engine has yet to read such hooks of a node."""
        last, places = self._last, self._places
        if ir.hook_kind(last.target) is kind and places.group(last) == (call, kind, index):
            return False
        now, group = places.place[last], places.calls[call]
        if kind in (post_hook, post_accumulate_hook):
            ran = places.leaves if kind is post_accumulate_hook else places.functions
            return call in ran and places.place[group[-1]] > now
        if call not in places.functions or self._has_begun(call):
            return False
        if kind is tensor_hook and ir.hook_kind(last.target) is tensor_hook and last.meta["call"] == call:
            # Those of its tensors are being called, one dict after the other; a new dict comes too late.
            others = (node for node in group if ir.hook_kind(node.target) is tensor_hook and places.place[node] > now)
            return any(places.group(node) == (call, kind, index) for node in others)
        before = (node for node in group if ir.hook_kind(node.target) is pre_hook)
        return kind is pre_hook or all(places.place[node] > now for node in before)

    # ---- where a hook is ---------------------------------------------------------------------------------------------

    def _leaf(self, call: int) -> Any:
        """The leaf that a node of the tape writes to."""
        node = self._places.leaves.get(call)
        return None if node is None else self.value_of(node.args[0])  # type: ignore[arg-type]

    def _of_tensor(self, tensor: torch.Tensor) -> tuple[int | None, int]:
        """The node of the tape that a tensor's hooks run before, and for which of the gradients that enter it."""
        node = attributes.grad_fn(tensor)
        if node is None:
            return next((call for call in self._places.leaves if self._leaf(call) is tensor), None), 0
        call = self._ends.numbers.get(node)
        return (call if call in self._places.calls else None), attributes.output_nr(tensor)

    def _of_node(self, hooks: Any) -> tuple[int | None, Any]:
        """The node of the tape that a dict of hooks belongs to, and which hooks these are. Leaves' nodes are not asked:
        they would have an empty dict from then on, and so the eager engine would copy what they are given."""
        running = self._last.meta["call"]
        if running and running not in self._places.leaves:
            for kind in (post_hook, pre_hook):
                if self._hooks_of(running, kind) is hooks:
                    return running, kind
        if self._dicts is None:
            others = [call for call in self._places.calls if call and call not in self._places.leaves]
            kinds = (post_hook, pre_hook)
            self._dicts = {id(self._hooks_of(call, kind)): (call, kind) for call in others for kind in kinds}
        return self._dicts.get(id(hooks), (None, None))

    def _hooks_of(self, call: int, kind: Any) -> Any:
        return hooks_of_node(self._ends.nodes[call - 1], kind is pre_hook)

    def _is_of_inner_tensor(self, node: fx.Node) -> bool:
        return ir.hook_kind(node.target) is tensor_hook and node.meta["call"] not in self._places.leaves

    def _may_be_in(self, node: fx.Node, hooks: Any, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether a hook of the tape graph can be in a dict of these tensors."""
        call, kind, index = self._places.group(node)
        if kind in (pre_hook, post_hook):
            return self._hooks_of(call, kind) is hooks
        leaf = self._leaf(call)
        if leaf is not None:
            return hooks is (leaf._backward_hooks if kind is tensor_hook else leaf._post_accumulate_grad_hooks)
        owners = [self._of_tensor(tensor) for tensor in tensors if tensor._backward_hooks is hooks]
        if index == UNDEFINED and any(owner[0] == call and self._is_undefined(*owner) for owner in owners):
            return True
        return not owners or (call, index) in owners or (not self._places.accumulates and owners[0][0] is None)

    def _is_undefined(self, call: int | None, index: int) -> bool:
        """Return whether a gradient that enters a node of the tape is undefined in the tape graph."""
        function = self._places.functions.get(call or 0)
        where = None if function is None else entering(function)
        value = None if function is None or where is None else at(function.args, where)[index]
        return value is None or _is_made_up(value, call or 0)

    # ---- calls with changed hooks ------------------------------------------------------------------------------------

    def run(self, node: fx.Node, arguments: Sequence[Any], run: Callable[[Sequence[Any]], Any]) -> Any:
        """Run a call with the hooks that there are now; ``run`` does it with such arguments."""
        kind, call = ir.hook_kind(node.target), node.meta["call"]
        if self._outputs:
            self._give(before=node)
        if node in self._removed:
            result = None if kind is post_accumulate_hook else arguments[1]
        else:
            is_function = self._places.functions.get(call) is node
            where = entering(node) if is_function or kind in (pre_hook, post_hook) else None
            if where is not None:
                made_up = [_is_made_up(each, call) for each in at(node.args, where)]
                given = at(arguments, where)
                seen = [None if zeros else grad for zeros, grad in zip(made_up, given, strict=True)]
                entered = self._now_entering(call, is_function, seen)
                if entered is not None:
                    both = zip(made_up, given, entered, strict=True)
                    arguments = put(arguments, where, [old if zeros else new for zeros, old, new in both])
            elif node.target is ir.cpp_hook and (call, tensor_hook) in self._added:  # retain_grad's comes last
                arguments = (arguments[0], self._new_in(self._places.group(node), arguments[1]))
            result = run(arguments)
            if kind is pre_hook and call in self._entered:
                self._entered[call] = list(result)
        if kind is tensor_hook and (call, tensor_hook) in self._added:
            result = self._behind(node, result)
        if call in self._places.calls and node is self._places.calls[call][-1]:
            result = self._after(call, node, result)
        return result

    def _behind(self, node: fx.Node, grad: Any) -> Any:
        """Call the new hooks of a tensor's dict, if its last hook was called."""
        group = self._places.group(node)
        if any(self._places.group(user) == group for user in node.users if ir.hook_kind(user.target) is tensor_hook):
            return grad
        return self._new_in(group, grad)

    def _new_in(self, group: tuple[int, Any, int], grad: Any) -> Any:
        """Call the hooks that are new in a tensor's dict."""
        call, _, index = group
        late = self._added[call, tensor_hook]
        for each in [each for each in late if each[0] == index]:
            late.remove(each)
            grad = tensor_hook(each[1], grad)
        return grad

    def _now_entering(self, call: int, is_function: bool, given: Sequence[Any]) -> list[Any] | None:
        """Return the gradients that enter a node of the tape, or its next hook; None if the graph has them."""
        late = self._added.pop((call, tensor_hook), ())
        before = self._added.pop((call, pre_hook), ()) if is_function else ()
        after = any(index != _WHILE_IT_RAN for index, _, _ in self._added.get((call, post_hook), ()))
        if not late and not before and not after and call not in self._entered:
            return None
        entered = self._entered.get(call, list(given))
        for index, hook, _ in late:
            entered[index] = tensor_hook(hook, entered[index])
        for _, hook, _ in before:
            entered = list(pre_hook(hook, entered))
        self._entered[call] = entered
        return entered

    def _after(self, call: int, node: fx.Node, result: Any) -> Any:
        """Call the late hooks after a node of the tape."""
        leaf = self._leaf(call)
        for _, hook, _ in self._added.pop((call, post_accumulate_hook), ()):
            post_accumulate_hook(hook, leaf)
        late = self._added.pop((call, post_hook), ())
        had = [each for each in self._places.calls[call] if ir.hook_kind(each.target) is post_hook]
        entered: Sequence[Any] = ()
        # What entered it the engine keeps only where it had hooks when it began; elsewhere it has moved on.
        if had or any(index != _WHILE_IT_RAN for index, _, _ in late):
            entered = self._entered.get(call, ())
            if had and call not in self._entered:
                entered = list(map(self.value_of, had[0].args[2]))  # type: ignore[arg-type]
        for _, hook, _ in late:
            result = post_hook(hook, result, entered)
        return result

    def _give(self, before: fx.Node | None = None) -> None:
        """Call the late hooks of outputs whose nodes do not run, those that the engine comes to before a call."""
        for place in list(self._outputs):
            if before is not None and not self._places.is_given(place, before):
                continue
            grad = self._value(self._places.given[place])
            for _, hook, _ in self._outputs.pop(place):
                grad = tensor_hook(hook, grad)
            self._given[place] = grad

    def _value(self, value: Any) -> Any:
        """Return a requested gradient. It may still have to be taken from a call's result, or summed."""
        found = self.value_of(value) if isinstance(value, fx.Node) else value
        if found is not None or not isinstance(value, fx.Node) or ir.PART_OF_SUM in value.meta:
            return found  # a part of a sum is made before a hook sees the sum; it may be undefined
        if value.target is operator.getitem:
            whole = self._value(value.args[0])
            return None if whole is None else whole[value.args[1]]
        return value.target(*map(self._value, value.args)) if value.target is ir.sum_gradients else None

    def outputs(self, results: list[Any]) -> list[Any]:
        """Return the results of ``autograd.grad``, from those of the tape graph."""
        self._give()
        return [self._given.get(place, result) for place, result in enumerate(results)]


def _is_made_up(value: Any, call: int) -> bool:
    """Return whether a gradient that enters a node is zeros that the engine made after all hooks before the node. These
    hooks see an undefined gradient."""
    return isinstance(value, fx.Node) and value.target is ir.zeros and value.meta["call"] == call


def _tensors_with(hooks: Any) -> list[torch.Tensor]:
    """Return the living tensors that have a dict of hooks."""
    return [each for each in gc.get_referrers(hooks) if isinstance(each, torch.Tensor)]
