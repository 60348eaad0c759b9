#include "skip.h"

#include "readers.h"

#include <utility>

namespace native {

namespace {

// An attribute in the `__slots__` of a class, read and written where it lies.
class Slot {
 public:
  explicit Slot(const char* name) : name_(checked(PyUnicode_InternFromString(name))) {}

  // Null if the object's class keeps it elsewhere, or it is not set. Throws PythonError.
  PyObject* get(PyObject* object) {
    PyObject** place = find(object);
    return place ? *place : nullptr;
  }

  void set(PyObject* object, Owned value) {
    PyObject** place = find(object);
    const Owned before(place ? std::exchange(*place, value.release()) : nullptr);
  }

 private:
  PyObject** find(PyObject* object) {
    if (Py_TYPE(object) != type_) {
      offset_ = offset_of_slot(object, name_);
      Py_XSETREF(type_, reinterpret_cast<PyTypeObject*>(Py_NewRef(Py_TYPE(object))));
    }
    return offset_ < 0 ? nullptr : reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_);
  }

  PyObject* name_;
  PyTypeObject* type_ = nullptr;
  Py_ssize_t offset_ = -1;
};

// Made once, as long as the process is there.
struct Slots {
  Slot stack{"stack"}, unseen{"unseen"}, looped{"looped"}, verdict{"verdict"}, record{"record"}, number{"number"};
  Slot ident{"ident"}, running{"running"};  // up to here of `Here`
  Slot reason{"reason"};                    // of `Record`
  Slot number_of_session{"number"}, left{"left"};
  Slot verdict_left{"verdict"}, count{"count"};  // of `LeftToEager`
};

Slots& slots() {
  static Slots all;
  return all;
}

bool are_equal(PyObject* one, PyObject* other) {
  const int result = one && other ? PyObject_RichCompareBool(one, other, Py_EQ) : 0;
  if (result < 0) throw PythonError();
  return result == 1;
}

Owned number(long value) { return Owned(checked(PyLong_FromLong(value))); }

// Has a thread among those in the eager engine.
class Counted {
 public:
  Counted(PyObject* idents, PyObject* ident) : idents_(idents), ident_(ident) {
    if (PyList_Append(idents, ident) < 0) throw PythonError();
  }
  ~Counted() {  // equal ones are of the same thread
    for (Py_ssize_t index = PyList_GET_SIZE(idents_) - 1; index >= 0; --index)
      if (PyObject_RichCompareBool(PyList_GET_ITEM(idents_, index), ident_, Py_EQ) == 1) {
        PyList_SetSlice(idents_, index, index + 1, nullptr);
        return;
      }
  }

 private:
  PyObject *idents_, *ident_;
};

// As `Session.left_to_eager`. It is called for the first of a row.
void count(PyObject* session, PyObject* verdict) {
  PyObject *left = slots().left.get(session), *count = left ? slots().count.get(left) : nullptr;
  if (count && slots().verdict_left.get(left) == verdict)
    return slots().count.set(left, number(PyLong_AsLong(count) + 1));
  const Owned told(checked(PyObject_CallMethodOneArg(session, names().left_to_eager, verdict)));
}

// Whether gradients are added to `.grad`: the only backwards that the own loop may run.
bool accumulates(PyObject* all, PyObject* by_name) {
  if (PyTuple_GET_SIZE(all) > 6) return PyTuple_GET_ITEM(all, 6) != Py_False;
  PyObject* given = by_name ? PyDict_GetItemString(by_name, "accumulate_grad") : nullptr;
  return given && given != Py_False;
}

}  // namespace

std::optional<Skip> skip_of(const FastPathState& path, PyObject* all, PyObject* by_name) {
  if (PyTuple_GET_SIZE(all) < 4 || PyTuple_GET_ITEM(all, 3) != Py_False) return std::nullopt;  // `create_graph`
  Slots& of = slots();
  Skip skip{attribute(path.thread, names().here)};  // this may run code of Python's, in which other threads run
  if (PyList_GET_SIZE(path.writing) || PyList_GET_SIZE(path.line)) return std::nullopt;
  PyObject* here = skip.here.get();
  PyObject *stack = of.stack.get(here), *unseen = of.unseen.get(here), *record = of.record.get(here);
  if (!stack || !PyList_Check(stack) || !of.ident.get(here) || !of.running.get(here)) return std::nullopt;
  const Py_ssize_t depth = PyList_GET_SIZE(stack);
  PyObject* session = depth ? PyList_GET_ITEM(stack, depth - 1) : Py_None;
  if (session == Py_None) return skip;
  const long left = unseen ? PyLong_AsLong(unseen) : 0;
  PyObject* verdict = of.verdict.get(here);
  if (left <= 0 || !record || of.reason.get(record) != verdict) return std::nullopt;
  if (of.looped.get(here) != Py_False && accumulates(all, by_name)) return std::nullopt;
  if (!are_equal(of.number.get(here), of.number_of_session.get(session))) return std::nullopt;
  skip.session.reset(Py_NewRef(session));
  skip.verdict.reset(Py_XNewRef(verdict));
  of.unseen.set(here, number(left - 1));
  return skip;
}

PyObject* run_on_eager(const FastPathState& path, const Skip& skip, PyObject* all, PyObject* by_name) {
  PyObject* here = skip.here.get();
  const Owned ident(Py_NewRef(slots().ident.get(here)));
  Owned outer(Py_NewRef(slots().running.get(here)));
  std::optional<Counted> counted(std::in_place, path.idents, ident.get());
  slots().running.set(here, Owned(Py_NewRef(Py_None)));
  Owned result(PyObject_Call(path.run, all, by_name));
  ErrorKept error;
  slots().running.set(here, std::move(outer));
  counted.reset();
  if (skip.session) {
    try {
      count(skip.session.get(), skip.verdict.get());
    } catch (const PythonError&) {  // Ctrl-C, for example
      error.drop();
      throw;
    }
  }
  return result.release();
}

}  // namespace native
