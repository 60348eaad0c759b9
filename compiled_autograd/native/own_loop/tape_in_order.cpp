#include "tape_in_order.h"

#include "../walk/members.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>

#include <algorithm>
#include <queue>
#include <typeinfo>

namespace native {

namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::CopyBackwards;
using torch::autograd::CopySlices;

enum class Kind : uint8_t { kOther, kPlain, kLeaf, kWrite, kPython };

// PyTorch's generated functions (torch/csrc/autograd/generated/Functions.h, 2.13) ask the engine for nothing, and those
// of Python in Python, where they are answered. Custom functions of C++ are in other namespaces.
Kind find_kind(const Node& node) {
  if (typeid(node) == typeid(AccumulateGrad)) return Kind::kLeaf;
  if (typeid(node) == typeid(CopySlices)) return Kind::kWrite;
  if (typeid(node) == typeid(CopyBackwards)) return Kind::kPlain;
  const std::string_view name = typeid(node).name();  // as GCC and clang write it
  if (name == "N5torch8autograd6PyNodeE") return Kind::kPython;
  return name.starts_with("N5torch8autograd9generated") ? Kind::kPlain : Kind::kOther;
}

// By class, since names take as long to compare as all else that is asked of a node.
Kind kind_of(const Node& node) {
  constexpr size_t kSlots = 256;
  thread_local std::pair<const std::type_info*, Kind> known[kSlots] = {};
  const std::type_info* type = &typeid(node);
  auto& slot = known[(reinterpret_cast<uintptr_t>(type) >> 4) % kSlots];
  if (slot.first != type) slot = {type, find_kind(node)};
  return slot.second;
}

bool has_hooks(Node& node) {
  return !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty() || !node.pre_hooks().empty() ||
         !node.post_hooks().empty();
}

// Null for what is a plain tensor of the CPU: else the engine has threads, or users' code is called by operators.
const char* what_is_special(const Node& node) {
  for (uint32_t index = 0; index < node.num_inputs(); ++index) {
    const auto& metadata = node.input_metadata(index);
    if (!metadata.device().is_cpu()) return " is not on the CPU";
    if (metadata.is_tensor_subclass()) return " takes tensors of a subclass";
    if (metadata.is_nested_tensor()) return " takes nested tensors";
  }
  return nullptr;
}

// Gives what it is. Hooks of a leaf's node are most often those of a reducer in C++, which asks for the engine itself.
Kind check(Node& node) {
  const Kind kind = kind_of(node);
  if (kind == Kind::kOther) throw Refused{node.name() + " is no function of PyTorch's own, nor of Python"};
  if (const char* special = what_is_special(node)) throw Refused{node.name() + special};
  if (kind == Kind::kWrite) {
    // Another thread that runs this tape releases its values under the lock, and without the GIL.
    const std::unique_lock lock(node.*pointer_to(NodeLock()), std::try_to_lock);
    if (!lock) throw Refused{"another thread runs " + node.name()};
    Node* inner = static_cast<CopySlices&>(node).fn.get();  // none, once it was freed
    if (inner && kind_of(*inner) != Kind::kPlain)
      throw Refused{inner->name() + ", which writes into a view, is no function of PyTorch's own"};
  }
  if (kind == Kind::kLeaf && (!node.post_hooks().empty() || !node.pre_hooks().empty()))
    throw Refused{"the node of a leaf has hooks"};
  return kind;
}

}  // namespace

bool has_nodes(const edge_list& roots, size_t count) {
  std::vector<const Node*> seen;
  seen.reserve(count);
  const auto see_all = [&](const edge_list& edges) {
    for (const Edge& edge : edges)
      if (edge.is_valid() && seen.size() < count &&
          std::find(seen.begin(), seen.end(), edge.function.get()) == seen.end())
        seen.push_back(edge.function.get());
  };
  see_all(roots);
  for (size_t index = 0; index < seen.size() && seen.size() < count; ++index) see_all(seen[index]->next_edges());
  return seen.size() >= count;
}

TapeInOrder::TapeInOrder(const edge_list& roots) {
  for (const Edge& edge : roots) see(edge.function.get());
  for (size_t index = 0; index < seen_.size(); ++index)
    for (const Edge& edge : seen_[index]->next_edges())
      if (edge.is_valid()) see(edge.function.get());
  find_order();
  follow_edges();
  for (const Edge& edge : roots) roots_.push_back(target_of(edge));
  check_leaves(roots_);
}

