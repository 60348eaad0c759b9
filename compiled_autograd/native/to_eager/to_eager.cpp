#include "to_eager.h"

namespace native {

namespace {

PyObject* item(PyObject* tuple, Py_ssize_t index) {
  PyObject* found = PyTuple_Check(tuple) ? PyTuple_GetItem(tuple, index) : nullptr;
  if (!found && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a tuple is wanted");
  return checked(found);
}

Owned item_owned(PyObject* tuple, Py_ssize_t index) { return Owned(Py_NewRef(item(tuple, index))); }

// Whether gradients are accumulated, in the form in which PyTorch calls the engine; nothing in another, and where the
// backward is to be differentiated.
std::optional<bool> accumulates(PyObject* all, PyObject* by_name) {
  if (PyTuple_GET_SIZE(all) < 5 || PyTuple_GET_ITEM(all, 3) != Py_False || !by_name) return std::nullopt;
  static PyObject* const names[] = {
      PyUnicode_InternFromString("accumulate_grad"), PyUnicode_InternFromString("allow_unreachable")};
  if (PyTuple_GET_SIZE(all) + PyDict_GET_SIZE(by_name) != 7) return std::nullopt;
  if (PyTuple_GET_SIZE(all) == 5 && !PyDict_GetItemWithError(by_name, names[1])) return std::nullopt;
  PyObject* given = PyDict_GetItemWithError(by_name, names[0]);
  if (!given || !PyBool_Check(given)) return std::nullopt;
  return given == Py_True;
}

// The last one that is the same object. What is at the end goes without the list's giving memory back, which the next
// one would ask for again.
void remove(PyObject* list, PyObject* number) {
  const Py_ssize_t last = PyList_GET_SIZE(list) - 1;
  Py_ssize_t index = last;
  while (index >= 0 && PyList_GET_ITEM(list, index) != number) --index;
  if (index >= 0 && index == last) {
    Py_SET_SIZE(list, last);
    Py_DECREF(number);
  } else if (index >= 0 && PyList_SetSlice(list, index, index + 1, nullptr) < 0) {
    throw PythonError();
  }
}

}  // namespace

ToEager::ToEager(PyObject* arguments)
    : eager_(item_owned(arguments, 0)),
      idents_(item_owned(item(arguments, 2), 0)),
      line_(item_owned(item(arguments, 2), 1)),
      claims_(item_owned(item(arguments, 2), 2)),
      here_type_(item_owned(item(arguments, 1), 0)),
      session_type_(item_owned(item(arguments, 1), 1)),
      known_type_(item_owned(item(arguments, 1), 2)),
      left_type_(item_owned(item(arguments, 1), 3)),
      stack_(here_type_.get(), "stack"),
      ident_(here_type_.get(), "ident"),
      running_(here_type_.get(), "running"),
      unseen_(here_type_.get(), "unseen"),
      length_(here_type_.get(), "length"),
      number_(here_type_.get(), "number"),
      known_(here_type_.get(), "known"),
      verdict_(here_type_.get(), "verdict"),
      looped_(here_type_.get(), "looped"),
      session_number_(session_type_.get(), "number"),
      left_(session_type_.get(), "left"),
      in_cpp_(session_type_.get(), "in_cpp"),
      holds_for_(known_type_.get(), "left"),
      left_verdict_(left_type_.get(), "verdict"),
      left_count_(left_type_.get(), "count") {
  for (PyObject* list : {idents_.get(), line_.get(), claims_.get()})
    if (!PyList_CheckExact(list)) {
      PyErr_SetString(PyExc_TypeError, "lists are wanted");
      throw PythonError();
    }
}

std::optional<PyObject*> ToEager::run(PyObject* here, PyObject* all, PyObject* by_name) const {
  const auto how = accumulates(all, by_name);
  if (!how || PyList_GET_SIZE(line_.get()) || PyList_GET_SIZE(claims_.get())) return std::nullopt;
  if (reinterpret_cast<PyObject*>(Py_TYPE(here)) != here_type_.get()) return std::nullopt;
  PyObject* stack = stack_.get(here);
  if (!stack || !PyList_CheckExact(stack)) return std::nullopt;
  const Py_ssize_t inside = PyList_GET_SIZE(stack);
  const Owned session(Py_NewRef(inside ? PyList_GET_ITEM(stack, inside - 1) : Py_None));
  if (session.get() == Py_None) {
    length_.set(here, Owned(checked(PyLong_FromLong(0))).get());
    return on_eager(here, all, by_name);
  }
  if (!is_left(here, session.get(), *how)) return std::nullopt;
  unseen_.add(here, -1);
  const Owned verdict(Py_NewRef(verdict_.get(here)));
  Owned result(or_error([&] { return on_eager(here, all, by_name); }));
  ErrorKept error;
  try {
    count(session.get(), verdict.get());
  } catch (const PythonError&) {
    error.give_way();
    throw;
  }
  return result.release();
}

int ToEager::traverse(visitproc visit, void* arg) const {
  for (const Owned* each :
       {&eager_, &idents_, &line_, &claims_, &here_type_, &session_type_, &known_type_, &left_type_})
    Py_VISIT(each->get());
  return 0;
}

bool ToEager::is_left(PyObject* here, PyObject* session, bool accumulates) const {
  if (reinterpret_cast<PyObject*>(Py_TYPE(session)) != session_type_.get() || !in_cpp_.is(session, Py_True))
    return false;
  if (unseen_.number(here) <= 0 || number_.number(here) != session_number_.number(session)) return false;
  PyObject* known = known_.get(here);
  if (!known || reinterpret_cast<PyObject*>(Py_TYPE(known)) != known_type_.get() || holds_for_.number(known) <= 0)
    return false;
  return verdict_.get(here) && !(accumulates && !looped_.is(here, Py_False));
}

PyObject* ToEager::on_eager(PyObject* here, PyObject* all, PyObject* by_name) const {
  const Owned me(Py_NewRef(checked(ident_.get(here)))), outer(Py_NewRef(checked(running_.get(here))));
  if (PyList_Append(idents_.get(), me.get()) < 0) throw PythonError();
  running_.set(here, Py_None);
  Owned result(PyObject_Call(eager_.get(), all, by_name));
  if (result && PyErr_CheckSignals() < 0) result.reset();  // as Python does here: else a handler's error comes later
  const ErrorKept error;
  running_.set(here, outer.get());
  remove(idents_.get(), me.get());
  return result.release();
}

void ToEager::count(PyObject* session, PyObject* verdict) const {
  PyObject* left = left_.get(session);
  const bool is_known = left && reinterpret_cast<PyObject*>(Py_TYPE(left)) == left_type_.get();
  if (is_known && left_verdict_.is(left, verdict)) {
    left_count_.add(left, 1);
    return;
  }
  static PyObject* const name = PyUnicode_InternFromString("left_to_eager");
  const Owned done(checked(PyObject_CallMethodOneArg(session, name, verdict)));
}

}  // namespace native
