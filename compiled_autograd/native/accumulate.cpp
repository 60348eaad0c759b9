#include "accumulate.h"

#include <ATen/ops/_foreach_add.h>

#include <unordered_set>

namespace native {

namespace {

constexpr size_t kBatch = 4;               // _BATCH in steps/accumulate.py
constexpr size_t kLongAddition = 1 << 20;  // bytes: some hundred microseconds, in which no other thread of Python runs

bool is_plain(const at::Tensor& tensor) {
  PyObject* object = tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  const bool is_of_a_subclass = object && reinterpret_cast<PyObject*>(Py_TYPE(object)) != THPVariableClass;
  return !is_of_a_subclass && tensor.layout() == at::kStrided && tensor.device().is_cpu();
}

// Whether Python would let the leaf have it as it is.
bool can_keep(const Gift& gift) {
  const at::Tensor &leaf = gift.leaf, &gradient = gift.gradient;
  return gift.can_keep && !gradient.is_same(leaf) && is_plain(gradient) && gradient.sizes() == leaf.sizes() &&
         gradient.dtype() == leaf.dtype();
}

}  // namespace

bool accumulate(const std::vector<Gift>& gifts) {
  size_t bytes = 0;
  std::vector<at::Tensor> into, terms;
  std::unordered_set<const c10::TensorImpl*> distinct;
  for (const Gift& gift : gifts) {
    if (!gift.gradient.defined()) continue;
    const at::Tensor& old = gift.leaf.grad();
    if (old.defined()) {
      if (!is_plain(old) || !is_plain(gift.gradient)) return false;
      bytes += old.nbytes();
      into.push_back(old);
      terms.push_back(gift.gradient);
      if (!distinct.insert(old.unsafeGetTensorImpl()).second) return false;
    } else if (!can_keep(gift)) {
      return false;
    }
  }
  if (bytes > kLongAddition) return false;
  if (into.size() >= kBatch)
    at::_foreach_add_(into, terms);
  else
    for (size_t index = 0; index < into.size(); ++index) into[index].add_(terms[index]);
  for (const Gift& gift : gifts)
    if (gift.gradient.defined() && !gift.leaf.grad().defined())
      gift.leaf.mutable_grad() = gift.gradient.is_view() ? gift.gradient.variable_data() : gift.gradient;
  return true;
}

}  // namespace native
