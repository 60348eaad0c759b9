// Attributes of a class of Python's that has `__slots__`, where they lie in its objects.

#pragma once

#include "../python.h"

#include <structmember.h>

namespace native {

// Of what a class has under a name: where its objects have that attribute; negative where it is no slot.
inline Py_ssize_t place_of_slot(PyObject* descriptor) {
  if (!Py_IS_TYPE(descriptor, &PyMemberDescr_Type)) return -1;
  const PyMemberDef& member = *reinterpret_cast<PyMemberDescrObject*>(descriptor)->d_member;
  return member.type == T_OBJECT_EX ? member.offset : -1;
}

class Slot {
 public:
  // Throws PythonError where the class has no such slot.
  Slot(PyObject* type, const char* name) {
    const Owned descriptor(checked(PyObject_GetAttrString(type, name)));
    place_ = place_of_slot(descriptor.get());
    if (place_ >= 0) return;
    PyErr_Format(PyExc_TypeError, "%R has no slot %s", type, name);
    throw PythonError();
  }

  // Borrowed; null where nothing is in it.
  PyObject* get(PyObject* object) const { return *of(object); }

  bool is(PyObject* object, PyObject* value) const { return get(object) == value; }

  void set(PyObject* object, PyObject* value) const {
    const Owned before(std::exchange(*of(object), Py_NewRef(value)));
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
  PyObject** of(PyObject* object) const {
    return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + place_);
  }

  Py_ssize_t place_;
};

}  // namespace native
