// The module as Python has it: `learn(outputs, gradients, ...)`, and of the plan that it gives `compare`,
// `add_variant` and `take`. Each gives a string, the reason, where it refuses a tape or the tape is another.

#include "alike.h"
#include "calls.h"
#include "fast_path/entry.h"
#include "fast_path/hit.h"
#include "own_loop/loop.h"
#include "peek.h"
#include "reducer.h"
#include "taken.h"

#include <ATen/ThreadLocalState.h>

#include <optional>
#include <system_error>
#include <thread>

namespace native {

std::pair<edge_list, variable_list> asked_for(const Call& call) {
  const Owned output_list(checked(PySequence_Fast(call.outputs, "outputs is no sequence")));
  const Owned gradient_list(checked(PySequence_Fast(call.gradients, "gradients is no sequence")));
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(output_list.get());
  if (PySequence_Fast_GET_SIZE(gradient_list.get()) != count) throw Refused{"not a gradient for each output"};
  edge_list edges;
  variable_list given;
  for (Py_ssize_t index = 0; index < count; ++index) {
    PyObject* output = PySequence_Fast_GET_ITEM(output_list.get(), index);
    PyObject* gradient = PySequence_Fast_GET_ITEM(gradient_list.get(), index);
    edges.push_back(torch::autograd::impl::gradient_edge(tensor_of(output, "an output that is no tensor")));
    if (!edges.back().is_valid()) throw Refused{"an output has no tape"};
    given.push_back(tensor_of(gradient, "a gradient that is undefined"));
  }
  return {std::move(edges), std::move(given)};
}

void begin(Walk& walk, const Call& call) {
  auto [edges, given] = asked_for(call);
  const bool writes_all = !call.captures && (!call.inputs || PyObject_Not(call.inputs) == 1);
  walk.begin(std::move(edges), std::move(given), writes_all);
}

namespace {

// As THPEngine_run_backward finds them (python_engine.cpp, 2.13).
Inputs inputs_of(const Call& call) {
  Inputs inputs{{}, call.captures != 0};
  if (!call.inputs) return inputs;
  const Owned list(checked(PySequence_Fast(call.inputs, "inputs is no sequence")));
  for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(list.get()); ++index) {
    const at::Tensor& input = tensor_of(PySequence_Fast_GET_ITEM(list.get(), index), "an input that is no tensor");
    if (!input.requires_grad()) throw Refused{"an input that requires no gradient"};
    if (const auto& function = input.grad_fn()) {
      if (!inputs.are_captured) throw Refused{"an input that is no leaf, whose gradient is kept"};
      inputs.edges.emplace_back(function, input.output_nr());
    } else {
      inputs.edges.emplace_back(torch::autograd::impl::try_get_grad_accumulator(input), 0);
    }
  }
  return inputs;
}

PyObject* handed_over(int variant, Handover found) {
  const Owned number(checked(PyLong_FromLong(variant)));
  const Owned lists(as_python(found));
  return checked(PySequence_Concat(Owned(checked(PyTuple_Pack(1, number.get()))).get(), lists.get()));
}

// ---- the class ------------------------------------------------------------------------------------------------------

struct PlanObject {
  PyObject_HEAD
  Plan* plan;
};

Plan& plan_of(PyObject* self) { return *reinterpret_cast<PlanObject*>(self)->plan; }

PyTypeObject* plan_type = nullptr;  // made with the module, which is made once

}  // namespace

Plan* plan_in(PyObject* object) { return Py_TYPE(object) == plan_type ? &plan_of(object) : nullptr; }

PyObject* take_tape(Plan& plan, const Call& call, bool keeps) {
  return or_reason([&]() -> PyObject* {
    const Lease walk;
    begin(*walk, call);
    if (const auto difference = plan.difference(*walk, inputs_of(call))) return text(*difference);
    const int number = plan.add_variant(walk->found());
    Owned taken(new_taken(number, walk->take()));
    if (!keeps) {
      const WithoutGIL meanwhile;
      plan.release(*walk);
    }
    return taken.release();
  });
}

