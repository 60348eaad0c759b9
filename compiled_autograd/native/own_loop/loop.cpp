#include "loop.h"

#include "tape_in_order.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/input_buffer.h>

// Declared here for the reason that contract.h gives: torch/csrc/autograd/python_cpp_function.h.
namespace torch::autograd {
PyObject* functionToPyObject(const native::NodePtr& node);
}  // namespace torch::autograd

namespace native {

namespace {

// What most depends on of the state of a thread, and what code of Python may leave in it. Cheap to compare.
struct QuickState {
  QuickState() {
    const auto& autograd = c10::AutogradState::get_tls_state();
    const auto& saving = at::SavedTensorDefaultHooks::get_tls_state();
    for (const bool each :
         {autograd.get_grad_mode(), autograd.get_inference_mode(), autograd.get_fw_grad_mode(),
          autograd.get_multithreading_enabled(), autograd.get_view_replay_enabled(),
          saving.disabled_error_message.has_value(), saving.is_tracing})
      flags = 2 * flags + each;
    packers = saving.stack.size();
    modes = at::impl::PythonTorchFunctionTLS::stack_len();
    disabled = at::impl::PythonTorchFunctionTLS::get_disabled_state();
  }
  bool operator==(const QuickState&) const = default;

  unsigned flags = 0;
  size_t packers;
  int64_t modes;
  int disabled;
};

// The engine sets the state of the thread anew for each node. Here that is done once, and again after users' code, and
// where a node has changed what can be compared quickly: what unpacks saved tensors is users' code that is not seen.
class ThreadState {
 public:
  void keep(bool ran_users_code) const {
    if (ran_users_code || is_changed()) at::ThreadLocalState::setThreadLocalState(all_);
  }

 private:
  bool is_changed() const {
    const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
    return keys.included_ != keys_.included_ || keys.excluded_ != keys_.excluded_ || !(QuickState() == state_);
  }

  QuickState state_;
  c10::impl::LocalDispatchKeySet keys_ = c10::impl::tls_local_dispatch_key_set();
  at::ThreadLocalState all_;
};

// As `call_function` (engine.cpp, 2.13). Hooks may have been registered since the tape was read: `calls_users_code` is
// set where some are called.
variable_list call_with_hooks(Node& node, variable_list gradients, bool keep_graph, bool& calls_users_code) {
  const auto hand_to = [&](const auto& hook) {
    calls_users_code = true;
    gradients = (*hook)(gradients);
  };
  for (const auto& hook : node.tensor_pre_hooks()) hand_to(hook);
  for (const auto& [index, hook] : node.retains_grad_hooks()) hand_to(hook);
  for (const auto& hook : node.pre_hooks()) hand_to(hook);
  if (!keep_graph) node.will_release_variables();
  const bool had_post_hooks = !node.post_hooks().empty();
  variable_list given;  // a leaf reckons with this second owner where there are hooks
  if (had_post_hooks) given = gradients;
  variable_list results = node(std::move(gradients));
  torch::autograd::validate_outputs(node.next_edges(), results, [&](const std::string& message) {
    return "Function " + node.name() + " returned an " + message;
  });
  for (const auto& hook : node.post_hooks()) {
    calls_users_code = true;
    results = (*hook)(results, given);
  }
  return results;
}

// Throws what the engine throws where it shows no buffers (`get_current_input_grad_buffers`, engine.cpp, since 2.15).
// The node that runs all others has no edges, so the engine has no buffer of its own to show.
template <typename Buffers>
void check_shows_buffers(Buffers* node) {
  if constexpr (requires { get_current_input_grad_buffers(node); }) get_current_input_grad_buffers(node);
}

// The sum so far; undefined if there is none, or if the engine would not add to it in place.
template <typename Buffer>
at::Tensor buffer_of(Buffer& inputs, uint32_t input) {
  if constexpr (requires { inputs.get_for_direct_accumulation(input, std::nullopt, std::nullopt); })
    return inputs.get_for_direct_accumulation(input, std::nullopt, std::nullopt);
  return {};
}

class Loop {
 public:
  // current: always has the node that runs; served: of how many nodes that are no leaves the results were handed on.
  Loop(const TapeInOrder& tape, bool keep_graph, Node*& current, uint32_t& served)
      : tape_(tape),
        keep_graph_(keep_graph),
        current_(current),
        served_(served),
        inputs_(variable_list(tape.inputs())) {
    for (uint32_t index = tape.leaves_begin(); index + 1 < tape.places().size(); ++index)
      waits_for_.push_back(tape.places()[index].edges_to_it);
  }

  void run(variable_list gradients) {
    give(tape_.roots().data(), tape_.roots().size(), gradients);
    for (uint32_t index = 0; index < tape_.leaves_begin(); ++index) {
      const TapeInOrder::Place& place = tape_.places()[index];
      const size_t count = tape_.places()[index + 1].first_edge - place.first_edge;
      variable_list results = run_node(index);
      served_ = index + 1;
      give(tape_.targets().data() + place.first_edge, count, results);
    }
  }

