// The hooks that DDP's reducer has on leaves: moved aside while the engine is asked for a tape, and called. Private,
// written against torch 2.13: torch/csrc/distributed/c10d/reducer.cpp, torch/csrc/autograd/utils/lambda_post_hook.h.

#pragma once

#include "python.h"

#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <cstring>
#include <typeinfo>
#include <unordered_set>

namespace native {

namespace {

using Hook = torch::autograd::FunctionPostHook;
using Hooks = std::vector<std::unique_ptr<Hook>>;
using torch::autograd::AccumulateGrad;

// By name: each library may have a type_info of its own for a class that headers define.
bool is_of_reducer(const Hook& hook) {
  return std::strcmp(typeid(hook).name(), "N5torch8autograd5utils14LambdaPostHookE") == 0;
}

struct Aside {
  std::vector<std::pair<NodePtr, Hooks>> moved;

  Aside() = default;
  Aside(const Aside&) = delete;
  Aside& operator=(const Aside&) = delete;
  ~Aside() { put_back(); }

  void put_back() {
    for (auto& [node, hooks] : moved) {
      Hooks& now = node->post_hooks();
      for (auto& hook : now) hooks.push_back(std::move(hook));
      now = std::move(hooks);
    }
    moved.clear();
  }
};

constexpr const char* kAside = "compiled_autograd_native.Aside";

Aside* aside_of(PyObject* capsule) { return static_cast<Aside*>(PyCapsule_GetPointer(capsule, kAside)); }

// Null where a leaf has such hooks and others too, lies elsewhere than on the CPU, or has another node by now.
bool find_leaves(PyObject* outputs, std::vector<AccumulateGrad*>& found) {
  const Owned list(checked(PySequence_Fast(outputs, "outputs is no sequence")));
  std::vector<Node*> stack;
  std::unordered_set<Node*> seen;
  const auto see = [&](Node* node) {
    if (node && seen.insert(node).second) stack.push_back(node);
  };
  for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(list.get()); ++index) {
    const at::Tensor* output = tensor_in(PySequence_Fast_GET_ITEM(list.get(), index));
    if (!output || !output->requires_grad()) return false;
    see(torch::autograd::impl::gradient_edge(*output).function.get());
  }
  while (!stack.empty()) {
    Node* node = stack.back();
    stack.pop_back();
    for (const Edge& edge : node->next_edges()) see(edge.function.get());
    size_t ours = 0;
    for (const auto& hook : node->post_hooks()) ours += is_of_reducer(*hook);
    if (!ours) continue;
    auto* leaf = dynamic_cast<AccumulateGrad*>(node);
    if (!leaf || ours != node->post_hooks().size() || !leaf->variable.device().is_cpu()) return false;
    if (torch::autograd::impl::try_get_grad_accumulator(leaf->variable).get() != node) return false;
    found.push_back(leaf);
  }
  return !found.empty();
}

PyObject* move_aside(PyObject*, PyObject* outputs) {
  return or_error([&]() -> PyObject* {
    std::vector<AccumulateGrad*> leaves;
    if (!find_leaves(outputs, leaves)) return Py_NewRef(Py_None);
    auto aside = std::make_unique<Aside>();
    aside->moved.reserve(leaves.size());
    PyObject* capsule =
        checked(PyCapsule_New(aside.get(), kAside, [](PyObject* object) { delete aside_of(object); }));
    Aside* kept = aside.release();
    for (AccumulateGrad* leaf : leaves) kept->moved.emplace_back(leaf->getptr(), std::exchange(leaf->post_hooks(), {}));
    return capsule;
  });
}

// How many leaves have theirs back.
PyObject* put_back(PyObject*, PyObject* capsule) {
  Aside* aside = aside_of(capsule);
  if (!aside) return nullptr;
  const size_t count = aside->moved.size();
  aside->put_back();
  return PyLong_FromSize_t(count);
}

PyObject* has_hooks(PyObject*, PyObject* leaf) {
  return or_error([&]() -> PyObject* {
    const at::Tensor* tensor = tensor_in(leaf);
    const NodePtr node = tensor ? torch::autograd::impl::try_get_grad_accumulator(*tensor) : NodePtr();
    bool has = false;
    if (node)
      for (const auto& hook : node->post_hooks()) has = has || is_of_reducer(*hook);
    return PyBool_FromLong(has);
  });
}

// A node that calls the hooks of leaves, in their order, when the engine runs it: what these queue for the end of the
// backward, the engine runs at the end of this one.
struct CallHooks : Node {
  std::vector<NodePtr> leaves;

  variable_list apply(variable_list&&) override {
    for (const NodePtr& leaf : leaves)
      for (const auto& hook : leaf->post_hooks())
        if (is_of_reducer(*hook)) (*hook)({}, {});  // it takes no notice of what it is given
    return {};
  }
};

PyObject* tape_of_hooks(PyObject*, PyObject* leaves) {
  return or_error([&]() -> PyObject* {
    const Owned list(checked(PySequence_Fast(leaves, "leaves is no sequence")));
    auto made = std::make_unique<CallHooks>();
    for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(list.get()); ++index) {
      const at::Tensor* leaf = tensor_in(PySequence_Fast_GET_ITEM(list.get(), index));
      NodePtr node = leaf ? torch::autograd::impl::try_get_grad_accumulator(*leaf) : NodePtr();
      if (node) made->leaves.push_back(std::move(node));
    }
    at::Tensor output = at::zeros({});
    made->add_input_metadata(output);
    torch::autograd::impl::set_gradient_edge(output, Edge(NodePtr(std::move(made)), 0));
    return THPVariable_Wrap(output);
  });
}

}  // namespace

}  // namespace native
