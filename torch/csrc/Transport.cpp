#include <ATen/HostMemory.h>
#include <ATen/PinTarget.h>
#include <ATen/PinnedSlots.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/PinBatch.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/SharedSlots.h>
#include <c10/util/Exception.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/torchpin.h>
#include <torch/csrc/utils/pybind.h>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <vector>

// Batches of DataLoader workers in shared slots: what fills a slot in a worker,
// and what makes tensors of it in the main process. Called by
// torch/utils/data/_utils/transport.py only.
//
// Note [How a batch travels]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~
// Worker: storages that default_collate asks for are cut from the slot that the
// worker has claimed (Packer::newShared). When the batch is complete it is
// pickled once; for each tensor and array the pickler calls Packer's reduce(),
// which notes it and lets the pickler write "next object here" (NEXT_BUFFER of
// pickle protocol 5). finish() then gives everything that is not in the slot
// yet a region there, copies it without the GIL, and commits the slot.
//
// A region is what becomes one storage: the span that the tensors of one source
// storage cover, without what lies outside it. Tensors are described by region,
// offset, dtype, sizes and strides.
//
// Main: unpack() takes the slot, makes all storages and tensors without the
// GIL, and returns them in the order in which the pickle asks for them.
//
// The description is a row of 64-bit words and goes, with the pickle, behind
// the regions in the slot, or into the message if it is small. Both ends are
// the same build: it has no version.

namespace torch::pin {

namespace {

using c10::SharedSlots;
using c10::SlotClaim;
using c10::SlotHold;
using c10::SlotTicket;

// What may travel in the message itself; more would make the pipe of the queue
// the slowest part for batches of many small tensors.
constexpr size_t kInlineBytes = 2048;
// A view whose span is this many times its elements goes the stock way: the
// rest of the span is not ours to send.
constexpr uint64_t kSparseSpan = 4;

// See Packer::batches_kept_.
constexpr size_t kMaxBatchesKept = 4;

enum class Kind : int64_t { Tensor = 0, Array = 1 };

struct Message {
  SlotTicket ticket;
  uint64_t words_bytes = 0;
  uint64_t body_bytes = 0;
  // Where both begin in the slot; UINT64_MAX: behind this struct.
  uint64_t offset = UINT64_MAX;
  // Objects that the pickle holds besides tensors, arrays and plain data.
  uint32_t others = 0;
  // Tensors among those: they travel the stock way.
  uint32_t stock_tensors = 0;
};

at::Tensor tensorOver(
    c10::Storage storage,
    c10::ScalarType type,
    int64_t offset,
    at::IntArrayRef sizes,
    at::IntArrayRef strides) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage),
      c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(type));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

// ---- The worker

// Bytes [begin, end) of the storage that a tensor covers.
struct Span {
  uint64_t begin;
  uint64_t end;
};

Span spanOf(const at::Tensor& tensor) {
  const uint64_t item = tensor.dtype().itemsize();
  uint64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    last += static_cast<uint64_t>(tensor.size(d) - 1) *
            static_cast<uint64_t>(tensor.stride(d));
  }
  const uint64_t begin = static_cast<uint64_t>(tensor.storage_offset()) * item;
  return {begin, begin + (last + 1) * item};
}

// Whether a tensor is nothing but a view of bytes on the CPU, so that sizes,
// strides and dtype say everything. What is not goes by the base's reducers.
bool isPlain(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  const auto keys = impl->key_set();
  constexpr c10::DispatchKeySet ordinary({
      c10::DispatchKey::CPU,
      c10::DispatchKey::AutogradCPU,
      c10::DispatchKey::AutocastCPU,
      c10::DispatchKey::ADInplaceOrView,
      c10::DispatchKey::BackendSelect,
  });
  if (!ordinary.isSupersetOf(keys) || !impl->has_storage() ||
      impl->is_inference() || impl->requires_grad() ||
      impl->has_symbolic_sizes_strides() || impl->numel() == 0) {
    return false;
  }
  const Span span = spanOf(tensor);
  return span.end <= tensor.storage().nbytes() &&
         (span.end - span.begin) / kSparseSpan <=
             static_cast<uint64_t>(impl->numel()) * tensor.dtype().itemsize();
}

class Packer;

// Context of a storage that was cut from a slot in the worker.
struct Piece {
  std::shared_ptr<Packer> packer;
  SlotHold hold;
  uint64_t generation;
  uint64_t begin;
  uint64_t end;
};

struct Array {
  const void* data;
  uint64_t bytes;
  std::vector<int64_t> sizes;
  bool fortran;
  std::string dtype;
  py::object owner;
};

// The slot that a worker fills. Storages are asked for and dropped by whatever
// threads the data set has; everything else is for the thread that fetches.
class Packer : public std::enable_shared_from_this<Packer> {
 public:
  explicit Packer(std::shared_ptr<SharedSlots> slots)
      : slots_(std::move(slots)), pid_(getpid()) {}

