// Functions of PyTorch's Python face that only say what a variable of C++ holds: read here without the way through
// Python, which takes a hundred times as long when nothing of it is in the processor's caches.

#pragma once

#include "../python.h"

namespace native {

class Reader {
 public:
  // Reads what that function says, if it is one of these; else it reads nothing. Throws PythonError.
  static Reader of(PyObject* function);

  explicit operator bool() const { return read_ != nullptr; }
  // The value as a number; the same only where the function says the same.
  int64_t operator()() const { return read_(argument_); }

 private:
  int64_t (*read_)(int64_t) = nullptr;
  int64_t argument_ = 0;
};

}  // namespace native
