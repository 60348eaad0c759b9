// The compiled code of a region, with C++ tensors as arguments and results. A straight-line program
// (`backends/inductor/straight_line`) takes them unchanged; other code is called in Python.

#pragma once

#include "accumulate.h"
#include "python.h"

#include "../../backends/inductor/straight_line/host.h"

namespace native {

class HostedProgram {
 public:
  // function: takes a list, which it empties, and returns a sequence. arguments: indices into a handover's tensors.
  // gives: the results for leaves, which are among these tensors.
  HostedProgram(PyObject* function, std::vector<size_t> arguments, std::vector<Gives> gives);

  // Appends the program's results. Tensors that are arguments and no leaves are released after their last use, and the
  // others at once. Throws what the function does.
  void run(variable_list& tensors, variable_list& results) const;

  const std::vector<Gives>& gives() const { return gives_; }
  bool is_straight_line() const { return entry_ != nullptr; }

 private:
  Owned function_;
  const straight_line::Entry* entry_ = nullptr;  // of a straight-line program
  bool is_leaf(size_t tensor) const { return tensor < is_leaf_.size() && is_leaf_[tensor]; }

  std::vector<size_t> arguments_;
  std::vector<bool> is_needed_later_;  // for each: by another argument, or since it is a leaf
  std::vector<bool> is_leaf_;
  std::vector<Gives> gives_;
};

}  // namespace native
