#pragma once

// A cache of page-locked host memory: the part that knows nothing of PyTorch.
// Backends use it through CachingHostMemory.h.
//
// Note [Host block cache]
// ~~~~~~~~~~~~~~~~~~~~~~~
// A *segment* is one piece of memory from the runtime, page-locked as a whole.
// It holds one block, or several of one size where a block is not a whole
// number of pages (a *slab*, at most 64 KiB). Hence small blocks share pages:
// per size class at most one slab is partly used while the use only grows.
//
// Block sizes are those of c10/core/SizeClass.h, at most 1/8 over the request;
// above kExactAbove they are the request rounded up to a page, and a free block
// serves a request that it exceeds by at most 1/8. A block is never smaller
// than the request.
//
// A block is FREE, LIVE (a caller has it), or PENDING: given back, but an event
// recorded on a stream that used it has not fired. Pending blocks wait in one
// list for each size. A request that finds no free block of its size asks the
// events of that list one block after the other and takes the first block that
// is ready; only if there is none it asks all the others and then the runtime.
// So no event that has not fired yet keeps another block from being reclaimed,
// and a request that finds a free block asks no event.
//
// How much stays locked. Segments whose blocks are all free are *idle* and
// stand in a list, the longest unused first. Before a new segment is locked,
// idle ones are unlocked from the head of that list until the total is not
// above the most that was busy at one time, plus an allowance. The allowance
// starts at 512 KiB and grows by 1/256 of the bytes that were unlocked for this
// reason: a program whose sizes never repeat stays near what it uses, and one
// that needs the same sizes alternately soon keeps them all, after page-locking
// that much 256 times. (Keeping everything, with eight sizes per doubling, held
// 3.5 times the peak use for random sizes.)
//
// Locks. One mutex, held for a few list operations. No function of the runtime
// is ever called with it held: a runtime may take the GIL, collect garbage and
// come back to free(). Looking up an address takes no lock, see PageMap.
//
// free() never unlocks memory: it may run under the GIL, or when the process is
// being torn down and the driver is gone. What the limit on cached bytes says
// must go, goes at the next allocate(), empty_cache() or set_limits().
//
// Fork. The child starts with an empty cache and a fresh mutex. Blocks of the
// parent are unknown there: freeing one does nothing, they do not count as
// pinned, their events and memory are left alone. Should the runtime hand the
// child memory at an address where the parent had a block (drivers that keep
// pinned memory from being inherited make that possible), that memory is not
// used, since freeing the old block could not be told from freeing the new one.

#include <ATen/core/HostCacheStats.h>
#include <c10/core/AtFork.h>
#include <c10/core/PageMap.h>
#include <c10/core/SizeClass.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

