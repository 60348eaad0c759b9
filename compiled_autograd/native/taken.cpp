#include "taken.h"

#include "spare.h"

#include <structmember.h>

namespace native {

namespace {

PyObject* to_python(const at::Tensor& tensor) { return THPVariable_Wrap(tensor); }
PyObject* to_python(int64_t size) { return PyLong_FromLongLong(size); }
PyObject* to_python(const IValue& scalar) {
  return scalar.isInt() ? PyLong_FromLongLong(scalar.toInt()) : PyFloat_FromDouble(scalar.toDouble());
}
PyObject* to_python(c10::SafePyObject& object) { return object.release(); }

template <typename Values>
Owned list_of(Values& values) {
  Owned list(checked(PyList_New(static_cast<Py_ssize_t>(values.size()))));
  Py_ssize_t index = 0;
  for (auto& value : values) PyList_SET_ITEM(list.get(), index++, checked(to_python(value)));
  return list;
}

struct TakenObject {
  PyObject_HEAD
  int variant;
  Handover found;
};

struct ProgramObject {
  PyObject_HEAD
  HostedProgram* program;
  char is_straight_line;
};

PyTypeObject* taken_type = nullptr;  // made with the module, which is made once
PyTypeObject* program_type = nullptr;

PyObject* lists(PyObject* self, PyObject*) {
  return or_error([&] { return as_python(reinterpret_cast<TakenObject*>(self)->found); });
}

PyObject* reduced(PyObject* self, void*) {
  return or_error([&] { return list_of(reinterpret_cast<TakenObject*>(self)->found.reduced).release(); });
}

PyObject* run(PyObject* self, PyObject* arguments) {
  PyObject *program_object, *may_write;
  if (!PyArg_ParseTuple(arguments, "O!O", program_type, &program_object, &may_write)) return nullptr;
  return or_error([&] { return run_taken(self, *program_in(program_object), may_write); });
}

void free_taken(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<TakenObject*>(self)->found.~Handover();
  type->tp_free(self);
  Py_DECREF(type);
}

void free_program(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<ProgramObject*>(self)->program;
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef taken_methods[] = {
    {"lists", lists, METH_NOARGS, "() -> (tensors, sizes, scalars, objects): it has nothing afterwards."},
    {"run", run, METH_VARARGS,
     "(program, may_write) -> None, where the leaves have their gradients; else (results, tensors), those of leaves."},
    {nullptr, nullptr, 0, nullptr}};
PyMemberDef taken_members[] = {
    {"variant", T_INT, offsetof(TakenObject, variant), READONLY, "Its number, or -1."}, {nullptr, 0, 0, 0, nullptr}};
PyGetSetDef taken_attributes[] = {
    {"reduced", reduced, nullptr, "The leaves that have hooks of DDP's reducer.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot taken_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(free_taken)},
    {Py_tp_methods, taken_methods},
    {Py_tp_getset, taken_attributes},
    {Py_tp_members, taken_members},
    {0, nullptr}};
PyType_Spec taken_spec = {
    "compiled_autograd_native.Taken", sizeof(TakenObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    taken_slots};
PyMemberDef program_members[] = {
    {"is_straight_line", T_BOOL, offsetof(ProgramObject, is_straight_line), READONLY,
     "Whether it is a straight-line program: else it is called in Python."},
    {nullptr, 0, 0, 0, nullptr}};
PyType_Slot program_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(free_program)}, {Py_tp_members, program_members}, {0, nullptr}};
PyType_Spec program_spec = {
    "compiled_autograd_native.Program", sizeof(ProgramObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, program_slots};

std::vector<size_t> numbers_of(PyObject* sequence) {
  const Owned list(checked(PySequence_Fast(sequence, "a sequence of numbers is wanted")));
  std::vector<size_t> numbers;
  for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(list.get()); ++index) {
    numbers.push_back(PyLong_AsSize_t(PySequence_Fast_GET_ITEM(list.get(), index)));
    if (PyErr_Occurred()) throw PythonError();
  }
  return numbers;
}

}  // namespace

PyObject* as_python(Handover& found) {
  const Owned tensors = list_of(found.tensors);
  const Owned sizes = list_of(found.sizes);
  const Owned scalars = list_of(found.scalars);
  const Owned objects = list_of(found.objects);
  found = Handover();
  return checked(PyTuple_Pack(4, tensors.get(), sizes.get(), scalars.get(), objects.get()));
}

PyObject* new_taken(int variant, Handover found) {
  PyObject* object = checked(taken_type->tp_alloc(taken_type, 0));
  auto* taken = reinterpret_cast<TakenObject*>(object);
  taken->variant = variant;
  new (&taken->found) Handover(std::move(found));
  return object;
}

bool is_taken(PyObject* object) { return Py_TYPE(object) == taken_type; }

int shapes_of(PyObject* taken) { return reinterpret_cast<TakenObject*>(taken)->variant; }

const HostedProgram* program_in(PyObject* object) {
  return Py_TYPE(object) == program_type ? reinterpret_cast<ProgramObject*>(object)->program : nullptr;
}

PyObject* run_taken(PyObject* taken, const HostedProgram& program, PyObject* may_write) {
  Handover found = std::exchange(reinterpret_cast<TakenObject*>(taken)->found, Handover());
  SpareList tensors(std::move(found.tensors)), results;
  program.run(*tensors, *results);
  const Owned may(checked(PyObject_CallNoArgs(may_write)));  // from here on no other thread of Python comes in between
  if (may.get() == Py_True && accumulate(program.gives(), *tensors, *results)) return Py_NewRef(Py_None);
  const Owned given = list_of(*results), leaves = list_of(*tensors);
  return checked(PyTuple_Pack(2, given.get(), leaves.get()));
}

PyObject* new_program(PyObject*, PyObject* arguments) {
  PyObject *function, *taken, *given;
  if (!PyArg_ParseTuple(arguments, "OOO", &function, &taken, &given)) return nullptr;
  return or_error([&] {
    std::vector<Gives> gives;
    const std::vector<size_t> numbers = numbers_of(given);
    for (size_t index = 0; index + 2 < numbers.size(); index += 3)
      gives.push_back({numbers[index], numbers[index + 1], numbers[index + 2] != 0});
    auto program = std::make_unique<HostedProgram>(function, numbers_of(taken), std::move(gives));
    PyObject* object = checked(program_type->tp_alloc(program_type, 0));
    auto* made = reinterpret_cast<ProgramObject*>(object);
    made->is_straight_line = program->is_straight_line();
    made->program = program.release();
    return object;
  });
}

bool make_classes_of_taken() {
  taken_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&taken_spec));
  program_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&program_spec));
  return taken_type && program_type;
}

}  // namespace native