  // A storage of `bytes` in the slot, as a tensor of bytes; undefined if there
  // is no room.
  at::Tensor newShared(uint64_t bytes) {
    // A forked child has a copy of the mutex in whatever state it was.
    if (bytes == 0 || getpid() != pid_) {
      return {};
    }
    std::unique_ptr<Piece> piece;
    void* data = nullptr;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      if (!claim_ && pieces_alive_ > 0) {
        ++batches_kept_;
      }
      if (batches_kept_ > kMaxBatchesKept || !claimSlot()) {
        return {};
      }
      const uint64_t mark = claim_.mark();
      data = claim_.reserve(bytes);
      SlotHold hold;
      if (data == nullptr || !slots_->retain(claim_.slot(), 1, &hold)) {
        claim_.rollback(mark);
        return {};
      }
      cuts_.push_back({mark, claim_.mark(), true});
      ++pieces_alive_;
      piece.reset(new Piece{
          shared_from_this(), hold, claim_.generation(), mark, claim_.mark()});
    }
    auto storage = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(),
        bytes,
        c10::DataPtr(
            data, piece.release(), &Packer::dropPiece, c10::Device(c10::kCPU)),
        /*allocator=*/nullptr,
        /*resizable=*/false);
    const auto size = static_cast<int64_t>(bytes);
    return tensorOver(
        c10::Storage(std::move(storage)), c10::kByte, 0, {size}, {1});
  }

  // Begins a batch. False without a slot.
  bool begin() {
    forget();
    if (getpid() != pid_) {
      return false;
    }
    std::lock_guard<std::mutex> guard(mutex_);
    return claimSlot();
  }

  // The same batch again, after finish() asked for it.
  void again() {
    clearNotes();
  }

  // Notes a tensor; false if the base's reducer has to take it.
  bool note(const at::Tensor& tensor) {
    if (!isPlain(tensor) ||
        (!stock_way_.empty() &&
         stock_way_.count(tensor.storage().unsafeGetStorageImpl()) != 0)) {
      noteStockTensor(tensor);
      return false;
    }
    tensors_.push_back(tensor);
    order_.push_back(Kind::Tensor);
    return true;
  }

  void noteArray(Array array) {
    arrays_.push_back(std::move(array));
    order_.push_back(Kind::Array);
  }

  void noteStockTensor(const at::Tensor& tensor) {
    ++message_.others;
    ++message_.stock_tensors;
    const auto* impl = tensor.unsafeGetTensorImpl();
    if (impl->has_storage()) {
      stock_way_.emplace(impl->unsafe_storage().unsafeGetStorageImpl(), true);
    }
  }

  void noteOther() {
    ++message_.others;
  }

  bool empty() const {
    return order_.empty();
  }

  enum class Result { Done, Again, NoRoom };

  // Copies what is not in the slot yet and commits it. Done: `*message` is to
  // be sent. Again: a part does not fit, or shares its storage with
  // what goes the stock way; pickle again, that part will go the stock way.
  // NoRoom: send the whole batch the stock way. Without the GIL.
  Result finish(std::string_view body, std::string* message) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (!claim_) {
      return Result::NoRoom;
    }
    const uint64_t mark = claim_.mark();
    copies_.clear();
    words_.clear();
    const Result result = layOut();
    if (result != Result::Done) {
      claim_.rollback(mark);
      return result;
    }
    const std::string_view words(
        reinterpret_cast<const char*>(words_.data()),
        words_.size() * sizeof(int64_t));
    message_.words_bytes = words.size();
    message_.body_bytes = body.size();
    message_.offset = UINT64_MAX;
    const uint64_t text_bytes = words.size() + body.size();
    char* text = nullptr;
    if (text_bytes > kInlineBytes) {
      text = static_cast<char*>(claim_.reserve(text_bytes));
    }
    message->resize(sizeof(Message) + (text == nullptr ? text_bytes : 0));
    if (text == nullptr) {
      text = message->data() + sizeof(Message);
    } else {
      message_.offset = claim_.mark() - text_bytes;
    }
    words.copy(text, words.size());
    body.copy(text + words.size(), body.size());
    for (const auto& copy : copies_) {
      std::memcpy(copy.to, copy.from, copy.bytes);
    }
    hint_ = claim_.mark();
    message_.ticket = claim_.commit();
    cuts_.clear();
    std::memcpy(message->data(), &message_, sizeof(Message));
    return Result::Done;
  }

  // Gives the slot up for this batch; it is free again once the tensors in it
  // are gone.
  void abandon() {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      claim_.abandon();
      cuts_.clear();
    }
    forget();
  }

  // Drops the references to what was noted. With the GIL.
  void forget() {
    clearNotes();
    stock_way_.clear();
  }

 private:
  struct Copy {
    void* to;
    const void* from;
    size_t bytes;
  };
  struct Cut {
    uint64_t begin;
    uint64_t end;
    bool alive;
  };
  // The noted tensors on one storage.
  struct Group {
    c10::StorageImpl* storage;
    Span span;
    int64_t region = -1;
  };

  // Never under the mutex: the last reference to a tensor comes back to
  // dropPiece().
  void clearNotes() {
    tensors_.clear();
    arrays_.clear();
    order_.clear();
    message_ = Message();
  }

  bool claimSlot() {
    if (!claim_) {
      claim_ = slots_->try_claim(hint_);
      cuts_.clear();
    }
    return static_cast<bool>(claim_);
  }

  static void dropPiece(void* context) {
    const std::unique_ptr<Piece> piece(static_cast<Piece*>(context));
    Packer& packer = *piece->packer;
    if (getpid() == packer.pid_) {
      packer.takeBack(*piece);
    }
    packer.slots_->release(piece->hold);
  }

  // A storage that is gone before its batch is complete leaves its place to the
  // next one; a data set that collates on the way to each sample would let the
  // slot grow otherwise.
  void takeBack(const Piece& piece) {
    std::lock_guard<std::mutex> guard(mutex_);
    --pieces_alive_;
    if (!claim_ || claim_.slot() != piece.hold.slot ||
        claim_.generation() != piece.generation) {
      return;
    }
    for (auto cut = cuts_.rbegin(); cut != cuts_.rend(); ++cut) {
      if (cut->begin == piece.begin && cut->end == piece.end) {
        cut->alive = false;
        break;
      }
    }
    while (!cuts_.empty() && !cuts_.back().alive &&
           claim_.mark() == cuts_.back().end) {
      claim_.rollback(cuts_.back().begin);
      cuts_.pop_back();
    }
  }

  Result layOut() {
    ska::flat_hash_map<c10::StorageImpl*, size_t> shared;
    std::vector<Group> groups;
    std::vector<size_t> group_of;
    groups.reserve(tensors_.size());
    group_of.reserve(tensors_.size());
    for (const auto& tensor : tensors_) {
      auto* storage = tensor.storage().unsafeGetStorageImpl();
      const Span span = spanOf(tensor);
      // A storage with one owner has no second view in this batch.
      if (tensor.storage().use_count() > 1) {
        const auto found = shared.emplace(storage, groups.size());
        if (!found.second) {
          Group& group = groups[found.first->second];
          group.span.begin = std::min(group.span.begin, span.begin);
          group.span.end = std::max(group.span.end, span.end);
          group_of.push_back(found.first->second);
          continue;
        }
      }
      group_of.push_back(groups.size());
      groups.push_back({storage, span});
    }

    // Behind what the batch has in the slot already nothing is kept of what
    // was cut and dropped.
    std::vector<int64_t> regions;
    Result result = Result::Done;
    for (auto& group : groups) {
      if (stock_way_.count(group.storage) != 0) {
        result = Result::Again;
        continue;
      }
      const auto* data = static_cast<const char*>(group.storage->data());
      uint64_t bytes = group.storage->nbytes();
      uint64_t offset = claim_.offset_of(data, bytes);
      if (offset != UINT64_MAX) {
        group.span = {0, bytes};
      } else {
        // Offsets in a storage count elements, of at most 16 bytes.
        group.span.begin = group.span.begin / 16 * 16;
        bytes = group.span.end - group.span.begin;
        void* place = claim_.reserve(bytes);
        if (place == nullptr) {
          stock_way_.emplace(group.storage, true);
          result = Result::Again;
          continue;
        }
        offset = claim_.mark() - bytes;
        copies_.push_back({place, data + group.span.begin, bytes});
      }
      group.region = static_cast<int64_t>(regions.size() / 2);
      regions.push_back(static_cast<int64_t>(offset));
      regions.push_back(static_cast<int64_t>(bytes));
    }
    std::vector<int64_t> array_offsets;
    for (const auto& array : arrays_) {
      void* place = claim_.reserve(array.bytes);
      if (place == nullptr) {
        return Result::NoRoom;
      }
      copies_.push_back({place, array.data, array.bytes});
      array_offsets.push_back(
          static_cast<int64_t>(claim_.mark() - array.bytes));
    }
    if (result == Result::Done) {
      describe(groups, group_of, regions, array_offsets);
    }
    return result;
  }

  void describe(
      const std::vector<Group>& groups,
      const std::vector<size_t>& group_of,
      const std::vector<int64_t>& regions,
      const std::vector<int64_t>& array_offsets) {
    const auto put = [this](auto value) {
      words_.push_back(static_cast<int64_t>(value));
    };
    put(regions.size() / 2);
    words_.insert(words_.end(), regions.begin(), regions.end());
    put(order_.size());
    size_t next_tensor = 0;
    size_t next_array = 0;
    for (const Kind kind : order_) {
      put(kind);
      if (kind == Kind::Tensor) {
        const Group& group = groups[group_of[next_tensor]];
        const at::Tensor& tensor = tensors_[next_tensor++];
        put(group.region);
        put(tensor.storage_offset() -
            static_cast<int64_t>(group.span.begin / tensor.itemsize()));
        put(tensor.scalar_type());
        put(tensor.dim());
        const auto sizes = tensor.sizes();
        const auto strides = tensor.strides();
        words_.insert(words_.end(), sizes.begin(), sizes.end());
        words_.insert(words_.end(), strides.begin(), strides.end());
      } else {
        const Array& array = arrays_[next_array];
        put(array_offsets[next_array++]);
        put(array.bytes);
        put(array.fortran);
        put(array.dtype.size());
        const size_t at = words_.size();
        words_.resize(at + (array.dtype.size() + 7) / 8);
        std::memcpy(&words_[at], array.dtype.data(), array.dtype.size());
        put(array.sizes.size());
        words_.insert(words_.end(), array.sizes.begin(), array.sizes.end());
      }
    }
  }

  const std::shared_ptr<SharedSlots> slots_;
  const pid_t pid_;
  // Guards what is said about the slot, down to the hint.
  std::mutex mutex_;
  SlotClaim claim_;
  std::vector<Cut> cuts_;
  // Storages in slots, and batches that began while there were some of earlier
  // ones: what a data set keeps of its batches takes whole slots away, so from
  // some point on it gets ordinary memory, which is copied in.
  size_t pieces_alive_ = 0;
  size_t batches_kept_ = 0;
  uint64_t hint_ = 0;

  // The batch being packed.
  std::vector<at::Tensor> tensors_;
  std::vector<Array> arrays_;
  std::vector<Kind> order_;
  std::vector<Copy> copies_;
  std::vector<int64_t> words_;
  Message message_;
  // Storages of which a tensor goes the stock way: then all do, or they would
  // share it no longer.
  ska::flat_hash_map<c10::StorageImpl*, bool> stock_way_;
};

