// Runs a straight-line program: the statements of Inductor's generated `call`, without Python between them.
//
// `kernel(slots, inputs, instructions, outputs)` makes a function of a program, which takes its arguments in a list,
// empties that list, and returns a tuple, as `call` does. (All libraries that `inductor/kernels.py` loads have that
// name.) What an instruction is made of: `translation.py`.
//
// Values are Python objects in slots, or plain memory where no Python sees it. Beside each slot stands the address of
// its memory, for the instructions that take addresses: kernels, products and copies. Where a host runs it (`host.h`),
// those of arguments and outputs are objects only where Python sees them.

#include "host.h"
#include "program.h"

#include <chrono>
#include <cstring>

namespace {

using straight_line::Host;
using straight_line::Shape;

static void* (*address_of_data)(PyObject* tensor);  // PyTorch's own; throws for what is no tensor

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
  using Product =
      void (*)(char*, char*, int*, int*, int*, Number*, const void*, int*, const void*, int*, Number*, void*, int*);
  reinterpret_cast<Product>(of.function)(
      &transpose_a, &transpose_b, &m, &n, &k, &alpha, a, &lda, b, &ldb, &beta, c, &ldc);
}

constexpr std::size_t alignment = 64;  // of memory that PyTorch allocates (c10/core/alignment.h)
using Clock = std::chrono::steady_clock;
constexpr auto longest_hold = std::chrono::milliseconds(2);  // of the interpreter's lock, where somebody wants it
constexpr std::int64_t long_product = 1 << 20;               // multiplications: some ten microseconds

class Run {
 public:
  // With a host, arguments and outputs are its tensors, and Python objects are made of those alone that Python sees.
  explicit Run(const Program& program, const Host* host = nullptr)
      : program_(program), host_(host), values_(program.slots), memory_(program.slots), addresses_(program.slots) {}

  PyObject* with(PyObject* arguments) {
    take(arguments);
    run_all();
    Owned results(PyTuple_New(static_cast<Py_ssize_t>(program_.outputs.size())));
    require(results != nullptr);
    for (std::size_t index = 0; index < program_.outputs.size(); ++index) {
      const auto slot = program_.outputs[index];
      PyTuple_SET_ITEM(results.get(), index, Py_NewRef(slot < 0 ? Py_None : values_[slot].get()));
    }
    return results.release();
  }

  void with_tensors_of_host(Py_ssize_t arguments) {
    require_slots_for(arguments);
    made_by_host_.resize(program_.slots);
    for (const auto slot : program_.inputs) addresses_[slot] = static_cast<char*>(host_->address(host_->self, slot));
    run_all();
    for (std::size_t index = 0; index < program_.outputs.size(); ++index) {
      const auto slot = program_.outputs[index];
      const bool is_the_hosts = slot < 0 || slot < arguments || made_by_host_[slot];
      host_->result(host_->self, static_cast<Py_ssize_t>(index), slot, is_the_hosts ? nullptr : values_[slot].get());
    }
  }

 private:
  void require_slots_for(Py_ssize_t arguments) {
    if (arguments <= program_.slots) return;
    PyErr_Format(PyExc_TypeError, "%zd arguments were given to a program with %zd slots", arguments, program_.slots);
    throw PythonError();
  }

  void take(PyObject* arguments) {
    const auto count = PyList_GET_SIZE(arguments);
    require_slots_for(count);
    for (Py_ssize_t index = 0; index < count; ++index)
      values_[index].reset(Py_NewRef(PyList_GET_ITEM(arguments, index)));
    require(PyList_SetSlice(arguments, 0, count, nullptr) == 0);
    for (const auto slot : program_.inputs) set_address(slot);
  }

  void set_address(Py_ssize_t slot) { addresses_[slot] = static_cast<char*>(address_of_data(values_[slot].get())); }

  void* at(const Memory& memory) const { return addresses_[memory.slot] + memory.offset; }

  void run_all() {
    for (const auto& instruction : program_.instructions) {
      __builtin_prefetch(&instruction + 2);  // an address, which need not be one of anything
      run(instruction);
      if (instruction.operation != Operation::drop) let_others_run();
    }
  }

