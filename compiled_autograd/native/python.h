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

// What `act` gives, or null with the error set. No exception of C++ goes further.
template <typename Act>
PyObject* or_error(Act act) {
  try {
    return act();
  } catch (const PythonError&) {
  } catch (const Refused& refused) {
    PyErr_SetString(PyExc_RuntimeError, refused.reason.c_str());
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