// ---- The main process

class Reader {
 public:
  Reader(const int64_t* words, size_t count) : words_(words), left_(count) {}
  int64_t next() {
    TORCH_CHECK(left_ > 0, "the description of a batch ends early");
    --left_;
    return *words_++;
  }
  const int64_t* take(size_t count) {
    TORCH_CHECK(left_ >= count, "the description of a batch ends early");
    const int64_t* start = words_;
    words_ += count;
    left_ -= count;
    return start;
  }

 private:
  const int64_t* words_;
  size_t left_;
};

struct Received {
  Kind kind = Kind::Tensor;
  at::Tensor tensor;
  // Of an array.
  const char* from = nullptr;
  char* to = nullptr;
  uint64_t bytes = 0;
  bool fortran = false;
  std::string dtype;
  std::vector<int64_t> sizes;
  py::object array;
};

// Pinned memory, or ordinary memory if the accelerator refuses (*refused then
// counts the bytes).
class Memory {
 public:
  Memory() : target_(at::pin::pinTarget(at::pin::Initialize::Yes)) {}

  c10::Storage allocate(uint64_t bytes) {
    if (target_.ready()) {
      try {
        return pinned(bytes);
      } catch (const std::exception&) {
      }
      if (!emptied_) {
        emptied_ = true;
        at::pin::emptyHostMemoryCache();
        try {
          return pinned(bytes);
        } catch (const std::exception&) {
        }
      }
    }
    refused_bytes += bytes;
    return c10::Storage(
        c10::Storage::use_byte_size_t(),
        bytes,
        c10::GetCPUAllocator(),
        /*resizable=*/false);
  }

