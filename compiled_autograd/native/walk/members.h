// Private members of PyTorch's classes that have no other way in. An explicit instantiation may name a private member
// ([temp.spec.general]), so this needs no change of the headers. What is taken, and why:
//
//   CompiledNodeArgs   the bytes of the key, which its only reader takes a node at a time
//   TensorArgs         maps that would grow with the tape; emptied after each node they stay in the cache
//   Node               the lock that is held while another thread runs the node or releases what it saved

#pragma once

#include "../contract.h"

namespace native {

template <typename Member, typename Member::Type pointer>
struct Grant {
  friend typename Member::Type pointer_to(Member) { return pointer; }
};

struct KeyBytes {
  using Type = uint8_t* CompiledNodeArgs::*;
  friend Type pointer_to(KeyBytes);
};
struct KeySize {
  using Type = size_t CompiledNodeArgs::*;
  friend Type pointer_to(KeySize);
};
struct TensorMap {
  using Type = std::unordered_map<const c10::TensorImpl*, torch::dynamo::autograd::TensorArg> TensorArgs::*;
  friend Type pointer_to(TensorMap);
};
struct SavedMap {
  using Type =
      std::unordered_map<const torch::autograd::SavedVariable*, torch::dynamo::autograd::TensorArg*> TensorArgs::*;
  friend Type pointer_to(SavedMap);
};
struct NextTensor {
  using Type = uint32_t TensorArgs::*;
  friend Type pointer_to(NextTensor);
};
struct NodeLock {
  using Type = std::mutex Node::*;
  friend Type pointer_to(NodeLock);
};

template struct Grant<KeyBytes, &CompiledNodeArgs::_specialization_key>;
template struct Grant<KeySize, &CompiledNodeArgs::_specialization_key_size>;
template struct Grant<TensorMap, &TensorArgs::_args>;
template struct Grant<SavedMap, &TensorArgs::_saved_variables>;
template struct Grant<NextTensor, &TensorArgs::_next_id>;
template struct Grant<NodeLock, &Node::mutex_>;

}  // namespace native
