// Runs a straight-line program: the statements of Inductor's generated `call`, without Python between them.
//
// `kernel(slots, inputs, instructions, outputs)` makes a function of a program, which takes its arguments in a list,
// empties that list, and returns a tuple, as `call` does. (All libraries that `inductor/kernels.py` loads have that
// name.) What an instruction is made of: `translation.py`.
//
// Values are Python objects in slots, or plain memory where no Python sees it. Beside each slot stands the address of its
// memory, for the instructions that take addresses: kernels, products and copies.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace {

// ---- references and instructions ------------------------------------------------------------------------------------

static void* (*address_of_data)(PyObject* tensor);  // PyTorch's own; throws for what is no tensor

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

enum class Operation { call, memory, kernel, product, copy, drop };

struct Instruction {
  Operation operation;
  // call: what, the slots it takes, the constants after them, and where the result goes (-1: nowhere); memory: where to
  Owned callee;
  std::vector<Py_ssize_t> slots;  // of a drop: what is let go
  std::vector<Owned> constants;
  Py_ssize_t result = -1;
  int result_has_address = 0;
  // kernel and product: a function of compiled code; kernel, copy (to, from) and product (a, b, c): on what memory
  void* function = nullptr;
  std::vector<Memory> memory;
  Py_ssize_t bytes = 0;  // of a copy, and of memory
  // product, as BLAS has it
  int in_double = 0;
  char transpose_a = 'n', transpose_b = 'n';
  int m = 0, n = 0, k = 0, lda = 0, ldb = 0, ldc = 0;
  double alpha = 1, beta = 0;
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

static std::vector<Memory> memory_of(PyObject* tuple) {
  std::vector<Memory> memory;
  const auto numbers = numbers_of(tuple);
  for (std::size_t index = 0; index + 1 < numbers.size(); index += 2)
    memory.push_back({numbers[index], numbers[index + 1]});
  return memory;
}

static Instruction instruction_of(PyObject* tuple) {
  Instruction made;
  const char* operation = nullptr;
  require(PyTuple_Check(tuple) && PyTuple_GET_SIZE(tuple) > 0);
  require((operation = PyUnicode_AsUTF8(PyTuple_GET_ITEM(tuple, 0))) != nullptr);
  const std::string name = operation;
  PyObject *callee = nullptr, *constants = nullptr, *slots = nullptr, *memory = nullptr;
  unsigned long long function = 0;
  if (name == "call") {
    made.operation = Operation::call;
    require(PyArg_ParseTuple(
        tuple, "sOOOnp", &operation, &callee, &slots, &constants, &made.result, &made.result_has_address));
    made.callee.reset(Py_NewRef(callee));
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(constants); ++index)
      made.constants.emplace_back(Py_NewRef(PyTuple_GET_ITEM(constants, index)));
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
        tuple, "sKpppiiiiiiddO", &operation, &function, &made.in_double, &transpose_a, &transpose_b, &made.m, &made.n,
        &made.k, &made.lda, &made.ldb, &made.ldc, &made.alpha, &made.beta, &memory));
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
  if (slots != nullptr) made.slots = numbers_of(slots);
  if (memory != nullptr) made.memory = memory_of(memory);
  return made;
}

// ---- running it -----------------------------------------------------------------------------------------------------

template <std::size_t>
using Address = void*;

constexpr std::size_t most_arguments = 64;  // MAX_ARGUMENTS in translation.py
using Caller = void (*)(void*, void**);

template <std::size_t... index>
static constexpr Caller caller_of(std::index_sequence<index...>) {
  return [](void* function, [[maybe_unused]] void** arguments) {
    reinterpret_cast<void (*)(Address<index>...)>(function)(arguments[index]...);
  };
}

template <std::size_t... count>
static Caller caller_for(std::size_t arguments, std::index_sequence<count...>) {
  static constexpr Caller callers[] = {caller_of(std::make_index_sequence<count>())...};
  return callers[arguments];
}

