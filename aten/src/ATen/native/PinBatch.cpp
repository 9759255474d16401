#include <ATen/native/PinBatch.h>

#include <ATen/Base.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/HostMemory.h>
#include <ATen/HostMemoryHooks.h>
#include <ATen/PinTarget.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/SizeClass.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <system_error>
#include <thread>

namespace at::pin {

namespace {

// Bytes [begin, end) of a storage.
struct Extent {
  size_t begin = 0;
  size_t end = 0;

  size_t size() const {
    return end - begin;
  }
};

// Intervals of one storage that go into the pinned one begin at such an
// address, so that no two of them share a cache line.
constexpr size_t kIntervalAlignment = 64;
// The widest dtype. An interval keeps its offset modulo this, because storage
// offsets count elements.
constexpr size_t kWidestElement = 16;
// A span that is at least this many times larger than its elements is copied
// element by element: the rest of it belongs to somebody else.
constexpr size_t kSparseSpan = 4;

// Blocks of leaves up to this size are taken from the host allocator together,
// so many at a time. What would have to be page-locked for them is not much.
constexpr size_t kSmallLeaf = size_t{4} << 10;
constexpr size_t kSmallLeavesAtOnce = 64;

// Worth the operator that copies tensors.
constexpr size_t kOperatorBytes = size_t{1} << 20;

// Each thread must have this much to copy to be worth being started.
constexpr size_t kBytesPerThread = size_t{2} << 20;
constexpr int kMostThreads = 16;
std::atomic<int> threadsOfCopies{1};

// The device that selectPinDevice() could not select yet.
thread_local c10::DeviceIndex wantedDevice = -1;

std::string messageOf(const std::exception& error) {
  const auto* c10Error = dynamic_cast<const c10::Error*>(&error);
  std::string text =
      c10Error ? c10Error->what_without_backtrace() : error.what();
  while (!text.empty() && text.back() == '\n') {
    text.pop_back();
  }
  return text;
}

bool isNested(const c10::TensorImpl& impl) {
  return impl.key_set().has_any(
      c10::DispatchKeySet(
          {c10::DispatchKey::NestedTensor,
           c10::DispatchKey::AutogradNestedTensor}));
}

Extent extentOf(const c10::TensorImpl& impl) {
  if (isNested(impl)) {
    return {0, impl.unsafe_storage().nbytes()};
  }
  const auto sizes = impl.sizes();
  const auto strides = impl.strides();
  const size_t item = impl.itemsize();
  const size_t begin = static_cast<size_t>(impl.storage_offset()) * item;
  size_t last = 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) {
      return {begin, begin};
    }
    last += static_cast<size_t>(sizes[d] - 1) * static_cast<size_t>(strides[d]);
  }
  return {begin, begin + (last + 1) * item};
}

// True where copying the whole span would mostly copy what is not the tensor's.
bool isSparseSpan(const c10::TensorImpl& impl, const Extent& extent) {
  if (extent.size() / kSparseSpan <
          static_cast<size_t>(impl.numel()) * impl.itemsize() ||
      extent.size() == 0 || isNested(impl) ||
      impl.key_set().has(c10::DispatchKey::Quantized)) {
    return false;
  }
  const auto sizes = impl.sizes();
  const auto strides = impl.strides();
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (strides[d] == 0 && sizes[d] > 1) {
      // copy_ refuses to write one element twice.
      return false;
    }
  }
  return true;
}

// Keys of a tensor that is its memory, sizes and strides, and nothing else.
bool isPlain(const c10::TensorImpl& impl) {
  auto keys = impl.key_set();
  c10::DispatchKeySet plain({
      c10::DispatchKey::CPU,
      c10::DispatchKey::AutogradCPU,
      c10::DispatchKey::AutocastCPU,
      c10::DispatchKey::ADInplaceOrView,
      c10::DispatchKey::BackendSelect,
  });
  return (keys.raw_repr() & ~plain.raw_repr()) == 0;
}

