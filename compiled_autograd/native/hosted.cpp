#include "hosted.h"

#include <ATen/EmptyTensor.h>
#include <torch/csrc/Dtype.h>

namespace native {

namespace {

// The tensors of one run, by slot: arguments first, then what the program has allocated to give back.
class Tensors {
 public:
  explicit Tensors(variable_list arguments) : tensors_(std::move(arguments)) {}

  straight_line::Host host() { return {this, address, allocate, object, drop, result}; }
  variable_list results;

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
    if (slot < 0 || object == Py_None)
      all.results.emplace_back();
    else if (!object)
      all.results.push_back(all.tensors_[slot]);
    else if (const at::Tensor* tensor = tensor_in(object))
      all.results.push_back(*tensor);
    else
      throw std::runtime_error("a straight-line program has given what is no tensor");
  }

  variable_list tensors_;
};

}  // namespace

HostedProgram::HostedProgram(PyObject* function, std::vector<size_t> arguments, std::vector<Gives> gives)
    : function_(Py_NewRef(function)), arguments_(std::move(arguments)), gives_(std::move(gives)) {
  PyObject* capsule = PyCFunction_Check(function) ? PyCFunction_GET_SELF(function) : nullptr;
  if (!capsule || !PyCapsule_IsValid(capsule, straight_line::program_name)) {
    PyErr_SetString(PyExc_TypeError, "a straight-line program is wanted");
    throw PythonError();
  }
  entry_ = static_cast<const straight_line::Entry*>(PyCapsule_GetContext(capsule));
}

variable_list HostedProgram::run(variable_list& tensors) const {
  variable_list arguments, leaves(tensors.size());
  arguments.reserve(arguments_.size());
  for (const size_t index : arguments_) arguments.push_back(tensors[index]);
  for (const Gives& each : gives_) leaves[each.leaf] = tensors[each.leaf];  // one may occur twice
  tensors = std::move(leaves);
  const auto count = static_cast<Py_ssize_t>(arguments.size());
  Tensors all(std::move(arguments));
  if (!entry_->run(entry_->program, count, all.host())) throw PythonError();
  return std::move(all.results);
}

std::vector<Gift> HostedProgram::gifts(const variable_list& tensors, const variable_list& results) const {
  std::vector<Gift> gifts;
  gifts.reserve(gives_.size());
  for (const Gives& each : gives_) gifts.push_back({tensors[each.leaf], results[each.result], each.can_keep});
  return gifts;
}

}  // namespace native
