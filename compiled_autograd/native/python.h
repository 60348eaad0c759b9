// What the files that Python sees share: objects that are owned, tensors of Python, and errors in either language.

#pragma once

#include "contract.h"

#include <new>

namespace native {

struct Release {
  void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Release>;

struct PythonError : std::exception {};  // the error is set

inline PyObject* checked(PyObject* object) {
  if (!object) throw PythonError();
  return object;
}

// The beginning of `THPVariable` (python_variable.h, 2.13), which the self-check of library.py proves.
struct PythonTensor {
  PyObject_HEAD
  at::Tensor tensor;
};

// Null for anything but a tensor.
inline const at::Tensor* tensor_in(PyObject* object) {
  if (!PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(THPVariableClass))) return nullptr;
  return &reinterpret_cast<PythonTensor*>(object)->tensor;
}

inline const at::Tensor& tensor_of(PyObject* object, const char* refusal) {
  const at::Tensor* tensor = tensor_in(object);
  if (!tensor) throw Refused{refusal};
  return *tensor;
}

// ---- errors ---------------------------------------------------------------------------------------------------------

inline PyObject* text(const std::string& reason) {
  return PyUnicode_DecodeUTF8(reason.data(), static_cast<Py_ssize_t>(reason.size()), "replace");
}

// The error that is set, in its own words; null, and it stays set, where it is none that a step goes on after.
inline PyObject* reason_of_error() {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  const Owned owned_type(type), owned_value(value), owned_traceback(traceback);
  PyObject* words = PyObject_Str(value);
  if (words || !PyErr_ExceptionMatches(PyExc_Exception)) return words;
  PyErr_Clear();
  return PyUnicode_FromString(reinterpret_cast<PyTypeObject*>(type)->tp_name);
}

// The last of an error and those in whose place it came, or the one that came in the place of `other`; null where there
// is no end.
inline Owned last_context(PyObject* error, PyObject* other) {
  constexpr int kMost = 1000;
  Owned each(Py_NewRef(error));
  for (int count = 0; count < kMost; ++count) {
    Owned before(PyException_GetContext(each.get()));
    if (!before || before.get() == other) return each;
    each = std::move(before);
  }
  return nullptr;
}

// As Python does it where an error is raised while another is handled: what was there is no context of its own.
inline void add_context(PyObject* error, PyObject* before) {
  const Owned last = last_context(error, before), first = last_context(before, error);
  if (error == before || !last || !first) return;
  PyException_SetContext(first.get(), nullptr);
  PyException_SetContext(last.get(), Py_NewRef(before));
}

// Keeps the error that is set from what is done meanwhile.
class ErrorKept {
 public:
  ErrorKept() { PyErr_Fetch(&type_, &value_, &traceback_); }
  ~ErrorKept() {
    if (type_) PyErr_Restore(type_, value_, traceback_);
  }
  PyObject* value() {
    PyErr_NormalizeException(&type_, &value_, &traceback_);
    return value_ ? value_ : Py_None;
  }
  // What was done meanwhile has set another, in the place of which this one was: as in a `finally` of Python's.
  void give_way() {
    if (!type_) return;
    PyObject *type, *other, *traceback;
    PyErr_Fetch(&type, &other, &traceback);
    PyErr_NormalizeException(&type, &other, &traceback);
    PyObject* before = value();
    if (traceback_) PyException_SetTraceback(before, traceback_);
    add_context(other, before);
    PyErr_Restore(type, other, traceback);
    for (PyObject** each : {&type_, &value_, &traceback_}) Py_CLEAR(*each);
  }

 private:
  PyObject *type_, *value_, *traceback_;
};

// What `act` gives, or null with the error set. No exception of C++ goes further.
template <typename Act>
PyObject* or_error(Act act) {
  try {
    return act();
  } catch (const PythonError&) {
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}

// The same, and the reason, where it refuses or something is raised that a step goes on after.
template <typename Act>
PyObject* or_reason(Act act) {
  PyObject* given = or_error([&] {
    try {
      return act();
    } catch (const Refused& refused) {
      return text(refused.reason);
    }
  });
  return given ? given : reason_of_error();
}

}  // namespace native