at::Tensor plainTensor(
    c10::Storage storage,
    caffe2::TypeMeta dtype,
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides,
    int64_t offset) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

// The tensor `source` over other memory: everything it is except its data.
at::Tensor over(
    const c10::TensorImpl& source,
    c10::Storage storage,
    size_t offsetInBytes) {
  if (isPlain(source)) {
    auto result = plainTensor(
        std::move(storage),
        source.dtype(),
        source.sizes(),
        source.strides(),
        static_cast<int64_t>(offsetInBytes / source.itemsize()));
    if (source.requires_grad()) {
      result.unsafeGetTensorImpl()->set_requires_grad(true);
    }
    return result;
  }
  auto copy = source.shallow_copy_and_detach(
      /*version_counter=*/c10::VariableVersion(0),
      /*allow_tensor_metadata_change=*/true);
  copy->set_storage_keep_dtype(std::move(storage));
  // A nested tensor covers its storage and has no offset of its own.
  if (!isNested(source)) {
    copy->set_storage_offset(
        static_cast<int64_t>(offsetInBytes / source.itemsize()));
  }
  at::Tensor result(std::move(copy));
  if (source.requires_grad()) {
    result.unsafeGetTensorImpl()->set_requires_grad(true);
  }
  return result;
}

class BatchPinner {
 public:
  BatchPinner(
      c10::SmallVectorImpl<Leaf>& leaves,
      std::vector<c10::Storage>* retired,
      Refusals& refusals)
      : leaves_(leaves), retired_(retired), refusals_(refusals) {}

  void run() {
    target_ = pinTarget(Initialize::Yes);
    if (!target_.ready()) {
      for (auto& leaf : leaves_) {
        refuse(leaf, extentOf(*leaf.source).size(), target_.reason);
      }
      return;
    }
    if (wantedDevice >= 0) {
      selectWantedDevice();
    }
    if (retired_ != nullptr) {
      retired_->reserve(retired_->size() + leaves_.size());
    }
    if (leaves_.size() > 1 && !target_.ownKernels) {
      auto* cache = dynamic_cast<HostMemoryCache*>(target_.allocator);
      deleter_ = target_.allocator->raw_deleter();
      if (cache != nullptr && cache->abi_version() >= 2 &&
          deleter_ != nullptr) {
        cache_ = cache;
      }
    }
    for (auto& leaf : leaves_) {
      const auto& storage = leaf.source->unsafe_storage();
      // A storage with one owner cannot have a second view in this batch.
      if (storage.use_count() > 1) {
        auto& members = groups_[storage.unsafeGetStorageImpl()];
        members.push_back(&leaf);
        if (members.size() == 1) {
          order_.push_back(storage.unsafeGetStorageImpl());
        }
      } else {
        pinAlone(leaf);
      }
    }
    for (auto* storage : order_) {
      const auto& members = groups_[storage];
      if (members.size() == 1) {
        pinAlone(*members.front());
      } else {
        pinGroup(members);
      }
    }
    pinSmall();
  }

 private:
  // For what only operators can say.
  static at::Tensor tensorOf(const Leaf& leaf) {
    return at::Tensor(
        c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::
            reclaim_copy(leaf.source));
  }

  bool isPinnedAlready(const Leaf& leaf) const {
    if (target_.ownKernels) {
      return tensorOf(leaf).is_pinned();
    }
    const auto& storage = *leaf.source->unsafe_storage().unsafeGetStorageImpl();
    const Extent extent = extentOf(*leaf.source);
    return isPinned(
        storage,
        static_cast<const char*>(storage.data()) + extent.begin,
        extent.size());
  }

  void refuse(Leaf& leaf, size_t asked, const std::string& reason) {
    leaf.outcome = Outcome::Refused;
    leaf.pinned = at::Tensor();
    if (refusals_.leaves == 0) {
      refusals_.asked = asked;
      refusals_.reason = reason;
    }
    ++refusals_.leaves;
    refusals_.bytes += extentOf(*leaf.source).size();
  }

