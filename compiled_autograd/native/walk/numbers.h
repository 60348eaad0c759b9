// Numbers of addresses, in the order in which they are first asked for. An open hash table: a tape asks for each of its
// edges and tensors once, which is too often for a map that allocates. Its slots are small, since memory outside
// the processor's caches costs more than all else here.

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
    if (2 * (addresses_.size() + 1) > slots_.size()) grow();
    Slot& slot = slot_of(address);
    if (slot.next) return {slot.next - 1, false};
    addresses_.push_back(address);
    slot = {tag_of(address), count()};
    return {count() - 1, true};
  }

  // The number of an address that was asked for before; else a number that none has.
  uint32_t known(const void* address) {
    if (slots_.empty()) return kNone;
    const Slot& slot = slot_of(address);
    return slot.next ? slot.next - 1 : kNone;
  }

  static constexpr uint32_t kNone = UINT32_MAX;
  uint32_t count() const { return static_cast<uint32_t>(addresses_.size()); }

  void clear() {
    if (count()) slots_.assign(slots_.size(), Slot());
    addresses_.clear();
  }

 private:
  struct Slot {
    uint32_t tag = 0;   // the address, shortened
    uint32_t next = 0;  // the number after its own; 0 where the slot is free
  };

  static uint64_t mixed(const void* address) {
    return reinterpret_cast<uintptr_t>(address) * UINT64_C(0x9E3779B97F4A7C15);
  }
  static uint32_t tag_of(const void* address) { return static_cast<uint32_t>(mixed(address)); }

  Slot& slot_of(const void* address) {
    const uint32_t tag = tag_of(address);
    const size_t mask = slots_.size() - 1;
    size_t place = (mixed(address) >> 32) & mask;
    while (slots_[place].next && (slots_[place].tag != tag || addresses_[slots_[place].next - 1] != address))
      place = (place + 1) & mask;
    return slots_[place];
  }

  void grow() {
    slots_.assign(slots_.empty() ? 256 : 2 * slots_.size(), Slot());
    for (uint32_t number = 0; number < count(); ++number)
      slot_of(addresses_[number]) = {tag_of(addresses_[number]), number + 1};
  }

  std::vector<Slot> slots_;
  std::vector<const void*> addresses_;
};

}  // namespace native
