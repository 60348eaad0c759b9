// Conditions that Python checks before it serves a hit, checked without running Python code. Each question has the
// answer that it had when Python served such a hit.

#pragma once

#include "readers.h"

#include <vector>

namespace native {

class Questions {
 public:
  // A sequence of tuples: (object, name, answer), where the attribute is that very object; (function, None, answer),
  // where a call without arguments gives something equal. Throws PythonError.
  explicit Questions(PyObject* sequence);
  Questions() = default;

  // Whether each has its answer. One that raises has not; what a step does not go on after, such as Ctrl-C, is thrown.
  bool hold() const;

 private:
  struct Question {
    Owned object, name, answer;
    Reader reader;  // read first; Python is asked only if the number differs
    int64_t read;   // the number while the question has its answer
  };
  static Reader reader_of(const Question& question);
  static bool holds(const Question& question);
  static bool holds_in_python(const Question& question);

  std::vector<Question> questions_;
};

}  // namespace native
