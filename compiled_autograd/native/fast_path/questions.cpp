#include "questions.h"

namespace native {

namespace {

// An error that is set says that a question has not its answer, unless it is one that a step does not go on after.
void forget_error() {
  if (!PyErr_Occurred()) return;
  if (!PyErr_ExceptionMatches(PyExc_Exception)) throw PythonError();
  PyErr_Clear();
}

}  // namespace

Questions::Questions(PyObject* sequence) {
  const Owned list(checked(PySequence_Fast(sequence, "a sequence of questions is wanted")));
  for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(list.get()); ++index) {
    PyObject *object, *name, *answer;
    if (!PyArg_ParseTuple(PySequence_Fast_GET_ITEM(list.get(), index), "OOO", &object, &name, &answer))
      throw PythonError();
    Question question{Owned(Py_NewRef(object)), Owned(Py_NewRef(name)), Owned(Py_NewRef(answer)), Reader(), 0};
    question.reader = reader_of(question);
    if (question.reader) question.read = question.reader();
    forget_error();
    // Else it has another answer now, or another thread has just changed what is read: Python is asked.
    const bool is_read = question.reader && holds_in_python(question) && question.reader() == question.read;
    if (!is_read) question.reader = Reader();
    forget_error();
    questions_.push_back(std::move(question));
  }
}

bool Questions::hold() const {
  for (const Question& question : questions_) {
    if (holds(question)) continue;
    forget_error();
    return false;
  }
  return true;
}

Reader Questions::reader_of(const Question& question) {
  PyObject *object = question.object.get(), *name = question.name.get(), *answer = question.answer.get();
  if (name != Py_None) return reader_of_attribute(object, name);
  const Reader reader = reader_of_variable(object);
  return reader ? reader : reader_of_method(object, answer);
}

bool Questions::holds(const Question& question) {
  if (question.reader && question.reader() == question.read) return true;
  forget_error();
  return holds_in_python(question);
}

bool Questions::holds_in_python(const Question& question) {
  if (question.name.get() != Py_None) {
    const Owned found(PyObject_GetAttr(question.object.get(), question.name.get()));
    return found.get() == question.answer.get();
  }
  const Owned found(PyObject_CallNoArgs(question.object.get()));
  return found && PyObject_RichCompareBool(found.get(), question.answer.get(), Py_EQ) == 1;
}

}  // namespace native
