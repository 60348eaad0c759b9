// What a step gives to its leaves.

#pragma once

#include "contract.h"

#include <vector>

namespace native {

struct Gift {
  const at::Tensor& leaf;
  const at::Tensor& gradient;
  bool can_keep;  // it lies in memory of its own and as the leaf wants it
};

// Write all of it into `.grad` of leaves that are all others, as `steps/accumulate.py` does; or nothing, and false,
// where that file has to do it: it knows more cases, and lets other threads run meanwhile. With grad mode off. Throws
// what PyTorch's addition throws.
bool accumulate(const std::vector<Gift>& gifts);

}  // namespace native