  c10::Storage storageOf(size_t bytes, c10::DataPtr data) const {
    return c10::Storage(
        c10::make_intrusive<c10::StorageImpl>(
            c10::StorageImpl::use_byte_size_t(),
            bytes,
            std::move(data),
            target_.allocator,
            /*resizable=*/false));
  }

  c10::Storage allocateOnce(size_t bytes) const {
    // One byte stands for none: memory that is nowhere is never pinned.
    const size_t wanted = std::max<size_t>(bytes, 1);
    if (target_.ownKernels) {
      // The backend pins by kernels of its own: what they make of a plain
      // vector of bytes is the memory.
      auto pinned = at::empty(
                        {static_cast<int64_t>(wanted)},
                        at::TensorOptions().dtype(at::kByte).device(at::kCPU))
                        .pin_memory();
      return pinned.storage();
    }
    auto data = target_.allocator->allocate(wanted);
    TORCH_CHECK(
        data.get() != nullptr,
        "the host allocator returned no memory for ",
        wanted,
        " bytes");
    return storageOf(bytes, std::move(data));
  }

  // Throws what the second try throws.
  c10::Storage allocate(size_t bytes) {
    try {
      return allocateOnce(bytes);
    } catch (const std::exception&) {
      // Once in a batch: emptying the cache for each of a thousand leaves
      // would cost more than it can give.
      if (emptied_) {
        throw;
      }
    }
    emptied_ = true;
    emptyHostMemoryCache();
    return allocateOnce(bytes);
  }

  static void copy(
      const Leaf& leaf,
      const Extent& extent,
      const c10::Storage& to,
      int64_t at) {
    const auto& from = leaf.source->unsafe_storage();
    copyBytes(
        static_cast<char*>(to.mutable_data()) + at,
        static_cast<const char*>(from.data()) + extent.begin,
        extent.size());
  }

  void pinAlone(Leaf& leaf) {
    const Extent extent = extentOf(*leaf.source);
    try {
      if (isPinnedAlready(leaf)) {
        leaf.outcome = Outcome::AsItIs;
        return;
      }
      check(leaf, extent);
      if (cache_ != nullptr && extent.size() <= kSmallLeaf) {
        small_.push_back({&leaf, extent});
        if (small_.size() == kSmallLeavesAtOnce) {
          pinSmall();
        }
        return;
      }
      fill(leaf, extent, allocate(extent.size()));
    } catch (const std::exception& error) {
      refuse(leaf, extent.size(), messageOf(error));
    }
  }

  // Makes `storage`, which is of this size, the leaf's.
  void fill(Leaf& leaf, const Extent& extent, c10::Storage storage) {
    const bool sparse = isSparseSpan(*leaf.source, extent);
    if (extent.size() > 0 && !sparse) {
      copy(leaf, extent, storage, 0);
    }
    leaf.pinned = over(*leaf.source, std::move(storage), 0);
    if (sparse) {
      copyElements(leaf);
    }
    finish(leaf);
  }

  // Those that pinAlone() put off, in blocks that are taken in one go. Where
  // there is no block each asks for one of its own, and is refused alone.
  void pinSmall() {
    std::array<size_t, kSmallLeavesAtOnce> sizes;
    std::array<void*, kSmallLeavesAtOnce> blocks;
    for (size_t i = 0; i < small_.size(); ++i) {
      sizes[i] = std::max<size_t>(small_[i].extent.size(), 1);
    }
    const size_t made =
        small_.empty()
            ? 0
            : cache_->allocate_many(sizes.data(), small_.size(), blocks.data());
    for (size_t i = 0; i < small_.size(); ++i) {
      const auto [leaf, extent] = small_[i];
      c10::DataPtr data;
      if (i < made) {
        data = {blocks[i], blocks[i], deleter_, c10::DeviceType::CPU};
      }
      try {
        fill(
            *leaf,
            extent,
            i < made ? storageOf(extent.size(), std::move(data))
                     : allocate(extent.size()));
      } catch (const std::exception& error) {
        refuse(*leaf, extent.size(), messageOf(error));
      }
    }
    small_.clear();
  }

