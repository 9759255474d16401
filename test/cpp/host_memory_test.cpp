// Tests of the host block cache, of the registry of page-locked ranges and of
// what they are made of, without PyTorch.
// Each case is a name on the command line; test/test_host_memory_cpp.py builds
// this file (plain, and with ThreadSanitizer) and runs the cases. Exit status 0
// is a pass.

#include <ATen/HostMemoryRegistry.h>
#include <ATen/core/HostBlockCache.h>

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <thread>

namespace {

namespace size_class = c10::size_class;

constexpr size_t kKiB = 1024;
constexpr size_t kMiB = 1024 * kKiB;

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::fflush(stderr);                                                 \
      _exit(1);                                                            \
    }                                                                      \
  } while (0)

// An accelerator whose events fire when the test says so. Memory is real, so
// that a block handed out twice is seen as overwritten bytes.
class FakeDevice {
 public:
  using Stream = int;

  struct Event {
    std::shared_ptr<std::atomic<bool>> fired;
  };

  struct State {
    std::mutex mutex;
    std::map<char*, size_t> locked; // what the cache has from us now
    size_t locked_bytes = 0;
    size_t peak_bytes = 0;
    size_t refuse_above = SIZE_MAX; // locked bytes at which we say no
    int64_t allocs = 0;
    int64_t frees = 0;
    int64_t queries = 0;
    int node = 0;
    bool careless = false; // every event is said to have fired
    pid_t process = getpid();
    std::vector<std::pair<int, std::shared_ptr<std::atomic<bool>>>> events;
    // Run inside the functions of the runtime, without our mutex.
    std::function<void()> on_allocate;
    std::function<void()> on_free;
    std::function<void()> on_record;
    std::function<void*(size_t)> map_memory;
  };

  std::shared_ptr<State> state = std::make_shared<State>();

  void* allocate_host_memory(size_t bytes) {
    CHECK(bytes % 4096 == 0);
    if (state->on_allocate) {
      state->on_allocate();
    }
    {
      std::lock_guard<std::mutex> lock(state->mutex);
      if (state->locked_bytes + bytes > state->refuse_above) {
        return nullptr;
      }
      state->locked_bytes += bytes;
      state->peak_bytes = std::max(state->peak_bytes, state->locked_bytes);
      ++state->allocs;
    }
    void* ptr = state->map_memory ? state->map_memory(bytes)
                                  : mmap(
                                        nullptr,
                                        bytes,
                                        PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS,
                                        -1,
                                        0);
    CHECK(ptr != MAP_FAILED);
    std::lock_guard<std::mutex> lock(state->mutex);
    CHECK(state->locked.emplace(static_cast<char*>(ptr), bytes).second);
    return ptr;
  }

  void free_host_memory(void* ptr, size_t bytes) {
    if (state->on_free) {
      state->on_free();
    }
    {
      std::lock_guard<std::mutex> lock(state->mutex);
      CHECK(state->process == getpid());
      auto found = state->locked.find(static_cast<char*>(ptr));
      CHECK(found != state->locked.end() && found->second == bytes);
      state->locked.erase(found);
      state->locked_bytes -= bytes;
      ++state->frees;
    }
    CHECK(munmap(ptr, bytes) == 0);
  }

  Event record_event(int stream) {
    if (state->on_record) {
      state->on_record();
    }
    Event event{std::make_shared<std::atomic<bool>>(false)};
    std::lock_guard<std::mutex> lock(state->mutex);
    state->events.emplace_back(stream, event.fired);
    return event;
  }

  bool query_event(Event& event) {
    {
      std::lock_guard<std::mutex> lock(state->mutex);
      ++state->queries;
    }
    return state->careless || event.fired->load(std::memory_order_acquire);
  }

  int numa_node() {
    return state->node;
  }
};

using Cache = at::pin::HostBlockCache<FakeDevice, int>;

struct Fixture {
  FakeDevice device;
  FakeDevice::State& state = *device.state;
  Cache cache;

  explicit Fixture(at::pin::HostCacheLimits limits = {})
      : cache(device, limits) {}

  void fire(int stream) {
    std::lock_guard<std::mutex> lock(state.mutex);
    for (auto& [of, fired] : state.events) {
      if (of == stream) {
        fired->store(true, std::memory_order_release);
      }
    }
  }
};

// ---- sizes and addresses

void size_classes() {
  size_t previous = 0;
  for (unsigned i = 0; i < size_class::kCount; ++i) {
    const size_t size = size_class::size(i);
    CHECK(size > previous);
    CHECK(size % 64 == 0);
    CHECK(size <= 32 * kKiB || size % 4096 == 0);
    // The last request that fits, the first one that does, and one more.
    CHECK(size_class::index(size) == i);
    CHECK(size_class::index(previous + 1) == i);
    const size_t worst = size - (previous + 1);
    CHECK(size <= 512 ? worst < 64 : worst * 8 <= previous + 1);
    previous = size;
  }
  CHECK(previous == size_class::kLargest);
}

void page_map() {
  c10::PageMap<int> map;
  int a = 0;
  int b = 0;
  const auto at = [](size_t address) {
    return reinterpret_cast<void*>(address);
  };
  CHECK(map.find(nullptr) == nullptr);
  CHECK(map.find(at(SIZE_MAX)) == nullptr);
  // Over the border of a leaf (16 MiB) and of a middle table (64 GiB).
  const size_t border = size_t{64} << 30;
  map.insert(at(border - 8192), 16384, &a);
  map.insert(at(border + 8192), 4096, &b);
  CHECK(map.find(at(border - 8193)) == nullptr);
  CHECK(map.find(at(border - 8192)) == &a);
  CHECK(map.find(at(border)) == &a);
  CHECK(map.find(at(border + 8191)) == &a);
  CHECK(map.find(at(border + 8192)) == &b);
  CHECK(map.find(at(border + 12288)) == nullptr);
  map.erase(at(border - 8192), 16384);
  CHECK(map.find(at(border)) == nullptr);
  CHECK(map.find(at(border + 8192)) == &b);
  map.abandon();
  CHECK(map.find(at(border + 8192)) == nullptr);
  CHECK(map.was_abandoned(at(border), 8193));
  CHECK(!map.was_abandoned(at(border), 8192));
  map.insert(at(border), 4096, &a);
  map.abandon();
  CHECK(map.was_abandoned(at(border), 1));
  CHECK(map.was_abandoned(at(border + 8192), 1));
  CHECK(!c10::PageMap<int>::fits(at(4096 + 64), 4096));
  CHECK(!c10::PageMap<int>::fits(nullptr, 4096));
  CHECK(!c10::PageMap<int>::fits(at(size_t{1} << 48), 4096));
  CHECK(c10::PageMap<int>::fits(at((size_t{1} << 48) - 4096), 4096));
}