  void run(const Instruction& instruction) {
    const Memory* memory = program_.memory.data() + instruction.memory.begin;
    const std::size_t count = instruction.memory.count;
    switch (instruction.operation) {
      case Operation::call:
        call(instruction);
        break;
      case Operation::output:
        host_ ? allocate_output(instruction) : call(instruction);
        break;
      case Operation::memory:
        allocate(instruction);
        break;
      case Operation::kernel: {
        void* arguments[most_arguments];
        for (std::size_t index = 0; index < count; ++index) arguments[index] = at(memory[index]);
        caller_for(count, std::make_index_sequence<most_arguments + 1>())(instruction.function, arguments);
        break;
      }
      case Operation::product: {
        const std::int64_t size = std::int64_t{instruction.m} * instruction.n * instruction.k;
        PyThreadState* others = size >= long_product ? PyEval_SaveThread() : nullptr;
        const auto product = instruction.in_double ? multiply<double> : multiply<float>;
        const auto limit = instruction.limit_threads;  // of this thread, and no other
        const int before = limit != nullptr ? limit(1) : 0;
        product(instruction, at(memory[0]), at(memory[1]), at(memory[2]));
        if (limit != nullptr) limit(before);
        if (others != nullptr) PyEval_RestoreThread(others);
        break;
      }
      case Operation::copy:
        std::memcpy(at(memory[0]), at(memory[1]), instruction.bytes);
        break;
      case Operation::drop:
        for (std::size_t index = 0; index < instruction.slots.count; ++index) drop(slots_of(instruction)[index]);
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

  void allocate_output(const Instruction& instruction) {
    const Call& made = program_.calls[instruction.call];
    const auto dimensions = static_cast<Py_ssize_t>(made.sizes.size());
    const Shape shape{dimensions, made.sizes.data(), made.strides.data(), made.constants.back().get()};
    addresses_[instruction.result] = static_cast<char*>(host_->allocate(host_->self, instruction.result, shape));
    made_by_host_[instruction.result] = true;
  }

  PyObject* object(Py_ssize_t slot) {
    if (!values_[slot] && host_) values_[slot].reset(host_->object(host_->self, slot));
    require(values_[slot] != nullptr);
    return values_[slot].get();
  }

  const Py_ssize_t* slots_of(const Instruction& instruction) const {
    return program_.slots_taken.data() + instruction.slots.begin;
  }

  void drop(Py_ssize_t slot) {
    values_[slot].reset();
    memory_[slot].reset();
    if (host_) host_->drop(host_->self, slot);
  }

  void call(const Instruction& instruction) {
    const Call& made = program_.calls[instruction.call];
    std::vector<PyObject*> arguments;
    arguments.reserve(instruction.slots.count + made.constants.size());
    for (std::size_t index = 0; index < instruction.slots.count; ++index)
      arguments.push_back(object(slots_of(instruction)[index]));
    for (const auto& constant : made.constants) arguments.push_back(constant.get());
    Owned result(PyObject_Vectorcall(made.callee.get(), arguments.data(), arguments.size(), nullptr));
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
  const Host* host_;
  std::vector<Owned> values_;
  std::vector<Bytes> memory_;
  std::vector<bool> made_by_host_;
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

static bool run_for_host(void* program, Py_ssize_t arguments, const Host& host) {
  Owned done(reporting_errors([&]() -> PyObject* {
    Run(*static_cast<Program*>(program), &host).with_tensors_of_host(arguments);
    return Py_NewRef(Py_None);
  }));
  return done != nullptr;
}

struct Held {
  Program program;
  straight_line::Entry entry{run_for_host, &program};
};

static Held* held_in(PyObject* capsule) {
  return static_cast<Held*>(PyCapsule_GetPointer(capsule, straight_line::program_name));
}

static PyObject* run_program(PyObject* capsule, PyObject* arguments) {
  return reporting_errors([&]() -> PyObject* {
    Held* held = held_in(capsule);
    require(held != nullptr);
    require(PyList_Check(arguments) || (PyErr_SetString(PyExc_TypeError, "a list of arguments is wanted"), false));
    return Run(held->program).with(arguments);
  });
}

static PyMethodDef run_method = {"straight_line_program", run_program, METH_O, nullptr};

static void free_program(PyObject* capsule) { delete held_in(capsule); }

static PyObject* make_program(PyObject*, PyObject* arguments) {
  return reporting_errors([&]() -> PyObject* {
    auto held = std::make_unique<Held>();
    Program& program = held->program;
    PyObject *inputs = nullptr, *instructions = nullptr, *outputs = nullptr;
    require(PyArg_ParseTuple(arguments, "nOOO", &program.slots, &inputs, &instructions, &outputs));
    program.inputs = numbers_of(inputs);
    program.outputs = numbers_of(outputs);
    require(PyList_Check(instructions));
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(instructions); ++index)
      program.instructions.push_back(instruction_of(PyList_GET_ITEM(instructions, index), program));
    Owned capsule(PyCapsule_New(held.get(), straight_line::program_name, free_program));
    require(capsule != nullptr);
    Held* kept = held.release();
    require(PyCapsule_SetContext(capsule.get(), &kept->entry) == 0);
    return PyCFunction_New(&run_method, capsule.get());
  });
}

static PyMethodDef methods[] = {{"kernel", make_program, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static struct PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "kernel", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_kernel(void) {
  const char* address =
      std::getenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR");  // where Inductor's kernels have it from
  if (address == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR must be set");
    return nullptr;
  }
  address_of_data = reinterpret_cast<decltype(address_of_data)>(std::strtoull(address, nullptr, 10));
  return PyModule_Create(&module_definition);
}
