// Backwards that go to the eager engine without a look at their tape: those of threads without a session, and those
// that `Here.unseen` counts. `Engine.run_backward` does the same in Python.

#pragma once

#include "serve.h"

#include <optional>

namespace native {

// Where such a backward belongs.
struct Skip {
  Owned here;
  Owned session, verdict;  // null for a thread without a session
};

// Null if Python has to look at it, or another thread has the seam or writes leaves. Throws PythonError. No other
// thread may run between this and `run_on_eager`.
std::optional<Skip> skip_of(const FastPathState& path, PyObject* all, PyObject* by_name);

// What the eager engine gives. The session has counted the backward. Throws PythonError.
PyObject* run_on_eager(const FastPathState& path, const Skip& skip, PyObject* all, PyObject* by_name);

}  // namespace native
