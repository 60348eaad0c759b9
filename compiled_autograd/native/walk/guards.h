// What compiled code was made for: the kinds, sizes and strides of the tensors that it is given, the sizes, the
// numbers. It asks what `TensorGuards` asks in Python (`Variant.serves`), of all tensors in one go.

#pragma once

#include "walk.h"

namespace native {

class Guards {
 public:
  // Those of what was found. Throws Refused where a tensor is none that code is made for.
  explicit Guards(const Handover& found);

  bool hold(const Handover& found) const;

 private:
  std::vector<int64_t> expected_;
};

}  // namespace native
