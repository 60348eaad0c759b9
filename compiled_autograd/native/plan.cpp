#include "plan.h"

#include <algorithm>
#include <numeric>

namespace native {

namespace {

// For each node below `root`, how many edges lead to it: the engine comes to it once it has been at all their
// beginnings (Engine::compute_dependencies, engine.cpp, 2.13). `numbers` are those of the result.
std::vector<uint32_t> edges_to(const Node& root, Numbers& numbers) {
  std::vector<uint32_t> counts;
  std::vector<const Node*> worklist{&root};
  while (!worklist.empty()) {
    const Node* node = worklist.back();
    worklist.pop_back();
    for (const Edge& edge : node->next_edges()) {
      if (!edge.is_valid()) continue;
      const auto [number, is_new] = numbers.of(edge.function.get());
      if (is_new) {
        counts.push_back(0);
        worklist.push_back(edge.function.get());
      }
      ++counts[number];
    }
  }
  return counts;
}

}  // namespace

Plan::Plan(Walk& walk, bool order_shows) {
  Numbers numbers;
  std::vector<uint32_t> waits_for = edges_to(walk.node(0), numbers);
  std::vector<uint32_t> ready{0};  // last in, first out, as in python_compiled_autograd.cpp
  while (!ready.empty()) {
    const uint32_t number = ready.back();
    ready.pop_back();
    order_.push_back(number);
    key_ += walk.visit(number);
    ends_.push_back(key_.size());
    for (const Edge& edge : walk.node(number).next_edges())
      if (edge.is_valid() && --waits_for[numbers.of(edge.function.get()).first] == 0)
        ready.push_back(walk.number_of(edge.function.get()));
  }
  if (order_shows) learn_ages(walk);
  tensors_ = walk.found().tensors.size();
  sizes_ = walk.found().sizes.size();
  scalars_ = walk.found().scalars.size();
  add_variant(walk.found());
}

std::optional<std::string> Plan::difference(Walk& walk) const {
  walk.expect(tensors_, sizes_, scalars_);
  const std::string_view key = key_;
  size_t begin = 0;
  for (size_t index = 0; index < order_.size(); ++index) {
    const std::string_view said = walk.visit(order_[index]);
    if (said != key.substr(begin, ends_[index] - begin))
      return walk.node(order_[index]).name() + " is another, node " + std::to_string(index) + " of the walk";
    begin = ends_[index];
  }
  if (!same_ages(walk)) return "its nodes were made in another order";
  return std::nullopt;
}

void Plan::learn_ages(const Walk& walk) {
  const auto age = [&](uint32_t number) { return walk.node(number).sequence_nr(); };
  for (const uint32_t number : order_)
    if (number != 0) by_age_.push_back(number);  // the engine's root is made for the walk
  std::stable_sort(by_age_.begin(), by_age_.end(), [&](uint32_t one, uint32_t other) { return age(one) < age(other); });
  for (size_t index = 1; index < by_age_.size(); ++index)
    older_than_next_.push_back(age(by_age_[index - 1]) < age(by_age_[index]));
}

bool Plan::same_ages(const Walk& walk) const {
  for (size_t index = 1; index < by_age_.size(); ++index) {
    const uint64_t before = walk.node(by_age_[index - 1]).sequence_nr();
    const uint64_t after = walk.node(by_age_[index]).sequence_nr();
    if (older_than_next_[index - 1] ? before >= after : before != after) return false;
  }
  return true;
}

int Plan::variant_for(const Handover& found) const {
  const auto holds = [&](const Guards& guards) { return guards.hold(found); };
  const auto variant = std::find_if(variants_.begin(), variants_.end(), holds);
  return variant == variants_.end() ? kNone : static_cast<int>(variant - variants_.begin());
}

int Plan::add_variant(const Handover& found) {
  const int known = variant_for(found);
  if (known != kNone || variants_.size() == kMaxVariants) return known;
  variants_.emplace_back(found);
  return static_cast<int>(variants_.size()) - 1;
}

void Plan::release(const Walk& walk) const {
  for (const uint32_t number : order_) walk.node(number).release_variables();
}

}  // namespace native