namespace {

PyObject* learn(PyObject*, PyObject* arguments) {
  Call call;
  int order_shows;
  if (!PyArg_ParseTuple(
          arguments, "OOp|Op", &call.outputs, &call.gradients, &order_shows, &call.inputs, &call.captures))
    return nullptr;
  return or_reason([&] {
    const Lease walk;
    begin(*walk, call);
    auto plan = std::make_unique<Plan>(*walk, inputs_of(call), order_shows);
    Owned object(checked(plan_type->tp_alloc(plan_type, 0)));
    reinterpret_cast<PlanObject*>(object.get())->plan = plan.release();
    return object.release();
  });
}

// Walk a tape with a plan, and give what it holds, with the number that `variant` gives for it.
template <typename Variant>
PyObject* walk_with(PyObject* self, PyObject* arguments, Variant variant) {
  Call call;
  if (!PyArg_ParseTuple(arguments, "OO|Op", &call.outputs, &call.gradients, &call.inputs, &call.captures))
    return nullptr;
  return or_reason([&]() -> PyObject* {
    const Lease walk;
    begin(*walk, call);
    if (const auto difference = plan_of(self).difference(*walk, inputs_of(call))) return text(*difference);
    const int number = variant(plan_of(self), walk->found());
    return handed_over(number, walk->take());
  });
}

PyObject* compare(PyObject* self, PyObject* arguments) {
  return walk_with(self, arguments, [](const Plan& plan, const Handover& found) { return plan.variant_for(found); });
}

PyObject* add_variant(PyObject* self, PyObject* arguments) {
  return walk_with(self, arguments, [](Plan& plan, const Handover& found) { return plan.add_variant(found); });
}

PyObject* take(PyObject* self, PyObject* arguments) {
  Call call;
  int keeps;
  if (!PyArg_ParseTuple(arguments, "OOp|Op", &call.outputs, &call.gradients, &keeps, &call.inputs, &call.captures))
    return nullptr;
  return take_tape(plan_of(self), call, keeps);
}

PyObject* nodes(PyObject* self, void*) { return PyLong_FromSize_t(plan_of(self).nodes()); }

void let_go(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<PlanObject*>(self)->plan;
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef plan_methods[] = {
    {"compare", compare, METH_VARARGS,
     "(outputs, gradients, inputs, captures) -> (variant or -1, tensors, sizes, scalars, objects), or what differs."},
    {"add_variant", add_variant, METH_VARARGS, "The same; what the tape holds becomes a variant if it is none."},
    {"take", take, METH_VARARGS,
     "(outputs, gradients, keep_graph, inputs, captures) -> Taken, or what differs; a tape that is not kept is freed "
     "as by "
     "the engine."},
    {nullptr, nullptr, 0, nullptr}};
PyGetSetDef plan_attributes[] = {
    {"nodes", nodes, nullptr, "How many nodes the tape has, the engine's root among them.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot plan_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(let_go)},
    {Py_tp_methods, plan_methods},
    {Py_tp_getset, plan_attributes},
    {0, nullptr}};
PyType_Spec plan_spec = {
    "compiled_autograd_native.Plan", sizeof(PlanObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    plan_slots};

// The numbers of the pairs of tensors that may differ.
PyObject* unlike(PyObject*, PyObject* arguments) {
  PyObject *wanted, *found;
  double relative;
  if (!PyArg_ParseTuple(arguments, "O!O!d", &PyList_Type, &wanted, &PyList_Type, &found, &relative)) return nullptr;
  return or_error([&]() -> PyObject* {
    std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
    const Py_ssize_t count = std::min(PyList_GET_SIZE(wanted), PyList_GET_SIZE(found));
    for (Py_ssize_t index = 0; index < count; ++index) {
      const at::Tensor* one = tensor_in(PyList_GET_ITEM(wanted, index));
      const at::Tensor* other = tensor_in(PyList_GET_ITEM(found, index));
      pairs.emplace_back(one ? *one : at::Tensor(), other ? *other : at::Tensor());
    }
    std::vector<Py_ssize_t> unclear;
    {
      const WithoutGIL meanwhile;
      for (size_t index = 0; index < pairs.size(); ++index) {
        const auto& [one, other] = pairs[index];
        const bool is_clear =
            one.defined() == other.defined() && (!one.defined() || surely_alike(one, other, relative));
        if (!is_clear) unclear.push_back(static_cast<Py_ssize_t>(index));
      }
    }
    Owned numbers(checked(PyList_New(static_cast<Py_ssize_t>(unclear.size()))));
    for (size_t index = 0; index < unclear.size(); ++index)
      PyList_SET_ITEM(numbers.get(), static_cast<Py_ssize_t>(index), checked(PyLong_FromSsize_t(unclear[index])));
    return numbers.release();
  });
}

// A thread is started to read the state that a new thread has: PyTorch has no other way to get it.
PyObject* apart(PyObject*, PyObject* function) {
  return or_error([&]() -> PyObject* {
    std::optional<at::ThreadLocalState> fresh;
    try {
      std::thread([&] { fresh.emplace(); }).join();
    } catch (const std::system_error& error) {
      PyErr_SetString(PyExc_OSError, error.what());
      throw PythonError();
    }
    const at::ThreadLocalStateGuard guard(*fresh);
    return checked(PyObject_CallNoArgs(function));
  });
}

PyMethodDef functions[] = {
    {"apart", apart, METH_O, "(function) -> what it gives, called in the state of a new thread."},
    {"fast_hit", new_fast_hit, METH_VARARGS,
     "(plan, program, shapes, settings, structure, variant, watched, number, questions, hand_over, may_write, write, "
     "counter) "
     "-> FastHit."},
    {"fast_path", new_fast_path, METH_VARARGS, "(fallback, resume, interrupted, thread, uses, engine) -> FastPath."},
    {"move_aside", move_aside, METH_O,
     "(outputs) -> what the hooks of DDP's reducer on the leaves of a tape are put back with, or None."},
    {"put_back", put_back, METH_O, "(what move_aside gave) -> the leaves that have their hooks back."},
    {"tape_of_hooks", tape_of_hooks, METH_O,
     "(leaves) -> a number whose backward calls these hooks of theirs, and at the second run what they queued."},
    {"has_queued", has_queued, METH_O, "(such a number) -> whether hooks have queued something for the end."},
    {"in_own_loop", in_own_loop, METH_VARARGS,
     "(outputs, gradients, keep_graph, least_nodes) -> (number, gradient), whose backward is theirs, or the reason why "
     "not."},
    {"node_in_own_loop", node_in_own_loop, METH_NOARGS,
     "() -> the node that runs, where the innermost backward of the thread is such a one; else None."},
    {"buffers_in_own_loop", buffers_in_own_loop, METH_O,
     "(ctx) -> for each edge of the node that the own loop runs the sum of gradients at its target, or None; None if "
     "that is not the node of the ctx, or has post hooks."},
    {"show_own_loop", show_own_loop, METH_NOARGS,
     "() -> None. Where it is such a one, the engine knows of the nodes that it runs from then on."},
    {"order_in_own_loop", order_in_own_loop, METH_NOARGS,
     "() -> the nodes of such a one in the order in which they run; else None."},
    {"learn", learn, METH_VARARGS,
     "(outputs, gradients, order_shows, inputs, captures) -> Plan, or the reason why not."},
    {"peek", peek, METH_VARARGS,
     "(outputs, inputs, seed) -> a hash of the seed, the number of inputs, and the tape's first nodes; None if an "
     "output "
     "is no tensor."},
    {"program", new_program, METH_VARARGS,
     "(function, arguments, gives) -> Program: what a region was compiled to, which of a handover's tensors it takes; "
     "for "
     "each leaf the number of its tensor, that of its result, and whether it can keep that."},
    {"unlike", unlike, METH_VARARGS,
     "(wanted, found, relative) -> the numbers of those pairs of two lists, of tensors and None, of which it cannot be "
     "told here that they are alike but for rounding."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "compiled_autograd_native", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

}  // namespace native

PyMODINIT_FUNC PyInit_compiled_autograd_native() {
  native::plan_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&native::plan_spec));
  if (!native::plan_type || !native::make_classes_of_taken()) return nullptr;
  if (!native::make_class_of_fast_hits() || !native::make_class_of_fast_paths()) return nullptr;
  PyObject* module = PyModule_Create(&native::module);
  if (module && PyModule_AddStringConstant(module, "built_for", NATIVE_BUILT_FOR) < 0) Py_CLEAR(module);
  return module;
}
