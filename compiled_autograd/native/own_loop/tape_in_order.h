// A tape, its nodes in the order in which the engine runs them.
//
// Of the nodes that are ready the engine takes the one that was made last (`CompareNodeTaskTime`, engine.cpp, 2.13).
// Where each edge leads to a node that was made before, the one that was made last of all that have not run is ready:
// so that order is known before anything runs, and needs neither a queue nor counts. Leaves are the exception: each
// runs as soon as the last edge to it has been served. Where several are ready at once the first edge's comes first; so
// it is with the engine's heap for two of them, and for more it depends on what else lies in the heap.

#pragma once

#include "../contract.h"
#include "../walk/numbers.h"

namespace native {

// Whether a tape has at least `count` nodes, a small number.
bool has_nodes(const edge_list& roots, size_t count);

class TapeInOrder {
 public:
  struct Place {
    Node* node;
    uint32_t first_input;   // its gradients come into that many places from there on, as many as it takes
    uint32_t first_edge;    // its edges, up to those of the next place
    uint32_t edges_to_it;   // counted for leaves alone
    bool calls_users_code;  // of saved tensors it is not known
  };
  struct Target {
    uint32_t place;  // kNowhere for an edge that leads nowhere, and for all that has no inputs
    uint32_t input;  // among those of all nodes
  };
  static constexpr uint32_t kNowhere = UINT32_MAX;

  // Throws Refused where a node is not plain, or where the engine's order is not known beforehand.
  explicit TapeInOrder(const edge_list& roots);

  // The nodes, the leaves after all others; and one more place, where the last one's edges end.
  const std::vector<Place>& places() const { return places_; }
  uint32_t leaves_begin() const { return leaves_begin_; }
  const std::vector<Target>& targets() const { return targets_; }
  const std::vector<Target>& roots() const { return roots_; }
  uint32_t inputs() const { return inputs_; }
  bool calls_users_code() const { return calls_users_code_; }  // of saved tensors it is not known

 private:
  void see(Node* node);
  void find_order();
  void follow_edges();
  // Throws Refused where hooks could see in which order leaves run that are ready at once.
  void check_leaves(const std::vector<Target>& ready) const;
  Target target_of(const Edge& edge);

  std::vector<Place> places_;
  std::vector<Target> targets_, roots_;
  uint32_t leaves_begin_ = 0, inputs_ = 0;
  bool calls_users_code_ = false;

  // While it is read.
  Numbers numbers_;
  std::vector<Node*> seen_;
  std::vector<uint32_t> place_of_;
};

// As `get_current_graph_task_execution_order` (engine.cpp, 2.13), once the results of so many nodes were handed on.
// Like that one it has an answer only where none that is to come waits for nothing any more, but for the roots.
std::vector<Node*> order_from(const edge_list& roots, const TapeInOrder& tape, uint32_t served);

}  // namespace native
