// CUDA's runtime and driver with the CPU in place of the GPU, as far as pinned
// memory and copies need them. Preloaded (LD_PRELOAD) into a process with a
// CUDA build of PyTorch, it lets that PyTorch find two devices: its own
// allocators, streams, events and copies then run as on a GPU. Kernels do
// nothing.
//
// What it takes care to do as CUDA does, since pinned memory is about just
// that: copies from and to page-locked memory run on a thread of their stream
// after the call has returned, later still if told so; pageable sources are
// staged before the call returns and pageable destinations written before it
// returns; memory that is page-locked in part cannot be copied; nothing can be
// locked twice, and is unlocked by the address that it was locked by; a refused
// call leaves an error behind for cudaGetLastError; contexts are made on first
// use; a forked child of a process that made one gets
// cudaErrorInitializationError.

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

// Handles of the two interfaces are pointers to these.
struct CUstream_st {
  int device = 0;
  int priority = 0;
  std::deque<std::function<void()>> queue;
  bool busy = false;
  std::thread thread;
};

struct CUevent_st {
  uint64_t recorded = 0;
  uint64_t done = 0;
  std::chrono::steady_clock::time_point when;
};

namespace {

constexpr int kDevices = 2;
constexpr size_t kPage = 4096;
constexpr size_t kDeviceBytes = size_t(8) << 30;

struct Range {
  size_t bytes;
  bool allocated; // by cudaHostAlloc
};

struct Device {
  bool context = false;
  CUstream_st default_stream;
  size_t in_use = 0;
};

struct Runtime {
  std::mutex mutex;
  std::condition_variable progress; // of streams: work added or done
  std::array<Device, kDevices> devices;
  std::map<uintptr_t, Range> host; // by first byte
  std::map<uintptr_t, std::pair<size_t, int>> device_memory;
  std::atomic<pid_t> pid{0}; // that made the first context
  double delay = 0;          // seconds that each copy takes at least
  bool held = false;         // no copy is started
  int64_t locked_bytes = 0;
  int64_t locked_limit = -1; // none
  uint64_t lock_calls = 0;
};

// Never destroyed: threads of streams run until the process ends.
Runtime& runtime = *new Runtime;

thread_local int current = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t fails(cudaError_t error) {
  last_error = error;
  return error;
}

int device_count() {
  static const int count = [] {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    if (visible == nullptr) {
      return kDevices;
    }
    int devices = *visible == '\0' || *visible == '-' ? 0 : 1;
    for (const char* at = visible; *at != '\0'; ++at) {
      devices += *at == ',';
    }
    return std::min(devices, kDevices);
  }();
  return count;
}

// Makes the context of the current device, as every call that needs one does.
cudaError_t enter() {
  if (device_count() == 0) {
    return fails(cudaErrorNoDevice);
  }
  // Asked before the mutex, which a child may have inherited locked.
  if (runtime.pid != 0 && runtime.pid != getpid()) {
    return fails(cudaErrorInitializationError);
  }
  std::lock_guard<std::mutex> guard(runtime.mutex);
  runtime.pid = getpid();
  runtime.devices[current].context = true;
  return cudaSuccess;
}

CUstream_st* stream_of(cudaStream_t stream) {
  // 1 and 2 stand for the legacy and the per-thread default stream.
  return reinterpret_cast<uintptr_t>(stream) <= 2
             ? &runtime.devices[current].default_stream
             : stream;
}

void serve(CUstream_st* stream) {
  std::unique_lock<std::mutex> lock(runtime.mutex);
  for (;;) {
    runtime.progress.wait(lock, [&] { return !stream->queue.empty(); });
    std::function<void()> work = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->busy = true;
    lock.unlock();
    work();
    work = nullptr;
    lock.lock();
    stream->busy = false;
    runtime.progress.notify_all();
  }
}

void enqueue(CUstream_st* stream, std::function<void()> work) {
  std::lock_guard<std::mutex> guard(runtime.mutex);
  if (!stream->thread.joinable()) {
    stream->thread = std::thread(serve, stream);
  }
  stream->queue.push_back(std::move(work));
  runtime.progress.notify_all();
}

bool idle(const CUstream_st& stream) {
  return stream.queue.empty() && !stream.busy;
}

// All streams made on a device, the default one among them.
std::map<CUstream_st*, int>& streams() {
  static auto& all = *new std::map<CUstream_st*, int>;
  return all;
}

void wait_for_device(int device) {
  std::unique_lock<std::mutex> lock(runtime.mutex);
  runtime.progress.wait(lock, [&] {
    if (!idle(runtime.devices[device].default_stream)) {
      return false;
    }
    for (const auto& [stream, of] : streams()) {
      if (of == device && !idle(*stream)) {
        return false;
      }
    }
    return true;
  });
}

enum class Where { pageable, locked, device, torn };

// With runtime.mutex held. The driver counts locked memory in bytes, not pages.
// Torn: partly locked.
Where where(uintptr_t begin, size_t bytes) {
  auto device = runtime.device_memory.upper_bound(begin);
  if (device != runtime.device_memory.begin()) {
    --device;
    if (begin < device->first + device->second.first) {
      return Where::device;
    }
  }
  const uintptr_t end = begin + bytes;
  size_t locked = 0;
  auto range = runtime.host.upper_bound(begin);
  if (range != runtime.host.begin()) {
    --range;
  }
  for (; range != runtime.host.end() && range->first < end; ++range) {
    const uintptr_t from = std::max(begin, range->first);
    const uintptr_t to = std::min(end, range->first + range->second.bytes);
    locked += from < to ? to - from : 0;
  }
  return locked == 0       ? Where::pageable
         : locked == bytes ? Where::locked
                           : Where::torn;
}

void wait_until_due() {
  std::unique_lock<std::mutex> lock(runtime.mutex);
  runtime.progress.wait(lock, [] { return !runtime.held; });
  const std::chrono::duration<double> delay(runtime.delay);
  lock.unlock();
  if (delay.count() > 0) {
    std::this_thread::sleep_for(delay);
  }
}

cudaError_t
copy(void* to, const void* from, size_t bytes, cudaStream_t handle, bool wait) {
  if (const cudaError_t error = enter()) {
    return error;
  }
  if (bytes == 0) {
    return cudaSuccess;
  }
  CUstream_st* stream = stream_of(handle);
  Where source;
  Where destination;
  {
    std::lock_guard<std::mutex> guard(runtime.mutex);
    source = where(reinterpret_cast<uintptr_t>(from), bytes);
    destination = where(reinterpret_cast<uintptr_t>(to), bytes);
  }
  if (source == Where::torn || destination == Where::torn) {
    return fails(cudaErrorInvalidValue);
  }
  std::shared_ptr<char[]> staged;
  if (source == Where::pageable) {
    staged = std::shared_ptr<char[]>(new char[bytes]);
    std::memcpy(staged.get(), from, bytes);
  }
  enqueue(stream, [=] {
    wait_until_due();
    std::memcpy(to, staged ? staged.get() : from, bytes);
  });
  if (wait || destination == Where::pageable) {
    return cudaStreamSynchronize(handle);
  }
  return cudaSuccess;
}

bool is_mapped(uintptr_t begin, uintptr_t end) {
  unsigned char there;
  for (uintptr_t page = begin / kPage * kPage; page < end; page += kPage) {
    if (mincore(reinterpret_cast<void*>(page), 1, &there) != 0) {
      return false;
    }
  }
  return true;
}

// With runtime.mutex held.
bool lock_pages(uintptr_t begin, size_t bytes, bool allocated) {
  ++runtime.lock_calls;
  const auto more = static_cast<int64_t>(bytes);
  if (runtime.locked_limit >= 0 &&
      runtime.locked_bytes + more > runtime.locked_limit) {
    return false;
  }
  runtime.host[begin] = {bytes, allocated};
  runtime.locked_bytes += more;
  return true;
}

void unlock_pages(std::map<uintptr_t, Range>::iterator range) {
  runtime.locked_bytes -= static_cast<int64_t>(range->second.bytes);
  runtime.host.erase(range);
}

// With runtime.mutex held.
bool overlaps(uintptr_t begin, uintptr_t end) {
  const auto next = runtime.host.lower_bound(end);
  if (next == runtime.host.begin()) {
    return false;
  }
  const auto& [last, range] = *std::prev(next);
  return last + range.bytes > begin;
}

CUresult unsupported() {
  return CUDA_ERROR_NOT_SUPPORTED;
}

cudaError_t entry_point(const char* name, void** function) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (*function == nullptr) {
    *function = reinterpret_cast<void*>(unsupported);
  }
  return cudaSuccess;
}

} // namespace