  // Leaves of one storage: what they cover together is copied once, each
  // stretch at its own place in the new storage.
  void pinGroup(const std::vector<Leaf*>& members) {
    size_t total = 0;
    try {
      if (isPinnedAlready(*members.front())) {
        for (auto* leaf : members) {
          leaf->outcome = Outcome::AsItIs;
        }
        return;
      }
      struct Stretch {
        Extent from;
        size_t to;
        std::vector<size_t> members;
      };
      std::vector<Extent> extents;
      std::vector<size_t> byBegin;
      for (const auto* leaf : members) {
        byBegin.push_back(extents.size());
        extents.push_back(extentOf(*leaf->source));
        check(*leaf, extents.back());
      }
      std::sort(byBegin.begin(), byBegin.end(), [&](size_t a, size_t b) {
        return extents[a].begin < extents[b].begin;
      });
      std::vector<Stretch> stretches;
      for (const auto i : byBegin) {
        // Stretches that touch become one, so that narrow() of one tensor and
        // the next part of it stay neighbours; and those whose gap is less than
        // what aligning the second may take.
        if (stretches.empty() || extents[i].begin > stretches.back().from.end +
                                                        kIntervalAlignment +
                                                        kWidestElement) {
          stretches.push_back({extents[i], 0, {}});
        }
        auto& stretch = stretches.back();
        stretch.from.end = std::max(stretch.from.end, extents[i].end);
        stretch.members.push_back(i);
      }
      for (auto& stretch : stretches) {
        total = (total + kIntervalAlignment - 1) / kIntervalAlignment *
                    kIntervalAlignment +
                stretch.from.begin % kWidestElement;
        stretch.to = total;
        total += stretch.from.size();
      }
      const auto storage = allocate(total);
      for (const auto& stretch : stretches) {
        const auto& first = *members[stretch.members.front()];
        const bool sparse = std::all_of(
            stretch.members.begin(), stretch.members.end(), [&](size_t i) {
              return isSparseSpan(*members[i]->source, extents[i]);
            });
        if (stretch.from.size() > 0 && !sparse) {
          copy(first, stretch.from, storage, static_cast<int64_t>(stretch.to));
        }
        for (const auto i : stretch.members) {
          auto& leaf = *members[i];
          leaf.pinned = over(
              *leaf.source,
              storage,
              stretch.to + extents[i].begin - stretch.from.begin);
          if (sparse) {
            copyElements(leaf);
          }
        }
      }
      for (auto* leaf : members) {
        finish(*leaf);
      }
    } catch (const std::exception& error) {
      for (auto* leaf : members) {
        refuse(*leaf, total, messageOf(error));
      }
    }
  }

  static void check(const Leaf& leaf, const Extent& extent) {
    const auto& storage = leaf.source->unsafe_storage();
    TORCH_CHECK(
        extent.end <= storage.nbytes() || extent.size() == 0,
        "the tensor ends at byte ",
        extent.end,
        " of a storage of ",
        storage.nbytes(),
        " bytes");
  }

  static void copyElements(Leaf& leaf) {
    // The bits say how to read the elements, not what they are: without them,
    // on both sides, nothing is computed.
    const auto bare = [](c10::TensorImpl& impl) {
      auto copy = impl.shallow_copy_and_detach(
          impl.is_inference()
              ? c10::VariableVersion(c10::VariableVersion::DISABLED)
              : c10::VariableVersion(0),
          /*allow_tensor_metadata_change=*/true);
      at::Tensor result(std::move(copy));
      result._set_conj(false);
      result._set_neg(false);
      return result;
    };
    bare(*leaf.pinned.unsafeGetTensorImpl()).copy_(bare(*leaf.source));
  }

