// A learnt tape: the order of the engine's walk, and the bytes of each node. A tape with the same bytes in the same
// order is the same to the engine. The bytes have the numbers of the nodes that edges lead to. So by induction the two
// walks come to corresponding nodes, and no count of dependencies is needed.

#pragma once

#include "guards.h"

#include <optional>

namespace native {

// The inputs that a backward is asked for; none where it is for all leaves.
struct Inputs {
  edge_list edges;    // one that is not valid leads nowhere: nothing of the tape knows that leaf
  bool are_captured;  // else they run, and accumulate
};

class Plan {
 public:
  // Learn the tape of a walk that has begun, with what it holds as variant 0. Throws Refused, and anything.
  //
  // order_shows: tapes whose nodes were made in another order are others.
  Plan(Walk& walk, const Inputs& inputs, bool order_shows);

  // Compare another tape, whose walk has begun. The difference in words; nothing if it is the same. Throws as the walk.
  std::optional<std::string> difference(Walk& walk, const Inputs& inputs) const;

  // The number of the variant whose guards hold, or -1.
  int variant_for(const Handover& found) const;
  // Its number; a new one where none held, or -1 where there are many. Throws Refused.
  int add_variant(const Handover& found);

  // Release the saved values of the nodes that run, as the engine does. Without the GIL: another thread may hold
  // a node's lock and wait for the GIL.
  void release(const Walk& walk) const;

  size_t nodes() const { return visits_.size(); }

 private:
  static constexpr int kNone = -1;
  static constexpr size_t kMaxVariants = 64;

  struct Visit {
    uint32_t node;  // its number
    Role role;
    size_t end;  // of what it said, in `key_`
  };
  struct Asked {
    uint32_t node;
    uint32_t input_nr;
    bool operator==(const Asked&) const = default;
  };

  void learn(Walk& walk, uint32_t number, Role role);
  void learn_beside(Walk& walk);
  static std::vector<Asked> asked(Walk& walk, const Inputs& inputs);
  void learn_ages(const Walk& walk);
  bool same_ages(const Walk& walk) const;

  size_t tensors_, sizes_, scalars_;  // their numbers
  std::vector<Visit> visits_;         // in the order of the walk; nodes that do not run come last
  std::string key_;                   // the nodes' bytes
  std::vector<Asked> asked_;          // for each input
  bool captures_;
  std::vector<uint32_t> by_age_;       // numbers of nodes, the oldest first; empty where the order does not show
  std::vector<bool> older_than_next_;  // else as old: leaves, and nodes of several threads
  std::vector<Guards> variants_;
};

}  // namespace native
