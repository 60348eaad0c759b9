#include "questions.h"

namespace native {

Questions::Questions(PyObject* sequence) {
  const Owned list(checked(PySequence_Fast(sequence, "a sequence of questions is wanted")));
  for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(list.get()); ++index) {
    PyObject *object, *name, *answer;
    if (!PyArg_ParseTuple(PySequence_Fast_GET_ITEM(list.get(), index), "OOO", &object, &name, &answer))
      throw PythonError();
    questions_.push_back({Owned(Py_NewRef(object)), Owned(Py_NewRef(name)), Owned(Py_NewRef(answer))});
  }
}

bool Questions::hold() const {
  for (const Question& question : questions_) {
    if (holds(question)) continue;
    if (PyErr_Occurred()) {
      if (!PyErr_ExceptionMatches(PyExc_Exception)) throw PythonError();
      PyErr_Clear();
    }
    return false;
  }
  return true;
}

bool Questions::holds(const Question& question) {
  if (question.name.get() != Py_None) {
    const Owned found(PyObject_GetAttr(question.object.get(), question.name.get()));
    return found.get() == question.answer.get();
  }
  const Owned found(PyObject_CallNoArgs(question.object.get()));
  return found && PyObject_RichCompareBool(found.get(), question.answer.get(), Py_EQ) == 1;
}

}  // namespace native