extern "C" {

// ---- errors

cudaError_t cudaGetLastError(void) {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError(void) {
  return last_error;
}

// ---- devices

cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return *count == 0 ? fails(cudaErrorNoDevice) : cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) {
    return fails(cudaErrorInvalidDevice);
  }
  current = device;
#if CUDART_VERSION >= 12000
  return enter();
#else
  return cudaSuccess;
#endif
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= device_count()) {
    return fails(cudaErrorInvalidDevice);
  }
  std::memset(properties, 0, sizeof(*properties));
  std::strcpy(properties->name, "CPU as CUDA device");
  properties->uuid.bytes[0] = static_cast<char>(device + 1);
  properties->totalGlobalMem = kDeviceBytes;
  properties->major = 9;
  properties->minor = 0;
  properties->warpSize = 32;
  properties->multiProcessorCount = 1;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->regsPerMultiprocessor = 65536;
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerMultiprocessor = 96 << 10;
  properties->maxGridSize[0] = 1 << 30;
  properties->unifiedAddressing = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  if (length < 13) {
    return fails(cudaErrorInvalidValue);
  }
  std::strcpy(text, device == 0 ? "0000:00:00.0" : "0000:01:00.0");
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
  if (const cudaError_t error = enter()) {
    return error;
  }
  wait_for_device(current);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  if (const cudaError_t error = enter()) {
    return error;
  }
  std::lock_guard<std::mutex> guard(runtime.mutex);
  *total = kDeviceBytes;
  *available = kDeviceBytes - runtime.devices[current].in_use;
  return cudaSuccess;
}

