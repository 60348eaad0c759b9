// Whether two tensors hold the same values but for rounding.

#pragma once

#include "contract.h"

namespace native {

// Whether no value of `found` is further from that of `wanted` than `relative` times the root mean square of `wanted`.
// False also where that cannot be told here: for anything but floats of one dtype on the CPU that lie in memory without
// gaps and in one order, and where a value is not finite. Needs no GIL.
bool surely_alike(const at::Tensor& wanted, const at::Tensor& found, double relative);

}  // namespace native
