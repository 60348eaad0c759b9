#include "entry.h"

#include "skip.h"

#include <structmember.h>

#include <optional>
#include <utility>

namespace native {

namespace {

struct FastPathObject {
  PyObject_HEAD
  FastPathState state;
};

FastPathState& state_of(PyObject* self) { return reinterpret_cast<FastPathObject*>(self)->state; }

// Whether there are gradients, and none is of the `vmap` of before `torch.func`: one may outlive it, so that the state
// of the thread does not tell.
bool are_plain(PyObject* gradients) {
  if (!PyTuple_Check(gradients)) return false;
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(gradients); ++index) {
    const at::Tensor* gradient = tensor_in(PyTuple_GET_ITEM(gradients, index));
    if (!gradient || gradient->key_set().has(c10::DispatchKey::Batched)) return false;
  }
  return true;
}

// `loss.backward()`, in the form in which PyTorch calls the engine for it.
std::optional<Asked> understood(PyObject* all, PyObject* by_name) {
  if (PyTuple_GET_SIZE(all) != 5 || !by_name || PyDict_GET_SIZE(by_name) != 2) return std::nullopt;
  if (PyDict_GetItemString(by_name, "accumulate_grad") != Py_True) return std::nullopt;
  if (!PyDict_GetItemString(by_name, "allow_unreachable")) return std::nullopt;
  PyObject *keeps = PyTuple_GET_ITEM(all, 2), *creates = PyTuple_GET_ITEM(all, 3), *inputs = PyTuple_GET_ITEM(all, 4);
  if (!PyBool_Check(keeps) || creates != Py_False || !PyTuple_Check(inputs) || PyTuple_GET_SIZE(inputs))
    return std::nullopt;
  if (!are_plain(PyTuple_GET_ITEM(all, 1))) return std::nullopt;
  return Asked{{PyTuple_GET_ITEM(all, 0), PyTuple_GET_ITEM(all, 1)}, keeps == Py_True, seconds()};
}

PyObject* run_backward(PyObject* self, PyObject* all, PyObject* by_name) {
  FastPathState& path = state_of(self);
  return or_error([&] {
    if (const auto skip = skip_of(path, all, by_name)) return run_on_eager(path, *skip, all, by_name);
    const auto asked = PyTuple_GET_SIZE(path.hits) ? understood(all, by_name) : std::nullopt;
    const Served served = asked ? serve(path, *asked) : Served();
    if (served.variant) return checked(PyTuple_New(0));
    if (!served.taken) return checked(PyObject_Call(path.fallback, all, by_name));
    const Owned when(checked(PyFloat_FromDouble(asked->started)));
    return checked(PyObject_CallFunctionObjArgs(
        path.resume, served.session.get(), all, by_name, when.get(), served.hand_over.get(), served.taken.get(),
        nullptr));
  });
}

PyObject* serve_after_policies(PyObject* self, PyObject* arguments) {
  PyObject *outputs, *gradients, *account;
  int keeps;
  if (!PyArg_ParseTuple(arguments, "OOpO", &outputs, &gradients, &keeps, &account)) return nullptr;
  FastPathState& path = state_of(self);
  return or_error([&] {
    if (!PyTuple_GET_SIZE(path.hits) || !are_plain(gradients)) return Py_NewRef(Py_None);
    const double started = PyFloat_AsDouble(attribute(account, names().started).get());
    const Served served = serve(path, {{outputs, gradients}, keeps != 0, started, account});
    if (served.variant) return checked(Py_BuildValue("(Od)", served.variant.get(), served.seconds));
    if (!served.taken) return Py_NewRef(Py_None);
    return checked(PyObject_CallOneArg(served.hand_over.get(), served.taken.get()));
  });
}

PyTypeObject* fast_path_type = nullptr;  // made with the module, which is made once

int traverse_fast_path(PyObject* self, visitproc visit, void* arg) {
  const FastPathState& path = state_of(self);
  for (PyObject* each :
       {path.hits, path.fallback, path.resume, path.interrupted, path.thread, path.uses, path.run, path.idents,
        path.writing, path.line})
    Py_VISIT(each);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int clear_fast_path(PyObject* self) {
  FastPathState& path = state_of(self);
  for (PyObject** each :
       {&path.hits, &path.fallback, &path.resume, &path.interrupted, &path.thread, &path.uses, &path.run, &path.idents,
        &path.writing, &path.line})
    Py_CLEAR(*each);
  return 0;
}

void free_fast_path(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear_fast_path(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* get_hits(PyObject* self, void*) { return Py_NewRef(state_of(self).hits); }

int set_hits(PyObject* self, PyObject* hits, void*) {
  bool are_hits = hits && PyTuple_CheckExact(hits);
  for (Py_ssize_t index = 0; are_hits && index < PyTuple_GET_SIZE(hits); ++index)
    are_hits = is_fast_hit(PyTuple_GET_ITEM(hits, index));
  if (!are_hits) {
    PyErr_SetString(PyExc_TypeError, "a tuple of FastHit is wanted");
    return -1;
  }
  const Owned before(std::exchange(state_of(self).hits, Py_NewRef(hits)));
  return 0;
}

PyMethodDef fast_path_methods[] = {
    {"serve", serve_after_policies, METH_VARARGS,
     "(outputs, gradients, keeps, account) -> (variant, seconds), or what the tape is if it is taken, or "
     "None."},
    {nullptr, nullptr, 0, nullptr}};
PyMemberDef fast_path_members[] = {
    {"served", T_PYSSIZET, offsetof(FastPathObject, state.served), READONLY, "How many backwards it has served."},
    {nullptr, 0, 0, 0, nullptr}};
PyGetSetDef fast_path_variables[] = {
    {"hits", get_hits, set_hits, "Those that it serves, in the order of tries.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot fast_path_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(free_fast_path)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_fast_path)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_fast_path)},
    {Py_tp_call, reinterpret_cast<void*>(run_backward)},
    {Py_tp_methods, fast_path_methods},
    {Py_tp_members, fast_path_members},
    {Py_tp_getset, fast_path_variables},
    {0, nullptr}};
PyType_Spec fast_path_spec = {
    "compiled_autograd_native.FastPath", sizeof(FastPathObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, fast_path_slots};

}  // namespace

PyObject* new_fast_path(PyObject*, PyObject* arguments) {
  PyObject *fallback, *resume, *interrupted, *thread, *uses, *run, *idents, *writing, *line;
  if (!PyArg_ParseTuple(
          arguments, "OOOOO(OO!O!O!)", &fallback, &resume, &interrupted, &thread, &uses, &run, &PyList_Type, &idents,
          &PyList_Type, &writing, &PyList_Type, &line))
    return nullptr;
  return or_error([&] {
    Owned hits(checked(PyTuple_New(0)));
    PyObject* object = checked(fast_path_type->tp_alloc(fast_path_type, 0));
    FastPathState& path = state_of(object);
    path.hits = hits.release();
    path.fallback = Py_NewRef(fallback);
    path.resume = Py_NewRef(resume);
    path.interrupted = Py_NewRef(interrupted);
    path.thread = Py_NewRef(thread);
    path.uses = Py_NewRef(uses);
    path.run = Py_NewRef(run);
    path.idents = Py_NewRef(idents);
    path.writing = Py_NewRef(writing);
    path.line = Py_NewRef(line);
    return object;
  });
}

bool make_class_of_fast_paths() {
  fast_path_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&fast_path_spec));
  return fast_path_type != nullptr;
}

}  // namespace native