// ---- memory of the device

cudaError_t cudaMalloc(void** address, size_t bytes) {
  if (const cudaError_t error = enter()) {
    return error;
  }
  std::lock_guard<std::mutex> guard(runtime.mutex);
  Device& device = runtime.devices[current];
  if (bytes > kDeviceBytes - device.in_use) {
    return fails(cudaErrorMemoryAllocation);
  }
  *address = mmap(
      nullptr,
      bytes,
      PROT_READ | PROT_WRITE,
      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
      -1,
      0);
  if (*address == MAP_FAILED) {
    return fails(cudaErrorMemoryAllocation);
  }
  device.in_use += bytes;
  runtime.device_memory[reinterpret_cast<uintptr_t>(*address)] = {
      bytes, current};
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  if (const cudaError_t error = enter()) {
    return error;
  }
  if (address == nullptr) {
    return cudaSuccess;
  }
  for (int device = 0; device < kDevices; ++device) {
    wait_for_device(device);
  }
  std::lock_guard<std::mutex> guard(runtime.mutex);
  auto found = runtime.device_memory.find(reinterpret_cast<uintptr_t>(address));
  if (found == runtime.device_memory.end()) {
    return fails(cudaErrorInvalidValue);
  }
  munmap(address, found->second.first);
  runtime.devices[found->second.second].in_use -= found->second.first;
  runtime.device_memory.erase(found);
  return cudaSuccess;
}

