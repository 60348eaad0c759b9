// Where Python keeps what some questions are about.

#include "readers.h"

#include <structmember.h>

namespace native {

namespace {

// Which object it is: it is compared, and never looked into.
int64_t number_of(PyObject* object) { return static_cast<int64_t>(reinterpret_cast<intptr_t>(object)); }

// Whether an object that equals it now always will.
bool is_for_ever(PyObject* object) {
  return object == Py_None || PyBool_Check(object) || PyLong_CheckExact(object) || PyBytes_CheckExact(object) ||
         PyUnicode_CheckExact(object);
}

int64_t read_slot(const Reader& reader) {
  return number_of(*reinterpret_cast<PyObject**>(reinterpret_cast<char*>(reader.object) + reader.number));
}

int64_t read_item(const Reader& reader) { return number_of(PyDict_GetItemWithError(reader.object, reader.key)); }

int64_t read_variable(const Reader& reader) {
  PyObject* value = nullptr;
  PyContextVar_Get(reader.object, nullptr, &value);
  Py_XDECREF(value);  // whoever set it keeps it
  return number_of(value);
}

int64_t read_dict_size(const Reader& reader) { return PyDict_GET_SIZE(reader.object); }

int64_t read_list_size(const Reader& reader) { return PyList_GET_SIZE(reader.object); }

// How to read what a method of C gives with these arguments; null where that is not known here.
int64_t (*how_to_read(PyObject* self, PyObject* name, Py_ssize_t arguments, PyObject* answer))(const Reader&) {
  const auto is_named = [&](const char* text) { return PyUnicode_CompareWithASCIIString(name, text) == 0; };
  if (is_named("__len__") && !arguments) {
    if (PyDict_CheckExact(self)) return read_dict_size;
    return PyList_CheckExact(self) ? read_list_size : nullptr;
  }
  if (!is_named("get") || !is_for_ever(answer)) return nullptr;
  if (PyContextVar_CheckExact(self) && !arguments) return read_variable;
  return PyDict_CheckExact(self) && arguments == 1 ? read_item : nullptr;
}

// Of `None.__str__` and its like: not every version of Python has a public name for the type.
PyTypeObject* type_of_method_wrappers() {
  static PyTypeObject* const type = Py_TYPE(checked(PyObject_GetAttrString(Py_None, "__str__")));
  return type;
}

}  // namespace

Py_ssize_t offset_of_slot(PyObject* object, PyObject* name) {
  PyTypeObject* type = Py_TYPE(object);
  if (type->tp_getattro != PyObject_GenericGetAttr) return -1;
  const Owned held = found(reinterpret_cast<PyObject*>(type), name);
  if (!held || !Py_IS_TYPE(held.get(), &PyMemberDescr_Type)) return -1;
  const PyMemberDef& member = *reinterpret_cast<PyMemberDescrObject*>(held.get())->d_member;
  return member.type == T_OBJECT_EX ? member.offset : -1;
}

Reader reader_of_attribute(PyObject* object, PyObject* name) {
  const Py_ssize_t place = offset_of_slot(object, name);
  if (place >= 0) return {read_slot, object, nullptr, place};
  return PyModule_CheckExact(object) ? Reader{read_item, PyModule_GetDict(object), name} : Reader();
}

Reader reader_of_method(PyObject* method, PyObject* answer) {
  const Owned called = found(method, "func"), given = found(method, "args"), named = found(method, "keywords");
  const bool is_partial = called && given && named && PyTuple_Check(given.get()) && PyDict_Check(named.get());
  if (is_partial && PyDict_GET_SIZE(named.get())) return {};
  PyObject* function = is_partial ? called.get() : method;
  if (!PyCFunction_Check(function) && !Py_IS_TYPE(function, type_of_method_wrappers())) return {};
  const Owned self = found(function, "__self__"), name = found(function, "__name__");
  if (!self || !name || !PyUnicode_Check(name.get())) return {};
  const Py_ssize_t arguments = is_partial ? PyTuple_GET_SIZE(given.get()) : 0;
  const Reader reader{
      how_to_read(self.get(), name.get(), arguments, answer), self.get(),
      arguments ? PyTuple_GET_ITEM(given.get(), 0) : nullptr};
  // Of what is only equal, nothing keeps the place from becoming that of something else.
  const bool is_object = reader.read == read_variable || reader.read == read_item;
  return is_object && reader() != number_of(answer) ? Reader() : reader;
}

}  // namespace native
