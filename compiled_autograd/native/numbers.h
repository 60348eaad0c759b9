// Numbers of addresses, in the order in which they are first asked for. An open hash table: a tape asks for each of its
// edges and tensors once, which is too often for a map that allocates.

#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace native {

class Numbers {
 public:
  // The number of an address, and whether it is new.
  std::pair<uint32_t, bool> of(const void* address) {
    if (2 * (count_ + 1) > slots_.size()) grow();
    Slot& slot = slot_of(address);
    if (slot.address) return {slot.number, false};
    slot = {address, count_};
    return {count_++, true};
  }

  // The same of an address that was asked for before; else a number that none has.
  uint32_t known(const void* address) {
    if (slots_.empty()) return kNone;
    const Slot& slot = slot_of(address);
    return slot.address ? slot.number : kNone;
  }

  static constexpr uint32_t kNone = UINT32_MAX;
  uint32_t count() const { return count_; }

  void clear() {
    if (count_) slots_.assign(slots_.size(), Slot());
    count_ = 0;
  }

 private:
  struct Slot {
    const void* address = nullptr;
    uint32_t number = 0;
  };

  Slot& slot_of(const void* address) {
    const uint64_t mixed = reinterpret_cast<uintptr_t>(address) * UINT64_C(0x9E3779B97F4A7C15);
    const size_t mask = slots_.size() - 1;
    size_t place = (mixed >> 32) & mask;
    while (slots_[place].address && slots_[place].address != address) place = (place + 1) & mask;
    return slots_[place];
  }

  void grow() {
    std::vector<Slot> before(slots_.empty() ? 256 : 2 * slots_.size());
    before.swap(slots_);
    for (const Slot& slot : before)
      if (slot.address) slot_of(slot.address) = slot;
  }

  std::vector<Slot> slots_;
  uint32_t count_ = 0;
};

}  // namespace native
