// The Python class `Taken`: the values of a tape that was taken. They become Python objects on request, or go to a
// program unchanged. And the Python class `Program`: a `HostedProgram`.

#pragma once

#include "hosted.h"
#include "walk/walk.h"

namespace native {

// The tuple (tensors, sizes, scalars, objects), which has them from then on. Throws PythonError.
PyObject* as_python(Handover& found);

// A new `Taken`. Throws PythonError.
PyObject* new_taken(int variant, Handover found);

bool is_taken(PyObject* object);
int shapes_of(PyObject* taken);  // the number of the variant of a plan's

// Run a program on the values of a tape, which are used up in any case. None if the leaves have their gradients; else
// (results, tensors), those of leaves. Throws PythonError, and what the program does.
PyObject* run_taken(PyObject* taken, const HostedProgram& program, PyObject* may_write);

// The program of a `Program` of Python's; null for any other object.
const HostedProgram* program_in(PyObject* object);

// program(function, arguments, gives) -> Program
PyObject* new_program(PyObject*, PyObject* arguments);

// Make the classes; false with the error set.
bool make_classes_of_taken();

}  // namespace native