// ---- what a request gets

void never_smaller_than_asked() {
  Fixture f;
  std::mt19937_64 random(7);
  struct Live {
    unsigned char* ptr;
    size_t bytes;
    unsigned char key;
  };
  std::vector<Live> live;
  size_t live_bytes = 0;
  for (int i = 0; i < 3000; ++i) {
    while (live.size() > 24 || live_bytes > 300 * kMiB) {
      const size_t victim = random() % live.size();
      const Live block = live[victim];
      // Whoever got a piece of it has written there.
      for (size_t at : {size_t{0}, block.bytes / 2, block.bytes - 1}) {
        CHECK(block.ptr[at] == block.key);
      }
      if (block.bytes < 64 * kKiB) {
        for (size_t at = 0; at < block.bytes; ++at) {
          CHECK(block.ptr[at] == block.key);
        }
      }
      f.cache.free(block.ptr);
      live_bytes -= block.bytes;
      live[victim] = live.back();
      live.pop_back();
    }
    // Bytes, kilobytes, megabytes, and around the exact threshold.
    const size_t ranges[] = {600, 40 * kKiB, 4 * kMiB, 48 * kMiB};
    const size_t bytes = 1 + random() % ranges[random() % 4];
    auto* ptr = static_cast<unsigned char*>(f.cache.allocate(bytes));
    CHECK(reinterpret_cast<uintptr_t>(ptr) % 64 == 0);
    CHECK(bytes < 32 * kKiB || reinterpret_cast<uintptr_t>(ptr) % 4096 == 0);
    CHECK(f.cache.owns(ptr) && f.cache.owns(ptr + bytes - 1));
    const auto key = static_cast<unsigned char>(i);
    if (bytes < 64 * kKiB) {
      std::memset(ptr, key, bytes);
    }
    ptr[0] = ptr[bytes / 2] = ptr[bytes - 1] = key;
    live.push_back({ptr, bytes, key});
    live_bytes += bytes;
  }
  const auto stats = f.cache.stats();
  CHECK(stats.active_requests.current == static_cast<int64_t>(live.size()));
  CHECK(stats.requested_bytes.current == static_cast<int64_t>(live_bytes));
}

void waste_of_one_block() {
  std::mt19937_64 random(8);
  for (int i = 0; i < 2000; ++i) {
    Fixture f;
    const size_t bytes = 32 * kKiB + random() % (80 * kMiB);
    f.cache.allocate(bytes);
    const size_t over = f.state.locked_bytes - bytes;
    CHECK(over * 8 <= bytes);
    CHECK(bytes <= Cache::kExactAbove || over < 4096);
    // The block is leaked with its fixture: nothing wrote to it.
  }
}

void large_blocks_are_exact_and_reused_when_they_fit() {
  Fixture f;
  void* first = f.cache.allocate(40 * kMiB + 1);
  CHECK(f.state.locked_bytes == 40 * kMiB + 4096);
  void* other = f.cache.allocate(50 * kMiB);
  f.cache.free(first);
  // One page more, in the same bin: the free block must not be taken.
  void* larger = f.cache.allocate(40 * kMiB + 4097);
  CHECK(larger != first);
  f.cache.free(other);
  f.cache.free(larger);
  // At most 1/8 smaller takes it, and nothing that is smaller still.
  CHECK(f.cache.allocate(36 * kMiB) == larger);
  f.cache.free(larger);
  const auto locks = f.state.allocs;
  void* small = f.cache.allocate(35 * kMiB);
  CHECK(f.state.allocs == locks + 1);
  f.cache.free(small);
}

void zero_and_impossible() {
  Fixture f;
  CHECK(f.cache.allocate(0) == nullptr);
  f.cache.free(nullptr);
  for (size_t bytes : {SIZE_MAX, SIZE_MAX - 4095, size_t{1} << 47}) {
    bool thrown = false;
    try {
      f.cache.allocate(bytes);
    } catch (const at::pin::HostOutOfMemory& error) {
      thrown = error.asked == bytes;
    }
    CHECK(thrown);
  }
  CHECK(f.state.allocs == 0);
}

void small_blocks_share_pages() {
  Fixture f;
  std::vector<void*> blocks;
  for (int i = 0; i < 64; ++i) {
    blocks.push_back(f.cache.allocate(64));
  }
  CHECK(f.state.locked_bytes == 4096);
  CHECK(std::set<void*>(blocks.begin(), blocks.end()).size() == 64);
  for (int i = 0; i < 10000; ++i) {
    blocks.push_back(f.cache.allocate(1000));
  }
  // One slab may be partly used, the rest is at most 1/8 over.
  CHECK(f.state.locked_bytes <= (64 * 64 + 10000 * 1000) * 9 / 8 + 64 * kKiB);
  CHECK(f.state.allocs < 200);
  for (void* block : blocks) {
    f.cache.free(block);
  }
  f.cache.empty_cache();
  CHECK(f.state.locked_bytes == 0);
  CHECK(f.state.allocs == f.state.frees);
}

// Partly used slabs are filled before others are touched, so that those become
// free as a whole.
void slabs_drain() {
  Fixture f;
  std::deque<void*> live;
  for (int i = 0; i < 2048; ++i) {
    live.push_back(f.cache.allocate(1024));
  }
  // Down to 256 blocks, in the order they came, with traffic.
  for (int i = 0; i < 4000; ++i) {
    f.cache.free(live.front());
    live.pop_front();
    if (live.size() < 256 || i % 3 == 0) {
      live.push_back(f.cache.allocate(1024));
    }
  }
  f.cache.trim(0);
  CHECK(f.state.locked_bytes <= live.size() * 1024 * 9 / 8 + 64 * kKiB);
  for (void* block : live) {
    f.cache.free(block);
  }
}

// 400 random sizes up to 4 MiB, 16 of them live at a time.
void waste_of_random_sizes() {
  for (unsigned seed = 1; seed <= 20; ++seed) {
    Fixture f;
    std::mt19937_64 random(seed);
    std::deque<std::pair<void*, size_t>> live;
    size_t live_bytes = 0;
    size_t peak_live = 0;
    for (int i = 0; i < 400; ++i) {
      if (live.size() == 16) {
        f.cache.free(live.front().first);
        live_bytes -= live.front().second;
        live.pop_front();
      }
      const size_t bytes = 1 + random() % (4 * kMiB);
      live.emplace_back(f.cache.allocate(bytes), bytes);
      live_bytes += bytes;
      peak_live = std::max(peak_live, live_bytes);
    }
    const double peak = static_cast<double>(f.state.peak_bytes) /
                        static_cast<double>(peak_live);
    f.cache.empty_cache();
    const double now = static_cast<double>(f.state.locked_bytes) /
                       static_cast<double>(live_bytes);
    std::printf("seed %u: peak %.3f, in use %.3f\n", seed, peak, now);
    CHECK(peak <= 1.13);
    CHECK(now <= 1.13);
    for (auto& block : live) {
      f.cache.free(block.first);
    }
    f.cache.empty_cache();
    CHECK(f.state.locked_bytes == 0);
  }
}

