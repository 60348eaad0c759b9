// What a backward is called with, for those who walk its tape: shared by module.cpp, fast_path and own_loop.

#pragma once

#include "walk/plan.h"
#include "python.h"

namespace native {

struct Call {
  PyObject *outputs, *gradients, *inputs = nullptr;
  int captures = 0;  // the gradients of inputs are asked for, and not added to theirs
};

// The edges to the tape and the gradients that come to them. Throws Refused and PythonError.
std::pair<edge_list, variable_list> asked_for(const Call& call);

// Begin a walk over the tape of some outputs. Throws Refused, PythonError, and what the engine raises.
void begin(Walk& walk, const Call& call);

// A `Taken`, of a tape that is the plan's. Unless the tape is kept, it releases its saved values, once nothing can fail
// any more. A string, the reason, if it is another tape; null with the error set, for an error that ends the step.
PyObject* take_tape(Plan& plan, const Call& call, bool keeps);

// The plan of a `Plan` of Python's; null for any other object.
Plan* plan_in(PyObject* object);

struct WithoutGIL {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutGIL() { PyEval_RestoreThread(state); }
};

}  // namespace native