  uint64_t refused_bytes = 0;

 private:
  c10::Storage pinned(uint64_t bytes) {
    if (target_.allocator == nullptr) {
      return at::empty(
                 {static_cast<int64_t>(bytes)},
                 at::TensorOptions().dtype(at::kByte).device(at::kCPU))
          .pin_memory()
          .storage();
    }
    auto data = target_.allocator->allocate(bytes);
    TORCH_CHECK(data.get() != nullptr, "the host allocator returned null");
    return c10::Storage(
        c10::make_intrusive<c10::StorageImpl>(
            c10::StorageImpl::use_byte_size_t(),
            bytes,
            std::move(data),
            target_.allocator,
            /*resizable=*/false));
  }

  at::pin::PinTarget target_;
  bool emptied_ = false;
};

// A slot that main has taken and puts back.
class Taken {
 public:
  Taken(SharedSlots& slots, uint32_t slot) : slots_(slots), slot_(slot) {}
  ~Taken() {
    slots_.put_back(slot_);
  }
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;

 private:
  SharedSlots& slots_;
  uint32_t slot_;
};

class Unpacker {
 public:
  Unpacker(std::shared_ptr<SharedSlots> slots, std::string_view text)
      : slots_(std::move(slots)) {
    TORCH_CHECK(
        text.size() >= sizeof(Message),
        "a message of ",
        text.size(),
        " bytes is too short for a packed batch");
    std::memcpy(&message_, text.data(), sizeof(Message));
    TORCH_CHECK(
        slots_->take(message_.ticket),
        "slot ",
        message_.ticket.slot,
        " holds no batch of generation ",
        message_.ticket.generation,
        "; the worker that filled it may have been given up as dead");
    taken_ = true;
    const uint64_t both = message_.words_bytes + message_.body_bytes;
    const char* start = nullptr;
    if (message_.offset == UINT64_MAX) {
      TORCH_CHECK(
          text.size() - sizeof(Message) == both,
          "a packed batch of ",
          text.size(),
          " bytes should have ",
          both + sizeof(Message));
      start = text.data() + sizeof(Message);
    } else {
      start = at(message_.offset, both);
    }
    words_.resize(message_.words_bytes / sizeof(int64_t));
    std::memcpy(words_.data(), start, message_.words_bytes);
    body_ = start + message_.words_bytes;
  }

