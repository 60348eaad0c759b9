// How a program is run by somebody who has the tensors in C++: no Python object is made of one that no Python sees.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace straight_line {

struct Shape {
  Py_ssize_t dimensions;
  const std::int64_t* sizes;
  const std::int64_t* strides;  // in elements
  PyObject* dtype;              // a torch.dtype
};

// Any of these may throw what derives from std::exception, with Python's error set or not. The GIL is held.
struct Host {
  void* self;
  void* (*address)(void* self, Py_ssize_t slot);                       // of an argument's memory
  void* (*allocate)(void* self, Py_ssize_t slot, const Shape& shape);  // something that is given back: its memory
  PyObject* (*object)(void* self, Py_ssize_t slot);                    // either, for Python: a new reference, or null
  void (*drop)(void* self, Py_ssize_t slot);                           // either is not needed any more
  // What is given back, one after the other; `object` is null where the host has it, by its slot.
  void (*result)(void* self, Py_ssize_t index, Py_ssize_t slot, PyObject* object);
};

// A program is a function of Python whose `self` is a capsule of this name, with an Entry for its context.
constexpr const char* program_name = "straight-line program, hosts 1";

struct Entry {
  bool (*run)(void* program, Py_ssize_t arguments, const Host& host);  // false: Python's error is set
  void* program;
};

}  // namespace straight_line
