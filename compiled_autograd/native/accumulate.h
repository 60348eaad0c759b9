// What a step gives to its leaves.

#pragma once

#include "contract.h"

#include <vector>

namespace native {

struct Gives {
  size_t leaf;    // of some tensors
  size_t result;  // of a program's results
  bool can_keep;  // it lies in memory of its own and as the leaf wants it
};

// Write all of it into `.grad` of leaves that are all others, as `steps/accumulate.py` does; or nothing, and false,
// where that file has to do it: it knows more cases, and lets other threads run meanwhile. With grad mode off. Throws
// what PyTorch's addition throws.
bool accumulate(const std::vector<Gives>& gives, const variable_list& tensors, const variable_list& results);

}  // namespace native
