#include "plan.h"

#include <algorithm>
#include <numeric>

namespace native {

namespace {

// The nodes of a tape that run, and how many edges from such nodes lead to each of them: the engine comes to a node
// once it has been at all their beginnings (Engine::compute_dependencies and GraphTask::init_to_execute, engine.cpp,
// 2.13).
class Dependencies {
 public:
  Dependencies(Node& root, const Inputs& inputs) {
    see(&root);
    for (size_t index = 0; index < nodes_.size(); ++index)
      for (const Edge& edge : nodes_[index]->next_edges())
        if (edge.is_valid()) see(edge.function.get());
    roles_.assign(nodes_.size(), Role::kRuns);
    if (!inputs.edges.empty()) find_roles(inputs);
    count_edges();
  }

  Role role(const Node* node) { return roles_[numbers_.known(node)]; }
  // The walk has been at the beginning of one of the edges to a node: whether it was the last.
  bool is_ready(const Node* node) { return --waits_for_[numbers_.known(node)] == 0; }

 private:
  void see(Node* node) {
    if (numbers_.of(node).second) nodes_.push_back(node);
  }

  // Those of nodes that run; all run until it is known which do.
  void count_edges() {
    waits_for_.assign(nodes_.size(), 0);
    for (size_t index = 0; index < nodes_.size(); ++index) {
      if (roles_[index] != Role::kRuns) continue;
      for (const Edge& edge : nodes_[index]->next_edges())
        if (edge.is_valid()) ++waits_for_[numbers_.known(edge.function.get())];
    }
  }

  // A node runs if an edge of it leads to one that runs or is asked for: so what lies below it is marked first.
  void find_roles(const Inputs& inputs) {
    const std::vector<uint32_t> from_above = topological_order();
    roles_.assign(nodes_.size(), Role::kIsBeside);
    for (const Edge& edge : inputs.edges) {
      const uint32_t number = edge.is_valid() ? numbers_.known(edge.function.get()) : Numbers::kNone;
      if (number != Numbers::kNone) roles_[number] = inputs.are_captured ? Role::kIsAsked : Role::kRuns;
    }
    const auto leads_on = [&](const Edge& edge) {
      return edge.is_valid() && role(edge.function.get()) != Role::kIsBeside;
    };
    for (auto number = from_above.rbegin(); number != from_above.rend(); ++number) {
      const edge_list& edges = nodes_[*number]->next_edges();
      if (std::any_of(edges.begin(), edges.end(), leads_on)) roles_[*number] = Role::kRuns;
    }
  }

  std::vector<uint32_t> topological_order() {
    count_edges();
    std::vector<uint32_t> order{0};
    for (size_t index = 0; index < order.size(); ++index)
      for (const Edge& edge : nodes_[order[index]]->next_edges())
        if (edge.is_valid() && is_ready(edge.function.get())) order.push_back(numbers_.known(edge.function.get()));
    return order;
  }

  Numbers numbers_;
  std::vector<Node*> nodes_;
  std::vector<Role> roles_;
  std::vector<uint32_t> waits_for_;
};

}  // namespace

Plan::Plan(Walk& walk, const Inputs& inputs, bool order_shows) : captures_(inputs.are_captured) {
  Dependencies dependencies(walk.node(0), inputs);
  if (dependencies.role(&walk.node(0)) != Role::kRuns) throw Refused{"no input is part of the tape"};
  std::vector<uint32_t> ready{0};  // last in, first out, as in python_compiled_autograd.cpp
  while (!ready.empty()) {
    const uint32_t number = ready.back();
    ready.pop_back();
    const Role role = dependencies.role(&walk.node(number));
    learn(walk, number, role);
    if (role != Role::kRuns) continue;
    for (const Edge& edge : walk.node(number).next_edges()) {
      if (!edge.is_valid() || dependencies.role(edge.function.get()) == Role::kIsBeside) continue;
      if (dependencies.is_ready(edge.function.get())) ready.push_back(walk.number_of(edge.function.get()));
    }
  }
  if (order_shows) learn_ages(walk);
  learn_beside(walk);
  asked_ = asked(walk, inputs);
  tensors_ = walk.found().tensors.size();
  sizes_ = walk.found().sizes.size();
  scalars_ = walk.found().scalars.size();
  add_variant(walk.found());
}

void Plan::learn(Walk& walk, uint32_t number, Role role) {
  key_ += walk.visit(number, role);
  visits_.push_back({number, role, key_.size()});
}

// Nodes that do not run decide which nodes run, by whether they lead to an input. So their edges are part of the plan.
void Plan::learn_beside(Walk& walk) {
  std::vector<bool> is_known;
  for (const Visit& visit : visits_) {
    is_known.resize(std::max<size_t>(is_known.size(), visit.node + 1));
    is_known[visit.node] = true;
  }
  for (uint32_t number = 0; number < walk.nodes_seen(); ++number)
    if (number >= is_known.size() || !is_known[number]) learn(walk, number, Role::kIsBeside);
}

std::vector<Plan::Asked> Plan::asked(Walk& walk, const Inputs& inputs) {
  std::vector<Asked> asked;
  for (const Edge& edge : inputs.edges) {
    const uint32_t node = edge.is_valid() ? walk.number_of(edge.function.get()) : Numbers::kNone;
    asked.push_back({node, node == Numbers::kNone ? 0 : edge.input_nr});
  }
  return asked;
}

std::optional<std::string> Plan::difference(Walk& walk, const Inputs& inputs) const {
  if (captures_ != inputs.are_captured || asked_.size() != inputs.edges.size()) return "other inputs are asked for";
  walk.expect(tensors_, sizes_, scalars_);
  const std::string_view key = key_;
  size_t begin = 0;
  for (size_t index = 0; index < visits_.size(); ++index) {
    const Visit& visit = visits_[index];
    if (walk.visit(visit.node, visit.role) != key.substr(begin, visit.end - begin))
      return walk.node(visit.node).name() + " is another, node " + std::to_string(index) + " of the walk";
    begin = visit.end;
  }
  if (!same_ages(walk)) return "its nodes were made in another order";
  if (!asked_.empty() && asked(walk, inputs) != asked_) return "other inputs are asked for";
  return std::nullopt;
}

void Plan::learn_ages(const Walk& walk) {
  const auto age = [&](uint32_t number) { return walk.node(number).sequence_nr(); };
  for (const Visit& visit : visits_)
    if (visit.node != 0) by_age_.push_back(visit.node);  // the engine's root is made for the walk
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
  for (const Visit& visit : visits_)
    if (visit.role == Role::kRuns) walk.node(visit.node).release_variables();
}

}  // namespace native