template <typename Number>
static void multiply(const Instruction& of, const void* a, const void* b, void* c) {
  char transpose_a = of.transpose_a, transpose_b = of.transpose_b;  // BLAS takes all by address, and as if to change it
  int m = of.m, n = of.n, k = of.k, lda = of.lda, ldb = of.ldb, ldc = of.ldc;
  auto alpha = static_cast<Number>(of.alpha), beta = static_cast<Number>(of.beta);
  using Product = void (*)(
      char*, char*, int*, int*, int*, Number*, const void*, int*, const void*, int*, Number*, void*, int*);
  reinterpret_cast<Product>(of.function)(
      &transpose_a, &transpose_b, &m, &n, &k, &alpha, a, &lda, b, &ldb, &beta, c, &ldc);
}

constexpr std::size_t alignment = 64;  // of memory that PyTorch allocates (c10/core/alignment.h)
using Clock = std::chrono::steady_clock;
constexpr auto longest_hold = std::chrono::milliseconds(2);  // of the interpreter's lock, where somebody wants it
constexpr std::int64_t long_product = 1 << 20;                // multiplications: some ten microseconds

struct Program {
  Py_ssize_t slots = 0;
  std::vector<Py_ssize_t> inputs;  // of each input that some instruction takes by its address
  std::vector<Instruction> instructions;
  std::vector<Py_ssize_t> outputs;  // -1 for None
};

class Run {
 public:
  explicit Run(const Program& program)
      : program_(program), values_(program.slots), memory_(program.slots), addresses_(program.slots) {}

  PyObject* operator()(PyObject* arguments) {
    take(arguments);
    for (const auto& instruction : program_.instructions) {
      run(instruction);
      if (instruction.operation != Operation::drop) let_others_run();
    }
    Owned results(PyTuple_New(static_cast<Py_ssize_t>(program_.outputs.size())));
    require(results != nullptr);
    for (std::size_t index = 0; index < program_.outputs.size(); ++index) {
      const auto slot = program_.outputs[index];
      PyTuple_SET_ITEM(results.get(), index, Py_NewRef(slot < 0 ? Py_None : values_[slot].get()));
    }
    return results.release();
  }

 private:
  void take(PyObject* arguments) {
    const auto count = PyList_GET_SIZE(arguments);
    if (count > program_.slots) {
      PyErr_Format(PyExc_TypeError, "%zd arguments were given to a program with %zd slots", count, program_.slots);
      throw PythonError();
    }
    for (Py_ssize_t index = 0; index < count; ++index)
      values_[index].reset(Py_NewRef(PyList_GET_ITEM(arguments, index)));
    require(PyList_SetSlice(arguments, 0, count, nullptr) == 0);
    for (const auto slot : program_.inputs) set_address(slot);
  }

  void set_address(Py_ssize_t slot) { addresses_[slot] = static_cast<char*>(address_of_data(values_[slot].get())); }

  void* at(const Memory& memory) const { return addresses_[memory.slot] + memory.offset; }

  void run(const Instruction& instruction) {
    const auto& memory = instruction.memory;
    switch (instruction.operation) {
      case Operation::call:
        call(instruction);
        break;
      case Operation::memory:
        allocate(instruction);
        break;
      case Operation::kernel: {
        void* arguments[most_arguments];
        for (std::size_t index = 0; index < memory.size(); ++index) arguments[index] = at(memory[index]);
        caller_for(memory.size(), std::make_index_sequence<most_arguments + 1>())(instruction.function, arguments);
        break;
      }
      case Operation::product: {
        const std::int64_t size = std::int64_t{instruction.m} * instruction.n * instruction.k;
        PyThreadState* others = size >= long_product ? PyEval_SaveThread() : nullptr;
        const auto product = instruction.in_double ? multiply<double> : multiply<float>;
        product(instruction, at(memory[0]), at(memory[1]), at(memory[2]));
        if (others != nullptr) PyEval_RestoreThread(others);
        break;
      }
      case Operation::copy:
        std::memcpy(at(memory[0]), at(memory[1]), instruction.bytes);
        break;
      case Operation::drop:
        for (const auto slot : instruction.slots) {
          values_[slot].reset();
          memory_[slot].reset();
        }
        break;
    }
  }

