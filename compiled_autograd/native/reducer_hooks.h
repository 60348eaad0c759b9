// The hooks that DDP's reducer has on leaves, kept from refusing a walk. Private, written against torch 2.13:
// torch/csrc/distributed/c10d/reducer.cpp, torch/csrc/autograd/utils/lambda_post_hook.h.

#pragma once

#include "contract.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <cstring>
#include <functional>
#include <typeinfo>
#include <vector>

namespace native {

namespace {

using Hook = torch::autograd::utils::LambdaPostHook;
using Answer = std::function<void(CompiledNodeArgs&)>;
using torch::autograd::AccumulateGrad;

// A hook's answer to the engine's question whether its tape can be reported. Only the reducer's hooks have an answer of
// their own: they refuse.
struct Answers : Hook {
  static Answer& of(Hook& hook) { return hook.*&Answers::compiled_fn_; }
};

// Null for any other hook. By name: each library may have a type_info of its own for a class of a header.
Hook* of_reducer(torch::autograd::FunctionPostHook& hook) {
  if (std::strcmp(typeid(hook).name(), typeid(Hook).name()) != 0) return nullptr;
  auto* found = static_cast<Hook*>(&hook);
  return Answers::of(*found) ? found : nullptr;
}

// Hooks that stay where they are, and say nothing to the engine until they are put back. The reducer may be deleted
// meanwhile, and its hooks with it.
struct Aside {
  struct Moved {
    NodePtr leaf;
    Hook* hook;
    Answer answer;
  };
  std::vector<Moved> moved;

  void move(Node& leaf) {
    for (const auto& hook : leaf.post_hooks()) {
      moved.push_back({leaf.getptr(), of_reducer(*hook), {}});
      Moved& last = moved.back();
      last.answer = std::exchange(Answers::of(*last.hook), [](CompiledNodeArgs&) {});
    }
  }

  Aside() = default;
  Aside(const Aside&) = delete;
  Aside& operator=(const Aside&) = delete;
  ~Aside() { put_back(); }

  void put_back() {
    for (Moved& each : moved)
      for (const auto& hook : each.leaf->post_hooks())
        if (hook.get() == each.hook) Answers::of(*each.hook) = std::move(each.answer);
    moved.clear();
  }
};

// The leaf of a node that has such hooks; null where it has none. Refuses a leaf that has others too, lies elsewhere
// than on the CPU, or has another node by now.
AccumulateGrad* leaf_with_hooks(Node& node) {
  size_t ours = 0;
  for (const auto& hook : node.post_hooks()) ours += of_reducer(*hook) != nullptr;
  if (!ours) return nullptr;
  auto* leaf = dynamic_cast<AccumulateGrad*>(&node);
  const bool is_known = leaf && ours == node.post_hooks().size() && leaf->variable.device().is_cpu() &&
                        torch::autograd::impl::try_get_grad_accumulator(leaf->variable).get() == &node;
  if (!is_known) throw Refused{"a leaf whose hooks of DDP's reducer cannot be called from here"};
  return leaf;
}

}  // namespace

}  // namespace native
