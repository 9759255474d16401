#include <ATen/PinnedSlots.h>

#include <ATen/DeviceAccelerator.h>
#include <ATen/HostMemory.h>
#include <ATen/HostMemoryHooks.h>
#include <ATen/PinTarget.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Event.h>
#include <c10/core/SizeClass.h>
#include <c10/util/Exception.h>

#if TORCHPIN_BASE_HAS_HOST_ALLOCATOR
#include <ATen/core/CachingHostAllocator.h>
#endif

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <shared_mutex>

namespace at::pin {

namespace {

std::atomic<bool> eventsHonoured{true};

class Slots;

// All that exist, for finding the slot of an address. Never destroyed: storages
// are freed late.
struct Directory {
  std::shared_mutex mutex;
  std::vector<Slots*> all;
  // Read before the mutex is taken, so that programs without slots pay a load.
  std::atomic<size_t> count{0};
  // Of the process that all belong to; a forked child may find the mutex taken
  // by a thread that it does not have.
  std::atomic<pid_t> pid{0};
};
Directory& directory() {
  static auto* const instance = new Directory();
  return *instance;
}

// The storages of one batch in a slot.
struct Batch {
  std::shared_ptr<Slots> slots;
  c10::SlotHold hold;
  std::atomic<size_t> storages;
};

class Slots final : public PinnedSlots,
                    public std::enable_shared_from_this<Slots> {
 public:
  Slots(std::shared_ptr<c10::SharedSlots> slots, uint32_t usual)
      : slots_(std::move(slots)),
        usual_(usual),
        pid_(getpid()),
        of_slot_(slots_->slots()) {
    auto& directory = at::pin::directory();
    std::unique_lock<std::shared_mutex> lock(directory.mutex);
    directory.all.push_back(this);
    directory.pid = pid_;
    ++directory.count;
  }

  ~Slots() override {
    // A forked child has neither the page locks nor a directory that it may
    // rely on.
    if (getpid() != pid_) {
      return;
    }
    {
      auto& directory = at::pin::directory();
      std::unique_lock<std::shared_mutex> lock(directory.mutex);
      directory.all.erase(
          std::find(directory.all.begin(), directory.all.end(), this));
      --directory.count;
    }
    for (uint32_t slot = 0; slot < of_slot_.size(); ++slot) {
      unlock(slot);
    }
  }

  bool lock(uint32_t slot, uint64_t bytes) override {
    const uint64_t locked = slots_->pinned_extent(slot);
    if (bytes <= locked) {
      return true;
    }
    // One range for each slot: some drivers refuse a copy that crosses from
    // one registered range into another. A slot that grew may grow again.
    const uint64_t extent = locked == 0
                                ? c10::size_class::round_up_to_page(bytes)
                                : slots_->resident_bytes(slot);
    if (locked == 0) {
      make_room(slot);
    }
    unlock(slot);
    try {
      registerHostMemory(slots_->slot_data(slot), extent, /*idle=*/true);
    } catch (const std::exception&) {
      return false;
    }
    slots_->set_pinned_extent(slot, extent);
    locked_bytes_.fetch_add(extent, std::memory_order_relaxed);
    locked_slots_.fetch_add(1, std::memory_order_relaxed);
    return true;
  }

  uint32_t instead_of(uint32_t slot, uint64_t bytes, bool keeps) override {
    if (!keeps && (slots_->pinned_extent(slot) != 0 || !enough_locked())) {
      return c10::SharedSlots::kNobody;
    }
    return slots_->take_free(bytes);
  }

  void make_room(uint32_t slot) noexcept override {
    if (!enough_locked()) {
      return;
    }
    // Only this thread takes slots, so one that is with a worker stays there or
    // becomes free.
    for (uint32_t other = 0; other < of_slot_.size(); ++other) {
      if (other != slot && slots_->pinned_extent(other) != 0 &&
          slots_->is_with_worker(other)) {
        unlock(other);
        return;
      }
    }
  }

  std::vector<c10::Storage> deliver(
      uint32_t slot,
      const std::vector<std::pair<uint64_t, uint64_t>>& regions) override {
    std::vector<c10::Storage> storages;
    if (regions.empty()) {
      return storages;
    }
    auto batch = std::make_unique<Batch>();
    batch->slots = shared_from_this();
    batch->storages = regions.size();
    TORCH_INTERNAL_ASSERT(slots_->retain(slot, 1, &batch->hold));
    storages.reserve(regions.size());
    auto* const allocator = requirePinTarget().allocator;
    char* const data = slots_->slot_data(slot);
    for (const auto& [offset, bytes] : regions) {
      storages.emplace_back(
          c10::make_intrusive<c10::StorageImpl>(
              c10::StorageImpl::use_byte_size_t(),
              bytes,
              c10::DataPtr(
                  data + offset,
                  batch.get(),
                  &Slots::drop,
                  c10::Device(c10::kCPU)),
              allocator,
              /*resizable=*/false));
    }
    (void)batch.release();
    return storages;
  }

  void poll() noexcept {
    std::vector<std::shared_ptr<Slots>> done;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      lookAtWaiting(done);
    }
    // May be the last of this object.
  }

