#include "entry.h"

#include "../calls.h"
#include "hit.h"

#include <ATen/core/grad_mode.h>
#include <structmember.h>

#include <algorithm>
#include <chrono>
#include <optional>

namespace native {

namespace {

constexpr size_t kMaxTried = 8;  // plans that a tape is compared with: _MAX_TRIED in engine/native_hits.py

struct FastPathObject {
  PyObject_HEAD
  PyObject* hits;         // a list of FastHit, which Python changes
  PyObject* fallback;     // the way through Python
  PyObject* resume;       // the same, once the tape is taken
  PyObject* interrupted;  // told of a backward that was ended before anything ran
  PyObject* thread;       // what is a thread's own
  PyObject* uses;         // counts what is used
  Py_ssize_t served;
};

// Of one call of `run_backward` that can be served here: `loss.backward()` in a form that is known.
struct Arguments {
  Call call;
  bool keeps;
  PyObject *all, *by_name;  // as they came; `by_name` may be null
};

// The clock of `time.perf_counter`.
double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

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

std::optional<Arguments> understood(PyObject* all, PyObject* by_name) {
  if (PyTuple_GET_SIZE(all) != 5 || !by_name || PyDict_GET_SIZE(by_name) != 2) return std::nullopt;
  if (PyDict_GetItemString(by_name, "accumulate_grad") != Py_True) return std::nullopt;
  if (!PyDict_GetItemString(by_name, "allow_unreachable")) return std::nullopt;
  PyObject *keeps = PyTuple_GET_ITEM(all, 2), *creates = PyTuple_GET_ITEM(all, 3), *inputs = PyTuple_GET_ITEM(all, 4);
  if (!PyBool_Check(keeps) || creates != Py_False || !PyTuple_Check(inputs) || PyTuple_GET_SIZE(inputs))
    return std::nullopt;
  if (!are_plain(PyTuple_GET_ITEM(all, 1))) return std::nullopt;
  return Arguments{{PyTuple_GET_ITEM(all, 0), PyTuple_GET_ITEM(all, 1)}, keeps == Py_True, all, by_name};
}

// The session that the calling thread is in; null where there is none, or something is under way in it.
Owned session_of(const FastPathObject& path) {
  const Owned here = attribute(path.thread, names().here), depth = attribute(here.get(), names().depth);
  const Owned stack = attribute(here.get(), names().stack);
  if (PyObject_IsTrue(depth.get()) || !PyList_Check(stack.get()) || !PyList_GET_SIZE(stack.get())) return nullptr;
  PyObject* session = PyList_GET_ITEM(stack.get(), PyList_GET_SIZE(stack.get()) - 1);
  if (session == Py_None || attribute(session, names().left).get() != Py_None) return nullptr;
  return Owned(Py_NewRef(session));
}

// Keeps the error that is set from what is done meanwhile.
class ErrorKept {
 public:
  ErrorKept() { PyErr_Fetch(&type_, &value_, &traceback_); }
  ~ErrorKept() {
    if (type_) PyErr_Restore(type_, value_, traceback_);
  }
  PyObject* value() {
    PyErr_NormalizeException(&type_, &value_, &traceback_);
    return value_ ? value_ : Py_None;
  }

 private:
  PyObject *type_, *value_, *traceback_;
};

// One hit, from the moment when its tape is taken.
class Run {
 public:
  Run(FastPathObject& path, const FastHit& hit, PyObject* session, PyObject* structure, PyObject* variant)
      : path_(path), hit_(hit), session_(session), structure_(structure), variant_(variant) {}

  // Throws PythonError.
  void go(PyObject* taken, double started) {
    count_use();
    const double begun = seconds();
    const Owned result(or_error([&] { return run(taken); }));
    const double ended = seconds();
    const ErrorKept error;
    if (result) {
      add_to(variant_, names().hits, Owned(checked(PyLong_FromLong(1))).get());
      add_to(variant_, names().ran, Owned(checked(PyFloat_FromDouble(ended - started))).get());
    }
    count(begun - started, ended - begun);
    if (!result) throw PythonError();
  }

 private:
  PyObject* run(PyObject* taken) {
    const at::AutoGradMode off(false);
    Owned left(checked(run_taken(taken, *hit_.program, hit_.may_write.get())));
    return left.get() == Py_None ? left.release() : checked(PyObject_Call(hit_.write.get(), left.get(), nullptr));
  }

  void count_use() {
    const Owned one(checked(PyLong_FromLong(1))), use(checked(PyIter_Next(path_.uses)));
    add_to(structure_, names().met, one.get());
    add_to(hit_.counter.get(), names().hits, one.get());
    for (PyObject* used : {structure_, variant_})
      if (PyObject_SetAttr(used, names().used, use.get()) < 0) throw PythonError();
  }

  // As `Session.record` does. Nothing of Python's runs from the first line on that counts.
  void count(double walk, double run) {
    const Owned last(checked(Py_BuildValue("(Odd)", structure_, walk, run)));
    const Owned stats = attribute(session_, names().stats), one(checked(PyLong_FromLong(1)));
    add_to(stats.get(), names().hits, one.get());
    add_to(stats.get(), names().backwards, one.get());
    if (PyObject_SetAttr(session_, names().last, last.get()) < 0) throw PythonError();
    ++path_.served;
  }

