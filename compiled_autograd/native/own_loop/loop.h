// A backward without the engine's queue: the nodes of a tape one after the other, inside of one call of a node by
// the engine. So all that depends on the engine is as it is under it: the task that is under way, the state of the
// thread, warnings, errors, a backward inside of another one.

#pragma once

#include "../calls.h"

namespace native {

// (outputs, gradients, keep_graph, least_nodes) -> (number, gradient): the backward of the number is that of the
// outputs, once. The reason where the engine is to run it itself.
PyObject* in_own_loop(PyObject*, PyObject* arguments);

// () -> the node that runs, where the innermost backward of the thread is such a one; else None.
PyObject* node_in_own_loop(PyObject*, PyObject*);

// (ctx) -> for each edge of the node that the loop runs the sum of gradients at its target, or None. None if that is
// not the node of the ctx, or has post hooks: then the engine's own getter raises.
PyObject* buffers_in_own_loop(PyObject*, PyObject* ctx);

// () -> None. Where it is such a one, the engine knows of all nodes that it runs from then on.
PyObject* show_own_loop(PyObject*, PyObject*);

// () -> the nodes in the order in which they run, as the engine tells it; None where it is no such one.
PyObject* order_in_own_loop(PyObject*, PyObject*);

}  // namespace native