// A program that needs sizes alternately ends up with all of them cached.
void alternating_sizes_settle() {
  Fixture f;
  int64_t after_half = 0;
  for (int i = 0; i < 4000; ++i) {
    if (i == 2000) {
      after_half = f.state.allocs;
    }
    void* block = f.cache.allocate((3 + 2 * (i % 4)) * kMiB);
    f.cache.free(block);
  }
  CHECK(after_half < 2000);
  CHECK(f.state.allocs == after_half);
  CHECK(f.state.locked_bytes <= (3 + 5 + 7 + 9) * kMiB * 9 / 8);
}

// ---- events

void reuse_waits_for_every_event() {
  Fixture f;
  void* block = f.cache.allocate(kMiB);
  CHECK(f.cache.record(block, 1));
  CHECK(f.cache.record(block, 2));
  CHECK(f.cache.record(block, 2));
  f.cache.free(block);
  CHECK(f.state.events.size() == 2);
  void* other = f.cache.allocate(kMiB);
  CHECK(other != block);
  f.fire(1);
  void* third = f.cache.allocate(kMiB);
  CHECK(third != block);
  CHECK(f.cache.stats().active_requests.current == 3);
  f.fire(2);
  CHECK(f.cache.stats().active_requests.current == 2);
  CHECK(f.cache.allocate(kMiB) == block);
  // Its streams were forgotten with the use that named them.
  f.cache.free(block);
  CHECK(f.state.events.size() == 2);
  CHECK(f.cache.allocate(kMiB) == block);
}

void slow_event_blocks_no_other() {
  for (int slow = 0; slow < 8; ++slow) {
    Fixture f;
    std::vector<void*> blocks;
    for (int i = 0; i < 8; ++i) {
      blocks.push_back(f.cache.allocate(kMiB + i % 2 * kMiB));
      f.cache.record(blocks.back(), i);
    }
    for (void* block : blocks) {
      f.cache.free(block);
    }
    for (int i = 0; i < 8; ++i) {
      if (i != slow) {
        f.fire(i);
      }
    }
    // All the others come back, without page-locking anything.
    const auto locks = f.state.allocs;
    std::set<void*> again;
    for (int i = 0; i < 8; ++i) {
      if (i != slow) {
        again.insert(f.cache.allocate(kMiB + i % 2 * kMiB));
      }
    }
    CHECK(f.state.allocs == locks);
    CHECK(again.size() == 7 && again.count(blocks[slow]) == 0);
  }
}

void a_hit_asks_no_event() {
  Fixture f;
  for (int i = 0; i < 100; ++i) {
    void* block = f.cache.allocate(kMiB);
    f.cache.record(block, i);
    f.cache.free(block);
  }
  void* block = f.cache.allocate(2 * kMiB);
  f.cache.free(block);
  const auto queries = f.state.queries;
  for (int i = 0; i < 100; ++i) {
    f.cache.free(f.cache.allocate(2 * kMiB));
  }
  CHECK(f.state.queries == queries);
}

void record_by_any_address() {
  Fixture f;
  for (size_t bytes : {size_t{64}, size_t{5000}, kMiB, 40 * kMiB}) {
    for (size_t at : {size_t{0}, size_t{1}, bytes / 2, bytes - 1}) {
      auto* block = static_cast<char*>(f.cache.allocate(bytes));
      auto* neighbour = static_cast<char*>(f.cache.allocate(bytes));
      const size_t events = f.state.events.size();
      CHECK(f.cache.record(block + at, 5));
      f.cache.free(neighbour);
      CHECK(f.state.events.size() == events);
      f.cache.free(block);
      CHECK(f.state.events.size() == events + 1);
      // Given back: no use can be recorded any more.
      CHECK(!f.cache.record(block + at, 6));
    }
  }
  int local = 0;
  CHECK(!f.cache.record(&local, 1));
  CHECK(!f.cache.record(nullptr, 1));
  CHECK(!f.cache.owns(&local));
}

void event_that_cannot_be_made() {
  Fixture f;
  void* block = f.cache.allocate(kMiB);
  f.cache.record(block, 1);
  f.state.on_record = [] { throw std::runtime_error("driver shut down"); };
  f.cache.free(block);
  f.state.on_record = nullptr;
  f.fire(1);
  CHECK(f.cache.stats().num_lost_blocks == 1);
  CHECK(f.cache.allocate(kMiB) != block);
  f.cache.empty_cache();
  CHECK(f.cache.owns(block));
}

// ---- limits and refusals

void cap_on_locked_bytes() {
  Fixture f({10 * kMiB});
  std::vector<void*> blocks;
  for (int i = 0; i < 10; ++i) {
    blocks.push_back(f.cache.allocate(kMiB));
  }
  bool thrown = false;
  try {
    f.cache.allocate(kMiB);
  } catch (const at::pin::HostOutOfMemory& error) {
    thrown = true;
    CHECK(error.asked == kMiB && error.held == 10 * kMiB);
    CHECK(error.cap == 10 * kMiB);
    const std::string text = error.what();
    for (const char* part :
         {"1048576 bytes", "10485760 bytes (10.0 MiB)", "ulimit -l"}) {
      CHECK(text.find(part) != std::string::npos);
    }
  }
  CHECK(thrown);
  // Idle memory of another size makes room, as little as is needed.
  for (int i = 0; i < 4; ++i) {
    f.cache.free(blocks[i]);
  }
  void* larger = f.cache.allocate(2 * kMiB);
  CHECK(f.state.frees == 2 && f.state.locked_bytes == 10 * kMiB);
  f.cache.free(larger);
  // A lower cap holds for what is idle at once, for the rest when it is freed.
  f.cache.set_limits({4 * kMiB});
  CHECK(f.state.locked_bytes == 6 * kMiB);
  for (int i = 4; i < 10; ++i) {
    f.cache.free(blocks[i]);
  }
  void* one = f.cache.allocate(3 * kMiB);
  CHECK(f.state.locked_bytes <= 4 * kMiB);
  f.cache.free(one);
  CHECK(f.state.peak_bytes == 10 * kMiB);
  CHECK(f.cache.stats().num_ooms == 1);
}

