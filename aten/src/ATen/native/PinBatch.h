#pragma once

// Pins all tensors of one batch in one go.
//
// The caller collects the leaves, calls pinLeaves() once without the GIL, and
// rebuilds the batch around what came out. No Python in here, no lock, and no
// lazily made static object: a process may be forked at any moment of it.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace at::pin {

enum class Outcome : uint8_t {
  Unvisited,
  Pinned,  // `pinned` holds the copy
  AsItIs,  // pinned already, or of no concern
  Refused, // the accelerator would not; the source is what is delivered
};

struct Leaf {
  explicit Leaf(c10::TensorImpl* source) : source(source) {}

  // The caller keeps it alive. Not counted here: on newer releases (2.11,
  // not 2.9) a second owner of a tensor that Python has seen costs a look at
  // the interpreter, and the caller owns the Python object anyway.
  c10::TensorImpl* source;
  at::Tensor pinned;
  Outcome outcome = Outcome::Unvisited;
};

// What went wrong for the leaves that were refused, taken together.
struct Refusals {
  size_t leaves = 0;
  size_t bytes = 0;
  // Of the first refusal: bytes asked for, and what the accelerator said.
  size_t asked = 0;
  std::string reason;
  // Bytes that the host allocator holds, where it can be asked.
  std::optional<size_t> held;
};

// How pinLeaves() has to treat a tensor.
enum class Treatment : uint8_t {
  // Memory in a storage on the CPU, which can be copied as bytes.
  Bytes,
  // Nothing to pin: another device, or no data at all (meta).
  Pass,
  // Only its own operators know: sparse, subclasses with a dispatch of their
  // own, opaque layouts, tensors with a history of gradients.
  Special,
};

Treatment treatmentOf(const at::Tensor& tensor);

// Gives every leaf an outcome. All leaves must be Treatment::Bytes.
//
// Tensors keep sizes, strides, dtype, conjugate and negative bits, names,
// quantizer and requires_grad. Leaves that share a storage share one pinned
// storage, which holds what they cover and nothing else of the source.
//
// The storages that were copied from are added to `retired`, if given: whoever
// drops that, without the GIL, is the one who unmaps them.
//
// Never throws for a leaf that cannot be pinned; what the initialisation of
// the accelerator throws comes through.
Refusals pinLeaves(
    c10::SmallVectorImpl<Leaf>& leaves,
    std::vector<c10::Storage>* retired);

// How many threads copy a large tensor of a batch in the pin thread; 1 unless
// set, for the reason in the documentation of torchpin.set_pin_threads().
void setCopyThreads(int threads);
int copyThreads() noexcept;

// As memcpy(); by copyThreads() threads, where there is enough to copy. These
// live for this call only: a pool would have to survive fork(), and OpenMP's
// keep their cores busy for a while after they have finished.
void copyBytes(void* to, const void* from, size_t bytes) noexcept;

// Makes `index` the calling thread's device of the current accelerator, without
// starting a device that was not started: where no device has a context yet,
// the choice takes effect with the first pinned byte. Nothing to do for a
// negative index or without an accelerator.
void selectPinDevice(c10::DeviceIndex index);

} // namespace at::pin