void TapeInOrder::see(Node* node) {
  if (!numbers_.of(node).second) return;
  seen_.push_back(node);
  constexpr size_t kLine = 64, kBytes = 256;
  for (size_t offset = 0; offset < kBytes; offset += kLine)
    __builtin_prefetch(reinterpret_cast<const char*>(node) + offset);
}

void TapeInOrder::find_order() {
  std::vector<std::pair<uint64_t, uint32_t>> made;  // when, and the number
  std::vector<uint32_t> leaves;
  std::vector<bool> call_users_code;
  made.reserve(seen_.size());
  for (uint32_t number = 0; number < seen_.size(); ++number) {
    Node& node = *seen_[number];
    const Kind kind = check(node);
    call_users_code.push_back(kind == Kind::kPython || has_hooks(node) || node.tensor_post_acc_grad_hooks());
    calls_users_code_ |= call_users_code.back();
    if (kind == Kind::kLeaf)
      leaves.push_back(number);
    else
      made.emplace_back(node.sequence_nr(), number);
  }
  std::sort(made.begin(), made.end(), [](const auto& one, const auto& other) { return one.first > other.first; });
  for (size_t index = 1; index < made.size(); ++index)
    if (made[index - 1].first == made[index].first) throw Refused{"nodes of several threads"};
  leaves_begin_ = static_cast<uint32_t>(made.size());
  places_.reserve(seen_.size() + 1);
  place_of_.resize(seen_.size());
  const auto place = [&](uint32_t number) {
    place_of_[number] = static_cast<uint32_t>(places_.size());
    places_.push_back({seen_[number], inputs_, 0, 0, call_users_code[number]});
    inputs_ += seen_[number]->num_inputs();
  };
  for (const auto& each : made) place(each.second);
  for (const uint32_t number : leaves) place(number);
  places_.push_back({nullptr, inputs_, 0, 0, false});
}

void TapeInOrder::follow_edges() {
  targets_.reserve(2 * places_.size());
  for (uint32_t index = 0; index < places_.size(); ++index) {
    places_[index].first_edge = static_cast<uint32_t>(targets_.size());
    if (!places_[index].node) break;
    for (const Edge& edge : places_[index].node->next_edges()) {
      targets_.push_back(target_of(edge));
      if (targets_.back().place <= index) throw Refused{"a node was made before one that it leads to"};
    }
    check_leaves({targets_.begin() + places_[index].first_edge, targets_.end()});
  }
}

void TapeInOrder::check_leaves(const std::vector<Target>& ready) const {
  if (!calls_users_code_ || ready.size() < 3) return;
  size_t leaves = 0;
  bool are_hooked = false;
  for (const Target& target : ready) {
    if (target.place == kNowhere || target.place < leaves_begin_) continue;
    ++leaves;
    are_hooked |= places_[target.place].calls_users_code;
  }
  if (are_hooked && leaves > 2) throw Refused{"more than two leaves, of which some have hooks, may be ready at once"};
}

TapeInOrder::Target TapeInOrder::target_of(const Edge& edge) {
  if (!edge.is_valid()) return {kNowhere, 0};
  const uint32_t index = place_of_[numbers_.known(edge.function.get())];
  ++places_[index].edges_to_it;
  return {index, places_[index].first_input + edge.input_nr};
}

std::vector<Node*> order_from(const edge_list& roots, const TapeInOrder& tape, uint32_t served) {
  std::unordered_map<const Node*, uint32_t> waits_for;
  const auto& places = tape.places();
  for (uint32_t index = served; index < tape.leaves_begin(); ++index)
    for (const Edge& edge : places[index].node->next_edges())
      if (edge.is_valid()) ++waits_for[edge.function.get()];
  const auto was_made_before = [](const Node* one, const Node* other) {
    return one->sequence_nr() < other->sequence_nr();
  };
  std::priority_queue<Node*, std::vector<Node*>, decltype(was_made_before)> ready(was_made_before);
  for (const Edge& edge : roots) ready.push(edge.function.get());
  std::vector<Node*> order;
  while (!ready.empty()) {
    Node* node = ready.top();
    ready.pop();
    order.push_back(node);
    for (const Edge& edge : node->next_edges()) {
      if (!edge.is_valid()) continue;
      const auto found = waits_for.find(edge.function.get());
      TORCH_INTERNAL_ASSERT(found != waits_for.end(), "it is known at the first node alone");
      if (--found->second != 0) continue;
      waits_for.erase(found);
      ready.push(edge.function.get());
    }
  }
  return order;
}

}  // namespace native