  void give_back() noexcept override {
    poll();
    for (uint32_t slot = 0; slot < of_slot_.size(); ++slot) {
      if (!slots_->in_use(slot)) {
        unlock(slot);
      }
    }
    slots_->trim_free_slots();
  }

  uint64_t locked_bytes() const noexcept override {
    return locked_bytes_.load(std::memory_order_relaxed);
  }

  uint64_t waiting() const noexcept override {
    std::lock_guard<std::mutex> guard(mutex_);
    return waiting_.size();
  }

  // Whether `address` is in a slot; then an event keeps the slot.
  bool record(const void* address, c10::Stream stream) {
    const uint32_t slot = slots_->slot_of(address);
    if (slot == c10::SharedSlots::kNobody) {
      return false;
    }
    std::lock_guard<std::mutex> guard(mutex_);
    auto& events = of_slot_[slot].events;
    const auto found =
        std::find_if(events.begin(), events.end(), [&](const auto& event) {
          return event.first == stream;
        });
    try {
      if (found != events.end()) {
        found->second.record(stream);
      } else {
        c10::Event event(stream.device_type());
        event.record(stream);
        events.emplace_back(stream, std::move(event));
      }
    } catch (const std::exception&) {
      // Nobody can tell any more when this memory is free.
      of_slot_[slot].lost = true;
      throw;
    }
    return true;
  }

 private:
  struct OfSlot {
    std::vector<std::pair<c10::Stream, c10::Event>> events;
    bool lost = false;
  };
  struct Waiting {
    c10::SlotHold hold;
    std::shared_ptr<Slots> self;
  };

  // As many as the base would hold batches, those included that only copies
  // keep.
  bool enough_locked() const noexcept {
    return locked_slots_.load(std::memory_order_relaxed) >=
           usual_ + most_waiting_.load(std::memory_order_relaxed);
  }

  static void drop(void* context) {
    auto* batch = static_cast<Batch*>(context);
    if (batch->storages.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      const std::unique_ptr<Batch> owned(batch);
      const auto slots = owned->slots;
      slots->let_go(owned->hold);
    }
  }

  void let_go(c10::SlotHold hold) noexcept {
    // In a forked child the mutex may be held by a thread that is not there,
    // and the accelerator is not to be asked.
    if (getpid() != pid_) {
      slots_->release(hold);
      return;
    }
    {
      std::lock_guard<std::mutex> guard(mutex_);
      if (isFree(hold.slot)) {
        slots_->release(hold);
      } else {
        // Keeps this object, and so the page lock, while copies are running.
        waiting_.push_back({hold, shared_from_this()});
        if (waiting_.size() > most_waiting_.load(std::memory_order_relaxed)) {
          most_waiting_.store(waiting_.size(), std::memory_order_relaxed);
        }
      }
    }
    poll();
  }

