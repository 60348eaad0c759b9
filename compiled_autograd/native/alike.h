// Whether two tensors hold the same values but for rounding.

#pragma once

#include "contract.h"

#include <algorithm>
#include <cmath>

namespace native {

inline constexpr int64_t kBlock = 8;  // so many sums beside one another: an addition need not wait for the one before

template <typename T>
double sum_of_squares(const T* values, int64_t count) {
  double sums[kBlock] = {};
  int64_t index = 0;
  for (; index + kBlock <= count; index += kBlock)
    for (int64_t each = 0; each < kBlock; ++each) {
      const double value = values[index + each];
      sums[each] += value * value;
    }
  for (; index < count; ++index) sums[0] += static_cast<double>(values[index]) * values[index];
  double sum = 0;
  for (const double each : sums) sum += each;
  return sum;
}

template <typename T>
bool values_alike(const T* wanted, const T* found, int64_t count, double relative) {
  const double squares = sum_of_squares(wanted, count);
  if (!std::isfinite(squares)) return false;
  const T bound = static_cast<T>(relative * std::sqrt(squares / static_cast<double>(count)));
  for (int64_t index = 0; index < count; index += 1024) {
    const int64_t end = std::min(count, index + 1024);
    bool apart = false;
    for (int64_t each = index; each < end; ++each)
      apart |= !(std::abs(found[each] - wanted[each]) <= bound);  // a NaN is apart
    if (apart) return false;
  }
  return true;
}

// Whether each value of `found` is at most `relative` times the root mean square of `wanted` away from that of
// `wanted`. False also if that is unknown here: for anything but floats of one dtype on the CPU that lie in memory
// without gaps and in one order, and if a value is not finite. Needs no GIL.
inline bool surely_alike(const at::Tensor& wanted, const at::Tensor& found, double relative) {
  const auto is_ours = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && tensor.device().is_cpu() && !tensor.is_conj() && !tensor.is_neg() &&
           !tensor._is_zerotensor() && tensor.is_non_overlapping_and_dense();
  };
  if (!is_ours(wanted) || !is_ours(found) || wanted.scalar_type() != found.scalar_type()) return false;
  if (wanted.sizes() != found.sizes() || wanted.strides() != found.strides()) return false;
  const int64_t count = wanted.numel();
  if (wanted.scalar_type() == at::kFloat)
    return values_alike(wanted.const_data_ptr<float>(), found.const_data_ptr<float>(), count, relative);
  if (wanted.scalar_type() == at::kDouble)
    return values_alike(wanted.const_data_ptr<double>(), found.const_data_ptr<double>(), count, relative);
  return false;
}

}  // namespace native
