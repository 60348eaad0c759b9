// Straight-line programs (`backends/inductor/straight_line`) whose arguments and results are tensors of C++.

#pragma once

#include "accumulate.h"
#include "python.h"

#include "../../backends/inductor/straight_line/host.h"

namespace native {

struct Gives {
  size_t leaf;    // of the handover's tensors
  size_t result;  // of the program's
  bool can_keep;
};

class HostedProgram {
 public:
  // function: what `straight_line.cpp` made. arguments: which of a handover's tensors it takes. Throws PythonError.
  HostedProgram(PyObject* function, std::vector<size_t> arguments, std::vector<Gives> gives);

  // The program's results. Of the tensors, those that are arguments and no leaves are let go as they are not needed any
  // more, and the others at once. Throws PythonError, and what others throw.
  variable_list run(variable_list& tensors) const;

  // What each leaf is to be given.
  std::vector<Gift> gifts(const variable_list& tensors, const variable_list& results) const;

  const std::vector<Gives>& gives() const { return gives_; }

 private:
  Owned function_;
  const straight_line::Entry* entry_;
  std::vector<size_t> arguments_;
  std::vector<Gives> gives_;
};

}  // namespace native
