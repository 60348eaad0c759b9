// The rules for all files of this room, and the parts of PyTorch that they need. Written against torch 2.13,
// tried on 2.11 to 2.15.
//
// The GIL. Callers of the room hold it. Nodes of Python functions run Python while they give their key, and programs
// release the GIL during long products and now and then. There other threads may run, and this thread may enter the
// room again. A tape is freed without the GIL. So working memory belongs to one walk (`Lease` in
// walk/walk.h), and nothing is kept in a global variable but idle memory.
//
// Errors. `Refused` says why a tape is left to the engine, in words for people. Any other exception comes from PyTorch
// or from users' code that it calls. Only functions of module.cpp, taken.cpp, fast_path and own_loop catch (python.h).
// While a tape is whole, an `Exception` of Python's, and whatever becomes one, is a reason to refuse, since the engine
// will raise it in its own words; the others (Ctrl-C) are raised. Once it has been taken, all of them are.
//
// The tape. It is read and not changed until all of it is known, so that an exception anywhere leaves it whole. The
// engine's root, which a walk makes, owns the edges to the tape until the walk ends, and each node owns those below it:
// so nodes are plain pointers. Another thread may run or free the same tape meanwhile: each node is read under its own
// lock.
//
// The values of a tape belong to the walk until `Walk::take` moves them. A plan owns bytes, and no tensors.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <string>
#include <utility>

namespace native {

using c10::IValue;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;
using torch::dynamo::autograd::AutogradCompilerCall;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::NodeCall;
using torch::dynamo::autograd::SizeInput;
using torch::dynamo::autograd::TensorArgs;

using NodePtr = decltype(Edge::function);  // owns a node: std::shared_ptr before 2.13, c10::intrusive_ptr since

struct Refused {
  std::string reason;
};

}  // namespace native

// PyTorch's own, exported, declared here since the headers that declare them include pybind11, which would make the
// compilation a third longer: torch/csrc/autograd/{engine,python_variable}.h, torch/csrc/Exceptions.h.

extern PyObject* THPVariableClass;
extern PyObject* ParameterClass;
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);

namespace torch {
void translate_exception_to_python(const std::exception_ptr& error);
}  // namespace torch

namespace torch::autograd {
void validate_outputs(
    const edge_list& edges, variable_list& grads, const std::function<std::string(const std::string&)>& format_error);
}  // namespace torch::autograd
