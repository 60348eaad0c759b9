// A program, and how it is read from Python: what an instruction is made of stands in `translation.py`.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace {

struct Release {
  void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Release>;

struct Free {
  void operator()(char* memory) const { std::free(memory); }
};
using Bytes = std::unique_ptr<char, Free>;

struct PythonError : std::exception {};  // the error is set

static void require(bool holds) {
  if (!holds) throw PythonError();
}

struct Memory {  // some bytes into the memory of a slot's tensor
  Py_ssize_t slot;
  Py_ssize_t offset;
};

enum class Operation { call, output, memory, kernel, product, copy, drop };

struct Range {  // of one of the lists of a program
  std::uint32_t begin = 0, count = 0;
};

struct Call {
  Owned callee;
  std::vector<Owned> constants;              // after the slots that it takes
  std::vector<std::int64_t> sizes, strides;  // of an output; its dtype is the last constant
};

// Between two runs of a program all of it may have left the processor's cache: so this is small, and what it needs lies
// in lists of the program, one after the other.
struct Instruction {
  Operation operation;
  int in_double = 0;  // and further down: a product, as BLAS has it
  // call, output and memory: where the result goes (or -1)
  Py_ssize_t result = -1;
  int result_has_address = 0;
  std::uint32_t call = 0;  // of `calls`
  Range slots;             // those that a call takes, and that a drop lets go
  Range memory;            // of a kernel, a copy (to, from) and a product (a, b, c)
  void* function = nullptr;
  int (*limit_threads)(int) = nullptr;  // of a product that one thread computes; gives the limit before
  Py_ssize_t bytes = 0;                 // of a copy, and of memory
  double alpha = 1, beta = 0;
  int m = 0, n = 0, k = 0, lda = 0, ldb = 0, ldc = 0;
  char transpose_a = 'n', transpose_b = 'n';
};

struct Program {
  Py_ssize_t slots = 0;
  std::vector<Py_ssize_t> inputs;  // of each input that some instruction takes by its address
  std::vector<Instruction> instructions;
  std::vector<Py_ssize_t> outputs;  // -1 for None
  std::vector<Call> calls;
  std::vector<Py_ssize_t> slots_taken;
  std::vector<Memory> memory;
};

// ---- reading a program from Python ----------------------------------------------------------------------------------

static std::vector<Py_ssize_t> numbers_of(PyObject* tuple) {
  std::vector<Py_ssize_t> numbers;
  require(PyTuple_Check(tuple) || (PyErr_SetString(PyExc_TypeError, "a tuple of numbers is wanted"), false));
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(tuple); ++index) {
    numbers.push_back(PyLong_AsSsize_t(PyTuple_GET_ITEM(tuple, index)));
    require(!PyErr_Occurred());
  }
  return numbers;
}

template <typename Value>
static Range added(std::vector<Value>& to, const std::vector<Value>& values) {
  const Range range{static_cast<std::uint32_t>(to.size()), static_cast<std::uint32_t>(values.size())};
  to.insert(to.end(), values.begin(), values.end());
  return range;
}

static std::vector<Memory> memory_of(PyObject* tuple) {
  std::vector<Memory> memory;
  const auto numbers = numbers_of(tuple);
  for (std::size_t index = 0; index + 1 < numbers.size(); index += 2)
    memory.push_back({numbers[index], numbers[index + 1]});
  return memory;
}

static std::uint32_t add_call(Program& program, PyObject* callee) {
  program.calls.emplace_back();
  program.calls.back().callee.reset(Py_NewRef(callee));
  return static_cast<std::uint32_t>(program.calls.size() - 1);
}

static Instruction instruction_of(PyObject* tuple, Program& program) {
  Instruction made{};
  const char* operation = nullptr;
  require(PyTuple_Check(tuple) && PyTuple_GET_SIZE(tuple) > 0);
  require((operation = PyUnicode_AsUTF8(PyTuple_GET_ITEM(tuple, 0))) != nullptr);
  const std::string name = operation;
  PyObject *callee = nullptr, *constants = nullptr, *slots = nullptr, *memory = nullptr;
  unsigned long long function = 0, limit = 0;
  if (name == "call") {
    made.operation = Operation::call;
    require(PyArg_ParseTuple(
        tuple, "sOOOnp", &operation, &callee, &slots, &constants, &made.result, &made.result_has_address));
    made.call = add_call(program, callee);
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(constants); ++index)
      program.calls.back().constants.emplace_back(Py_NewRef(PyTuple_GET_ITEM(constants, index)));
  } else if (name == "output") {
    PyObject *sizes = nullptr, *strides = nullptr, *dtype = nullptr;
    made.operation = Operation::output;
    require(PyArg_ParseTuple(
        tuple, "sOOOOnp", &operation, &callee, &sizes, &strides, &dtype, &made.result, &made.result_has_address));
    made.call = add_call(program, callee);
    Call& call = program.calls.back();
    for (PyObject* constant : {sizes, strides, dtype}) call.constants.emplace_back(Py_NewRef(constant));
    for (const auto size : numbers_of(sizes)) call.sizes.push_back(size);
    for (const auto stride : numbers_of(strides)) call.strides.push_back(stride);
  } else if (name == "memory") {
    made.operation = Operation::memory;
    require(PyArg_ParseTuple(tuple, "snn", &operation, &made.bytes, &made.result));
  } else if (name == "kernel") {
    made.operation = Operation::kernel;
    require(PyArg_ParseTuple(tuple, "sKO", &operation, &function, &memory));
  } else if (name == "product") {
    int transpose_a = 0, transpose_b = 0;
    made.operation = Operation::product;
    require(PyArg_ParseTuple(
        tuple, "sKKpppiiiiiiddO", &operation, &function, &limit, &made.in_double, &transpose_a, &transpose_b, &made.m,
        &made.n, &made.k, &made.lda, &made.ldb, &made.ldc, &made.alpha, &made.beta, &memory));
    made.transpose_a = transpose_a ? 't' : 'n';
    made.transpose_b = transpose_b ? 't' : 'n';
  } else if (name == "copy") {
    made.operation = Operation::copy;
    require(PyArg_ParseTuple(tuple, "snO", &operation, &made.bytes, &memory));
  } else if (name == "drop") {
    made.operation = Operation::drop;
    require(PyArg_ParseTuple(tuple, "sO", &operation, &slots));
  } else {
    PyErr_Format(PyExc_ValueError, "no instruction is called %s", name.c_str());
    throw PythonError();
  }
  made.function = reinterpret_cast<void*>(static_cast<std::uintptr_t>(function));
  made.limit_threads = reinterpret_cast<int (*)(int)>(static_cast<std::uintptr_t>(limit));
  if (slots != nullptr) made.slots = added(program.slots_taken, numbers_of(slots));
  if (memory != nullptr) made.memory = added(program.memory, memory_of(memory));
  return made;
}

}  // namespace