namespace at::pin {
// See HostCacheStats.h on the version in the name.
inline namespace host_cache_v1 {

namespace detail {

// Doubly linked list through members of its items. Owns nothing.
template <class Item, Item* Item::* Previous, Item* Item::* Next>
struct LinkedList {
  Item* head = nullptr;
  Item* tail = nullptr;

  void push_front(Item* item) noexcept {
    item->*Previous = nullptr;
    item->*Next = head;
    (head ? head->*Previous : tail) = item;
    head = item;
  }
  void push_back(Item* item) noexcept {
    item->*Previous = tail;
    item->*Next = nullptr;
    (tail ? tail->*Next : head) = item;
    tail = item;
  }
  void erase(Item* item) noexcept {
    (item->*Previous ? item->*Previous->*Next : head) = item->*Next;
    (item->*Next ? item->*Next->*Previous : tail) = item->*Previous;
  }
};

// int numa_node() is optional in a runtime.
template <class Runtime, class = void>
struct NumaNode {
  static int of(Runtime&) noexcept {
    return 0;
  }
};
template <class Runtime>
struct NumaNode<
    Runtime,
    std::void_t<decltype(std::declval<Runtime&>().numa_node())>> {
  static int of(Runtime& runtime) {
    return runtime.numa_node();
  }
};

} // namespace detail

// Runtime supplies, all of them callable from any thread at the same time:
//
//   void* allocate_host_memory(size_t bytes)
//       New page-locked memory on a page boundary; bytes is a multiple of
//       4096. Null, or std::bad_alloc, when refused; any other exception goes
//       through to the caller of allocate() unchanged.
//   void free_host_memory(void* ptr, size_t bytes)
//       Undoes one call of the above. Never called from free().
//   Event record_event(Stream stream)
//       An event that fires when what is on the stream now has finished. Event
//       is any movable type. Called from free(): must not be slow, and must
//       not need the GIL.
//   bool query_event(Event& event)
//       Whether it has fired. One that throws counts as not fired.
//
// and optionally
//
//   int numa_node()
//       The node (0 to 15; others count as 0) on which memory that the calling
//       thread allocates now should lie. Memory of one node is not reused for
//       another. Called for every request.
//
// All functions are thread-safe.
template <class Runtime, class Stream>
class HostBlockCache {
 public:
  using Event = std::decay_t<decltype(std::declval<Runtime&>().record_event(
      std::declval<Stream>()))>;

  // Blocks above this size are not rounded to a size class.
  static constexpr size_t kExactAbove = size_t{32} << 20;
  static constexpr size_t kLargestSlab = size_t{64} << 10;

  explicit HostBlockCache(
      Runtime runtime = Runtime(),
      HostCacheLimits limits = {})
      : runtime_(std::move(runtime)),
        limits_(limits),
        at_fork_(&after_fork_in_child, this) {}

  // Returns idle segments. Blocks still live stay valid, and are leaked.
  ~HostBlockCache() {
    std::unique_lock<std::mutex> lock(mutex_);
    reclaim_pending(lock);
    release(take_idle(HostCacheLimits::kNone), lock);
    for (auto& node : nodes_) {
      delete node.load(std::memory_order_relaxed);
    }
  }

  HostBlockCache(const HostBlockCache&) = delete;
  HostBlockCache& operator=(const HostBlockCache&) = delete;

  Runtime& runtime() noexcept {
    return runtime_;
  }

  // At least `bytes` of page-locked memory, aligned to 64 bytes (to a page from
  // 32 KiB on); null for 0. Throws HostOutOfMemory, and what the runtime
  // throws.
  void* allocate(size_t bytes) {
    if (bytes == 0) {
      return nullptr;
    }
    if (bytes > c10::size_class::kLargest / 2) {
      std::lock_guard<std::mutex> lock(mutex_);
      throw out_of_memory(bytes, "no such size exists");
    }
    const Request request = classify(bytes);
    Node& node = node_of_caller();
    std::unique_lock<std::mutex> lock(mutex_);
    Segment* segment = find_free(node, request);
    if (segment == nullptr && poll(node, request, lock)) {
      segment = find_free(node, request);
    }
    if (segment == nullptr && pending_ != 0) {
      reclaim_pending(lock);
      segment = find_free(node, request);
    }
    if (segment == nullptr) {
      segment = lock_segment(node, request, lock);
    }
    void* ptr = take_block(segment, bytes);
    keep_cached_limit(lock);
    return ptr;
  }

  // allocate() of each, with one lock for all that are in the cache. Returns
  // how many there are; the next was refused, which allocate() explains.
  size_t
  allocate_many(const size_t* bytes, size_t count, void** blocks) noexcept {
    size_t made = 0;
    try {
      Node& node = node_of_caller();
      while (made < count) {
        {
          std::unique_lock<std::mutex> lock(mutex_);
          for (; made < count && bytes[made] > 0 &&
                 bytes[made] <= c10::size_class::kLargest / 2;
               ++made) {
            Segment* segment = find_free(node, classify(bytes[made]));
            if (segment == nullptr) {
              break;
            }
            blocks[made] = take_block(segment, bytes[made]);
          }
          keep_cached_limit(lock);
        }
        if (made < count) {
          blocks[made] = allocate(bytes[made]);
          ++made;
        }
      }
    } catch (const std::exception&) {
    }
    return made;
  }

  // Gives back what allocate() returned; null is nothing. In a forked child a
  // block of the parent is nothing, too.
  void free(void* ptr) noexcept {
    if (ptr == nullptr) {
      return;
    }
    std::vector<Stream> streams;
    Block* block = nullptr;
    uint64_t epoch = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      block = live_block(ptr);
      if (block == nullptr) {
        return;
      }
      if (block->streams.empty()) {
        free_block(block);
        return;
      }
      block->state = State::Pending;
      streams.swap(block->streams);
      epoch = epoch_;
    }
    // Nobody else touches the block now: it is in no list.
    bool recorded = true;
    try {
      block->events.reserve(streams.size());
      for (const Stream& stream : streams) {
        block->events.push_back(runtime_.record_event(stream));
      }
    } catch (...) {
      // Nothing says when the accelerator has done with it. Never reused.
      recorded = false;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (epoch != epoch_) {
      return;
    }
    if (recorded) {
      Segment* segment = block->segment;
      segment->node->bins[segment->bin].pending.push_back(block);
      ++pending_;
    } else {
      ++stats_.num_lost_blocks;
    }
  }

  // The live block around ptr is not reused before what is on `stream` when it
  // is freed has finished. False for any other memory.
  bool record(const void* ptr, const Stream& stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    Block* block = live_block(ptr);
    if (block == nullptr) {
      return false;
    }
    if (std::find(block->streams.begin(), block->streams.end(), stream) ==
        block->streams.end()) {
      block->streams.push_back(stream);
    }
    return true;
  }

  // Whether ptr lies in memory that this cache has page-locked. No lock.
  bool owns(const void* ptr) const noexcept {
    return map_.find(ptr) != nullptr;
  }

  // Unlocks every idle segment, after asking all events, and forgets what the
  // program needed before.
  void empty_cache() {
    trim(0);
    std::lock_guard<std::mutex> lock(mutex_);
    busy_peak_ = allocated_bytes_ - idle_bytes_;
    allowance_ = kFirstAllowance;
  }

  // Unlocks idle segments, the longest unused first, until at most
  // `cached_bytes` are left.
  void trim(size_t cached_bytes) {
    std::unique_lock<std::mutex> lock(mutex_);
    reclaim_pending(lock);
    if (idle_bytes_ > cached_bytes) {
      release(take_idle(idle_bytes_ - cached_bytes), lock);
    }
  }

  HostCacheLimits limits() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return limits_;
  }

  // What is idle above a new limit is unlocked; what is used stays.
  void set_limits(HostCacheLimits limits) {
    std::unique_lock<std::mutex> lock(mutex_);
    limits_ = limits;
    reclaim_pending(lock);
    size_t excess =
        idle_bytes_ > limits.cached ? idle_bytes_ - limits.cached : 0;
    if (allocated_bytes_ > limits.locked) {
      excess = std::max(excess, allocated_bytes_ - limits.locked);
    }
    release(take_idle(excess), lock);
  }

  // Asks all events first, so that what is reusable does not count as active.
  HostCacheStats stats() {
    std::unique_lock<std::mutex> lock(mutex_);
    reclaim_pending(lock);
    return stats_;
  }

  void reset_peak_stats() {
    std::lock_guard<std::mutex> lock(mutex_);
    for_each_stat([](HostStat& stat) { stat.reset_peak(); });
    for (HostTiming* timing :
         {&stats_.host_alloc_time, &stats_.host_free_time}) {
      timing->max = timing->min = 0;
    }
  }

  void reset_accumulated_stats() {
    std::lock_guard<std::mutex> lock(mutex_);
    for_each_stat([](HostStat& stat) { stat.reset_accumulated(); });
    for (HostTiming* timing :
         {&stats_.host_alloc_time, &stats_.host_free_time}) {
      timing->total = timing->count = 0;
    }
    stats_.num_host_alloc = stats_.num_host_free = 0;
    stats_.num_alloc_retries = stats_.num_ooms = stats_.num_lost_blocks = 0;
  }

 private:
  static constexpr size_t kPage = c10::size_class::kPage;
  static constexpr size_t kFirstAllowance = size_t{512} << 10;
  static constexpr size_t kUnlocksPerAllowance = 256;
  static constexpr int kNodes = 16;

  enum class State : uint8_t { Free, Live, Pending };

  struct Node;
  struct Segment;

  struct Block {
    Segment* segment = nullptr;
    // In the list of free blocks of a segment, or in a list of pending ones.
    Block* previous = nullptr;
    Block* next = nullptr;
    size_t requested = 0;
    State state = State::Free;
    std::vector<Stream> streams;
    std::vector<Event> events;
  };

  struct Segment {
    char* base = nullptr;
    size_t bytes = 0;
    size_t block_bytes = 0;
    size_t blocks_in_all = 0;
    size_t blocks_used = 0; // live or pending
    unsigned bin = 0;
    Node* node = nullptr;
    std::unique_ptr<Block[]> blocks;
    Block* free_blocks = nullptr;
    Segment* bin_previous = nullptr; // while it has a free block
    Segment* bin_next = nullptr;
    Segment* idle_previous = nullptr; // while all its blocks are free
    Segment* idle_next = nullptr;
  };

  using BlockList = detail::LinkedList<Block, &Block::previous, &Block::next>;
  using BinList =
      detail::LinkedList<Segment, &Segment::bin_previous, &Segment::bin_next>;
  using IdleList =
      detail::LinkedList<Segment, &Segment::idle_previous, &Segment::idle_next>;

  struct Bin {
    BinList segments; // with a free block: partly used ones first
    BlockList pending;
    size_t used_bytes = 0;
  };

  struct Node {
    Bin bins[c10::size_class::kCount];
  };

  struct Request {
    unsigned bin;
    unsigned last_bin; // of those where a fitting block can be
    size_t block_bytes;
    bool exact;
  };

  static Request classify(size_t bytes) noexcept {
    const unsigned bin = c10::size_class::index(bytes);
    const bool exact = bytes > kExactAbove;
    return {
        bin,
        exact ? c10::size_class::index(bytes + bytes / 8) : bin,
        exact ? c10::size_class::round_up_to_page(bytes)
              : c10::size_class::size(bin),
        exact};
  }

  Node& node_of_caller() {
    const int node = detail::NumaNode<Runtime>::of(runtime_);
    const int index = node >= 0 && node < kNodes ? node : 0;
    std::atomic<Node*>& slot = nodes_[index];
    Node* known = slot.load(std::memory_order_acquire);
    if (known == nullptr) {
      auto fresh = std::make_unique<Node>();
      if (slot.compare_exchange_strong(
              known, fresh.get(), std::memory_order_acq_rel)) {
        known = fresh.release();
      }
    }
    return *known;
  }

  // Functions from here on are called with mutex_ held. Those that take the
  // lock as an argument give it up in between and have it again on return.

  void keep_cached_limit(std::unique_lock<std::mutex>& lock) {
    if (idle_bytes_ > limits_.cached) {
      release(take_idle(idle_bytes_ - limits_.cached), lock);
    }
  }

  Segment* find_free(Node& node, const Request& request) noexcept {
    if (!request.exact) {
      return node.bins[request.bin].segments.head;
    }
    // The smallest that is large enough and at most 1/8 too large.
    Segment* best = nullptr;
    for (unsigned bin = request.bin; bin <= request.last_bin; ++bin) {
      for (Segment* segment = node.bins[bin].segments.head; segment != nullptr;
           segment = segment->bin_next) {
        if (segment->block_bytes >= request.block_bytes &&
            segment->block_bytes - request.block_bytes <=
                request.block_bytes / 8 &&
            (best == nullptr || segment->block_bytes < best->block_bytes)) {
          best = segment;
        }
      }
    }
    return best;
  }

  void* take_block(Segment* segment, size_t requested) noexcept {
    Bin& bin = segment->node->bins[segment->bin];
    Block* block = segment->free_blocks;
    segment->free_blocks = block->next;
    if (segment->free_blocks == nullptr) {
      bin.segments.erase(segment);
    }
    if (segment->blocks_used++ == 0) {
      idle_.erase(segment);
      idle_bytes_ -= segment->bytes;
      busy_peak_ = std::max(busy_peak_, allocated_bytes_ - idle_bytes_);
    }
    bin.used_bytes += segment->block_bytes;
    block->state = State::Live;
    block->requested = requested;
    stats_.active_requests.increase(1);
    stats_.active_bytes.increase(segment->block_bytes);
    stats_.requested_bytes.increase(requested);
    return segment->base + static_cast<size_t>(block - segment->blocks.get()) *
                               segment->block_bytes;
  }

  void free_block(Block* block) noexcept {
    Segment* segment = block->segment;
    Bin& bin = segment->node->bins[segment->bin];
    block->state = State::Free;
    stats_.active_requests.decrease(1);
    stats_.active_bytes.decrease(segment->block_bytes);
    stats_.requested_bytes.decrease(block->requested);
    bin.used_bytes -= segment->block_bytes;
    const bool was_full = segment->free_blocks == nullptr;
    block->next = segment->free_blocks;
    segment->free_blocks = block;
    if (was_full) {
      bin.segments.push_front(segment);
    }
    if (--segment->blocks_used == 0) {
      // A slab that is wholly free is used after those that are not, so that it
      // can be returned. A block of its own is used again while it is warm.
      if (segment->blocks_in_all > 1) {
        bin.segments.erase(segment);
        bin.segments.push_back(segment);
      }
      idle_.push_back(segment);
      idle_bytes_ += segment->bytes;
    }
  }

  Block* live_block(const void* ptr) noexcept {
    Segment* segment = map_.find(ptr);
    if (segment == nullptr) {
      return nullptr;
    }
    const auto offset =
        static_cast<size_t>(static_cast<const char*>(ptr) - segment->base);
    Block* block =
        &segment->blocks
             [segment->blocks_in_all == 1 ? 0 : offset / segment->block_bytes];
    return block->state == State::Live ? block : nullptr;
  }

  // Whether every event of a pending block that is in no list has fired. Called
  // without the mutex.
  bool fired(Block* block) noexcept {
    try {
      while (!block->events.empty()) {
        if (!runtime_.query_event(block->events.back())) {
          return false;
        }
        block->events.pop_back();
      }
      return true;
    } catch (...) {
      return false;
    }
  }

  // Asks the pending blocks of a bin, one after the other, until one is ready
  // (or all of them) and makes the ready ones free. Returns whether any was.
  bool poll_bin(Bin& bin, bool all, std::unique_lock<std::mutex>& lock) {
    BlockList waiting;
    bool any = false;
    const uint64_t epoch = epoch_;
    // Blocks that come in meanwhile go to the tail: each is asked once.
    Block* const last = bin.pending.tail;
    for (bool more = last != nullptr; more && bin.pending.head != nullptr;) {
      Block* block = bin.pending.head;
      more = block != last;
      bin.pending.erase(block);
      --pending_;
      lock.unlock();
      const bool ready = fired(block);
      lock.lock();
      if (epoch != epoch_) {
        return false;
      }
      if (ready) {
        free_block(block);
        any = true;
        if (!all) {
          break;
        }
      } else {
        waiting.push_back(block);
        ++pending_;
      }
    }
    if (waiting.head != nullptr) {
      // Back in front, oldest first.
      waiting.tail->next = bin.pending.head;
      (bin.pending.head ? bin.pending.head->previous : bin.pending.tail) =
          waiting.tail;
      bin.pending.head = waiting.head;
    }
    return any;
  }

  bool
  poll(Node& node, const Request& request, std::unique_lock<std::mutex>& lock) {
    bool any = false;
    for (unsigned bin = request.bin; bin <= request.last_bin; ++bin) {
      any |= poll_bin(node.bins[bin], request.exact, lock);
    }
    return any;
  }

  void reclaim_pending(std::unique_lock<std::mutex>& lock) {
    if (pending_ == 0) {
      return;
    }
    for (auto& slot : nodes_) {
      Node* node = slot.load(std::memory_order_acquire);
      if (node == nullptr) {
        continue;
      }
      for (Bin& bin : node->bins) {
        if (bin.pending.head != nullptr) {
          poll_bin(bin, true, lock);
        }
      }
    }
  }

  // Takes idle segments out of everything, the longest unused first, until
  // they make up `bytes` or there are no more. Their bytes still count as
  // allocated.
  IdleList take_idle(size_t bytes) noexcept {
    IdleList taken;
    size_t sum = 0;
    while (sum < bytes && idle_.head != nullptr) {
      Segment* segment = idle_.head;
      idle_.erase(segment);
      idle_bytes_ -= segment->bytes;
      segment->node->bins[segment->bin].segments.erase(segment);
      // Before the memory is given back: its address may be used at once.
      map_.erase(segment->base, segment->bytes);
      taken.push_back(segment);
      sum += segment->bytes;
    }
    return taken;
  }

  // Gives segments back to the runtime.
  void release(IdleList taken, std::unique_lock<std::mutex>& lock) noexcept {
    while (Segment* segment = taken.head) {
      taken.erase(segment);
      const uint64_t epoch = epoch_;
      lock.unlock();
      const auto start = std::chrono::steady_clock::now();
      try {
        runtime_.free_host_memory(segment->base, segment->bytes);
      } catch (...) {
        // Whatever is wrong with the driver, the memory is not ours any more.
      }
      const int64_t elapsed = microseconds_since(start);
      lock.lock();
      if (epoch == epoch_) {
        allocated_bytes_ -= segment->bytes;
        stats_.allocations.decrease(1);
        stats_.allocated_bytes.decrease(segment->bytes);
        stats_.host_free_time.add(elapsed);
        ++stats_.num_host_free;
      }
      delete segment;
    }
  }

  // A new segment, with all blocks free, from the runtime.
  Segment* lock_segment(
      Node& node,
      const Request& request,
      std::unique_lock<std::mutex>& lock) {
    const uint64_t epoch = epoch_;
    size_t count = 1;
    const size_t size = request.block_bytes;
    if (size % kPage != 0 || size < kLargestSlab / 2) {
      // Whole pages, and as much again as is used of this size already.
      const size_t least = kPage / std::gcd(size, kPage);
      const size_t wanted =
          std::min(node.bins[request.bin].used_bytes, kLargestSlab);
      count = least * std::max<size_t>(1, wanted / (least * size));
      if (limits_.locked - std::min(limits_.locked, allocated_bytes_) <
          size * count) {
        count = least;
      }
    }
    auto segment = std::make_unique<Segment>();
    segment->bytes = size * count;
    segment->block_bytes = size;
    segment->blocks_in_all = count;
    segment->bin = request.bin;
    segment->node = &node;
    segment->blocks = std::make_unique<Block[]>(count);
    for (size_t i = count; i-- > 0;) {
      segment->blocks[i].segment = segment.get();
      segment->blocks[i].next = segment->free_blocks;
      segment->free_blocks = &segment->blocks[i];
    }

    const size_t busy = allocated_bytes_ - idle_bytes_;
    const size_t bound =
        std::max(busy_peak_, busy + segment->bytes) + allowance_;
    if (allocated_bytes_ + segment->bytes > bound) {
      const size_t before = idle_bytes_;
      IdleList taken = take_idle(allocated_bytes_ + segment->bytes - bound);
      allowance_ += (before - idle_bytes_) / kUnlocksPerAllowance;
      release(taken, lock);
    }
    segment->base =
        static_cast<char*>(allocate_within_limit(segment->bytes, lock));
    if (segment->base == nullptr) {
      ++stats_.num_alloc_retries;
      reclaim_pending(lock);
      release(take_idle(HostCacheLimits::kNone), lock);
      segment->base =
          static_cast<char*>(allocate_within_limit(segment->bytes, lock));
    }
    if (segment->base == nullptr) {
      ++stats_.num_ooms;
      throw out_of_memory(segment->bytes, "the driver refused");
    }
    if (epoch != epoch_) {
      throw std::runtime_error(
          "the process was forked while it page-locked host memory");
    }
    try {
      map_.insert(segment->base, segment->bytes, segment.get());
    } catch (...) {
      give_back(segment->base, segment->bytes, lock);
      throw;
    }
    stats_.allocations.increase(1);
    stats_.allocated_bytes.increase(segment->bytes);
    ++stats_.num_host_alloc;
    node.bins[request.bin].segments.push_front(segment.get());
    idle_.push_back(segment.get());
    idle_bytes_ += segment->bytes;
    return segment.release();
  }

  // Memory from the runtime, counted in allocated_bytes_; null when refused.
  // Throws when the limit allows it at no price.
  void* allocate_within_limit(
      size_t bytes,
      std::unique_lock<std::mutex>& lock) {
    while (bytes > limits_.locked ||
           allocated_bytes_ > limits_.locked - bytes) {
      const size_t excess = bytes > limits_.locked
                                ? HostCacheLimits::kNone
                                : allocated_bytes_ - (limits_.locked - bytes);
      IdleList taken = take_idle(excess);
      if (taken.head == nullptr) {
        ++stats_.num_ooms;
        throw out_of_memory(bytes, "the cap would be exceeded");
      }
      release(taken, lock);
    }
    // Counted before it exists, so that threads together keep to the limit.
    allocated_bytes_ += bytes;
    void* ptr = nullptr;
    std::vector<void*> unusable;
    const uint64_t epoch = epoch_;
    int64_t elapsed = 0;
    lock.unlock();
    try {
      const auto start = std::chrono::steady_clock::now();
      ptr = ask_runtime(bytes);
      // See Note [Host block cache] on fork.
      while (ptr != nullptr && map_.was_abandoned(ptr, bytes) &&
             unusable.size() < 64) {
        unusable.push_back(ptr);
        ptr = ask_runtime(bytes);
      }
      elapsed = microseconds_since(start);
    } catch (...) {
      lock.lock();
      if (epoch == epoch_) {
        allocated_bytes_ -= bytes;
      }
      throw;
    }
    lock.lock();
    if (epoch != epoch_) {
      return ptr;
    }
    if (ptr == nullptr) {
      allocated_bytes_ -= bytes;
      return nullptr;
    }
    stats_.host_alloc_time.add(elapsed);
    if (!map_.fits(ptr, bytes) || map_.was_abandoned(ptr, bytes)) {
      give_back(ptr, bytes, lock);
      throw std::runtime_error(
          "allocate_host_memory() of this backend returned memory that is not "
          "on a page boundary, beyond 48 bits of address, or that its parent "
          "process used");
    }
    return ptr;
  }

  void* ask_runtime(size_t bytes) {
    try {
      return runtime_.allocate_host_memory(bytes);
    } catch (const std::bad_alloc&) {
      return nullptr;
    }
  }

  void give_back(
      void* ptr,
      size_t bytes,
      std::unique_lock<std::mutex>& lock) noexcept {
    allocated_bytes_ -= bytes;
    lock.unlock();
    try {
      runtime_.free_host_memory(ptr, bytes);
    } catch (...) {
    }
    lock.lock();
  }

  HostOutOfMemory out_of_memory(size_t bytes, const char* who) const {
    return HostOutOfMemory(bytes, allocated_bytes_, limits_.locked, who);
  }

  static int64_t microseconds_since(
      std::chrono::steady_clock::time_point start) noexcept {
    return std::chrono::duration_cast<std::chrono::microseconds>(
               std::chrono::steady_clock::now() - start)
        .count();
  }

  template <class Function>
  void for_each_stat(Function function) {
    for (HostStat* stat :
         {&stats_.allocations,
          &stats_.allocated_bytes,
          &stats_.active_requests,
          &stats_.active_bytes,
          &stats_.requested_bytes}) {
      function(*stat);
    }
  }

  static void after_fork_in_child(void* self) noexcept {
    auto& cache = *static_cast<HostBlockCache*>(self);
    // Not unlocked, not destroyed: whoever held it does not exist here.
    new (&cache.mutex_) std::mutex;
    cache.map_.abandon();
    for (auto& slot : cache.nodes_) {
      slot.store(nullptr, std::memory_order_relaxed);
    }
    cache.idle_ = {};
    cache.idle_bytes_ = cache.allocated_bytes_ = cache.busy_peak_ = 0;
    cache.allowance_ = kFirstAllowance;
    cache.pending_ = 0;
    cache.stats_ = {};
    ++cache.epoch_;
  }

  Runtime runtime_;
  mutable std::mutex mutex_;
  c10::PageMap<Segment> map_;
  std::atomic<Node*> nodes_[kNodes] = {};
  IdleList idle_;
  size_t idle_bytes_ = 0;
  size_t allocated_bytes_ = 0; // includes what is being locked or unlocked
  size_t busy_peak_ = 0;
  size_t allowance_ = kFirstAllowance;
  size_t pending_ = 0; // blocks in lists of pending ones
  uint64_t epoch_ = 0; // how many forks lie between here and the first process
  HostCacheLimits limits_;
  HostCacheStats stats_;
  c10::AtForkInChild at_fork_; // last: see there
};

} // namespace host_cache_v1
} // namespace at::pin
