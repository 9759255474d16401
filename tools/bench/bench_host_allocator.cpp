// Compares at::pin::CachingHostMemory with the base's CachingHostAllocatorImpl
// on one runtime, whose memory is ordinary: the time of allocation and release
// from the cache, and the bytes that the runtime was asked for. Prints one JSON
// object. bench_host_allocator.py compiles and runs it.

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/CachingHostMemory.h>

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <deque>
#include <random>
#include <thread>
#include <vector>

namespace {

constexpr size_t kMiB = size_t{1} << 20;

struct Use {
  std::atomic<size_t> bytes{0};
  std::atomic<size_t> peak{0};
  std::atomic<size_t> calls{0};

  void* get(size_t size) {
    bytes += size;
    peak = std::max(peak.load(), bytes.load());
    ++calls;
    void* ptr = mmap(
        nullptr,
        size,
        PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS,
        -1,
        0);
    return ptr == MAP_FAILED ? nullptr : ptr;
  }
  void put(void* ptr, size_t size) {
    bytes -= size;
    munmap(ptr, size);
  }
};

Use ofBase;
Use ofOurs;

struct Event {};

struct Runtime {
  void* allocate_host_memory(size_t bytes) {
    return ofOurs.get(bytes);
  }
  void free_host_memory(void* ptr, size_t bytes) {
    ofOurs.put(ptr, bytes);
  }
  Event record_event(c10::Stream /*stream*/) {
    return {};
  }
  bool query_event(Event& /*event*/) {
    return true;
  }
};
using Ours = at::pin::CachingHostMemory<Runtime>;

struct BaseImpl final : at::CachingHostAllocatorImpl<c10::Stream, Event> {
  void allocate_host_memory(size_t size, void** ptr) override {
    *ptr = ofBase.get(size);
  }
  void free_block(at::HostBlock<c10::Stream>* block) override {
    ofBase.put(block->ptr_, block->size_);
  }
  void record_stream(
      std::optional<std::vector<Event>>& events,
      c10::Stream /*stream*/) override {
    events->push_back(Event{});
  }
  bool query_event(Event& /*event*/) override {
    return true;
  }
};
DECLARE_HOST_ALLOCATOR(BaseAllocator, BaseImpl, base_deleter, base_allocator)

c10::Stream stream() {
  return c10::Stream(
      c10::Stream::UNSAFE, c10::Device(c10::DeviceType::PrivateUse1, 0), 1);
}

template <class Work>
double nanoseconds_each(size_t count, Work work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  const std::chrono::duration<double, std::nano> elapsed =
      std::chrono::steady_clock::now() - start;
  return elapsed.count() / static_cast<double>(count);
}

// Allocation and release of one block that is in the cache.
double one(at::HostAllocator& allocator, size_t bytes, bool record) {
  constexpr size_t kRounds = 200000;
  const c10::Stream used = stream();
  {
    auto warm = allocator.allocate(bytes);
  }
  return nanoseconds_each(kRounds, [&] {
    for (size_t i = 0; i < kRounds; ++i) {
      auto block = allocator.allocate(bytes);
      if (record) {
        allocator.record_event(block.get(), block.get_context(), used);
      }
    }
  });
}

// 64 blocks of 16 floats and more, allocated together and released together.
double batch(at::HostAllocator& allocator) {
  constexpr size_t kRounds = 4000;
  constexpr size_t kBlocks = 64;
  std::vector<c10::DataPtr> blocks(kBlocks);
  const auto round = [&] {
    for (size_t k = 0; k < kBlocks; ++k) {
      blocks[k] = allocator.allocate(64 + k * 997);
    }
    for (auto& block : blocks) {
      block.clear();
    }
  };
  round();
  return nanoseconds_each(kRounds * kBlocks, [&] {
    for (size_t i = 0; i < kRounds; ++i) {
      round();
    }
  });
}

double threads(at::HostAllocator& allocator) {
  constexpr size_t kRounds = 100000;
  return nanoseconds_each(2 * kRounds, [&] {
    std::vector<std::thread> workers;
    for (int t = 0; t < 2; ++t) {
      workers.emplace_back([&, t] {
        for (size_t i = 0; i < kRounds; ++i) {
          auto block = allocator.allocate((t + 1) * kMiB);
        }
      });
    }
    for (auto& worker : workers) {
      worker.join();
    }
  });
}

struct Waste {
  double peak;
  double in_use;
  double left_mib;
  size_t calls;
};

// 400 random sizes up to 4 MiB, 16 live at a time.
Waste waste(at::HostAllocator& allocator, Use& use) {
  allocator.empty_cache();
  const size_t before = use.bytes;
  use.peak = use.bytes.load();
  use.calls = 0;
  std::mt19937_64 random(1);
  std::deque<c10::DataPtr> live;
  std::deque<size_t> sizes;
  size_t bytes = 0;
  size_t peak = 0;
  for (int i = 0; i < 400; ++i) {
    if (live.size() == 16) {
      live.pop_front();
      bytes -= sizes.front();
      sizes.pop_front();
    }
    sizes.push_back(1 + random() % (4 * kMiB));
    live.push_back(allocator.allocate(sizes.back()));
    bytes += sizes.back();
    peak = std::max(peak, bytes);
  }
  Waste result{};
  result.peak = static_cast<double>(use.peak - before) / double(peak);
  result.calls = use.calls;
  allocator.empty_cache();
  result.in_use = static_cast<double>(use.bytes - before) / double(bytes);
  live.clear();
  allocator.empty_cache();
  result.left_mib = static_cast<double>(use.bytes - before) / double(kMiB);
  return result;
}

template <class Measure>
void compare(const char* name, Measure measure) {
  std::vector<double> base;
  std::vector<double> ours;
  for (int i = 0; i < 7; ++i) {
    base.push_back(measure(static_cast<at::HostAllocator&>(base_allocator)));
    ours.push_back(measure(static_cast<at::HostAllocator&>(Ours::instance())));
  }
  std::sort(base.begin(), base.end());
  std::sort(ours.begin(), ours.end());
  std::printf("  \"%s\": [%.1f, %.1f],\n", name, base[3], ours[3]);
}

} // namespace

int main() {
  using Allocator = at::HostAllocator;
  std::printf("{\n");
  compare("64 bytes", [](Allocator& a) { return one(a, 64, false); });
  compare("1 MiB", [](Allocator& a) { return one(a, kMiB, false); });
  compare("38 MiB", [](Allocator& a) { return one(a, 38 * kMiB, false); });
  compare("1 MiB, used by a stream", [](Allocator& a) {
    return one(a, kMiB, true);
  });
  compare("64 blocks, 64 bytes to 62 KiB", batch);
  compare("two threads", threads);
  const Waste base = waste(base_allocator, ofBase);
  const Waste ours = waste(Ours::instance(), ofOurs);
  std::printf(
      "  \"peak locked over peak live\": [%.3f, %.3f],\n",
      base.peak,
      ours.peak);
  std::printf(
      "  \"locked over live, cache emptied\": [%.3f, %.3f],\n",
      base.in_use,
      ours.in_use);
  std::printf("  \"page-lock calls\": [%zu, %zu],\n", base.calls, ours.calls);
  std::printf(
      "  \"MiB left when all is freed\": [%.1f, %.1f]\n}\n",
      base.left_mib,
      ours.left_mib);
  return 0;
}