cudaError_t
cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t stream) {
  if (const cudaError_t error = enter()) {
    return error;
  }
  enqueue(stream_of(stream), [=] { std::memset(address, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaMemset(void* address, int value, size_t bytes) {
  return cudaMemsetAsync(address, value, bytes, nullptr);
}

cudaError_t cudaMemcpyAsync(
    void* to,
    const void* from,
    size_t bytes,
    cudaMemcpyKind,
    cudaStream_t stream) {
  return copy(to, from, bytes, stream, false);
}

cudaError_t
cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return copy(to, from, bytes, nullptr, true);
}

cudaError_t cudaMemcpyPeerAsync(
    void* to,
    int,
    const void* from,
    int,
    size_t bytes,
    cudaStream_t stream) {
  return copy(to, from, bytes, stream, false);
}

cudaError_t cudaPointerGetAttributes(
    cudaPointerAttributes* attributes,
    const void* address) {
  if (const cudaError_t error = enter()) {
    return error;
  }
  std::lock_guard<std::mutex> guard(runtime.mutex);
  std::memset(attributes, 0, sizeof(*attributes));
  attributes->device = current;
  switch (where(reinterpret_cast<uintptr_t>(address), 1)) {
    case Where::device:
      attributes->type = cudaMemoryTypeDevice;
      attributes->devicePointer = const_cast<void*>(address);
      break;
    case Where::locked:
      attributes->type = cudaMemoryTypeHost;
      attributes->devicePointer = const_cast<void*>(address);
      attributes->hostPointer = const_cast<void*>(address);
      break;
    default:
      attributes->type = cudaMemoryTypeUnregistered;
      attributes->hostPointer = const_cast<void*>(address);
  }
  return cudaSuccess;
}

// ---- memory of the host

cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned int) {
  if (const cudaError_t error = enter()) {
    return error;
  }
  *address = mmap(
      nullptr,
      bytes,
      PROT_READ | PROT_WRITE,
      MAP_PRIVATE | MAP_ANONYMOUS,
      -1,
      0);
  if (*address == MAP_FAILED) {
    return fails(cudaErrorMemoryAllocation);
  }
  std::lock_guard<std::mutex> guard(runtime.mutex);
  if (!lock_pages(reinterpret_cast<uintptr_t>(*address), bytes, true)) {
    munmap(*address, bytes);
    return fails(cudaErrorMemoryAllocation);
  }
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* address) {
  if (const cudaError_t error = enter()) {
    return error;
  }
  for (int device = 0; device < kDevices; ++device) {
    wait_for_device(device);
  }
  std::lock_guard<std::mutex> guard(runtime.mutex);
  auto found = runtime.host.find(reinterpret_cast<uintptr_t>(address));
  if (found == runtime.host.end() || !found->second.allocated) {
    return fails(cudaErrorInvalidValue);
  }
  munmap(address, found->second.bytes);
  unlock_pages(found);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned int) {
  if (const cudaError_t error = enter()) {
    return error;
  }
  const auto begin = reinterpret_cast<uintptr_t>(address);
  if (bytes == 0 || !is_mapped(begin, begin + bytes)) {
    return fails(cudaErrorInvalidValue);
  }
  std::lock_guard<std::mutex> guard(runtime.mutex);
  if (overlaps(begin, begin + bytes)) {
    return fails(cudaErrorHostMemoryAlreadyRegistered);
  }
  return lock_pages(begin, bytes, false) ? cudaSuccess
                                         : fails(cudaErrorMemoryAllocation);
}

cudaError_t cudaHostUnregister(void* address) {
  if (const cudaError_t error = enter()) {
    return error;
  }
  std::lock_guard<std::mutex> guard(runtime.mutex);
  auto found = runtime.host.find(reinterpret_cast<uintptr_t>(address));
  if (found == runtime.host.end() || found->second.allocated) {
    return fails(cudaErrorHostMemoryNotRegistered);
  }
  unlock_pages(found);
  return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned int) {
  *device = host;
  return cudaSuccess;
}

// ---- streams and events

cudaError_t
cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int, int priority) {
  if (const cudaError_t error = enter()) {
    return error;
  }
  *stream = new CUstream_st;
  (*stream)->device = current;
  (*stream)->priority = priority;
  std::lock_guard<std::mutex> guard(runtime.mutex);
  streams()[*stream] = current;
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}

// Its thread goes on waiting for work until the process ends.
cudaError_t cudaStreamDestroy(cudaStream_t) {
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (const cudaError_t error = enter()) {
    return error;
  }
  std::lock_guard<std::mutex> guard(runtime.mutex);
  return idle(*stream_of(stream)) ? cudaSuccess : fails(cudaErrorNotReady);
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  if (const cudaError_t error = enter()) {
    return error;
  }
  CUstream_st* stream = stream_of(handle);
  std::unique_lock<std::mutex> lock(runtime.mutex);
  runtime.progress.wait(lock, [&] { return idle(*stream); });
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(
    cudaStream_t,
    cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}

#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t,
    cudaStreamCaptureStatus* status,
    unsigned long long* id,
    cudaGraph_t*,
    const cudaGraphNode_t**,
    const cudaGraphEdgeData**,
    size_t*) {
#else
#undef cudaStreamGetCaptureInfo
#undef cudaStreamGetCaptureInfo_v2
cudaError_t cudaStreamGetCaptureInfo_v2(
    cudaStream_t,
    cudaStreamCaptureStatus* status,
    unsigned long long* id,
    cudaGraph_t*,
    const cudaGraphNode_t**,
    size_t*) {
#endif
  *status = cudaStreamCaptureStatusNone;
  if (id != nullptr) {
    *id = 0;
  }
  return cudaSuccess;
}

cudaError_t
cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  if (const cudaError_t error = enter()) {
    return error;
  }
  enqueue(stream_of(stream), [=] { function(argument); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  if (const cudaError_t error = enter()) {
    return error;
  }
  *event = new CUevent_st;
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, 0);
}

// Kept: a stream may still have to mark it.
cudaError_t cudaEventDestroy(cudaEvent_t) {
  return cudaSuccess;
}

cudaError_t
cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int) {
  if (const cudaError_t error = enter()) {
    return error;
  }
  uint64_t version;
  {
    std::lock_guard<std::mutex> guard(runtime.mutex);
    version = ++event->recorded;
  }
  enqueue(stream_of(stream), [=] {
    std::lock_guard<std::mutex> guard(runtime.mutex);
    event->done = std::max(event->done, version);
    event->when = std::chrono::steady_clock::now();
    runtime.progress.notify_all();
  });
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (const cudaError_t error = enter()) {
    return error;
  }
  std::lock_guard<std::mutex> guard(runtime.mutex);
  return event->done >= event->recorded ? cudaSuccess
                                        : fails(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (const cudaError_t error = enter()) {
    return error;
  }
  std::unique_lock<std::mutex> lock(runtime.mutex);
  runtime.progress.wait(lock, [event, version = event->recorded] {
    return event->done >= version;
  });
  return cudaSuccess;
}

cudaError_t
cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  std::lock_guard<std::mutex> guard(runtime.mutex);
  *milliseconds =
      std::chrono::duration<float, std::milli>(to->when - from->when).count();
  return cudaSuccess;
}

cudaError_t
cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  if (const cudaError_t error = enter()) {
    return error;
  }
  uint64_t version;
  {
    std::lock_guard<std::mutex> guard(runtime.mutex);
    version = event->recorded;
  }
  enqueue(stream_of(stream), [=] {
    std::unique_lock<std::mutex> lock(runtime.mutex);
    runtime.progress.wait(lock, [=] { return event->done >= version; });
  });
  return cudaSuccess;
}