// As many as there are, in the order asked for; the first refusal ends it.
void many_at_once() {
  Fixture f({4 * kMiB});
  const std::vector<size_t> sizes{16, 100, 3 * kMiB, 64, 2 * kMiB, 16};
  std::vector<void*> blocks(sizes.size());
  const auto ask = [&](size_t count) {
    return f.cache.allocate_many(sizes.data(), count, blocks.data());
  };
  for (int round = 0; round < 3; ++round) {
    CHECK(ask(0) == 0);
    CHECK(ask(sizes.size()) == 4);
    CHECK(f.cache.stats().num_ooms == round + 1);
    for (size_t i = 0; i < 4; ++i) {
      CHECK(f.cache.owns(blocks[i]));
      std::memset(blocks[i], static_cast<int>(i), sizes[i]);
    }
    CHECK(std::set<void*>(blocks.begin(), blocks.begin() + 4).size() == 4);
    for (size_t i = 0; i < 4; ++i) {
      const auto* bytes = static_cast<const unsigned char*>(blocks[i]);
      CHECK(bytes[0] == i && bytes[sizes[i] - 1] == i);
      f.cache.free(blocks[i]);
    }
  }
  const size_t none = 0;
  CHECK(f.cache.allocate_many(&none, 1, blocks.data()) == 1);
  CHECK(blocks[0] == nullptr);
  // What has not been read yet is not handed out again here, either.
  CHECK(ask(2) == 2);
  void* read = blocks[1];
  f.cache.record(read, 1);
  f.cache.free(read);
  const std::vector<size_t> same(8, 100);
  std::vector<void*> others(8);
  CHECK(f.cache.allocate_many(same.data(), 8, others.data()) == 8);
  CHECK(std::find(others.begin(), others.end(), read) == others.end());
}

void cap_on_cached_bytes() {
  Fixture f({SIZE_MAX, 3 * kMiB});
  std::vector<void*> blocks;
  for (int i = 0; i < 10; ++i) {
    blocks.push_back(f.cache.allocate(kMiB));
  }
  for (void* block : blocks) {
    f.cache.free(block);
  }
  // free() unlocks nothing itself.
  CHECK(f.state.frees == 0);
  void* block = f.cache.allocate(kMiB);
  CHECK(f.state.locked_bytes == 4 * kMiB);
  f.cache.free(block);
  f.cache.trim(kMiB);
  CHECK(f.state.locked_bytes == kMiB);
  f.cache.set_limits({SIZE_MAX, 0});
  CHECK(f.state.locked_bytes == 0);
}

void refusal_empties_the_cache_and_retries_once() {
  Fixture f;
  f.state.refuse_above = 8 * kMiB;
  void* keep = f.cache.allocate(2 * kMiB);
  void* pending = f.cache.allocate(2 * kMiB);
  f.cache.record(pending, 1);
  std::vector<void*> blocks;
  for (int i = 0; i < 4; ++i) {
    blocks.push_back(f.cache.allocate(kMiB));
  }
  f.cache.free(pending);
  for (void* block : blocks) {
    f.cache.free(block);
  }
  f.fire(1);
  int calls = 0;
  f.state.on_allocate = [&] { ++calls; };
  void* large = f.cache.allocate(6 * kMiB);
  CHECK(calls <= 2);
  CHECK(f.state.locked_bytes == 8 * kMiB);
  calls = 0;
  bool thrown = false;
  try {
    f.cache.allocate(kMiB);
  } catch (const at::pin::HostOutOfMemory& error) {
    thrown = true;
    CHECK(error.held == 8 * kMiB);
  }
  CHECK(thrown && calls == 2);
  f.state.on_allocate = [] { throw std::bad_alloc(); };
  thrown = false;
  try {
    f.cache.allocate(kMiB);
  } catch (const at::pin::HostOutOfMemory&) {
    thrown = true;
  }
  CHECK(thrown);
  // Anything else is not a refusal.
  f.state.on_allocate = [] { throw std::logic_error("no device"); };
  thrown = false;
  try {
    f.cache.allocate(kMiB);
  } catch (const std::logic_error&) {
    thrown = true;
  }
  CHECK(thrown);
  f.state.on_allocate = nullptr;
  f.cache.free(large);
  f.cache.free(f.cache.allocate(kMiB));
  f.cache.free(keep);
  f.cache.empty_cache();
  CHECK(f.state.locked_bytes == 0);
  const auto stats = f.cache.stats();
  CHECK(stats.allocated_bytes.current == 0 && stats.num_ooms == 2);
}

void memory_off_a_page_boundary_is_refused() {
  Fixture f;
  std::vector<char> store(kMiB * 4);
  f.state.map_memory = [&](size_t) { return store.data() + 64 + 1; };
  FakeDevice device = f.device;
  bool thrown = false;
  // munmap in the fake would fail; the cache must give back what it got.
  f.state.on_free = [] { throw std::runtime_error("given back"); };
  try {
    f.cache.allocate(kMiB);
  } catch (const std::runtime_error&) {
    thrown = true;
  }
  CHECK(thrown);
  CHECK(f.cache.stats().allocated_bytes.current == 0);
}

void nodes_are_kept_apart() {
  Fixture f;
  f.state.node = 1;
  void* on_one = f.cache.allocate(kMiB);
  f.state.node = 3;
  void* on_three = f.cache.allocate(kMiB);
  f.cache.free(on_one);
  f.cache.free(on_three);
  f.state.node = 1;
  CHECK(f.cache.allocate(kMiB) == on_one);
  // A number that is no node counts as 0, of which there is nothing yet.
  f.state.node = -1;
  const auto locks = f.state.allocs;
  CHECK(f.cache.allocate(kMiB) != nullptr);
  CHECK(f.state.allocs == locks + 1);
}

void statistics_add_up() {
  Fixture f;
  std::mt19937_64 random(3);
  std::deque<void*> live;
  for (int i = 0; i < 2000; ++i) {
    if (live.size() > 20) {
      f.cache.free(live.front());
      live.pop_front();
    }
    live.push_back(f.cache.allocate(1 + random() % kMiB));
  }
  auto stats = f.cache.stats();
  for (const at::pin::HostStat& stat :
       {stats.allocations,
        stats.allocated_bytes,
        stats.active_requests,
        stats.active_bytes,
        stats.requested_bytes}) {
    CHECK(stat.current == stat.allocated - stat.freed);
    CHECK(stat.peak >= stat.current && stat.current >= 0);
  }
  CHECK(stats.allocated_bytes.current == int64_t(f.state.locked_bytes));
  CHECK(stats.allocated_bytes.peak == int64_t(f.state.peak_bytes));
  CHECK(stats.allocations.current == int64_t(f.state.locked.size()));
  CHECK(stats.active_requests.current == int64_t(live.size()));
  CHECK(stats.num_host_alloc == f.state.allocs);
  CHECK(stats.num_host_free == f.state.frees);
  CHECK(stats.host_alloc_time.count == f.state.allocs);
  CHECK(stats.host_free_time.count == f.state.frees);
  CHECK(stats.requested_bytes.current <= stats.active_bytes.current);
  CHECK(stats.active_bytes.current <= stats.allocated_bytes.current);
  f.cache.reset_peak_stats();
  f.cache.reset_accumulated_stats();
  stats = f.cache.stats();
  CHECK(stats.allocated_bytes.peak == stats.allocated_bytes.current);
  CHECK(stats.allocated_bytes.allocated == 0 && stats.num_host_alloc == 0);
  CHECK(stats.host_alloc_time.total == 0 && stats.host_alloc_time.max == 0);
  std::map<std::string, int64_t> seen;
  at::pin::visit_host_stats(
      stats,
      [](void* to, const char* key, int64_t value) {
        (*static_cast<std::map<std::string, int64_t>*>(to))[key] = value;
      },
      &seen);
  CHECK(seen.at("allocated_bytes.current") == int64_t(f.state.locked_bytes));
  CHECK(seen.size() == 5 * 4 + 2 * 5 + 5);
}