  FastPathObject& path_;
  const FastHit& hit_;
  PyObject *session_, *structure_, *variant_;
};

// The session is told of a backward that was ended before anything ran, by the error that is set, and stays so.
void tell_of_end(const FastPathObject& path, PyObject* session, double started) {
  ErrorKept error;
  const Owned when(checked(PyFloat_FromDouble(started)));
  const Owned told(
      checked(PyObject_CallFunctionObjArgs(path.interrupted, session, when.get(), error.value(), nullptr)));
}

// The Taken, if the tape is that of a plan; null where it is another.
Owned take(const FastPathObject& path, const FastHit& hit, const Arguments& given, PyObject* session, double started) {
  Owned taken(take_tape(*hit.plan, given.call, given.keeps));
  if (!taken) {
    tell_of_end(path, session, started);
    throw PythonError();
  }
  return is_taken(taken.get()) ? std::move(taken) : nullptr;
}

// The variant that a hit would run for a tape that was taken for another one of the same plan; null where it would not.
Owned variant_of(
    const FastPathObject& path, const FastHit& found, PyObject* structure, PyObject* session, double started) {
  try {
    return found.variant_to_run(structure);
  } catch (const PythonError&) {
    tell_of_end(path, session, started);
    throw;
  }
}

// What `run_backward` gives; null where the way through Python is to be taken, and the tape is whole. Throws
// PythonError.
Owned serve(FastPathObject& path, const Arguments& given, double started) {
  const Owned session = session_of(path);
  if (!session) return nullptr;
  const Owned settings = attribute(session.get(), names().settings);
  const Owned hits(checked(PyList_AsTuple(path.hits)));  // walks and runs let other threads change the list
  std::vector<const Plan*> tried;
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(hits.get()); ++index) {
    const FastHit& hit = fast_hit_of(PyTuple_GET_ITEM(hits.get(), index));
    if (!hit.is_for(settings.get()) || std::find(tried.begin(), tried.end(), hit.plan) != tried.end()) continue;
    if (tried.size() == kMaxTried) return nullptr;
    const Owned structure = hit.structure_to_walk();
    if (!structure) continue;
    tried.push_back(hit.plan);
    Owned taken = take(path, hit, given, session.get(), started);
    if (!taken) continue;
    const int shapes = shapes_of(taken.get());
    for (Py_ssize_t other = 0; other < PyTuple_GET_SIZE(hits.get()); ++other) {
      const FastHit& found = fast_hit_of(PyTuple_GET_ITEM(hits.get(), other));
      if (!found.serves(hit, shapes)) continue;
      const Owned variant = variant_of(path, found, structure.get(), session.get(), started);
      if (!variant) continue;
      Run(path, found, session.get(), structure.get(), variant.get()).go(taken.get(), started);
      return Owned(checked(PyTuple_New(0)));
    }
    const Owned when(checked(PyFloat_FromDouble(started)));
    return Owned(checked(PyObject_CallFunctionObjArgs(
        path.resume, session.get(), given.all, given.by_name, when.get(), hit.hand_over.get(), taken.get(), nullptr)));
  }
  return nullptr;
}

PyObject* run_backward(PyObject* self, PyObject* all, PyObject* by_name) {
  auto& path = *reinterpret_cast<FastPathObject*>(self);
  return or_error([&] {
    const double started = seconds();
    const auto given = PyList_GET_SIZE(path.hits) ? understood(all, by_name) : std::nullopt;
    Owned served = given ? serve(path, *given, started) : nullptr;
    return served ? served.release() : checked(PyObject_Call(path.fallback, all, by_name));
  });
}

PyTypeObject* fast_path_type = nullptr;  // made with the module, which is made once

int traverse_fast_path(PyObject* self, visitproc visit, void* arg) {
  const auto& path = *reinterpret_cast<FastPathObject*>(self);
  for (PyObject* each : {path.hits, path.fallback, path.resume, path.interrupted, path.thread, path.uses})
    Py_VISIT(each);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int clear_fast_path(PyObject* self) {
  auto& path = *reinterpret_cast<FastPathObject*>(self);
  Py_CLEAR(path.hits);
  Py_CLEAR(path.fallback);
  Py_CLEAR(path.resume);
  Py_CLEAR(path.interrupted);
  Py_CLEAR(path.thread);
  Py_CLEAR(path.uses);
  return 0;
}

void free_fast_path(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear_fast_path(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMemberDef fast_path_members[] = {
    {"hits", T_OBJECT_EX, offsetof(FastPathObject, hits), READONLY, "Those that it serves, in the order of tries."},
    {"served", T_PYSSIZET, offsetof(FastPathObject, served), READONLY, "How many backwards it has served."},
    {nullptr, 0, 0, 0, nullptr}};
PyType_Slot fast_path_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(free_fast_path)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_fast_path)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_fast_path)},
    {Py_tp_call, reinterpret_cast<void*>(run_backward)},
    {Py_tp_members, fast_path_members},
    {0, nullptr}};
PyType_Spec fast_path_spec = {
    "compiled_autograd_native.FastPath", sizeof(FastPathObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, fast_path_slots};

}  // namespace

PyObject* new_fast_path(PyObject*, PyObject* arguments) {
  PyObject *fallback, *resume, *interrupted, *thread, *uses;
  if (!PyArg_ParseTuple(arguments, "OOOOO", &fallback, &resume, &interrupted, &thread, &uses)) return nullptr;
  return or_error([&] {
    Owned hits(checked(PyList_New(0)));
    PyObject* object = checked(fast_path_type->tp_alloc(fast_path_type, 0));
    auto& path = *reinterpret_cast<FastPathObject*>(object);
    path.hits = hits.release();
    path.fallback = Py_NewRef(fallback);
    path.resume = Py_NewRef(resume);
    path.interrupted = Py_NewRef(interrupted);
    path.thread = Py_NewRef(thread);
    path.uses = Py_NewRef(uses);
    return object;
  });
}

bool make_class_of_fast_paths() {
  fast_path_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&fast_path_spec));
  return fast_path_type != nullptr;
}

}  // namespace native
