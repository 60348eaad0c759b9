#include "guards.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstring>

namespace native {

namespace {

// The class that the tensor has in Python, also where it has not been there yet.
PyObject* class_of(const at::Tensor& tensor) {
  PyObject* object = tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  return object ? reinterpret_cast<PyObject*>(Py_TYPE(object)) : THPVariableClass;
}

int64_t bits_of(const IValue& scalar) {
  if (scalar.isInt()) return scalar.toInt();
  const double value = scalar.toDouble();
  int64_t bits;
  static_assert(sizeof bits == sizeof value);
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Says it all as numbers, one after the other, until `say` gives false. (Device, dtype and whether a gradient is
// required are in the key of the node that saved the tensor.)
template <typename Say>
bool describe(const Handover& found, Say say) {
  const auto state = c10::impl::tls_local_dispatch_key_set();
  if (!say(found.tensors.size()) || !say(found.sizes.size()) || !say(found.scalars.size())) return false;
  for (const at::Tensor& tensor : found.tensors) {
    const auto keys = (tensor.key_set() | state.included_) - state.excluded_;
    if (!say(keys.raw_repr()) || !say(reinterpret_cast<intptr_t>(class_of(tensor))) || !say(tensor.dim())) return false;
    if (tensor.layout() != at::kStrided) return false;
    for (const int64_t size : tensor.sizes())
      if (!say(size)) return false;
    for (const int64_t stride : tensor.strides())
      if (!say(stride)) return false;
  }
  for (const int64_t size : found.sizes)
    if (!say(size)) return false;
  for (const IValue& scalar : found.scalars)
    if (!say(scalar.isInt()) || !say(bits_of(scalar))) return false;
  return true;
}

void refuse_unknown(const at::Tensor& tensor) {
  PyObject* type = class_of(tensor);
  if (type != THPVariableClass && type != ParameterClass) throw Refused{"a tensor of a subclass"};
  if (tensor.layout() != at::kStrided) throw Refused{"a tensor that is not strided"};
  if (!tensor.device().is_cpu() && !tensor.device().is_cuda())
    throw Refused{"a tensor that is neither on the CPU nor on a CUDA device"};
  if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) throw Refused{"a tensor of symbolic sizes"};
}

}  // namespace

Guards::Guards(const Handover& found) {
  for (const at::Tensor& tensor : found.tensors) refuse_unknown(tensor);
  describe(found, [this](int64_t value) {
    expected_.push_back(value);
    return true;
  });
}

bool Guards::hold(const Handover& found) const {
  const int64_t* next = expected_.data();
  const int64_t* end = next + expected_.size();
  return describe(found, [&](int64_t value) { return next != end && *next++ == value; }) && next == end;
}

}  // namespace native