// A runtime that comes back to the cache, as one that runs a garbage collector
// may.
void runtime_may_come_back() {
  Fixture f;
  std::vector<void*> garbage;
  for (int i = 0; i < 30; ++i) {
    garbage.push_back(f.cache.allocate(64 * kKiB));
    f.cache.record(garbage.back(), i % 3);
  }
  const auto collect = [&] {
    if (!garbage.empty()) {
      void* block = garbage.back();
      garbage.pop_back();
      f.cache.free(block);
      f.cache.stats();
    }
  };
  f.state.on_allocate = f.state.on_free = collect;
  f.cache.empty_cache();
  for (int i = 0; i < 20; ++i) {
    f.fire(i % 3);
    f.cache.free(f.cache.allocate((i + 1) * kMiB));
    f.cache.trim(2 * kMiB);
  }
  CHECK(garbage.empty());
  f.state.on_allocate = f.state.on_free = nullptr;
}

// ---- fork

int exit_status(pid_t child) {
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 256 + WTERMSIG(status);
}

void forked_child_starts_empty() {
  Fixture f;
  void* live = f.cache.allocate(kMiB);
  void* used = f.cache.allocate(kMiB);
  f.cache.record(used, 1);
  void* pending = f.cache.allocate(2 * kMiB);
  f.cache.record(pending, 2);
  f.cache.free(pending);
  void* idle = f.cache.allocate(3 * kMiB);
  f.cache.free(idle);
  const auto locked = f.state.locked_bytes;
  const pid_t child = fork();
  if (child == 0) {
    // The fake checks that nothing of the parent is given back.
    CHECK(!f.cache.owns(live) && !f.cache.record(live, 1));
    f.cache.free(live);
    f.cache.free(used);
    CHECK(f.state.events.size() == 1); // none was made for `used`
    f.cache.empty_cache();
    CHECK(f.state.frees == 0 && f.state.locked_bytes == locked);
    CHECK(f.cache.stats().allocated_bytes.current == 0);
    f.state.process = getpid();
    void* own = f.cache.allocate(3 * kMiB);
    CHECK(own != idle && f.cache.owns(own));
    f.cache.record(own, 7);
    f.cache.free(own);
    f.fire(7);
    CHECK(f.cache.allocate(3 * kMiB) == own);
    f.cache.free(own);
    f.cache.empty_cache();
    CHECK(f.state.locked_bytes == locked);
    // And a grandchild.
    const pid_t grandchild = fork();
    if (grandchild == 0) {
      f.cache.free(live);
      CHECK(f.cache.allocate(kMiB) != nullptr);
      _exit(0);
    }
    _exit(exit_status(grandchild));
  }
  CHECK(exit_status(child) == 0);
  // Nothing happened to the parent.
  CHECK(f.cache.owns(live) && f.cache.stats().active_requests.current == 3);
  f.fire(2);
  CHECK(f.cache.allocate(2 * kMiB) == pending);
  CHECK(f.cache.allocate(3 * kMiB) == idle);
}

// Memory that children do not inherit leaves a hole, where a child's own
// memory may come to lie.
void forked_child_does_not_mix_up_addresses() {
  Fixture f;
  void* live = f.cache.allocate(4 * kMiB);
  CHECK(madvise(live, 4 * kMiB, MADV_DONTFORK) == 0);
  const pid_t child = fork();
  if (child == 0) {
    f.state.process = getpid();
    f.state.locked.clear();
    int calls = 0;
    f.state.map_memory = [&](size_t bytes) {
      ++calls;
      return mmap(
          calls == 1 ? static_cast<char*>(live) + kMiB : nullptr,
          bytes,
          PROT_READ | PROT_WRITE,
          MAP_PRIVATE | MAP_ANONYMOUS | (calls == 1 ? MAP_FIXED : 0),
          -1,
          0);
    };
    void* own = f.cache.allocate(2 * kMiB);
    CHECK(calls == 2);
    f.cache.free(live);
    CHECK(f.cache.record(own, 1));
    _exit(0);
  }
  CHECK(exit_status(child) == 0);
}

// Forks while other threads are inside the cache: no child may find a lock
// held or a list half-linked.
void fork_while_threads_work() {
  Fixture f;
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      std::deque<void*> live;
      while (!stop.load()) {
        live.push_back(f.cache.allocate(1 + random() % (256 * kKiB)));
        f.cache.record(live.back(), t);
        if (live.size() > 8) {
          f.cache.free(live.front());
          live.pop_front();
        }
        if (random() % 64 == 0) {
          f.fire(t);
          f.cache.trim(kMiB);
        }
      }
      for (void* block : live) {
        f.cache.free(block);
      }
    });
  }
  for (int i = 0; i < 60; ++i) {
    void* parents = f.cache.allocate(100 * kKiB);
    const pid_t child = fork();
    if (child == 0) {
      alarm(20); // a held lock must not hang the test
      f.cache.free(parents);
      for (int k = 0; k < 20; ++k) {
        // Not through the fake: its own mutex may have been held.
        CHECK(!f.cache.owns(parents));
        CHECK(!f.cache.record(parents, 1));
      }
      CHECK(f.cache.limits().locked == SIZE_MAX);
      _exit(0);
    }
    CHECK(exit_status(child) == 0);
    f.cache.free(parents);
  }
  stop = true;
  for (auto& thread : threads) {
    thread.join();
  }
}

// ---- threads

