// The fake driver under the reference accelerator: two devices, their memory,
// page-locked host memory, streams, events and a copy engine for each device.
// It knows nothing of PyTorch; the backend is its only caller.
//
// Note [What the driver keeps apart]
// Device memory has two addresses. The one that callers see is mapped without
// any access, so that a load or store from the CPU faults. The other, given by
// kernelAddress(), is a second mapping of the same pages; only the copy engine
// and kernels that run in stream order may use it.
//
// Note [When a copy reads its source]
// From locked host memory and from device memory the engine reads when the
// copy's turn comes, never earlier: nothing is kept of what the source held at
// the time of the call. From pageable host memory the source is staged before
// the call returns.
//
// Note [Exit]
// At exit the engines finish the op they are at and stop; what has not started
// is dropped. A thread that waits then is left waiting until the process is
// gone: to return would take a thread of Python into an interpreter that is
// gone already.
//
// Note [Fork]
// After a fork the child has no engine threads, and a mutex that another
// thread of the parent held at that moment stays locked in the child for ever.
// So in a child of an initialised parent no function here takes a lock: those
// that release something do nothing, those that ask answer "no", and the rest
// return Status::forked.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace refdev {

constexpr int kDeviceCount = 2;
// The default stream of a device and those that newStream() hands out in turn.
constexpr int kStreamCount = 33;

enum class Status {
  ok,
  outOfMemory, // of the device
  outOfHostMemory,
  lockLimit,         // locking more host memory would pass the limit
  alreadyRegistered, // a page of the range is locked already
  notRegistered,
  invalidValue,
  forked, // a child of an initialised process
  held,   // the caller holds the copies that it would wait for
  shutDown,
};
const char* describe(Status status) noexcept;

// The process. init() may be called again; nothing else but the settings and
// the questions need not be preceded by it.
Status init() noexcept;
bool initialized() noexcept;
bool inBadFork() noexcept;
// Stops the engines; copies that have not started are dropped. Runs at exit.
void shutDown() noexcept;

// The device of the calling thread. Selecting a device does not touch it.
int currentDevice() noexcept;
void selectDevice(int device) noexcept;
// A device gets its context when it is first touched: by an allocation, a
// copy, a kernel, an event, or by locking host memory while it is selected.
bool hasContext(int device) noexcept;

// Device memory. A freed block is used again only when the streams named have
// finished what had been enqueued at the time of the free.
Status deviceAlloc(int device, size_t bytes, void** address) noexcept;
void deviceFree(void* address, const std::vector<int>& streams) noexcept;
// -1 where no device has this address.
int deviceOf(const void* address) noexcept;
void* kernelAddress(const void* address) noexcept;
size_t deviceBytesInUse(int device) noexcept;
size_t deviceCapacity() noexcept;
// Gives the pages of free blocks back to the system.
void deviceTrim(int device) noexcept;

// Page-locked host memory. `hostRegister` locks the pages that a range which
// the driver did not allocate lies in. Ranges may share pages, which are locked
// while one of them uses them, but no bytes. Freeing and unregistering wait for
// the copies that use the memory.
Status hostAlloc(size_t bytes, void** address) noexcept;
Status hostFree(void* address) noexcept;
Status hostRegister(void* address, size_t bytes) noexcept;
Status hostUnregister(void* address) noexcept;
// Whether the driver has locked every byte of the range.
bool hostIsLocked(const void* address, size_t bytes = 1) noexcept;
// Whether a locked range begins here.
bool hostIsLockedStart(const void* address) noexcept;

// Streams are numbers within their device; 0 is the default stream.
int newStream() noexcept;

enum class Blocking { no, yes };
// `internal`: moves data for an operator that is computed on the host, which
// stands for a kernel: neither delayed, held nor counted. A copy within one
// device is a kernel, too, but counted.
enum class Traffic { user, internal };

// Source and destination are any two of device and host memory. On return
// `in_flight` says whether the engine still has to read or write host memory
// that belongs to the caller.
Status copy(
    int device,
    int stream,
    void* destination,
    const void* source,
    size_t bytes,
    Blocking blocking,
    Traffic traffic,
    bool* in_flight) noexcept;

// Runs `kernel` in stream order, perhaps before the call returns.
Status launch(int device, int stream, std::function<void()> kernel) noexcept;

bool queryStream(int device, int stream) noexcept;
Status synchronizeStream(int device, int stream) noexcept;
Status synchronizeDevice(int device) noexcept;

struct EventState;
using Event = std::shared_ptr<EventState>;
Event newEvent();
Status recordEvent(const Event& event, int device, int stream) noexcept;
// Makes a stream wait for the last record of the event.
Status waitEvent(const Event& event, int device, int stream) noexcept;
bool queryEvent(const Event& event) noexcept;
Status synchronizeEvent(const Event& event) noexcept;
// Milliseconds between two events that have happened; negative if they have
// not.
double elapsedMilliseconds(const Event& begin, const Event& end) noexcept;

// Settings for tests. Delay, bandwidth and holds are for copies from or to host
// memory or between devices.
void setCopyDelay(double seconds) noexcept;
// Bytes per second; 0: as fast as the CPU copies.
void setCopyBandwidth(double bytes_per_second) noexcept;
// Negative: no limit.
void setLockedLimit(int64_t bytes) noexcept;
// While copies are held the engine starts none. Holds of threads add up.
void holdCopies() noexcept;
void releaseCopies() noexcept;
// Breaks the staging of pageable memory, for tests of tests.
void setPageableIsAsync(bool value) noexcept;

struct Touch {
  int device;
  int64_t thread; // as gettid() and Python's threading.get_native_id()
};

struct Counters {
  uint64_t pin_calls = 0; // hostAlloc and hostRegister that succeeded
  uint64_t unpin_calls = 0;
  uint64_t pin_refusals = 0;    // because of the limit
  int64_t locked_bytes = 0;     // whole pages; not changed by a reset
  uint64_t locked_ranges = 0;   // the same
  uint64_t copies_direct = 0;   // host memory read or written in place
  uint64_t copies_staged = 0;   // through a buffer of the driver
  uint64_t copies_device = 0;   // within or between devices
  int64_t copies_in_flight = 0; // not changed by a reset
  std::vector<int> contexts;    // devices; not changed by a reset
  std::vector<Touch> touches;
};
Counters counters();
void resetCounters() noexcept;

} // namespace refdev
