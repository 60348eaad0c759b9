#include "hit.h"

#include "../calls.h"

namespace native {

namespace {

struct FastHitObject {
  PyObject_HEAD
  FastHit* hit;
};

PyTypeObject* fast_hit_type = nullptr;  // made with the module, which is made once

// What a weak reference leads to; null where it is gone.
Owned referent(const Owned& reference) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* object;
  if (PyWeakref_GetRef(reference.get(), &object) < 0) throw PythonError();
  return Owned(object);
#else
  PyObject* object = PyWeakref_GetObject(reference.get());
  if (!object) throw PythonError();
  return Owned(object == Py_None ? nullptr : Py_NewRef(object));
#endif
}

bool is_at(PyObject* object, PyObject* name, PyObject* wanted) { return attribute(object, name).get() == wanted; }

bool has(PyObject* structure, PyObject* variant) {
  const Owned variants = attribute(structure, names().variants);
  if (!PyList_Check(variants.get())) return false;
  for (Py_ssize_t index = 0; index < PyList_GET_SIZE(variants.get()); ++index)
    if (PyList_GET_ITEM(variants.get(), index) == variant) return true;
  return false;
}

void free_fast_hit(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<FastHitObject*>(self)->hit;
  type->tp_free(self);
  Py_DECREF(type);
}

PyType_Slot fast_hit_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(free_fast_hit)}, {0, nullptr}};
PyType_Spec fast_hit_spec = {
    "compiled_autograd_native.FastHit", sizeof(FastHitObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, fast_hit_slots};

}  // namespace

Owned attribute(PyObject* object, PyObject* name) { return Owned(checked(PyObject_GetAttr(object, name))); }

void add_to(PyObject* object, PyObject* name, PyObject* number) {
  const Owned before = attribute(object, name), after(checked(PyNumber_Add(before.get(), number)));
  if (PyObject_SetAttr(object, name, after.get()) < 0) throw PythonError();
}

const Names& names() {
  const auto made = [](const char* text) { return PyUnicode_InternFromString(text); };
  static const Names all = {made("depth"),  made("evicted"),  made("here"),      made("hits"),         made("left"),
                            made("met"),    made("ran"),      made("saving"),    made("settings"),     made("stack"),
                            made("used"),   made("variants"), made("backwards"), made("_last"),        made("started"),
                            made("_stats"), made("told"),     made("hit_times"), made("left_to_eager")};
  return all;
}

FastHit::FastHit(PyObject* arguments) {
  PyObject *plan_object, *program_object, *settings, *structure, *variant, *watched, *questions[2], *others[4];
  if (!PyArg_ParseTuple(
          arguments, "OOiOOOO!K(OO)OOOO", &plan_object, &program_object, &shapes_, &settings, &structure, &variant,
          &PyDict_Type, &watched, &number_, &questions[0], &questions[1], &others[0], &others[1], &others[2],
          &others[3]))
    throw PythonError();
  plan = plan_in(plan_object);
  program = program_in(program_object);
  if (!plan || !program || !PyWeakref_Check(structure) || !PyWeakref_Check(variant)) {
    PyErr_SetString(PyExc_TypeError, "a Plan, a Program and two weak references are wanted");
    throw PythonError();
  }
  plan_object_.reset(Py_NewRef(plan_object));
  program_object_.reset(Py_NewRef(program_object));
  settings_.reset(Py_NewRef(settings));
  structure_.reset(Py_NewRef(structure));
  variant_.reset(Py_NewRef(variant));
  hand_over.reset(Py_NewRef(others[0]));
  may_write.reset(Py_NewRef(others[1]));
  write.reset(Py_NewRef(others[2]));
  counter.reset(Py_NewRef(others[3]));
  watched_.reset(Py_NewRef(watched));
  before_ = Questions(questions[0]);
  before_list_.reset(Py_NewRef(questions[0]));
  after_ = Questions(questions[1]);
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  keys_included_ = keys.included_.raw_repr();
  keys_excluded_ = keys.excluded_.raw_repr();
}

bool FastHit::is_watched(PyObject* outputs) const {
  if (!PyDict_GET_SIZE(watched_.get())) return false;
  uint64_t found = 0;
  try {
    found = peek_at(outputs, 0, number_);
  } catch (const Refused&) {  // Python has a key for it
    return true;
  }
  const Owned key(checked(PyLong_FromUnsignedLongLong(found)));
  const int has_it = PyDict_Contains(watched_.get(), key.get());
  if (has_it < 0) throw PythonError();
  return has_it == 1;
}

Owned FastHit::structure_to_walk(const FastHit* asked) const {
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  if (keys.included_.raw_repr() != keys_included_ || keys.excluded_.raw_repr() != keys_excluded_) return nullptr;
  Owned structure = referent(structure_);
  if (!structure || !is_at(structure.get(), names().evicted, Py_False)) return nullptr;
  const bool are_asked = asked && asked->before_list_.get() == before_list_.get();
  return are_asked || before_.hold() ? std::move(structure) : nullptr;
}

Owned FastHit::variant_to_run(PyObject* structure) const {
  Owned variant = referent(variant_);
  if (!variant || !is_at(structure, names().saving, Py_None) || !has(structure, variant.get())) return nullptr;
  return after_.hold() ? std::move(variant) : nullptr;
}

PyObject* new_fast_hit(PyObject*, PyObject* arguments) {
  return or_error([&] {
    auto hit = std::make_unique<FastHit>(arguments);
    PyObject* object = checked(fast_hit_type->tp_alloc(fast_hit_type, 0));
    reinterpret_cast<FastHitObject*>(object)->hit = hit.release();
    return object;
  });
}

bool is_fast_hit(PyObject* object) { return Py_IS_TYPE(object, fast_hit_type); }

const FastHit& fast_hit_of(PyObject* object) { return *reinterpret_cast<FastHitObject*>(object)->hit; }

bool make_class_of_fast_hits() {
  fast_hit_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&fast_hit_spec));
  return fast_hit_type != nullptr;
}

}  // namespace native