  ~Unpacker() {
    putBack();
  }
  Unpacker(const Unpacker&) = delete;
  Unpacker& operator=(const Unpacker&) = delete;

  const Message& message() const {
    return message_;
  }
  // Valid until putBack().
  py::bytes body() const {
    return py::bytes(body_, message_.body_bytes);
  }

  void putBack() {
    if (taken_) {
      slots_->put_back(message_.ticket.slot);
      taken_ = false;
    }
  }

  using Regions = std::vector<std::pair<uint64_t, uint64_t>>;

  // Reads the description; `storagesOf` makes the storages of all regions,
  // which are given as (offset in the slot, bytes).
  template <typename StoragesOf>
  void read(const StoragesOf& storagesOf) {
    Reader reader(words_.data(), words_.size());
    Regions regions(static_cast<size_t>(reader.next()));
    for (auto& [offset, bytes] : regions) {
      offset = static_cast<uint64_t>(reader.next());
      bytes = static_cast<uint64_t>(reader.next());
      (void)at(offset, bytes);
    }
    const std::vector<c10::Storage> storages = storagesOf(regions);
    const auto objects = static_cast<size_t>(reader.next());
    received.resize(objects);
    for (auto& object : received) {
      object.kind = static_cast<Kind>(reader.next());
      if (object.kind == Kind::Tensor) {
        const auto region = static_cast<size_t>(reader.next());
        TORCH_CHECK(
            region < storages.size(),
            "no region ",
            region,
            " of ",
            storages.size());
        const auto offset = reader.next();
        const auto type = static_cast<c10::ScalarType>(reader.next());
        const auto dim = static_cast<size_t>(reader.next());
        const at::IntArrayRef sizes(reader.take(dim), dim);
        const at::IntArrayRef strides(reader.take(dim), dim);
        object.tensor =
            tensorOver(storages[region], type, offset, sizes, strides);
      } else {
        const auto offset = static_cast<uint64_t>(reader.next());
        object.bytes = static_cast<uint64_t>(reader.next());
        object.from = at(offset, object.bytes);
        object.fortran = reader.next() != 0;
        const auto length = static_cast<size_t>(reader.next());
        const auto* name = reader.take((length + 7) / 8);
        object.dtype.assign(reinterpret_cast<const char*>(name), length);
        const auto dim = static_cast<size_t>(reader.next());
        const auto* sizes = reader.take(dim);
        object.sizes.assign(sizes, sizes + dim);
        has_arrays = true;
      }
    }
  }

  std::vector<Received> received;
  bool has_arrays = false;

 private:
  const char* at(uint64_t offset, uint64_t bytes) const {
    TORCH_CHECK(
        offset <= message_.ticket.bytes &&
            bytes <= message_.ticket.bytes - offset,
        bytes,
        " bytes at ",
        offset,
        " are outside of a batch of ",
        message_.ticket.bytes,
        " bytes");
    return slots_->slot_data(message_.ticket.slot) + offset;
  }

  const std::shared_ptr<SharedSlots> slots_;
  Message message_;
  bool taken_ = false;
  std::vector<int64_t> words_;
  const char* body_ = nullptr;
};

// Arrays own their memory, because a program may resize them in place, so they
// are copied in every mode. `make` is called as make(sizes, dtype, fortran) and
// returns the array and its address.
void copyArrays(std::vector<Received>& received, const py::object& make) {
  for (auto& object : received) {
    if (object.kind == Kind::Array) {
      const py::tuple made =
          make(py::tuple(py::cast(object.sizes)), object.dtype, object.fortran);
      object.array = made[0];
      object.to = reinterpret_cast<char*>(made[1].cast<uintptr_t>());
    }
  }
  py::gil_scoped_release noGil;
  for (const auto& object : received) {
    if (object.kind == Kind::Array) {
      std::memcpy(object.to, object.from, object.bytes);
    }
  }
}

