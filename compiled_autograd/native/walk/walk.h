// One walk over a tape: what each node says of itself, in bytes that are the same for nodes that the engine's cache
// takes for the same; and what they hold, in the lists that the engine would hand over.

#pragma once

#include "../contract.h"
#include "numbers.h"

#include <memory>
#include <string_view>
#include <vector>

namespace native {

// What a tape holds: tensors, each once, sizes, numbers, and the objects of users (a `ctx`, a hook).
struct Handover {
  variable_list tensors;
  std::vector<int64_t> sizes;
  std::vector<IValue> scalars;
  std::vector<c10::SafePyObject> objects;
  variable_list reduced;  // leaves that have hooks of DDP's reducer, of which nothing is in the others
};

// What becomes of a node in a backward.
enum class Role : uint8_t {
  kRuns,
  kIsAsked,  // it does not run: the gradient that comes to it is asked for
  kIsBeside  // neither: with inputs, the tape has nodes that lead to none of them
};

class Walk {
 public:
  Walk();

  // Begin, with the engine's own root, which is number 0; all outputs have a tape. Throws what the engine raises of the
  // gradients.
  //
  // writes_all: every leaf of the tape is written, so hooks of DDP's reducer are noted; else they refuse the walk.
  void begin(edge_list outputs, variable_list gradients, bool writes_all);

  // Make room for what a walk will find.
  void expect(size_t tensors, size_t sizes, size_t scalars);

  // What a node says of itself: valid until the next call. Nodes have numbers, in the order in which they are first
  // seen at the end of an edge. What the node holds joins the handover, if it runs. Throws Refused, and anything.
  std::string_view visit(uint32_t number, Role role);

  Node& node(uint32_t number) const { return *nodes_[number]; }
  uint32_t nodes_seen() const { return nodes_seen_.count(); }
  uint32_t number_of(const Node* node) { return nodes_seen_.known(node); }  // Numbers::kNone where it was not seen

  const Handover& found() const { return found_; }
  Handover take();

  // Forget all of it. Releases tensors and users' objects, which may run any code.
  void clear();
  bool is_large() const { return nodes_.capacity() > kLarge; }

 private:
  static constexpr size_t kLarge = 1 << 16;

  uint32_t see(Node* node);
  void collect_edges(const Node& node, bool with_metadata);
  void collect_inner_nodes();
  void take_tensors();
  void take_sizes();
  void take_scalars();
  void forget_node();

  AutogradCompilerCall compiler_;
  NodeCall call_;
  CompiledNodeArgs args_;
  Numbers nodes_seen_;
  Numbers tensors_seen_;
  std::vector<Node*> nodes_;
  NodePtr root_;
  bool writes_all_ = false;
  Handover found_;
};

// The working memory of one walk, of this thread, emptied when the walk ends, however it ends.
class Lease {
 public:
  Lease();
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  Walk& operator*() const { return *walk_; }
  Walk* operator->() const { return walk_.get(); }

 private:
  std::unique_ptr<Walk> walk_;
};

}  // namespace native
