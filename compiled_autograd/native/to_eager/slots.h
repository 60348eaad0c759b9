// Attributes of a class of Python's that has `__slots__`, where they lie in its objects.

#pragma once

#include "../python.h"

#include <structmember.h>

namespace native {

class Slot {
 public:
  // Throws PythonError where the class has no such slot.
  Slot(PyObject* type, const char* name) {
    const Owned descriptor(checked(PyObject_GetAttrString(type, name)));
    const bool is_member = Py_IS_TYPE(descriptor.get(), &PyMemberDescr_Type);
    const PyMemberDef* member =
        is_member ? reinterpret_cast<PyMemberDescrObject*>(descriptor.get())->d_member : nullptr;
    if (!member || member->type != T_OBJECT_EX) {
      PyErr_Format(PyExc_TypeError, "%R has no slot %s", type, name);
      throw PythonError();
    }
    offset_ = member->offset;
  }

  // Borrowed; null where nothing is in it.
  PyObject* get(PyObject* object) const { return *place_in(object); }

  bool is(PyObject* object, PyObject* value) const { return get(object) == value; }

  void set(PyObject* object, PyObject* value) const {
    const Owned before(std::exchange(*place_in(object), Py_NewRef(value)));
  }

  // Of a slot with a number.
  long number(PyObject* object) const {
    PyObject* found = get(object);
    const long value = found ? PyLong_AsLong(found) : -1;
    if (value == -1 && PyErr_Occurred()) throw PythonError();
    return value;
  }

  void add(PyObject* object, long more) const {
    set(object, Owned(checked(PyLong_FromLong(number(object) + more))).get());
  }

 private:
  PyObject** place_in(PyObject* object) const {
    return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_);
  }

  Py_ssize_t offset_;
};

}  // namespace native
