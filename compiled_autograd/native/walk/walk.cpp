#include "walk.h"

#include "members.h"
#include "../reducer_hooks.h"
#include "../spare.h"

#include <mutex>
#include <typeinfo>

namespace native {

namespace {

// Idle working memory: as many as this thread had walks inside one another.
thread_local std::vector<std::unique_ptr<Walk>> idle;

std::unique_ptr<Walk> take_idle() {
  if (idle.empty()) return std::make_unique<Walk>();
  std::unique_ptr<Walk> walk = std::move(idle.back());
  idle.pop_back();
  return walk;
}

// Have the processor fetch nodes and their edges before the walk needs them, while PyTorch unpacks what this one saved:
// a walk over a tape that was just made waits for memory more than for anything else.
void prefetch_next(const Node& node) {
  constexpr size_t kLine = 64, kBytes = 1024;  // of a node's own members, and of what the common ones save
  for (const Edge& edge : node.next_edges())
    for (size_t offset = 0; offset < kBytes; offset += kLine)
      __builtin_prefetch(reinterpret_cast<const char*>(edge.function.get()) + offset);
}

// While the engine captures a tape, the nodes below an edge have symbols for sizes (SwapSavedVariables::before,
// torch/csrc/dynamo/compiled_autograd.h, 2.13), also those of leaves, which tapes of other threads have too. Python
// that this walk calls may let a capture begin.
bool has_symbols(const torch::autograd::InputMetadata& metadata) {
  for (const c10::SymInt& size : metadata.shape_as_dim_vector())
    if (size.is_heap_allocated()) return true;
  return false;
}

// Whether the engine would make another gradient of it, where no other thread of Python waits meanwhile: that takes
// long for a large one, and a number from the CPU waits for all that a GPU is at. So it is to be done once, and there.
bool is_converted(const Edge& edge, const at::Tensor& gradient) {
  if (!edge.is_valid() || !gradient.defined()) return false;
  const torch::autograd::InputMetadata& metadata = edge.function->input_metadata(edge.input_nr);
  if (metadata.is_nested_tensor() || has_symbols(metadata)) return true;
  return metadata.device() != gradient.device() || !metadata.is_same_shape(gradient) ||
         metadata.grad_dtype().value_or(gradient.scalar_type()) != gradient.scalar_type();
}

uint64_t type_of(const Node& node) { return reinterpret_cast<uintptr_t>(&typeid(node)); }

}  // namespace

Lease::Lease() : walk_(take_idle()) {}

Lease::~Lease() {
  walk_->clear();
  if (!walk_->is_large()) idle.push_back(std::move(walk_));
}

Walk::Walk() : compiler_(SizeInput::DYNAMIC), call_(0, nullptr), args_(compiler_, call_) {}

void Walk::begin(edge_list outputs, variable_list gradients, bool writes_all) {
  writes_all_ = writes_all;
  for (size_t index = 0; index < outputs.size(); ++index)
    if (is_converted(outputs[index], gradients[index])) throw Refused{"a gradient that the engine converts"};
  // As Engine::execute does before it asks for the tape (engine.cpp, 2.13).
  torch::autograd::validate_outputs(outputs, gradients, [](const std::string& message) { return message; });
  root_ = NodePtr(std::make_unique<torch::autograd::GraphRoot>(std::move(outputs), std::move(gradients)));
  see(root_.get());
}

void Walk::expect(size_t tensors, size_t sizes, size_t scalars) {
  if (!found_.tensors.capacity()) found_.tensors = SpareList::take();
  found_.tensors.reserve(tensors);
  found_.sizes.reserve(sizes);
  found_.scalars.reserve(scalars);
}

uint32_t Walk::see(Node* node) {
  const auto [number, is_new] = nodes_seen_.of(node);
  if (is_new) nodes_.push_back(node);
  return number;
}

std::string_view Walk::visit(uint32_t number, Role role) {
  Node& node = *nodes_[number];
  prefetch_next(node);
  forget_node();
  const std::unique_lock<std::mutex> lock(node.*pointer_to(NodeLock()), std::try_to_lock);
  if (!lock) throw Refused{"another thread is at the tape"};
  call_.id = number;
  call_.node = node.getptr();
  args_.collect(type_of(node));
  // How many gradients it takes: the engine's key has it of what is used alone, so that unused pieces do not count.
  args_.collect_size(node.num_inputs());
  Aside aside;  // until the node has said all; no Python runs meanwhile that could have others meet its hooks
  const AccumulateGrad* leaf = writes_all_ ? leaf_with_hooks(node) : nullptr;
  if (args_.cond(leaf)) {
    aside.move(node);
    found_.reduced.push_back(leaf->variable);
  }
  if (role != Role::kIsBeside) args_.collect(call_);
  if (role == Role::kRuns) {
    node.compiled_args(args_);
    collect_inner_nodes();
  }
  collect_edges(node, role == Role::kRuns);
  take_tensors();
  take_sizes();
  take_scalars();
  args_.collect_size(compiler_.hooks.size());
  if (!compiler_.cpp_tensor_pre_hooks.empty()) throw Refused{"a hook that C++ registered"};
  if (!compiler_.packed_inputs.empty()) throw Refused{"saved-tensor hooks"};
  return {reinterpret_cast<const char*>(args_.*pointer_to(KeyBytes())), args_.*pointer_to(KeySize())};
}

void Walk::collect_edges(const Node& node, bool with_metadata) {
  args_.collect_size(node.next_edges().size());
  for (const Edge& edge : node.next_edges()) {
    if (!args_.cond(edge.is_valid())) continue;
    args_.collect_size(see(edge.function.get()));
    args_.collect_size(edge.input_nr);
    if (!with_metadata) continue;
    __builtin_prefetch(edge.function->next_edges().data());
    const torch::autograd::InputMetadata& metadata = edge.function->input_metadata(edge.input_nr);
    if (!metadata.is_nested_tensor() && has_symbols(metadata)) throw Refused{"the engine walks for another thread"};
    args_.collect(metadata);
    args_.collect(metadata.grad_dtype());  // which the engine's key lacks
  }
}

// Nodes that are no part of the tape but members of one: the function that wrote into a view, in `CopySlices`. Their
// class, which the engine's key lacks, tells such writes apart.
void Walk::collect_inner_nodes() {
  const uint32_t count = compiler_.node_calls.size();
  args_.collect_size(count);
  for (uint32_t index = 0; index < count; ++index) {
    Node* inner = std::as_const(compiler_.node_calls).lookup(index).node.get();
    args_.collect_size(see(inner));
    args_.collect(type_of(*inner));
  }
}

// PyTorch numbers the tensors of this node alone. Which of them other nodes had too, the numbers over all nodes say.
void Walk::take_tensors() {
  args_.collect_size(compiler_.tensor_args.inputs.size());
  for (at::Tensor& tensor : compiler_.tensor_args.inputs) {
    const auto [number, is_new] = tensors_seen_.of(tensor.unsafeGetTensorImpl());
    args_.collect_size(number);
    if (is_new) found_.tensors.push_back(std::move(tensor));  // kept: its address is its name
  }
}

void Walk::take_sizes() {
  args_.collect_size(compiler_.all_size_inputs.size());
  for (const SizeInput& size : compiler_.all_size_inputs) {
    if (args_.cond(size.dyn_type == SizeInput::DYNAMIC)) {
      found_.sizes.push_back(size.value);
    } else {
      args_.collect(size.value);
    }
  }
}

void Walk::take_scalars() {
  args_.collect_size(compiler_.lifted_ivalue_args.args.size());
  for (const auto& lifted : compiler_.lifted_ivalue_args.args) {
    if (!lifted.actual_ptr->isInt() && !lifted.actual_ptr->isDouble()) throw Refused{"a symbolic number"};
    found_.scalars.push_back(*lifted.actual_ptr);
  }
}

// What PyTorch collected of the node before. Users' objects are counted over all nodes, and stay.
void Walk::forget_node() {
  args_.*pointer_to(KeySize()) = 0;
  call_.tensor_pre_hooks.clear();
  call_.pre_hooks.clear();
  call_.post_hooks.clear();
  call_.post_acc_grad_hooks.clear();
  TensorArgs& tensors = compiler_.tensor_args;
  if (!(tensors.*pointer_to(SavedMap())).empty()) (tensors.*pointer_to(SavedMap())).clear();
  if (!(tensors.*pointer_to(TensorMap())).empty()) (tensors.*pointer_to(TensorMap())).clear();
  tensors.*pointer_to(NextTensor()) = 1;  // 0 is that of an undefined tensor
  tensors.inputs.clear();
  compiler_.all_size_inputs.clear();
  compiler_.lifted_ivalue_args.args.clear();
  if (!compiler_.node_calls.empty()) compiler_.node_calls.clear();
}

Handover Walk::take() {
  found_.objects = std::exchange(compiler_.hooks, {});
  return std::exchange(found_, Handover());
}

void Walk::clear() {
  forget_node();
  compiler_.default_dyn_type = SizeInput::DYNAMIC;
  compiler_.cpp_tensor_pre_hooks.clear();
  compiler_.packed_inputs.clear();
  compiler_.hooks.clear();
  compiler_.sv_to_hooks.clear();
  compiler_.pynode_objs.clear();
  call_.cpp_tensor_pre_hooks.clear();
  call_.node.reset();
  found_ = Handover();
  nodes_.clear();
  nodes_seen_.clear();
  tensors_seen_.clear();
  root_.reset();
}

}  // namespace native
