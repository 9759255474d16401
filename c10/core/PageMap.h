#pragma once

// Which object owns an address: a table from 4 KiB pages to pointers.
//
// find() is three loads, takes no lock, never throws and may run in any thread
// at any time, also in a forked child. insert(), erase() and abandon() are for
// whoever owns the map, one at a time. Addresses are those of a Linux process
// (48 bits). The table costs 8 bytes for each page mapped, and what it has
// allocated it keeps.
//
// Why not a sorted vector under a reader-writer lock: the question "is this
// address pinned" is asked for every tensor that is copied, from all threads,
// and must also be answered in a child that was forked while a writer held the
// lock.

#include <c10/core/SizeClass.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace c10 {

template <class T>
class PageMap {
 public:
  PageMap() = default;
  PageMap(const PageMap&) = delete;
  PageMap& operator=(const PageMap&) = delete;

  ~PageMap() {
    destroy(root_.load(std::memory_order_relaxed));
  }

  // The owner of the page in which address lies, or null.
  T* find(const void* address) const noexcept {
    return find_in(root_.load(std::memory_order_acquire), page_of(address));
  }

  // Whether the range can be entered: not null, on page boundaries, within the
  // addresses that the table covers.
  static bool fits(const void* begin, size_t bytes) noexcept {
    const auto first = reinterpret_cast<uintptr_t>(begin);
    return first != 0 && first % size_class::kPage == 0 &&
           bytes % size_class::kPage == 0 && first < kAddresses &&
           bytes <= kAddresses - first;
  }

  // Makes owner the owner of every page of the range, which must fit. Throws
  // std::bad_alloc, and then the range has no owner.
  void insert(const void* begin, size_t bytes, T* owner) {
    const uintptr_t first = page_of(begin);
    const uintptr_t last = first + bytes / size_class::kPage;
    // All tables first, so that nothing can fail half-way.
    for (uintptr_t page = first; page < last;
         page = (page | (kFanout - 1)) + 1) {
      leaf_of(page, /*create=*/true);
    }
    for (uintptr_t page = first; page < last; ++page) {
      leaf_of(page, false)
          ->entry[page % kFanout]
          .store(owner, std::memory_order_release);
    }
  }

  // Pages of the range have no owner any more.
  void erase(const void* begin, size_t bytes) noexcept {
    const uintptr_t first = page_of(begin);
    const uintptr_t last = first + bytes / size_class::kPage;
    for (uintptr_t page = first; page < last; ++page) {
      if (Leaf* leaf = leaf_of(page, false)) {
        leaf->entry[page % kFanout].store(nullptr, std::memory_order_release);
      }
    }
  }

  // In a forked child: nothing has an owner any more, but was_abandoned()
  // remembers what had one in the parent. Allocates nothing and frees nothing.
  void abandon() noexcept {
    if (Root* root = root_.exchange(nullptr, std::memory_order_acq_rel)) {
      root->older = abandoned_;
      abandoned_ = root;
    }
  }

  // Whether any page of the range had an owner before abandon().
  bool was_abandoned(const void* begin, size_t bytes) const noexcept {
    const uintptr_t first = page_of(begin);
    const uintptr_t last =
        first + (bytes + size_class::kPage - 1) / size_class::kPage;
    for (const Root* root = abandoned_; root != nullptr; root = root->older) {
      for (uintptr_t page = first; page < last; ++page) {
        if (find_in(root, page) != nullptr) {
          return true;
        }
      }
    }
    return false;
  }

 private:
  static constexpr size_t kFanout = 4096;
  static constexpr size_t kAddresses = size_t{1} << 48;

  template <class Entry>
  struct Table {
    std::atomic<Entry*> entry[kFanout] = {};
  };
  using Leaf = Table<T>;
  using Middle = Table<Leaf>;
  struct Root : Table<Middle> {
    Root* older = nullptr;
  };

  static uintptr_t page_of(const void* address) noexcept {
    return reinterpret_cast<uintptr_t>(address) / size_class::kPage;
  }

  static T* find_in(const Root* root, uintptr_t page) noexcept {
    if (root == nullptr || page >= kAddresses / size_class::kPage) {
      return nullptr;
    }
    const Middle* middle =
        root->entry[page / kFanout / kFanout].load(std::memory_order_acquire);
    if (middle == nullptr) {
      return nullptr;
    }
    const Leaf* leaf =
        middle->entry[page / kFanout % kFanout].load(std::memory_order_acquire);
    return leaf == nullptr
               ? nullptr
               : leaf->entry[page % kFanout].load(std::memory_order_acquire);
  }

  template <class Entry>
  static Entry* get(std::atomic<Entry*>& slot, bool create) {
    Entry* entry = slot.load(std::memory_order_relaxed);
    if (entry == nullptr && create) {
      entry = new Entry();
      slot.store(entry, std::memory_order_release);
    }
    return entry;
  }

  Leaf* leaf_of(uintptr_t page, bool create) {
    Root* root = get(root_, create);
    if (root == nullptr) {
      return nullptr;
    }
    Middle* middle = get(root->entry[page / kFanout / kFanout], create);
    return middle == nullptr
               ? nullptr
               : get(middle->entry[page / kFanout % kFanout], create);
  }

  static void destroy(Root* root) noexcept {
    if (root == nullptr) {
      return;
    }
    for (auto& middle_slot : root->entry) {
      if (Middle* middle = middle_slot.load(std::memory_order_relaxed)) {
        for (auto& leaf_slot : middle->entry) {
          delete leaf_slot.load(std::memory_order_relaxed);
        }
        delete middle;
      }
    }
    delete root;
  }

  std::atomic<Root*> root_{nullptr};
  // Only written in a child that has one thread yet.
  Root* abandoned_ = nullptr;
};

} // namespace c10
