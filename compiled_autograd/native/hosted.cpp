#include "hosted.h"

#include "spare.h"

#include <algorithm>

#include <ATen/EmptyTensor.h>
#include <torch/csrc/Dtype.h>

namespace native {

namespace {

at::Tensor result_in(PyObject* object) {
  if (!object || object == Py_None) return {};
  const at::Tensor* tensor = tensor_in(object);
  if (!tensor) throw std::runtime_error("a compiled region has given what is no tensor");
  return *tensor;
}

void call(PyObject* function, variable_list& arguments, variable_list& results) {
  Owned list(checked(PyList_New(static_cast<Py_ssize_t>(arguments.size()))));
  for (size_t index = 0; index < arguments.size(); ++index)
    PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(index), checked(THPVariable_Wrap(arguments[index])));
  arguments.clear();  // the function lets go of them
  const Owned given(checked(PyObject_CallOneArg(function, list.get())));
  const Owned found(checked(PySequence_Fast(given.get(), "a compiled region has given no sequence")));
  for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(found.get()); ++index)
    results.push_back(result_in(PySequence_Fast_GET_ITEM(found.get(), index)));
}

// The tensors of one run of a straight-line program, by slot: arguments first, then what the program has allocated to
// give back.
class Tensors {
 public:
  Tensors(variable_list& arguments, variable_list& results) : tensors_(arguments), results_(results) {}

  straight_line::Host host() { return {this, address, allocate, object, drop, result}; }

 private:
  static Tensors& of(void* self) { return *static_cast<Tensors*>(self); }

  static void* address(void* self, Py_ssize_t slot) { return of(self).tensors_[slot].data_ptr(); }

  static void* allocate(void* self, Py_ssize_t slot, const straight_line::Shape& shape) {
    auto& tensors = of(self).tensors_;
    if (tensors.size() <= static_cast<size_t>(slot)) tensors.resize(slot + 1);
    const size_t dimensions = shape.dimensions;
    const at::ScalarType dtype = reinterpret_cast<THPDtype*>(shape.dtype)->scalar_type;
    tensors[slot] = at::detail::empty_strided_cpu({shape.sizes, dimensions}, {shape.strides, dimensions}, dtype);
    return tensors[slot].data_ptr();
  }

  static PyObject* object(void* self, Py_ssize_t slot) { return THPVariable_Wrap(of(self).tensors_[slot]); }

  static void drop(void* self, Py_ssize_t slot) {
    auto& tensors = of(self).tensors_;
    if (static_cast<size_t>(slot) < tensors.size()) tensors[slot].reset();
  }

  static void result(void* self, Py_ssize_t, Py_ssize_t slot, PyObject* object) {
    Tensors& all = of(self);
    all.results_.push_back(slot < 0 || object ? result_in(object) : all.tensors_[slot]);
  }

  variable_list& tensors_;
  variable_list& results_;
};

}  // namespace

HostedProgram::HostedProgram(PyObject* function, std::vector<size_t> arguments, std::vector<Gives> gives)
    : function_(Py_NewRef(function)), arguments_(std::move(arguments)), gives_(std::move(gives)) {
  PyObject* capsule = PyCFunction_Check(function) ? PyCFunction_GET_SELF(function) : nullptr;
  if (capsule && PyCapsule_IsValid(capsule, straight_line::program_name))
    entry_ = static_cast<const straight_line::Entry*>(PyCapsule_GetContext(capsule));
  for (const Gives& each : gives_) {
    is_leaf_.resize(std::max(is_leaf_.size(), each.leaf + 1));
    is_leaf_[each.leaf] = true;
  }
  for (auto index = arguments_.begin(); index != arguments_.end(); ++index)
    is_needed_later_.push_back(is_leaf(*index) || std::find(index + 1, arguments_.end(), *index) != arguments_.end());
}

void HostedProgram::run(variable_list& tensors, variable_list& results) const {
  SpareList arguments;
  arguments->reserve(arguments_.size());
  for (size_t place = 0; place < arguments_.size(); ++place) {
    at::Tensor& tensor = tensors[arguments_[place]];
    arguments->push_back(is_needed_later_[place] ? tensor : std::move(tensor));
  }
  for (size_t index = 0; index < tensors.size(); ++index)
    if (!is_leaf(index)) tensors[index].reset();
  if (!entry_) return call(function_.get(), *arguments, results);
  const auto count = static_cast<Py_ssize_t>(arguments->size());
  Tensors all(*arguments, results);
  if (!entry_->run(entry_->program, count, all.host())) throw PythonError();
}

}  // namespace native