// ---- kernels

cudaError_t
cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return enter();
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof(*attributes));
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks,
    const void*,
    int,
    size_t,
    unsigned int) {
  *blocks = 1;
  return cudaSuccess;
}

// ---- the driver

#if CUDART_VERSION < 13000
cudaError_t cudaGetDriverEntryPoint(
    const char* name,
    void** function,
    unsigned long long,
    cudaDriverEntryPointQueryResult* found) {
  if (found != nullptr) {
    *found = cudaDriverEntryPointSuccess;
  }
  return entry_point(name, function);
}
#endif

#if CUDART_VERSION >= 12050
cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name,
    void** function,
    unsigned int,
    unsigned long long,
    cudaDriverEntryPointQueryResult* found) {
  if (found != nullptr) {
    *found = cudaDriverEntryPointSuccess;
  }
  return entry_point(name, function);
}
#endif

CUresult
cuDevicePrimaryCtxGetState(CUdevice device, unsigned int* flags, int* active) {
  *flags = 0;
  *active = 0;
  if (runtime.pid == getpid()) {
    std::lock_guard<std::mutex> guard(runtime.mutex);
    *active = runtime.devices[device].context;
  }
  return CUDA_SUCCESS;
}

// libcaffe2_nvrtc.so wants these to be there when it is loaded.
#define TORCHPIN_UNSUPPORTED(name)                  \
  CUresult name##_unsupported(void) __asm__(#name); \
  CUresult name##_unsupported(void) {               \
    return CUDA_ERROR_NOT_SUPPORTED;                \
  }