  void finish(Leaf& leaf) {
    leaf.outcome = Outcome::Pinned;
    if (retired_ != nullptr) {
      retired_->push_back(leaf.source->unsafe_storage());
    }
  }

  void selectWantedDevice() {
    const c10::impl::VirtualGuardImpl guard(*target_.accelerator);
    const auto& hooks =
        at::globalContext().getAcceleratorHooksInterface(target_.accelerator);
    const auto index = wantedDevice;
    wantedDevice = -1;
    for (c10::DeviceIndex i = 0; i < guard.deviceCount(); ++i) {
      // Pinned memory is good for all devices and can be had where something
      // runs already. A backend that could not tell never gets here.
      if (hooks.hasPrimaryContext(i)) {
        return;
      }
    }
    guard.setDevice(c10::Device(*target_.accelerator, index));
  }

  c10::SmallVectorImpl<Leaf>& leaves_;
  std::vector<c10::Storage>* retired_;
  Refusals& refusals_;
  PinTarget target_;
  // Of the host allocator, if it hands out blocks together.
  HostMemoryCache* cache_ = nullptr;
  c10::DeleterFnPtr deleter_ = nullptr;
  struct SmallLeaf {
    Leaf* leaf;
    Extent extent;
  };
  c10::SmallVector<SmallLeaf, kSmallLeavesAtOnce> small_;
  bool emptied_ = false;
  ska::flat_hash_map<c10::StorageImpl*, std::vector<Leaf*>> groups_;
  std::vector<c10::StorageImpl*> order_;
};

} // namespace

Treatment treatmentOf(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return Treatment::Pass;
  }
  auto* impl = tensor.unsafeGetTensorImpl();
  auto keys = impl->key_set();
  // Keys of a tensor whose memory says everything.
  c10::DispatchKeySet ordinary({
      c10::DispatchKey::CPU,
      c10::DispatchKey::AutogradCPU,
      c10::DispatchKey::AutocastCPU,
      c10::DispatchKey::ADInplaceOrView,
      c10::DispatchKey::BackendSelect,
      c10::DispatchKey::QuantizedCPU,
      c10::DispatchKey::NestedTensorCPU,
      c10::DispatchKey::AutogradNestedTensor,
      c10::DispatchKey::Conjugate,
      c10::DispatchKey::Negative,
#if TORCHPIN_BASE_HAS_NAMED_TENSORS
      c10::DispatchKey::Named,
#endif
  });
  // By raw bits: operator- of key sets leaves the backend's bit in.
  if ((keys.raw_repr() & ~ordinary.raw_repr()) == 0 && impl->has_storage() &&
      // Made anew they are what the current mode makes them; copied they would
      // want a version counter.
      (!impl->is_inference() || isPlain(*impl)) &&
      !impl->has_symbolic_sizes_strides()) {
    if (!impl->requires_grad() || tensor.is_leaf()) {
      return Treatment::Bytes;
    }
    return Treatment::Special;
  }
  if (impl->device_type() != c10::kCPU) {
    return Treatment::Pass;
  }
  return Treatment::Special;
}

Refusals pinLeaves(
    c10::SmallVectorImpl<Leaf>& leaves,
    std::vector<c10::Storage>* retired) {
  Refusals refusals;
  if (leaves.empty()) {
    return refusals;
  }
  {
    RECORD_FUNCTION(
        "pin_memory: allocate and copy", c10::ArrayRef<const c10::IValue>{});
    BatchPinner(leaves, retired, refusals).run();
  }
  if (refusals.leaves > 0) {
    refusals.held = hostMemoryHeld();
  }
  return refusals;
}

void setCopyThreads(int threads) {
  TORCH_CHECK_VALUE(
      threads >= 1 && threads <= kMostThreads,
      "the number of copy threads has to be from 1 to ",
      kMostThreads,
      ", got ",
      threads);
  threadsOfCopies.store(threads, std::memory_order_relaxed);
}