  // The sum of gradients at the target of each edge of the running node, which must be no leaf.
  variable_list buffers() {
    variable_list sums;
    for (uint32_t edge = tape_.places()[served_].first_edge; edge < tape_.places()[served_ + 1].first_edge; ++edge) {
      const auto& [place, input] = tape_.targets()[edge];
      sums.push_back(place == TapeInOrder::kNowhere ? at::Tensor() : buffer_of(inputs_, input));
    }
    return sums;
  }

 private:
  // As `Engine::evaluate_function` (engine.cpp, 2.13).
  variable_list run_node(uint32_t index) {
    const TapeInOrder::Place& place = tape_.places()[index];
    Node& node = *place.node;
    const auto begin = inputs_.buffer.begin() + place.first_input;
    const auto end = inputs_.buffer.begin() + tape_.places()[index + 1].first_input;
    current_ = &node;
    bool calls_users_code = place.calls_users_code;
    variable_list results = call_with_hooks(
        node, {std::make_move_iterator(begin), std::make_move_iterator(end)}, keep_graph_, calls_users_code);
    if (!keep_graph_) node.release_variables();
    state_.keep(calls_users_code || (index >= tape_.leaves_begin() && node.tensor_post_acc_grad_hooks()));
    return results;
  }

  // The second one and those after it as the engine adds them, in place or not.
  void add(uint32_t input, at::Tensor&& gradient, uint32_t place) {
    if (!gradient.defined()) return;
    at::Tensor& sum = inputs_.buffer[input];
    if (sum.defined())
      inputs_.add(input, std::move(gradient), std::nullopt, std::nullopt, tape_.places()[place].node);
    else
      sum = std::move(gradient);
  }

  // Hand gradients on. Leaves that wait for nothing any more run then, before any other node does.
  void give(const TapeInOrder::Target* targets, size_t count, variable_list& gradients) {
    TORCH_CHECK(gradients.size() == count, "hooks have made ", gradients.size(), " gradients of ", count);
    bool leaves_are_ready = false;
    for (size_t index = 0; index < count; ++index) {
      const auto& [place, input] = targets[index];
      if (place == TapeInOrder::kNowhere) continue;
      add(input, std::move(gradients[index]), place);
      if (place >= tape_.leaves_begin()) leaves_are_ready |= --waits_for_[place - tape_.leaves_begin()] == 0;
    }
    if (!leaves_are_ready) return;
    gradients.clear();  // else a leaf would not be the only owner of what is among them twice, and would copy it
    for (size_t index = 0; index < count; ++index) {
      const uint32_t place = targets[index].place;
      if (place == TapeInOrder::kNowhere || place < tape_.leaves_begin()) continue;
      uint32_t& waits = waits_for_[place - tape_.leaves_begin()];
      if (waits != 0) continue;
      waits = TapeInOrder::kNowhere;  // another edge may lead to it from here
      run_node(place);
    }
  }

  const TapeInOrder& tape_;
  const bool keep_graph_;
  Node*& current_;
  uint32_t& served_;
  const ThreadState state_;
  torch::autograd::InputBuffer inputs_;  // of all nodes
  std::vector<uint32_t> waits_for_;      // of each leaf: the number of edges left
};

// It takes no sequence number, by which others count what a thread has recorded.
struct RunsLoop : Node {
  RunsLoop(edge_list roots, variable_list gradients, bool keep_graph)
      : Node(UINT64_MAX),
        roots(std::move(roots)),
        gradients(std::move(gradients)),
        tape(this->roots),
        keep_graph(keep_graph) {}

  variable_list apply(variable_list&&) override {
    TORCH_CHECK(!has_run, "a backward without the engine's queue runs once");
    has_run = true;
    if (tape.calls_users_code()) show_nodes();
    Loop made(tape, keep_graph, current, served);
    loop = &made;
    const auto forget = c10::make_scope_exit([this] { loop = nullptr; });
    made.run(std::move(gradients));
    current = nullptr;
    return {};
  }

  // Anomaly mode tells of it, where what runs here has recorded something.
  std::string name() const override { return current ? current->name() : "BackwardWithoutQueue"; }

  // To those who ask the engine whether it will run a node, as hooks over several gradients do. Where it is asked for
  // one root it does not reckon that among them.
  void show_nodes() {
    if (has_shown) return;
    const std::unordered_set<Node*>* shown = torch::autograd::get_current_graph_task_nodes_in_graph();
    TORCH_CHECK(shown, "a backward without the engine's queue runs inside of the engine");
    auto& nodes = const_cast<std::unordered_set<Node*>&>(*shown);
    const Node* root = roots.size() == 1 ? roots.front().function.get() : nullptr;
    for (const TapeInOrder::Place& place : tape.places())
      if (place.node && place.node != root) nodes.insert(place.node);
    has_shown = true;
  }

