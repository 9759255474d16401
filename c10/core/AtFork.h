#pragma once

// Lets an object put itself in order in a forked child, before anything else
// runs there.
//
// A child has one thread and a copy of the parent's memory: locks that other
// threads of the parent held stay locked for ever, and handles of a device
// driver belong to the parent. Checking the process id at every use instead
// would cost a system call and could not tell who holds the lock.

#include <pthread.h>

#include <atomic>

namespace c10 {
// The version in the name keeps libraries that were compiled with different
// releases of this file from sharing the list below.
inline namespace at_fork_v1 {

// A member of the object, and its last one, so that it exists only while all
// the others do.
class AtForkInChild {
 public:
  // In the child action(object) runs in the only thread there is. It must not
  // allocate, free or wait; it may make fresh locks where the old ones stood.
  using Action = void (*)(void* object) noexcept;

  AtForkInChild(Action action, void* object)
      : entry_(new Entry{action, {object}, nullptr}) {
    static const int registered =
        pthread_atfork(nullptr, nullptr, &AtForkInChild::run_all);
    static_cast<void>(registered);
    entry_->next = list().load(std::memory_order_relaxed);
    while (!list().compare_exchange_weak(
        entry_->next,
        entry_,
        std::memory_order_release,
        std::memory_order_relaxed)) {
    }
  }

  // The entry itself stays: another thread may be forking at this moment.
  ~AtForkInChild() {
    entry_->object.store(nullptr, std::memory_order_release);
  }

  AtForkInChild(const AtForkInChild&) = delete;
  AtForkInChild& operator=(const AtForkInChild&) = delete;

 private:
  struct Entry {
    Action action;
    std::atomic<void*> object;
    Entry* next;
  };

  static std::atomic<Entry*>& list() noexcept {
    static std::atomic<Entry*> head{nullptr};
    return head;
  }

  static void run_all() noexcept {
    for (Entry* entry = list().load(std::memory_order_acquire);
         entry != nullptr;
         entry = entry->next) {
      if (void* object = entry->object.load(std::memory_order_acquire)) {
        entry->action(object);
      }
    }
  }

  Entry* entry_;
};

} // namespace at_fork_v1
} // namespace c10