py::list wrapped(std::vector<Received>& received) {
  py::list objects(received.size());
  for (size_t i = 0; i < received.size(); ++i) {
    auto& object = received[i];
    PyObject* item = object.kind == Kind::Tensor
                         ? THPVariable_Wrap(std::move(object.tensor))
                         : object.array.release().ptr();
    if (item == nullptr) {
      throw python_error();
    }
    PyList_SET_ITEM(objects.ptr(), static_cast<Py_ssize_t>(i), item);
  }
  return objects;
}

// How a batch was delivered.
enum class Delivery : int {
  Copied = 0,
  InPlace = 1,
  // Copied, although in place was asked for: the worker still uses the slot,
  // and what it may write there later must not be seen here;
  KeptByWorker = 2,
  // or the accelerator refused to page-lock it;
  LockRefused = 3,
  // or enough slots were locked already, and it was moved to one of those.
  Moved = 4,
};

// The worker drops its references right after the message that brought us here
// was queued, unless it keeps them for good. If it lost its processor just then
// it takes longer; to copy the batch costs time too, and a block of pinned
// memory that would not be needed otherwise. So we wait about as long as the
// copy would take, but not for workers that kept the last batches as well.
constexpr auto kPatience = std::chrono::microseconds(200);
constexpr uint64_t kCopyBytesPerMicrosecond = 4096;
constexpr auto kNap = std::chrono::microseconds(50);
constexpr uint32_t kKeptInARow = 2;

bool isDroppedByWorker(
    const SharedSlots& slots,
    at::pin::PinnedSlots& pinned,
    const SlotTicket& ticket) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  auto patience = kPatience;
  if (pinned.kept_in_a_row < kKeptInARow) {
    patience +=
        std::chrono::microseconds(ticket.bytes / kCopyBytesPerMicrosecond);
  }
  while (slots.held_by_others(ticket.slot)) {
    const auto waited = Clock::now() - begin;
    if (waited > patience) {
      ++pinned.kept_in_a_row;
      return false;
    }
    if (waited < kPatience) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kNap);
    }
  }
  pinned.kept_in_a_row = 0;
  return true;
}

// `*slot` becomes the one that the batch is moved to, taken, if it is.
Delivery choose(
    SharedSlots& slots,
    at::pin::PinnedSlots* pinned,
    const SlotTicket& ticket,
    uint32_t* slot) {
  if (pinned == nullptr) {
    return Delivery::Copied;
  }
  const auto move = [&](bool keeps) {
    const uint32_t other = pinned->instead_of(ticket.slot, ticket.bytes, keeps);
    if (other != SharedSlots::kNobody) {
      *slot = other;
    }
    return other != SharedSlots::kNobody;
  };
  if (move(/*keeps=*/false)) {
    return Delivery::Moved;
  }
  if (!isDroppedByWorker(slots, *pinned, ticket)) {
    if (!move(/*keeps=*/true)) {
      pinned->make_room(ticket.slot);
    }
    return Delivery::KeptByWorker;
  }
  return pinned->lock(ticket.slot, ticket.bytes) ? Delivery::InPlace
                                                 : Delivery::LockRefused;
}

// (objects in the order of the pickle, pickle, others, stock tensors, bytes,
// bytes that the accelerator refused to pin, delivery)
py::tuple unpack(
    const std::shared_ptr<SharedSlots>& slots,
    const std::shared_ptr<at::pin::PinnedSlots>& pinned,
    const py::bytes& text,
    const py::object& make_array) {
  Unpacker unpacker(slots, std::string_view(text));
  const Message& message = unpacker.message();
  const uint32_t slot = message.ticket.slot;
  uint32_t moved_to = slot;
  uint64_t refused = 0;
  Delivery delivery = Delivery::Copied;
  {
    py::gil_scoped_release noGil;
    at::pin::pollPinnedSlots();
    delivery = choose(*slots, pinned.get(), message.ticket, &moved_to);
    if (delivery == Delivery::InPlace) {
      RECORD_FUNCTION(
          "pin transport: deliver in place",
          c10::ArrayRef<const c10::IValue>{});
      unpacker.read([&](const Unpacker::Regions& regions) {
        return pinned->deliver(slot, regions);
      });
    } else if (moved_to != slot) {
      const Taken other(*slots, moved_to);
      RECORD_FUNCTION(
          "pin transport: move", c10::ArrayRef<const c10::IValue>{});
      slots->map_in(slot, message.ticket.bytes);
      unpacker.read([&](const Unpacker::Regions& regions) {
        for (const auto& [offset, bytes] : regions) {
          at::pin::copyBytes(
              slots->slot_data(moved_to) + offset,
              slots->slot_data(slot) + offset,
              bytes);
        }
        return pinned->deliver(moved_to, regions);
      });
    } else {
      RECORD_FUNCTION(
          "pin transport: copy", c10::ArrayRef<const c10::IValue>{});
      slots->map_in(slot, message.ticket.bytes);
      Memory memory;
      const char* data = slots->slot_data(slot);
      unpacker.read([&](const Unpacker::Regions& regions) {
        std::vector<c10::Storage> storages;
        storages.reserve(regions.size());
        for (const auto& [offset, bytes] : regions) {
          storages.push_back(memory.allocate(bytes));
          at::pin::copyBytes(
              storages.back().mutable_data(), data + offset, bytes);
        }
        return storages;
      });
      refused = memory.refused_bytes;
    }
  }
  if (unpacker.has_arrays) {
    copyArrays(unpacker.received, make_array);
  }
  auto body = unpacker.body();
  unpacker.putBack();
  return py::make_tuple(
      wrapped(unpacker.received),
      std::move(body),
      message.others,
      message.stock_tensors,
      message.ticket.bytes,
      refused,
      static_cast<int>(delivery));
}