// Threads write a block, start "copies" that read it later, and free it at
// once. A copy that finds other bytes than were written says that the block was
// handed out too early.
void threads_and_copies(bool careless) {
  Fixture f({96 * kMiB, 24 * kMiB});
  f.state.careless = careless;
  struct Copy {
    const unsigned char* ptr;
    size_t bytes;
    unsigned char key;
    int stream;
  };
  std::mutex mutex;
  std::vector<Copy> copies[4];
  std::atomic<bool> stop{false};
  std::atomic<int64_t> checked{0};
  // One engine for each stream; events fire after the copies before them.
  std::vector<std::thread> engines;
  for (int stream = 0; stream < 4; ++stream) {
    engines.emplace_back([&, stream] {
      for (bool last = false; !last;) {
        last = stop.load();
        std::this_thread::sleep_for(std::chrono::microseconds(200 << stream));
        std::vector<Copy> batch;
        std::vector<std::shared_ptr<std::atomic<bool>>> fired;
        {
          // Events first: one made before this point follows copies that are
          // in the batch or were done already.
          std::lock_guard<std::mutex> lock(f.state.mutex);
          auto& events = f.state.events;
          for (size_t i = 0; i < events.size();) {
            if (events[i].first == stream) {
              fired.push_back(events[i].second);
              events[i] = events.back();
              events.pop_back();
            } else {
              ++i;
            }
          }
        }
        {
          std::lock_guard<std::mutex> lock(mutex);
          batch.swap(copies[stream]);
        }
        for (const Copy& copy : batch) {
          for (size_t at = 0; at < copy.bytes; at += 509) {
            CHECK(copy.ptr[at] == copy.key);
          }
          ++checked;
        }
        for (auto& event : fired) {
          event->store(true, std::memory_order_release);
        }
      }
    });
  }
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      for (int i = 0; i < 3000; ++i) {
        const size_t bytes = 1 + random() % (i % 50 ? 20 * kKiB : 2 * kMiB);
        unsigned char* ptr = nullptr;
        try {
          ptr = static_cast<unsigned char*>(f.cache.allocate(bytes));
        } catch (const at::pin::HostOutOfMemory&) {
          std::this_thread::yield();
          continue;
        }
        const auto key = static_cast<unsigned char>(random());
        std::memset(ptr, key, bytes);
        for (unsigned n = random() % 3; n > 0; --n) {
          const int stream = static_cast<int>(random() % 4);
          {
            std::lock_guard<std::mutex> lock(mutex);
            copies[stream].push_back({ptr, bytes, key, stream});
          }
          CHECK(f.cache.record(ptr + bytes / 2, stream));
        }
        CHECK(f.cache.owns(ptr));
        f.cache.free(ptr);
        if (random() % 500 == 0) {
          f.cache.empty_cache();
        }
        if (random() % 500 == 1) {
          f.cache.stats();
        }
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  stop = true;
  for (auto& engine : engines) {
    engine.join();
  }
  CHECK(checked.load() > 1000);
  f.cache.empty_cache();
  CHECK(f.state.locked_bytes == 0);
  CHECK(f.state.peak_bytes <= 96 * kMiB);
  const auto stats = f.cache.stats();
  CHECK(stats.active_requests.current == 0);
  CHECK(stats.allocations.allocated == stats.allocations.freed);
}

void threads_and_delayed_copies() {
  threads_and_copies(false);
}

// Fails: shows that the case above would notice.
void careless_reuse() {
  threads_and_copies(true);
}

// ---- page-locking in place

// A driver that takes whole pages, each of them once.
struct FakeDriver {
  std::mutex mutex;
  std::map<uintptr_t, size_t> locked;
  std::vector<std::pair<uintptr_t, size_t>> calls;
  size_t unlocks = 0;
  size_t refuse_above = SIZE_MAX;
  size_t granularity = 4096;
  std::function<void()> on_lock;
  std::function<void()> on_unlock;

  bool lock(void* ptr, size_t bytes) {
    if (on_lock) {
      on_lock();
    }
    const auto begin = reinterpret_cast<uintptr_t>(ptr);
    CHECK(bytes > 0 && begin % granularity == 0 && bytes % granularity == 0);
    std::lock_guard<std::mutex> guard(mutex);
    const auto next = locked.lower_bound(begin);
    CHECK(next == locked.end() || next->first >= begin + bytes);
    if (next != locked.begin()) {
      const auto before = std::prev(next);
      CHECK(before->first + before->second <= begin);
    }
    if (bytes > refuse_above) {
      return false;
    }
    locked[begin] = bytes;
    calls.emplace_back(begin, bytes);
    return true;
  }

  void unlock(void* ptr, size_t bytes) {
    if (on_unlock) {
      on_unlock();
    }
    std::lock_guard<std::mutex> guard(mutex);
    const auto found = locked.find(reinterpret_cast<uintptr_t>(ptr));
    CHECK(found != locked.end() && found->second == bytes);
    locked.erase(found);
    ++unlocks;
  }

  bool has(uintptr_t address) {
    std::lock_guard<std::mutex> guard(mutex);
    auto next = locked.upper_bound(address);
    return next != locked.begin() &&
           std::prev(next)->first + std::prev(next)->second > address;
  }

  std::shared_ptr<const at::pin::HostMemoryLocker> locker() {
    return std::make_shared<const at::pin::HostMemoryLocker>(
        at::pin::HostMemoryLocker{
            [this](void* ptr, size_t bytes) { return lock(ptr, bytes); },
            [this](void* ptr, size_t bytes) { unlock(ptr, bytes); },
            granularity});
  }
};

// Addresses are only looked at, so no memory is needed.
constexpr uintptr_t kArena = uintptr_t{1} << 40;

const void* at(size_t offset) {
  return reinterpret_cast<const void*>(kArena + offset);
}

void registrations_are_counted() {
  FakeDriver driver;
  const auto locker = driver.locker();
  at::pin::HostMemoryRegistry registry;
  registry.register_range(locker, at(100), 0);
  CHECK(driver.calls.empty());
  registry.register_range(locker, at(8192), 8192);
  registry.register_range(locker, at(8192), 8192);
  CHECK(driver.calls.size() == 1);
  CHECK(registry.covers(at(8192), 8192) && !registry.covers(at(8192), 8193));
  CHECK(!registry.covers(at(8191), 1) && !registry.covers(at(16384), 1));
  CHECK(registry.totals() == std::make_pair(size_t{1}, size_t{8192}));
  CHECK(!registry.unregister_range(at(8192), 4096));
  CHECK(registry.unregister_range(at(8192), 8192));
  CHECK(driver.locked.size() == 1);
  CHECK(registry.unregister_range(at(8192), 8192));
  CHECK(driver.locked.empty() && !registry.covers(at(8192), 1));
  CHECK(!registry.unregister_range(at(8192), 8192));
  CHECK(!registry.touches(at(0), 1 << 20));
  // The address is used again.
  registry.register_range(locker, at(8192), 8192);
  CHECK(driver.locked.size() == 1);
  CHECK(registry.unregister_range(at(8192), 8192));
  CHECK(driver.calls.size() == 2 && driver.unlocks == 2);
}

void buffers_that_share_a_page() {
  FakeDriver driver;
  const auto locker = driver.locker();
  at::pin::HostMemoryRegistry registry;
  // a: pages 0 to 4, b: pages 4 to 8, c: within page 4 between them.
  const size_t a = 4 * 4096 + 100 - 64;
  registry.register_range(locker, at(64), a);
  registry.register_range(locker, at(4 * 4096 + 2000), 4 * 4096);
  registry.register_range(locker, at(4 * 4096 + 500), 100);
  CHECK(registry.covers(at(64), a) && registry.covers(at(4 * 4096 + 500), 100));
  CHECK(registry.covers(at(4 * 4096 + 2000), 4 * 4096));
  // What lies in the page but belongs to nobody is not registered.
  CHECK(!registry.covers(at(0), 64) && !registry.covers(at(63), 2));
  CHECK(!registry.covers(at(4 * 4096 + 100), 1));
  CHECK(!registry.covers(at(4 * 4096 + 599), 2));
  CHECK(registry.unregister_range(at(64), a));
  // All of a but the page that the others need.
  CHECK(!driver.has(kArena) && !driver.has(kArena + 3 * 4096));
  CHECK(driver.has(kArena + 4 * 4096));
  CHECK(!registry.covers(at(64), a));
  CHECK(!registry.covers(at(4 * 4096 + 50), 1));
  CHECK(registry.covers(at(4 * 4096 + 2000), 4 * 4096));
  CHECK(registry.unregister_range(at(4 * 4096 + 2000), 4 * 4096));
  CHECK(driver.locked.size() == 1 && driver.has(kArena + 4 * 4096));
  CHECK(registry.unregister_range(at(4 * 4096 + 500), 100));
  CHECK(driver.locked.empty());
}

void views_and_wholes() {
  FakeDriver driver;
  const auto locker = driver.locker();
  at::pin::HostMemoryRegistry registry;
  registry.register_range(locker, at(10 * 4096), 3 * 4096);
  registry.register_range(locker, at(0), 40 * 4096);
  registry.register_range(locker, at(5 * 4096 + 8), 4096);
  CHECK(driver.calls.size() == 3);
  CHECK(registry.covers(at(0), 40 * 4096));
  CHECK(registry.unregister_range(at(0), 40 * 4096));
  CHECK(registry.covers(at(10 * 4096), 3 * 4096));
  CHECK(registry.covers(at(5 * 4096 + 8), 4096));
  CHECK(!registry.covers(at(0), 40 * 4096));
  CHECK(registry.unregister_range(at(5 * 4096 + 8), 4096));
  CHECK(registry.unregister_range(at(10 * 4096), 3 * 4096));
  CHECK(driver.locked.empty());
}

void large_ranges_go_in_chunks() {
  FakeDriver driver;
  const auto locker = driver.locker();
  at::pin::HostMemoryRegistry registry(64 * kKiB);
  registry.register_range(locker, at(12), 300 * kKiB);
  size_t sum = 0;
  for (const auto& call : driver.calls) {
    CHECK(call.second <= 64 * kKiB);
    sum += call.second;
  }
  CHECK(sum == 304 * kKiB && registry.covers(at(12), 300 * kKiB));
  CHECK(registry.unregister_range(at(12), 300 * kKiB));
  CHECK(driver.locked.empty());
  // The last page is refused: everything before it is undone.
  for (const size_t bad : {size_t{4096}, 64 * kKiB}) {
    driver.calls.clear();
    driver.on_lock = [&] {
      if (driver.calls.size() == 3) {
        throw std::runtime_error("limit reached");
      }
    };
    bool thrown = false;
    try {
      registry.register_range(locker, at(0), 3 * 64 * kKiB + bad);
    } catch (const at::pin::HostMemoryRefused& error) {
      thrown = true;
      const std::string text = error.what();
      CHECK(text.find("limit reached") != std::string::npos);
      CHECK(
          text.find(std::to_string(3 * 64 * kKiB + bad) + " bytes") !=
          std::string::npos);
    }
    driver.on_lock = nullptr;
    CHECK(thrown && driver.locked.empty());
    CHECK(registry.totals() == std::make_pair(size_t{0}, size_t{0}));
    CHECK(!registry.covers(at(0), 1));
    // And it can be tried again.
    registry.register_range(locker, at(0), 3 * 64 * kKiB + bad);
    CHECK(registry.unregister_range(at(0), 3 * 64 * kKiB + bad));
    CHECK(driver.locked.empty());
  }
  driver.refuse_above = 100;
  bool thrown = false;
  try {
    registry.register_range(locker, at(0), 4096);
  } catch (const at::pin::HostMemoryRefused&) {
    thrown = true;
  }
  CHECK(thrown && driver.locked.empty());
}

void a_driver_that_takes_any_range() {
  FakeDriver driver;
  driver.granularity = 1;
  const auto locker = driver.locker();
  at::pin::HostMemoryRegistry registry;
  registry.register_range(locker, at(100), 50);
  registry.register_range(locker, at(120), 50);
  registry.register_range(locker, at(4000), 5000);
  CHECK(driver.calls.size() == 3 && driver.calls[1].second == 20);
  CHECK(registry.touches(at(99), 2) && !registry.touches(at(99), 1));
  CHECK(registry.touches(at(169), 9) && !registry.touches(at(170), 9));
  CHECK(registry.covers(at(100), 70) && !registry.covers(at(100), 71));
  CHECK(!registry.covers(at(99), 2) && registry.covers(at(4000), 5000));
  CHECK(registry.holds(at(169)) && !registry.holds(at(170)));
  CHECK(registry.unregister_range(at(100), 50));
  CHECK(driver.has(kArena + 125) && driver.has(kArena + 160));
  CHECK(registry.covers(at(120), 50));
  CHECK(registry.unregister_range(at(120), 50));
  CHECK(registry.unregister_range(at(4000), 5000));
  CHECK(!registry.holds(at(4000)) && !registry.covers(at(4000), 1));
  CHECK(driver.locked.empty());
}

// What covers() looks up without a lock are pages: one has to stay in that
// table while any range in it is locked, in whatever order they go.
void ranges_that_share_a_page() {
  const std::vector<std::pair<size_t, size_t>> ranges = {
      {100, 50}, {200, 4096}, {5000, 10}, {5010, 9000}, {14020, 8}};
  std::vector<size_t> order(ranges.size());
  std::iota(order.begin(), order.end(), 0);
  do {
    FakeDriver driver;
    driver.granularity = 1;
    const auto locker = driver.locker();
    at::pin::HostMemoryRegistry registry;
    for (const auto& [offset, bytes] : ranges) {
      registry.register_range(locker, at(offset), bytes);
    }
    CHECK(driver.calls.size() == ranges.size());
    for (size_t gone = 0; gone < order.size(); ++gone) {
      const auto& [offset, bytes] = ranges[order[gone]];
      CHECK(registry.unregister_range(at(offset), bytes));
      for (size_t i = 0; i < order.size(); ++i) {
        const auto& [other, size] = ranges[order[i]];
        CHECK(registry.covers(at(other), size) == (i > gone));
        CHECK(registry.holds(at(other + size - 1)) == (i > gone));
      }
    }
    CHECK(driver.locked.empty());
  } while (std::next_permutation(order.begin(), order.end()));
}

void unlock_that_throws() {
  FakeDriver driver;
  const auto locker = driver.locker();
  at::pin::HostMemoryRegistry registry;
  registry.register_range(locker, at(0), 8192);
  driver.on_unlock = [] { throw std::runtime_error("driver shut down"); };
  CHECK(registry.unregister_range(at(0), 8192));
  CHECK(registry.totals() == std::make_pair(size_t{0}, size_t{0}));
}

// In a child of a process in which `bytes` at 64 are registered.
void check_registry_of_child(
    at::pin::HostMemoryRegistry& registry,
    size_t bytes) {
  CHECK(!registry.covers(at(64), 1));
  CHECK(!registry.unregister_range(at(64), bytes));
  CHECK(registry.totals() == std::make_pair(size_t{0}, size_t{0}));
  FakeDriver own;
  registry.register_range(own.locker(), at(64), bytes);
  CHECK(registry.covers(at(64), bytes));
  CHECK(registry.unregister_range(at(64), bytes) && own.locked.empty());
}

void registry_after_fork() {
  FakeDriver driver;
  at::pin::HostMemoryRegistry registry;
  registry.register_range(driver.locker(), at(64), 40000);
  const pid_t child = fork();
  if (child == 0) {
    check_registry_of_child(registry, 40000);
    _exit(0);
  }
  CHECK(exit_status(child) == 0);
  CHECK(registry.covers(at(64), 40000));
  CHECK(registry.unregister_range(at(64), 40000) && driver.locked.empty());
}

// The child allocates. glibc sees to it that the locks of its allocator are
// free in a child; those of the sanitizers do not, and one may be held for ever
// by the thread that the child has not got.
void registry_fork_while_a_thread_works() {
  FakeDriver driver;
  const auto locker = driver.locker();
  at::pin::HostMemoryRegistry registry;
  registry.register_range(locker, at(64), 40000);
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop.load()) {
      registry.register_range(locker, at(kMiB), 8192);
      registry.unregister_range(at(kMiB), 8192);
    }
  });
  for (int i = 0; i < 40; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20); // a held lock must not hang the test
      check_registry_of_child(registry, 40000);
      _exit(0);
    }
    CHECK(exit_status(child) == 0);
  }
  stop = true;
  busy.join();
  CHECK(registry.covers(at(64), 40000));
  CHECK(registry.unregister_range(at(64), 40000) && driver.locked.empty());
}