  void allocate(const Instruction& instruction) {
    void* memory = nullptr;
    if (posix_memalign(&memory, alignment, instruction.bytes) != 0) {
      PyErr_Format(PyExc_RuntimeError, "can't allocate memory: %zd bytes are wanted", instruction.bytes);
      throw PythonError();
    }
    memory_[instruction.result].reset(static_cast<char*>(memory));
    addresses_[instruction.result] = static_cast<char*>(memory);
  }

  void call(const Instruction& instruction) {
    std::vector<PyObject*> arguments;
    arguments.reserve(instruction.slots.size() + instruction.constants.size());
    for (const auto slot : instruction.slots) arguments.push_back(values_[slot].get());
    for (const auto& constant : instruction.constants) arguments.push_back(constant.get());
    Owned result(PyObject_Vectorcall(instruction.callee.get(), arguments.data(), arguments.size(), nullptr));
    require(result != nullptr);
    if (instruction.result < 0) return;
    values_[instruction.result] = std::move(result);
    if (instruction.result_has_address) set_address(instruction.result);
  }

  // What the interpreter does between statements: other threads get the lock, and Ctrl-C is heard.
  void let_others_run() {
    const auto now = Clock::now();
    if (now - held_since_ < longest_hold) return;
    require(PyErr_CheckSignals() == 0);
    PyEval_RestoreThread(PyEval_SaveThread());
    held_since_ = Clock::now();
  }

  const Program& program_;
  std::vector<Owned> values_;
  std::vector<Bytes> memory_;
  std::vector<char*> addresses_;
  Clock::time_point held_since_ = Clock::now();
};

// ---- what Python sees -----------------------------------------------------------------------------------------------

template <typename Function>
static PyObject* reporting_errors(Function function) {
  try {
    return function();
  } catch (const PythonError&) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a straight-line program is not made of what it should be");
  } catch (const std::exception& error) {  // of a kernel, or of PyTorch
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

constexpr const char* capsule_name = "straight-line program";

static PyObject* run_program(PyObject* capsule, PyObject* arguments) {
  return reporting_errors([&]() -> PyObject* {
    auto* program = static_cast<Program*>(PyCapsule_GetPointer(capsule, capsule_name));
    require(program != nullptr);
    require(PyList_Check(arguments) || (PyErr_SetString(PyExc_TypeError, "a list of arguments is wanted"), false));
    return Run(*program)(arguments);
  });
}

static PyMethodDef run_method = {"straight_line_program", run_program, METH_O, nullptr};

static void free_program(PyObject* capsule) {
  delete static_cast<Program*>(PyCapsule_GetPointer(capsule, capsule_name));
}

static PyObject* make_program(PyObject*, PyObject* arguments) {
  return reporting_errors([&]() -> PyObject* {
    auto program = std::make_unique<Program>();
    PyObject *inputs = nullptr, *instructions = nullptr, *outputs = nullptr;
    require(PyArg_ParseTuple(arguments, "nOOO", &program->slots, &inputs, &instructions, &outputs));
    program->inputs = numbers_of(inputs);
    program->outputs = numbers_of(outputs);
    require(PyList_Check(instructions));
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(instructions); ++index)
      program->instructions.push_back(instruction_of(PyList_GET_ITEM(instructions, index)));
    Owned capsule(PyCapsule_New(program.get(), capsule_name, free_program));
    require(capsule != nullptr);
    program.release();
    return PyCFunction_New(&run_method, capsule.get());
  });
}

static PyMethodDef methods[] = {{"kernel", make_program, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static struct PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "kernel", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_kernel(void) {
  const char* address = std::getenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR");  // where Inductor's kernels have it from
  if (address == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR must be set");
    return nullptr;
  }
  address_of_data = reinterpret_cast<decltype(address_of_data)>(std::strtoull(address, nullptr, 10));
  return PyModule_Create(&module_definition);
}
