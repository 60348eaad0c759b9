// Lists of tensors whose memory is used again. One that is freed after a backward has some kilobytes, and where that
// much is freed, malloc joins all the small pieces that were freed before: those of a whole tape.

#pragma once

#include "contract.h"

#include <vector>

namespace native {

class SpareList {
 public:
  // Empty, with the memory of one that ended in this thread.
  SpareList() : list_(take()) {}
  explicit SpareList(variable_list list) : list_(std::move(list)) {}
  // Releases its tensors, which may run any code.
  ~SpareList() {
    list_.clear();
    if (list_.capacity() && list_.capacity() <= kLarge && spare().size() < kKept) spare().push_back(std::move(list_));
  }
  SpareList(const SpareList&) = delete;
  SpareList& operator=(const SpareList&) = delete;

  variable_list& operator*() { return list_; }
  variable_list* operator->() { return &list_; }

  // The memory alone.
  static variable_list take() {
    variable_list list;
    if (spare().empty()) return list;
    list.swap(spare().back());
    spare().pop_back();
    return list;
  }

 private:
  static constexpr size_t kKept = 8, kLarge = 1 << 14;

  static std::vector<variable_list>& spare() {
    thread_local std::vector<variable_list> lists;
    return lists;
  }

  variable_list list_;
};

}  // namespace native