// ---- What Python calls

std::shared_ptr<SharedSlots> makeSlots(
    uint32_t workers,
    uint32_t slots,
    uint64_t max_slot_bytes,
    uint64_t max_resident_bytes) {
  c10::SharedSlotsOptions options;
  options.workers = workers;
  options.slots = slots;
  options.max_slot_bytes = max_slot_bytes;
  options.max_resident_bytes = max_resident_bytes;
  options.guests = 2 * workers + 16;
  std::string error;
  auto result = SharedSlots::create(options, &error);
  TORCH_CHECK(result != nullptr, "cannot make slots for batches: ", error);
  return result;
}

std::shared_ptr<SharedSlots> attachSlots(int fd) {
  std::string error;
  auto result = SharedSlots::attach(fd, &error);
  TORCH_CHECK(result != nullptr, "cannot attach the slots: ", error);
  return result;
}

py::dict statsOf(const SharedSlots& slots) {
  const auto stats = slots.stats();
  py::dict result;
  result["slots"] = stats.slots;
  result["in_use"] = stats.in_use;
  result["retired"] = stats.retired;
  result["most_in_use"] = stats.most_in_use;
  result["resident_bytes"] = stats.resident_bytes;
  result["claims"] = stats.claims;
  result["commits"] = stats.commits;
  result["refused_no_slot"] = stats.refused_no_slot;
  result["refused_size"] = stats.refused_size;
  result["refused_memory"] = stats.refused_memory;
  result["reclaimed"] = stats.reclaimed;
  return result;
}

const char kPackerCapsule[] = "torchpin.Packer";

// What the pickler calls for every object that is not plain data, as a C
// function because a batch may hold a thousand of them. Its `self` is a tuple:
// capsule of the packer, function that stands for "what it is called with",
// PickleBuffer, type of arrays, function(array) that takes an array apart.
PyObject* reduce(PyObject* state, PyObject* object) {
  HANDLE_TH_ERRORS
  Packer& packer = **static_cast<std::shared_ptr<Packer>*>(
      PyCapsule_GetPointer(PyTuple_GET_ITEM(state, 0), kPackerCapsule));
  PyObject* identity = PyTuple_GET_ITEM(state, 1);
  PyObject* buffer = PyTuple_GET_ITEM(state, 2);
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  bool noted = false;
  if (type == THPVariableClass) {
    noted = packer.note(THPVariable_Unpack(object));
  } else if (type == PyTuple_GET_ITEM(state, 3)) {
    const auto parts =
        py::handle(PyTuple_GET_ITEM(state, 4))(py::handle(object));
    if (PyTuple_Check(parts.ptr())) {
      const auto [address, bytes, sizes, fortran, dtype] =
          parts.cast<std::tuple<
              uintptr_t,
              uint64_t,
              std::vector<int64_t>,
              bool,
              std::string>>();
      packer.noteArray(
          {reinterpret_cast<const void*>(address),
           bytes,
           sizes,
           fortran,
           dtype,
           py::reinterpret_borrow<py::object>(object)});
      noted = true;
    } else {
      if (parts.cast<bool>()) {
        packer.noteOther();
      }
      // Not as protocol 5 would have it: the array would not own its memory.
      return PyObject_CallMethod(object, "__reduce__", nullptr);
    }
  } else if (THPVariable_Check(object)) {
    packer.noteStockTensor(THPVariable_Unpack(object));
  } else if (object != identity) {
    packer.noteOther();
  }
  if (!noted) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  // A tuple of its own each time: the pickler would send the same one as a
  // reference to the first.
  return Py_BuildValue("O(O)", identity, buffer);
  END_HANDLE_TH_ERRORS
}

PyMethodDef reduceDefinition = {"reduce", reduce, METH_O, nullptr};