TORCHPIN_UNSUPPORTED(cuCtxGetCurrent)
TORCHPIN_UNSUPPORTED(cuCtxSetCurrent)
TORCHPIN_UNSUPPORTED(cuDeviceGet)
TORCHPIN_UNSUPPORTED(cuDeviceGetAttribute)
TORCHPIN_UNSUPPORTED(cuDevicePrimaryCtxRetain)
TORCHPIN_UNSUPPORTED(cuFuncGetAttribute)
TORCHPIN_UNSUPPORTED(cuFuncSetAttribute)
TORCHPIN_UNSUPPORTED(cuFuncSetCacheConfig)
TORCHPIN_UNSUPPORTED(cuGetErrorString)
TORCHPIN_UNSUPPORTED(cuLaunchCooperativeKernel)
TORCHPIN_UNSUPPORTED(cuLaunchKernel)
TORCHPIN_UNSUPPORTED(cuLinkAddData_v2)
TORCHPIN_UNSUPPORTED(cuLinkComplete)
TORCHPIN_UNSUPPORTED(cuLinkCreate_v2)
TORCHPIN_UNSUPPORTED(cuModuleGetFunction)
TORCHPIN_UNSUPPORTED(cuModuleLoad)
TORCHPIN_UNSUPPORTED(cuModuleLoadData)
TORCHPIN_UNSUPPORTED(cuModuleLoadDataEx)
TORCHPIN_UNSUPPORTED(cuModuleUnload)
TORCHPIN_UNSUPPORTED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
TORCHPIN_UNSUPPORTED(cuPointerGetAttribute)
TORCHPIN_UNSUPPORTED(cuTensorMapEncodeTiled)

// ---- what tests tell it and ask it

void cudart_on_cpu_set_delay(double seconds) {
  std::lock_guard<std::mutex> guard(runtime.mutex);
  runtime.delay = seconds;
}

void cudart_on_cpu_hold(int held) {
  std::lock_guard<std::mutex> guard(runtime.mutex);
  runtime.held = held != 0;
  runtime.progress.notify_all();
}

void cudart_on_cpu_set_locked_limit(int64_t bytes) {
  std::lock_guard<std::mutex> guard(runtime.mutex);
  runtime.locked_limit = bytes;
}

int64_t cudart_on_cpu_locked_bytes(void) {
  std::lock_guard<std::mutex> guard(runtime.mutex);
  return runtime.locked_bytes;
}

uint64_t cudart_on_cpu_lock_calls(void) {
  std::lock_guard<std::mutex> guard(runtime.mutex);
  return runtime.lock_calls;
}

int cudart_on_cpu_has_context(int device) {
  std::lock_guard<std::mutex> guard(runtime.mutex);
  return runtime.devices[device].context;
}

} // extern "C"