// Overlapping ranges from several threads. The driver checks that no page is
// locked twice; each thread checks that its own range is locked while it has
// it.
void registry_threads() {
  FakeDriver driver;
  const auto locker = driver.locker();
  at::pin::HostMemoryRegistry registry(64 * kKiB);
  std::atomic<int> refused{0};
  std::atomic<int> calls{0};
  driver.on_lock = [&] {
    if (++calls % 97 == 0) {
      throw std::runtime_error("now and then");
    }
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      for (int i = 0; i < 1500; ++i) {
        const size_t offset = random() % 40 * 2048 + (i % 2 ? 0 : 64);
        const size_t bytes = 1 + random() % (i % 10 ? 9000 : 200000);
        try {
          registry.register_range(locker, at(offset), bytes);
        } catch (const at::pin::HostMemoryRefused&) {
          ++refused;
          continue;
        }
        CHECK(driver.has(kArena + offset));
        CHECK(driver.has(kArena + offset + bytes - 1));
        CHECK(registry.covers(at(offset), bytes));
        CHECK(registry.unregister_range(at(offset), bytes));
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  CHECK(refused.load() > 10);
  CHECK(registry.totals() == std::make_pair(size_t{0}, size_t{0}));
}

const std::map<std::string, void (*)()> cases = {
    {"size_classes", size_classes},
    {"page_map", page_map},
    {"never_smaller_than_asked", never_smaller_than_asked},
    {"waste_of_one_block", waste_of_one_block},
    {"large_blocks_are_exact_and_reused_when_they_fit",
     large_blocks_are_exact_and_reused_when_they_fit},
    {"zero_and_impossible", zero_and_impossible},
    {"small_blocks_share_pages", small_blocks_share_pages},
    {"slabs_drain", slabs_drain},
    {"waste_of_random_sizes", waste_of_random_sizes},
    {"alternating_sizes_settle", alternating_sizes_settle},
    {"reuse_waits_for_every_event", reuse_waits_for_every_event},
    {"slow_event_blocks_no_other", slow_event_blocks_no_other},
    {"a_hit_asks_no_event", a_hit_asks_no_event},
    {"record_by_any_address", record_by_any_address},
    {"event_that_cannot_be_made", event_that_cannot_be_made},
    {"cap_on_locked_bytes", cap_on_locked_bytes},
    {"many_at_once", many_at_once},
    {"cap_on_cached_bytes", cap_on_cached_bytes},
    {"refusal_empties_the_cache_and_retries_once",
     refusal_empties_the_cache_and_retries_once},
    {"memory_off_a_page_boundary_is_refused",
     memory_off_a_page_boundary_is_refused},
    {"nodes_are_kept_apart", nodes_are_kept_apart},
    {"statistics_add_up", statistics_add_up},
    {"runtime_may_come_back", runtime_may_come_back},
    {"forked_child_starts_empty", forked_child_starts_empty},
    {"forked_child_does_not_mix_up_addresses",
     forked_child_does_not_mix_up_addresses},
    {"fork_while_threads_work", fork_while_threads_work},
    {"threads_and_delayed_copies", threads_and_delayed_copies},
    {"careless_reuse", careless_reuse},
    {"registrations_are_counted", registrations_are_counted},
    {"buffers_that_share_a_page", buffers_that_share_a_page},
    {"views_and_wholes", views_and_wholes},
    {"large_ranges_go_in_chunks", large_ranges_go_in_chunks},
    {"a_driver_that_takes_any_range", a_driver_that_takes_any_range},
    {"ranges_that_share_a_page", ranges_that_share_a_page},
    {"unlock_that_throws", unlock_that_throws},
    {"registry_after_fork", registry_after_fork},
    {"registry_fork_while_a_thread_works", registry_fork_while_a_thread_works},
    {"registry_threads", registry_threads},
};

} // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    for (const auto& entry : cases) {
      std::printf("%s\n", entry.first.c_str());
    }
    return 0;
  }
  const auto found = cases.find(argv[1]);
  if (found == cases.end()) {
    std::fprintf(stderr, "no case %s\n", argv[1]);
    return 2;
  }
  found->second();
  return 0;
}
