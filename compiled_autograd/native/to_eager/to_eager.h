// Backwards that go to the eager engine without a look at their tape: outside of every session, and those of tapes that
// were left to it again and again, whose roots are not read. As `Engine.run_backward` and `execution.on_eager` do it,
// which Python runs where there is more to ask.

#pragma once

#include "slots.h"

#include <optional>

namespace native {

class ToEager {
 public:
  // See `Module.fast_path` in interface.py. Throws PythonError.
  explicit ToEager(PyObject* arguments);

  // What the engine gives, null with the error set; nothing where Python is to see to it. Throws PythonError.
  //
  // here: what Python knows of the calling thread.
  // all, by_name: what `run_backward` was given.
  std::optional<PyObject*> run(PyObject* here, PyObject* all, PyObject* by_name) const;

  int traverse(visitproc visit, void* arg) const;

 private:
  bool is_left(PyObject* here, PyObject* session, bool accumulates) const;
  PyObject* on_eager(PyObject* here, PyObject* all, PyObject* by_name) const;
  void count(PyObject* session, PyObject* verdict) const;

  Owned eager_, idents_, line_, claims_;  // the engine's method; lists of the gate and of the claims
  Owned here_type_, session_type_, known_type_, left_type_;
  Slot stack_, ident_, running_, unseen_, length_, number_, known_, verdict_, looped_;  // of a thread
  Slot session_number_, left_, in_cpp_;                                                 // of a session
  Slot holds_for_;                                                                      // of what a sketch has led to
  Slot left_verdict_, left_count_;                                                      // of what was left
};

}  // namespace native
