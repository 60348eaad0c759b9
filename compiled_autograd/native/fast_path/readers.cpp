#include "readers.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/profiler/orchestration/observer.h>

namespace native {

namespace {

using Read = int64_t (*)(const Reader&);

const at::Context& context() { return at::globalContext(); }

// What cannot be said, since what is set for several backends differs, is an error in Python.
int64_t matmul_precision(const Reader&) {
  try {
    return static_cast<int64_t>(context().float32MatmulPrecision());
  } catch (const c10::Error&) {
    return -1;
  }
}

struct Known {
  const char* name;  // in `torch._C`, or else in `torch._C._autograd`
  Read read;
};

constexpr Known kKnown[] = {
    {"_get_deterministic_algorithms", [](const Reader&) -> int64_t { return context().deterministicAlgorithms(); }},
    {"_get_deterministic_algorithms_warn_only",
     [](const Reader&) -> int64_t { return context().deterministicAlgorithmsWarnOnly(); }},
    {"_get_deterministic_fill_uninitialized_memory",
     [](const Reader&) -> int64_t { return context().deterministicFillUninitializedMemory(); }},
    {"_get_float32_matmul_precision", matmul_precision},
    {"_get_mkldnn_deterministic", [](const Reader&) -> int64_t { return context().deterministicMkldnn(); }},
    {"_get_mkldnn_enabled", [](const Reader&) -> int64_t { return context().userEnabledMkldnn(); }},
    {"_get_nnpack_enabled", [](const Reader&) -> int64_t { return context().userEnabledNNPACK(); }},
    {"_len_torch_dispatch_stack", [](const Reader&) { return c10::impl::TorchDispatchModeTLS::stack_len(); }},
    {"_profiler_enabled", [](const Reader&) -> int64_t { return torch::profiler::impl::profilerEnabled(); }},
    {"get_default_dtype",
     [](const Reader&) { return static_cast<int64_t>(c10::typeMetaToScalarType(c10::get_default_dtype())); }},
    {"get_num_threads", [](const Reader&) -> int64_t { return at::get_num_threads(); }},
    {"is_anomaly_enabled", [](const Reader&) -> int64_t { return torch::autograd::AnomalyMode::is_enabled(); }},
    {"is_inference_mode_enabled", [](const Reader&) -> int64_t { return c10::InferenceMode::is_enabled(); }},
};

// `functools.partial(_get_fp32_precision_getter, backend, operation)`: which precision is set for products of float32.
template <typename Context = at::Context>
Reader precision_of(PyObject* arguments) {
  Reader reader;
  if constexpr (requires(const Context& all) { all.float32Precision(at::str2backend(""), at::str2op("")); }) {
    const char *backend_name, *operation_name;
    if (!PyArg_ParseTuple(arguments, "ss", &backend_name, &operation_name)) throw PythonError();
    const auto backend = static_cast<int64_t>(at::str2backend(backend_name));
    const auto operation = static_cast<int64_t>(at::str2op(operation_name));
    reader.number = backend << 8 | operation;
    reader.read = [](const Reader& self) {
      const auto of = static_cast<at::Float32Backend>(self.number >> 8);
      return static_cast<int64_t>(context().float32Precision(of, static_cast<at::Float32Op>(self.number & 0xFF)));
    };
  }
  return reader;
}

}  // namespace

Owned found(PyObject* object, PyObject* name) {
  Owned attribute(object ? PyObject_GetAttr(object, name) : nullptr);
  if (!attribute && PyErr_Occurred()) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw PythonError();
    PyErr_Clear();
  }
  return attribute;
}

Owned found(PyObject* object, const char* name) {
  // One object for each name: Python's cache of what types have keeps every other one that it is asked for.
  return found(object, Owned(checked(PyUnicode_InternFromString(name))).get());
}

Reader reader_of_variable(PyObject* function) {
  static PyObject* const module = checked(PyImport_ImportModule("torch._C"));  // as long as the process is there
  static PyObject* const autograd = found(module, "_autograd").release();
  Reader reader;
  if (PyCFunction_Check(function)) {
    for (const Known& known : kKnown)
      for (PyObject* holder : {module, autograd})
        if (found(holder, known.name).get() == function) reader.read = known.read;
    return reader;
  }
  const Owned called = found(function, "func"), arguments = found(function, "args");
  const Owned named = found(function, "keywords");
  if (!called || !arguments || !named || !PyDict_Check(named.get()) || PyDict_GET_SIZE(named.get())) return reader;
  const bool is_precision = found(module, "_get_fp32_precision_getter").get() == called.get();
  return is_precision ? precision_of(arguments.get()) : reader;
}

}  // namespace native
