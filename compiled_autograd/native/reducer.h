// The same hooks for Python: moved aside while the engine is asked for a tape, and called.

#pragma once

#include "python.h"
#include "reducer_hooks.h"

#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/graph_task.h>

#include <mutex>
#include <unordered_set>

namespace native {

namespace {

constexpr const char* kAside = "compiled_autograd_native.Aside";

Aside* aside_of(PyObject* capsule) { return static_cast<Aside*>(PyCapsule_GetPointer(capsule, kAside)); }

// False where there are none. Throws Refused.
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
    if (AccumulateGrad* leaf = leaf_with_hooks(*node)) found.push_back(leaf);
  }
  return !found.empty();
}

PyObject* move_aside(PyObject*, PyObject* outputs) {
  return or_error([&]() -> PyObject* {
    std::vector<AccumulateGrad*> leaves;
    try {
      if (!find_leaves(outputs, leaves)) return Py_NewRef(Py_None);
    } catch (const Refused&) {
      return Py_NewRef(Py_None);
    }
    auto aside = std::make_unique<Aside>();
    PyObject* capsule = checked(PyCapsule_New(aside.get(), kAside, [](PyObject* object) { delete aside_of(object); }));
    Aside* kept = aside.release();
    for (AccumulateGrad* leaf : leaves) kept->move(*leaf);
    return capsule;
  });
}

// The leaves that have theirs back.
PyObject* put_back(PyObject*, PyObject* capsule) {
  return or_error([&]() -> PyObject* {
    Aside* aside = aside_of(capsule);
    if (!aside) throw PythonError();
    std::vector<at::Tensor> leaves;
    const void* last = nullptr;
    for (const Aside::Moved& each : aside->moved)
      if (std::exchange(last, each.leaf.get()) != each.leaf.get())
        leaves.push_back(static_cast<AccumulateGrad*>(each.leaf.get())->variable);
    aside->put_back();
    Owned list(checked(PyList_New(0)));
    for (const at::Tensor& leaf : leaves) {
      const Owned object(checked(THPVariable_Wrap(leaf)));
      if (PyList_Append(list.get(), object.get())) throw PythonError();
    }
    return list.release();
  });
}

// What was queued for the end of the backward that is under way in this thread. The task of the engine is not to be had
// but by the addresses of two members of it.
std::vector<std::function<void()>> taken_from_task() {
  using torch::autograd::GraphTask;
  const auto* info = torch::autograd::get_current_graph_task_exec_info();
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  TORCH_CHECK(info && nodes, "hooks of DDP's reducer are called by the engine alone");
  alignas(GraphTask) char memory[sizeof(GraphTask)];  // for the place of a member alone, since offsetof is refused
  const auto place = reinterpret_cast<const char*>(&reinterpret_cast<GraphTask*>(memory)->exec_info_) - memory;
  auto* task = reinterpret_cast<GraphTask*>(const_cast<char*>(reinterpret_cast<const char*>(info)) - place);
  TORCH_CHECK(nodes == &task->nodes_in_graph_, "a task of the engine has another layout than its header says");
  const std::lock_guard<std::mutex> lock(task->final_callbacks_lock_);
  return std::exchange(task->final_callbacks_, {});
}

// A node that calls the hooks of leaves, in their order, when the engine runs it; and what these have queued for the
// end of the backward, when it is run again.
struct CallHooks : Node {
  std::vector<NodePtr> leaves;
  std::vector<std::function<void()>> queued;
  bool called = false;

  variable_list apply(variable_list&&) override {
    if (called) {
      for (const auto& callback : std::exchange(queued, {})) callback();
      return {};
    }
    called = true;
    for (const NodePtr& leaf : leaves)
      for (const auto& hook : leaf->post_hooks())
        if (of_reducer(*hook)) (*hook)({}, {});  // it takes no notice of what it is given
    queued = taken_from_task();
    return {};
  }
};

PyObject* tape_of_hooks(PyObject*, PyObject* leaves) {
  return or_error([&]() -> PyObject* {
    const Owned list(checked(PySequence_Fast(leaves, "leaves is no sequence")));
    auto made = std::make_unique<CallHooks>();
    for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(list.get()); ++index) {
      const at::Tensor* leaf = tensor_in(PySequence_Fast_GET_ITEM(list.get(), index));
      NodePtr of_leaf = leaf ? torch::autograd::impl::try_get_grad_accumulator(*leaf) : NodePtr();
      if (of_leaf) made->leaves.push_back(std::move(of_leaf));
    }
    at::Tensor output = at::zeros({});
    made->add_input_metadata(output);
    torch::autograd::impl::set_gradient_edge(output, Edge(NodePtr(std::move(made)), 0));
    return THPVariable_Wrap(output);
  });
}

PyObject* has_queued(PyObject*, PyObject* number) {
  return or_error([&]() -> PyObject* {
    const at::Tensor* output = tensor_in(number);
    const auto* node = output ? dynamic_cast<const CallHooks*>(output->grad_fn().get()) : nullptr;
    return PyBool_FromLong(node && !node->queued.empty());
  });
}

}  // namespace

}  // namespace native