  edge_list roots;  // own the tape
  variable_list gradients;
  TapeInOrder tape;
  bool keep_graph, has_run = false, has_shown = false;
  Node* current = nullptr;
  Loop* loop = nullptr;
  uint32_t served = 0;
};

// The one that runs in the innermost backward of the thread; null where that is none.
RunsLoop* running() {
  const NodePtr node = torch::autograd::get_current_node();
  auto* loop = dynamic_cast<RunsLoop*>(node.get());  // its task owns it
  return loop && loop->current ? loop : nullptr;
}

// Of which the engine warns; there are none from 2.13 on.
template <typename Tensor>
bool has_names(const Tensor& tensor) {
  if constexpr (requires { tensor.has_names(); }) return tensor.has_names();
  return false;
}

// Refuse backwards for which the engine does more for each node.
void refuse_onlookers() {
  if (torch::autograd::AnomalyMode::is_enabled()) throw Refused{"anomaly mode"};
  for (const auto scope : {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION})
    if (at::getStepCallbacksUnlessEmpty(scope).has_value()) throw Refused{"a profiler looks on"};
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  if (!(keys.included_ - c10::default_included_set).empty()) throw Refused{"a mode or a transform is on"};
  const c10::AutogradState state = c10::AutogradState::get_tls_state();
  if (state.get_inference_mode()) throw Refused{"inference mode"};
  // Then users' code may ask for the order in which nodes will run.
  if (!state.get_multithreading_enabled()) throw Refused{"multithreading is off"};
}

}  // namespace

PyObject* in_own_loop(PyObject*, PyObject* arguments) {
  Call call;
  int keep_graph;
  Py_ssize_t least_nodes;
  if (!PyArg_ParseTuple(arguments, "OOpn", &call.outputs, &call.gradients, &keep_graph, &least_nodes)) return nullptr;
  return or_reason([&]() -> PyObject* {
    if (!PyTuple_Check(call.outputs) || !PyTuple_Check(call.gradients)) throw Refused{"the engine takes tuples alone"};
    auto [roots, gradients] = asked_for(call);
    // Not thrown: that takes as long as half of such a backward.
    if (!has_nodes(roots, static_cast<size_t>(least_nodes))) return text("so small a tape takes the engine less");
    refuse_onlookers();
    for (const at::Tensor& gradient : gradients)
      if (at::isTensorSubclassLike(gradient) || has_names(gradient)) throw Refused{"a gradient is no plain tensor"};
    // As `Engine::execute` does (engine.cpp, 2.13).
    torch::autograd::validate_outputs(roots, gradients, [](const std::string& message) { return message; });
    auto made = std::make_unique<RunsLoop>(std::move(roots), std::move(gradients), keep_graph);
    at::Tensor number = at::zeros({});
    made->add_input_metadata(number);
    const Owned gradient(checked(THPVariable_Wrap(at::zeros({}))));
    torch::autograd::impl::set_gradient_edge(number, Edge(NodePtr(std::move(made)), 0));
    return checked(PyTuple_Pack(2, Owned(checked(THPVariable_Wrap(number))).get(), gradient.get()));
  });
}

PyObject* node_in_own_loop(PyObject*, PyObject*) {
  return or_error([]() -> PyObject* {
    const RunsLoop* loop = running();
    if (!loop) return Py_NewRef(Py_None);
    return checked(torch::autograd::functionToPyObject(loop->current->getptr()));
  });
}

PyObject* buffers_in_own_loop(PyObject*, PyObject* asked) {
  return or_error([&]() -> PyObject* {
    RunsLoop* runs = running();
    if (!runs || !runs->loop || !runs->current->post_hooks().empty()) return Py_NewRef(Py_None);
    if (Owned(checked(torch::autograd::functionToPyObject(runs->current->getptr()))).get() != asked)
      return Py_NewRef(Py_None);
    check_shows_buffers<Node>(runs);
    const variable_list sums = runs->loop->buffers();
    Owned list(checked(PyList_New(static_cast<Py_ssize_t>(sums.size()))));
    for (size_t index = 0; index < sums.size(); ++index)
      PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(index), checked(THPVariable_Wrap(sums[index])));
    return list.release();
  });
}

PyObject* show_own_loop(PyObject*, PyObject*) {
  return or_error([]() -> PyObject* {
    if (RunsLoop* loop = running()) loop->show_nodes();
    return Py_NewRef(Py_None);
  });
}

PyObject* order_in_own_loop(PyObject*, PyObject*) {
  return or_error([]() -> PyObject* {
    const RunsLoop* loop = running();
    if (!loop) return Py_NewRef(Py_None);
    const std::vector<Node*> order = order_from(loop->roots, loop->tape, loop->served);
    Owned list(checked(PyList_New(static_cast<Py_ssize_t>(order.size()))));
    for (size_t index = 0; index < order.size(); ++index)
      PyList_SET_ITEM(
          list.get(), static_cast<Py_ssize_t>(index),
          checked(torch::autograd::functionToPyObject(order[index]->getptr())));
    return list.release();
  });
}

}  // namespace native