  // With the mutex.
  bool isFree(uint32_t slot) noexcept {
    auto& of_slot = of_slot_[slot];
    if (!eventsHonoured.load(std::memory_order_relaxed)) {
      of_slot.events.clear();
      return true;
    }
    auto& events = of_slot.events;
    try {
      events.erase(
          std::remove_if(
              events.begin(),
              events.end(),
              [](const auto& event) { return event.second.query(); }),
          events.end());
    } catch (const std::exception&) {
      // An event that cannot be asked (captured in a graph, a lost device)
      // never says that it has fired.
      of_slot.lost = true;
    }
    return events.empty() && !of_slot.lost;
  }

  // With the mutex; references to this object that are to be dropped without it
  // go to `done`.
  void lookAtWaiting(std::vector<std::shared_ptr<Slots>>& done) noexcept {
    for (size_t i = 0; i < waiting_.size();) {
      if (isFree(waiting_[i].hold.slot)) {
        slots_->release(waiting_[i].hold);
        done.push_back(std::move(waiting_[i].self));
        waiting_[i] = std::move(waiting_.back());
        waiting_.pop_back();
      } else {
        ++i;
      }
    }
  }

  // Of a slot that nobody uses: its events have fired.
  void unlock(uint32_t slot) noexcept {
    const uint64_t locked = slots_->pinned_extent(slot);
    if (locked == 0) {
      return;
    }
    try {
      unregisterHostMemory(slots_->slot_data(slot), locked);
    } catch (const std::exception&) {
      // The driver is gone, and its locks with it.
    }
    slots_->set_pinned_extent(slot, 0);
    locked_bytes_.fetch_sub(locked, std::memory_order_relaxed);
    locked_slots_.fetch_sub(1, std::memory_order_relaxed);
  }

  const std::shared_ptr<c10::SharedSlots> slots_;
  const uint32_t usual_;
  const pid_t pid_;
  std::atomic<uint64_t> locked_bytes_{0};
  std::atomic<uint32_t> locked_slots_{0};
  std::atomic<size_t> most_waiting_{0};
  mutable std::mutex mutex_;
  std::vector<OfSlot> of_slot_;
  std::vector<Waiting> waiting_;
};

#if TORCHPIN_BASE_HAS_HOST_ALLOCATOR

// Answers for slots and hands everything else to the allocator that was
// registered before it.
class SlotHostAllocator final : public at::HostAllocator {
 public:
  explicit SlotHostAllocator(at::HostAllocator* next) : next_(next) {}

  at::HostAllocator* next() const {
    return next_;
  }

  bool record_event(void* ptr, void* ctx, c10::Stream stream) override {
    auto& directory = at::pin::directory();
    if (directory.count.load(std::memory_order_acquire) != 0) {
      std::shared_lock<std::shared_mutex> lock(directory.mutex);
      for (Slots* slots : directory.all) {
        if (slots->record(ptr, stream)) {
          return true;
        }
      }
    }
    return next_->record_event(ptr, ctx, stream);
  }

