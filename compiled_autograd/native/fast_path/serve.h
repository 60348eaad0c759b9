// A backward that one of the known hits may serve: found, run and counted as Python would.

#pragma once

#include "../calls.h"
#include "hit.h"

#include <chrono>

namespace native {

// The clock of `time.perf_counter`.
inline double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// What a `FastPath` of Python's knows.
struct FastPathState {
  PyObject* hits;         // a tuple of FastHit, in whose place Python puts another one
  PyObject* fallback;     // the way through Python
  PyObject* resume;       // the same, once the tape is taken
  PyObject* interrupted;  // records a backward that ended before anything ran
  PyObject* thread;       // the thread's state
  PyObject* uses;         // numbers uses
  PyObject* run;          // `run_backward` of the eager engine
  PyObject* idents;       // lists of threads: those in the eager engine,
  PyObject* writing;      // those that write leaves,
  PyObject* line;         // and those that have a tape walked
  Py_ssize_t served;
  const FastHit* last;  // the hit that served last: it may no longer exist
};

// Keeps the error that is set from what is done meanwhile.
class ErrorKept {
 public:
  ErrorKept() { PyErr_Fetch(&type_, &value_, &traceback_); }
  ~ErrorKept() {
    if (type_) PyErr_Restore(type_, value_, traceback_);
  }
  void drop() {
    const Owned type(type_), value(value_), traceback(traceback_);
    type_ = value_ = traceback_ = nullptr;
  }
  PyObject* value() {
    PyErr_NormalizeException(&type_, &value_, &traceback_);
    return value_ ? value_ : Py_None;
  }

 private:
  PyObject *type_, *value_, *traceback_;
};

// How it was asked for.
struct Asked {
  Call call;
  bool keeps;
  double started;               // when, by the clock of `time.perf_counter`
  PyObject* account = nullptr;  // of Python's, where that has asked what policies ask before: it says what is counted
};

// What became of it.
struct Served {
  Owned session;           // null where nothing here can serve the thread
  Owned variant;           // it has run it,
  double seconds = 0;      // in this time
  Owned taken, hand_over;  // else, if the tape is taken: its values, and the function that makes them Python's
};

// Throws PythonError; then the session knows of it, or, where there is an account, what that says.
Served serve(FastPathState& path, const Asked& asked);

}  // namespace native
