// `FastPath`, of Python: called in the place of `run_backward`. It serves hits that Python has served before, runs on
// eager what skips a look, and hands everything else on.

#pragma once

#include "../python.h"

namespace native {

// fast_path(fallback, resume, interrupted, thread, uses, engine) -> FastPath
PyObject* new_fast_path(PyObject*, PyObject* arguments);

bool make_class_of_fast_paths();

}  // namespace native