  c10::DataPtr allocate(size_t bytes) override {
    return next_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return next_->raw_deleter();
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    next_->copy_data(to, from, bytes);
  }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return next_->is_simple_data_ptr(data);
  }
  void empty_cache() override {
    next_->empty_cache();
  }
  at::HostStats get_stats() override {
    return next_->get_stats();
  }
  void reset_accumulated_stats() override {
    next_->reset_accumulated_stats();
  }
  void reset_peak_stats() override {
    next_->reset_peak_stats();
  }
#if TORCHPIN_BASE_HAS_HOST_POOLS
  void begin_allocate_to_pool(
      c10::MempoolId_t pool,
      std::function<bool(c10::Stream)> filter) override {
    next_->begin_allocate_to_pool(pool, std::move(filter));
  }
  void end_allocate_to_pool(c10::MempoolId_t pool) override {
    next_->end_allocate_to_pool(pool);
  }
  void release_pool(c10::MempoolId_t pool) override {
    next_->release_pool(pool);
  }
#endif
#if TORCHPIN_BASE_HAS_HOST_HISTORY
  void record_history(
      bool enabled,
      c10::CachingDeviceAllocator::CreateContextFn recorder,
      size_t entries,
      c10::CachingDeviceAllocator::RecordContext when,
      bool clear) override {
    next_->record_history(enabled, recorder, entries, when, clear);
  }
  bool is_history_enabled() const override {
    return next_->is_history_enabled();
  }
  std::vector<at::HostSegmentInfo> get_segments() override {
    return next_->get_segments();
  }
  std::vector<c10::CachingDeviceAllocator::TraceEntry> get_traces() override {
    return next_->get_traces();
  }
  void record_external_register(void* ptr, size_t bytes) override {
    next_->record_external_register(ptr, bytes);
  }
  void record_external_unregister(void* ptr) override {
    next_->record_external_unregister(ptr);
  }
#endif

 private:
  at::HostAllocator* const next_;
};

// Above the priority of any backend that leaves it at its default.
constexpr uint8_t kPriority = 100;

bool standInFront(c10::DeviceType type) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> guard(mutex);
  auto* const current = at::getHostAllocator(type);
  if (current == nullptr) {
    return false;
  }
  if (dynamic_cast<SlotHostAllocator*>(current) != nullptr) {
    return true;
  }
  // Never destroyed: somebody may have asked for it already.
  at::setHostAllocator(type, new SlotHostAllocator(current), kPriority);
  return dynamic_cast<SlotHostAllocator*>(at::getHostAllocator(type)) !=
         nullptr;
}

bool reportsCopies(c10::DeviceType type) {
  if (type == c10::kCUDA) {
    return true;
  }
  if (type != c10::kPrivateUse1 || !at::isPrivateUse1HooksRegistered()) {
    return false;
  }
  const auto* hooks =
      dynamic_cast<const HostMemoryHooks*>(&at::detail::getPrivateUse1Hooks());
  return hooks != nullptr && hooks->copies_record_events();
}

#endif // TORCHPIN_BASE_HAS_HOST_ALLOCATOR

} // namespace

std::string whyNotInPlace() {
#if TORCHPIN_BASE_HAS_HOST_ALLOCATOR
  const auto target = pinTarget(Initialize::Yes);
  if (!target.ready()) {
    return target.reason;
  }
  if (target.ownKernels || target.allocator == nullptr) {
    return "the backend pins by kernels of its own";
  }
  if (!reportsCopies(*target.accelerator)) {
    return "the backend does not report its copies to "
           "at::HostAllocator::record_event";
  }
  if (!standInFront(*target.accelerator)) {
    return "no host allocator is registered for the accelerator, or one that "
           "gives no other precedence";
  }
  return "";
#else
  return "this release of PyTorch does not report copies to the host allocator";
#endif
}

std::shared_ptr<PinnedSlots> PinnedSlots::make(
    std::shared_ptr<c10::SharedSlots> slots,
    uint32_t usual) {
  return std::make_shared<Slots>(std::move(slots), usual);
}

void pollPinnedSlots() noexcept {
  auto& directory = at::pin::directory();
  if (directory.count.load(std::memory_order_acquire) == 0 ||
      directory.pid.load(std::memory_order_relaxed) != getpid()) {
    return;
  }
  std::vector<std::shared_ptr<Slots>> all;
  {
    std::shared_lock<std::shared_mutex> lock(directory.mutex);
    for (Slots* slots : directory.all) {
      if (auto alive = slots->weak_from_this().lock()) {
        all.push_back(std::move(alive));
      }
    }
  }
  for (const auto& slots : all) {
    slots->poll();
  }
}

void setSlotEventsHonoured(bool honoured) {
  eventsHonoured.store(honoured, std::memory_order_relaxed);
}

} // namespace at::pin
