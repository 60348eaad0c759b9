// A hash of the first nodes of a tape, read before the engine is called, in about a microsecond.

#pragma once

#include "python.h"

namespace native {

// (outputs, inputs, number) -> a hash of the number that the settings have in the ledger, of the number of inputs, and
// of the classes and the numbers of edges of the tape's first nodes: at most 64, level by level. None if an output is
// no tensor.
PyObject* peek(PyObject*, PyObject* arguments);

// The same hash in C++. Throws Refused.
uint64_t peek_at(PyObject* outputs, Py_ssize_t inputs, uint64_t number);

}  // namespace native
