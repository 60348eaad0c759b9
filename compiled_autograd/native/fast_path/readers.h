// Questions whose answer lies somewhere in memory: a variable of PyTorch behind a function that only says what it
// holds, an attribute, how long a dict is. Read here without the way through Python, which takes a hundred times as
// long when nothing of it is in the processor's caches.

#pragma once

#include "../python.h"

namespace native {

// It keeps nothing alive: the object that it reads has to live as long.
struct Reader {
  int64_t (*read)(const Reader&) = nullptr;
  PyObject* object = nullptr;
  PyObject* key = nullptr;
  int64_t number = 0;

  explicit operator bool() const { return read != nullptr; }
  // If the number is unchanged, Python would give the same answer. It may leave an error set.
  int64_t operator()() const { return read(*this); }
};

// Each of them: the reader of what it is given, or one that reads nothing where that is not known here. Throws
// PythonError.

// A function of `torch._C`, or a `functools.partial` of one.
Reader reader_of_variable(PyObject* function);
// What a dict, a list or a variable of the context says of itself: a method without arguments, or a `functools.partial`
// of one.
Reader reader_of_method(PyObject* method, PyObject* answer);
// Where in an object its class keeps what is in `__slots__`; negative for anything else. Throws PythonError.
Py_ssize_t offset_of_slot(PyObject* object, PyObject* name);
// An attribute.
Reader reader_of_attribute(PyObject* object, PyObject* name);

// An attribute; null where it is not there. Throws PythonError.
Owned found(PyObject* object, PyObject* name);
Owned found(PyObject* object, const char* name);

}  // namespace native
