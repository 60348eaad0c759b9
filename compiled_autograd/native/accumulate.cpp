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
  return !is_of_a_subclass && tensor.layout() == at::kStrided && (tensor.is_cpu() || tensor.is_cuda());
}

// Whether it can be added here, where no other thread of Python runs meanwhile: on a GPU that may wait for a place in
// the stream, and so for what another thread does in Python.
bool can_add(const at::Tensor& tensor) { return is_plain(tensor) && tensor.is_cpu(); }

// Whether Python would let the leaf have it as it is, if it lies as the leaf wants it.
bool can_keep(const at::Tensor& leaf, const at::Tensor& gradient) {
  return !gradient.is_same(leaf) && is_plain(gradient) && gradient.sizes() == leaf.sizes() &&
         gradient.dtype() == leaf.dtype() && gradient.device() == leaf.device();
}

}  // namespace

bool accumulate(const std::vector<Gives>& gives, const variable_list& tensors, const variable_list& results) {
  size_t bytes = 0;
  variable_list into, terms;
  std::unordered_set<const c10::TensorImpl*> distinct;
  for (const Gives& each : gives) {
    if (each.result >= results.size()) throw std::runtime_error("a compiled region has given too few results");
    const at::Tensor &leaf = tensors[each.leaf], &gradient = results[each.result];
    if (!gradient.defined()) continue;
    const at::Tensor& old = leaf.grad();
    if (old.defined()) {
      if (!can_add(old) || !can_add(gradient)) return false;
      bytes += old.nbytes();
      into.push_back(old);
      terms.push_back(gradient);
      if (!distinct.insert(old.unsafeGetTensorImpl()).second) return false;
    } else if (!each.can_keep || !can_keep(leaf, gradient)) {
      return false;
    }
  }
  if (bytes > kLongAddition) return false;
  if (into.size() >= kBatch)
    at::_foreach_add_(into, terms);
  else
    for (size_t index = 0; index < into.size(); ++index) into[index].add_(terms[index]);
  for (const Gives& each : gives) {
    const at::Tensor &leaf = tensors[each.leaf], &gradient = results[each.result];
    if (gradient.defined() && !leaf.grad().defined())
      leaf.mutable_grad() = gradient.is_view() ? gradient.variable_data() : gradient;
  }
  return true;
}

}  // namespace native