PyObject* makeReduce(
    std::shared_ptr<Packer> packer,
    const py::object& identity,
    const py::object& buffer,
    const py::object& array_type,
    const py::object& take_apart) {
  auto* owned = new std::shared_ptr<Packer>(std::move(packer));
  py::capsule capsule(owned, kPackerCapsule, [](PyObject* capsule) {
    delete static_cast<std::shared_ptr<Packer>*>(
        PyCapsule_GetPointer(capsule, kPackerCapsule));
  });
  const py::tuple state =
      py::make_tuple(capsule, identity, buffer, array_type, take_apart);
  return PyCFunction_New(&reduceDefinition, state.ptr());
}

// The message, None to send the batch the stock way, or NotImplemented to
// pickle it again.
py::object finish(Packer& packer, const py::bytes& body) {
  std::string message;
  Packer::Result result;
  const auto view = std::string_view(body);
  {
    py::gil_scoped_release noGil;
    result = packer.finish(view, &message);
  }
  switch (result) {
    case Packer::Result::Done:
      packer.forget();
      return py::bytes(message);
    case Packer::Result::Again:
      packer.again();
      return py::reinterpret_borrow<py::object>(Py_NotImplemented);
    default:
      return py::none();
  }
}

PyObject* identity(PyObject* /*module*/, PyObject* object) {
  Py_INCREF(object);
  return object;
}

// Buffer callback of the pickler. Only ours, its self, stands for something out
// of line; those of the user's classes stay in the pickle.
PyObject* staysInBand(PyObject* ours, PyObject* buffer) {
  return PyBool_FromLong(buffer != ours);
}

PyMethodDef staysInBandDefinition = {
    "stays_in_band",
    staysInBand,
    METH_O,
    nullptr};

PyMethodDef functions[] = {
    {"_identity", identity, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};

} // namespace

void initTransportBindings(PyObject* module) {
  if (PyModule_AddFunctions(module, functions) != 0) {
    throw py::error_already_set();
  }
  auto m = py::handle(module).cast<py::module>();
  py::class_<SharedSlots, std::shared_ptr<SharedSlots>>(m, "_SharedSlots")
      .def(
          py::init(&makeSlots),
          py::arg("workers"),
          py::arg("slots"),
          py::arg("max_slot_bytes"),
          py::arg("max_resident_bytes") = 0)
      .def_static("attach", &attachSlots)
      .def("adopt", &SharedSlots::adopt)
      .def("reclaim", &SharedSlots::reclaim)
      .def("reap_guests", &SharedSlots::reap_guests)
      .def("end", &SharedSlots::end)
      .def("is_ending", &SharedSlots::is_ending)
      .def(
          "trim_free_slots",
          [](SharedSlots& slots) {
            py::gil_scoped_release noGil;
            return slots.trim_free_slots();
          })
      .def(
          "trim_to",
          [](SharedSlots& shared, uint32_t slots, uint64_t bytes) {
            py::gil_scoped_release noGil;
            return shared.trim_to(slots, bytes);
          })
      .def("fd", &SharedSlots::fd)
      .def("stats", &statsOf);
  py::class_<Packer, std::shared_ptr<Packer>>(m, "_Packer")
      .def(py::init<std::shared_ptr<SharedSlots>>())
      .def(
          "new_shared",
          torch::wrap_pybind_function(
              [](Packer& packer, uint64_t bytes) -> std::optional<at::Tensor> {
                auto tensor = packer.newShared(bytes);
                if (!tensor.defined()) {
                  return std::nullopt;
                }
                return tensor;
              }))
      .def("begin", &Packer::begin)
      .def("is_empty", &Packer::empty)
      .def("finish", torch::wrap_pybind_function(finish))
      .def("abandon", &Packer::abandon)
      .def(
          "make_reduce",
          [](std::shared_ptr<Packer> packer,
             const py::object& identity,
             const py::object& buffer,
             const py::object& array_type,
             const py::object& take_apart) {
            return py::reinterpret_steal<py::object>(makeReduce(
                std::move(packer), identity, buffer, array_type, take_apart));
          })
      .def_static("make_buffer_callback", [](const py::object& ours) {
        return py::reinterpret_steal<py::object>(
            PyCFunction_New(&staysInBandDefinition, ours.ptr()));
      });
  py::class_<at::pin::PinnedSlots, std::shared_ptr<at::pin::PinnedSlots>>(
      m, "_PinnedSlots")
      .def(py::init(&at::pin::PinnedSlots::make))
      .def(
          "give_back",
          [](at::pin::PinnedSlots& slots) {
            py::gil_scoped_release noGil;
            slots.give_back();
          })
      .def("locked_bytes", &at::pin::PinnedSlots::locked_bytes)
      .def("waiting", &at::pin::PinnedSlots::waiting);
  m.def(
      "_why_not_in_place",
      torch::wrap_pybind_function_no_gil(at::pin::whyNotInPlace));
  m.def("_set_slot_events_honoured", &at::pin::setSlotEventsHonoured);
  m.def("_unpack", torch::wrap_pybind_function(unpack));
}

} // namespace torch::pin