int copyThreads() noexcept {
  return threadsOfCopies.load(std::memory_order_relaxed);
}

namespace {

// The operator that copies tensors, in its fastest type: on some processors a
// few per cent faster than memcpy() (measured: 3 to 7 on one with AVX-512), and
// it takes the threads of the calling thread's operators. In the pin thread
// that is one, so that the training loop keeps its cores.
void copyLarge(char* to, const char* from, size_t bytes) noexcept {
  using Word = int64_t;
  const auto isAligned = [](const char* at) {
    return reinterpret_cast<uintptr_t>(at) % alignof(Word) == 0;
  };
  size_t done = 0;
  if (bytes >= kOperatorBytes && isAligned(to) && isAligned(from)) {
    const size_t whole = bytes - bytes % sizeof(Word);
    const auto words = [whole](void* data) {
      return plainTensor(
          c10::Storage(
              c10::Storage::use_byte_size_t(),
              whole,
              c10::DataPtr(data, c10::Device(c10::kCPU))),
          caffe2::TypeMeta::Make<Word>(),
          {static_cast<int64_t>(whole / sizeof(Word))},
          {1},
          0);
    };
    try {
      auto target = words(to);
      // Past modes and everything else that is meant for the user's tensors.
      at::_ops::copy_::redispatch(
          c10::DispatchKeySet(c10::DispatchKey::CPU),
          target,
          words(const_cast<char*>(from)),
          /*non_blocking=*/false);
      done = whole;
    } catch (const std::exception&) {
      // Without memory for a tensor it is copied as bytes.
    }
  }
  std::memcpy(to + done, from + done, bytes - done);
}

} // namespace

void copyBytes(void* to, const void* from, size_t bytes) noexcept {
  const auto parts = std::min(
      static_cast<size_t>(copyThreads()),
      std::max<size_t>(bytes / kBytesPerThread, 1));
  if (parts < 2) {
    copyLarge(static_cast<char*>(to), static_cast<const char*>(from), bytes);
    return;
  }
  // Whole pages, so that no two threads fault in the same one.
  const size_t part = c10::size_class::round_up_to_page(bytes / parts);
  const auto copyPart = [=](size_t begin) noexcept {
    std::memcpy(
        static_cast<char*>(to) + begin,
        static_cast<const char*>(from) + begin,
        std::min(part, bytes - begin));
  };
  std::array<std::thread, kMostThreads> helpers;
  size_t begin = part;
  try {
    for (size_t i = 0; begin < bytes; ++i, begin += part) {
      helpers[i] = std::thread(copyPart, begin);
    }
  } catch (const std::system_error&) {
    // No more threads to be had: the rest is copied here.
  }
  for (copyPart(0); begin < bytes; begin += part) {
    copyPart(begin);
  }
  for (auto& helper : helpers) {
    if (helper.joinable()) {
      helper.join();
    }
  }
}

void selectPinDevice(c10::DeviceIndex index) {
  wantedDevice = -1;
  const auto accelerator = at::getAccelerator(/*checked=*/false);
  if (index < 0 || !accelerator.has_value()) {
    return;
  }
  const c10::impl::VirtualGuardImpl guard(*accelerator);
  TORCH_CHECK(
      index < guard.deviceCount(),
      "cannot select device ",
      static_cast<int>(index),
      ": there are ",
      static_cast<int>(guard.deviceCount()),
      " devices of type ",
      *accelerator);
  bool started = true;
  try {
    started = at::globalContext()
                  .getAcceleratorHooksInterface(*accelerator)
                  .hasPrimaryContext(index);
  } catch (const std::exception&) {
    // A backend that cannot tell gets the plain call.
  }
  const c10::Device device(*accelerator, index);
  if (guard.getDevice() == device) {
    return;
  }
  if (started) {
    guard.setDevice(device);
    return;
  }
  // CUDA only notes the choice then; others select at once.
  guard.uncheckedSetDevice(device);
  wantedDevice = index;
}

} // namespace at::pin
