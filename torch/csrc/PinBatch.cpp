#include <ATen/native/PinBatch.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/torchpin.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

// Walks one batch, pins its tensors in one call without the GIL, and rebuilds
// it around them. Called by torch/utils/data/_utils/pin_memory.py only.
//
// Exact dict, list and Tensor, tuples and named tuples are handled here.
// Everything else is taken apart and put together by the four Python functions
// in Callbacks.
//
// Note [The walk of a batch]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~
// 1. A depth-first walk gives each container a node, each tensor a leaf, and
//    each child that might matter an edge; plain data gets nothing. It keeps
//    its own stack, so depth is no limit. A container is scanned whole before
//    anything below it is looked at, because looking runs code of users, which
//    may change it; edges therefore own what they point to.
// 2. The leaves are pinned.
// 3. Nodes are rebuilt in the order in which the walk left them, children
//    before parents. What holds nothing that changed is handed on as it is.
//    Only a cycle brings a parent whose child is not there yet: the child is
//    then made empty-handed first (a shell: a copy that still has the old
//    contents) and filled when it is its turn; a parent that cannot be filled
//    yet is filled at the end.
//
// An object with one reference can be met only once, so it needs no entry in
// the table of what was met. That is most of a batch.

namespace torch::pin {

namespace {

// What an edge leads to: the index of a node, the index of a leaf with kLeaf
// added, or one of the two last values.
constexpr uint32_t kLeaf = uint32_t{1} << 31;
constexpr uint32_t kPlain = UINT32_MAX;
constexpr uint32_t kLater = UINT32_MAX - 1;

bool isLeaf(uint32_t to) {
  return to >= kLeaf && to < kLater;
}

bool isNode(uint32_t to) {
  return to < kLeaf;
}

// What kindOfType() answers.
enum class TypeKind : int8_t { Expand = 0, Plain = 1, BareTuple = 2 };

// What expand() answers with, as the first element of a tuple.
enum Answer : long {
  kReplaced = 0, // (0, object): this takes its place
  kParts = 1,    // (1, children, label, make or None, fill)
  kMissed = 2,   // (2, path from the object to the tensor, reason or None)
};

struct Callbacks {
  py::object kindOfType; // (type) -> TypeKind
  py::object expand;     // (object) -> None | tuple
  py::object missed;     // (object, path, reason or None)
  py::object resisted;   // (object, path, exception)
};

enum class Kind : uint8_t { List, Tuple, Dict, Parts, Finished };

struct Edge {
  PyObject* child;
  PyObject* key; // of a dict; else null
  Py_ssize_t position;
  uint32_t to;
};

struct Node {
  PyObject* object;
  PyObject* result = nullptr;
  PyObject* parts = nullptr; // expand()'s tuple
  uint32_t parent;
  uint32_t edgeOfParent;
  uint32_t first = 0;
  uint32_t count = 0;
  Kind kind;
  bool open = true;
  bool changed = false;
  bool filled = false;
};

[[noreturn]] void throwPythonError() {
  throw py::error_already_set();
}

py::object checked(PyObject* object) {
  if (object == nullptr) {
    throwPythonError();
  }
  return py::reinterpret_steal<py::object>(object);
}

// Sources whose last reference this is; dropped without the GIL.
class Retired {
 public:
  explicit Retired(std::vector<c10::Storage> storages)
      : storages_(std::move(storages)) {}
  Retired(const Retired&) = delete;
  Retired& operator=(const Retired&) = delete;
  ~Retired() {
    release();
  }

  void release() {
    if (storages_.empty()) {
      return;
    }
    py::gil_scoped_release noGil;
    storages_.clear();
  }

 private:
  std::vector<c10::Storage> storages_;
};

class Walk {
 public:
  explicit Walk(const Callbacks& callbacks) : callbacks_(callbacks) {}
  Walk(const Walk&) = delete;
  Walk& operator=(const Walk&) = delete;

  ~Walk() {
    for (const auto& node : nodes_) {
      Py_XDECREF(node.object);
      Py_XDECREF(node.result);
      Py_XDECREF(node.parts);
    }
    for (const auto& edge : edges_) {
      Py_DECREF(edge.child);
      Py_XDECREF(edge.key);
    }
    for (auto* tensor : tensors_) {
      Py_XDECREF(tensor);
    }
  }

  // With `retire` the storages that were copied from are kept for
  // takeRetired().
  py::object run(PyObject* batch, bool retire) {
    uint32_t root = atFirstSight(batch);
    if (root == kLater) {
      root = visit(batch, kPlain, 0);
      if (isNode(root)) {
        descend(root);
      }
    }
    if (root == kPlain) {
      return py::reinterpret_borrow<py::object>(batch);
    }
    if (!leaves_.empty()) {
      py::gil_scoped_release noGil;
      refusals_ = at::pin::pinLeaves(leaves_, retire ? &retired_ : nullptr);
    }
    tensors_.resize(leaves_.size());
    rebuild();
    return py::reinterpret_borrow<py::object>(
        isChanged(root) ? resultOf(root) : batch);
  }

  std::vector<c10::Storage> takeRetired() {
    return std::move(retired_);
  }

  const at::pin::Refusals& refusals() const {
    return refusals_;
  }

 private:
  // ---- 1. the walk

  static bool isAlwaysPlain(PyTypeObject* type) {
    return type == &PyLong_Type || type == &PyFloat_Type ||
           type == &PyUnicode_Type || type == &PyBool_Type ||
           type == Py_TYPE(Py_None) || type == &PyBytes_Type ||
           type == &PyByteArray_Type || type == &PyComplex_Type ||
           type == &PyRange_Type || type == &PyMemoryView_Type;
  }

  // Asked once per type and walk; the reference keeps the address from being
  // used again.
  TypeKind kindOf(PyTypeObject* type) {
    if (type == lastType_) {
      return lastKind_;
    }
    auto found = types_.find(type);
    if (found == types_.end()) {
      const auto handle = py::handle(reinterpret_cast<PyObject*>(type));
      const auto kind =
          static_cast<TypeKind>(callbacks_.kindOfType(handle).cast<int>());
      kept_.push_back(py::reinterpret_borrow<py::object>(handle));
      found = types_.emplace(type, kind).first;
    }
    lastType_ = type;
    lastKind_ = found->second;
    return lastKind_;
  }

  static bool hasAttributes(PyObject* object) {
    PyObject** dict = _PyObject_GetDictPtr(object);
    return dict != nullptr && *dict != nullptr && PyDict_GET_SIZE(*dict) > 0;
  }

  uint32_t
  addNode(PyObject* object, Kind kind, uint32_t parent, uint32_t edgeOfParent) {
    Py_INCREF(object);
    Node node;
    node.object = object;
    node.kind = kind;
    node.parent = parent;
    node.edgeOfParent = edgeOfParent;
    nodes_.push_back(node);
    return static_cast<uint32_t>(nodes_.size() - 1);
  }

  uint32_t addLeaf(const at::Tensor& tensor) {
    leaves_.emplace_back(tensor.unsafeGetTensorImpl());
    return kLeaf + static_cast<uint32_t>(leaves_.size() - 1);
  }

  // What can be said without running anybody's code: kPlain, the leaf of a
  // tensor that is nothing but a tensor, or kLater.
  uint32_t atFirstSight(PyObject* object) {
    auto* type = Py_TYPE(object);
    if (isAlwaysPlain(type)) {
      return kPlain;
    }
    if (type == reinterpret_cast<PyTypeObject*>(THPVariableClass)) {
      const auto& tensor = THPVariable_Unpack(object);
      switch (at::pin::treatmentOf(tensor)) {
        case at::pin::Treatment::Pass:
          return kPlain;
        case at::pin::Treatment::Special:
          return kLater;
        case at::pin::Treatment::Bytes:
          break;
      }
      if (hasAttributes(object)) {
        return kLater;
      }
      if (Py_REFCNT(object) > 1) {
        const auto found = met_.find(object);
        if (found != met_.end()) {
          return found->second;
        }
        const auto leaf = addLeaf(tensor);
        met_.emplace(object, leaf);
        return leaf;
      }
      return addLeaf(tensor);
    }
    if (type == &PyDict_Type || type == &PyList_Type || type == &PyTuple_Type) {
      return kLater;
    }
    return kindOf(type) == TypeKind::Plain ? kPlain : kLater;
  }

  void addEdge(PyObject* child, PyObject* key, Py_ssize_t position) {
    const auto to = atFirstSight(child);
    if (to == kPlain) {
      return;
    }
    Py_INCREF(child);
    Py_XINCREF(key);
    edges_.push_back({child, key, position, to});
  }

  // Asking about a type may, in theory, run code that changes the container:
  // sizes are read again at every step.
  void scan(uint32_t index) {
    const auto kind = nodes_[index].kind;
    PyObject* object = nodes_[index].object;
    const auto first = static_cast<uint32_t>(edges_.size());
    if (kind == Kind::Dict) {
      Py_ssize_t position = 0;
      PyObject* key = nullptr;
      PyObject* value = nullptr;
      while (PyDict_Next(object, &position, &key, &value)) {
        addEdge(value, key, 0);
      }
    } else if (kind == Kind::Tuple) {
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i) {
        addEdge(PyTuple_GET_ITEM(object, i), nullptr, i);
      }
    } else {
      PyObject* list = object;
      if (kind == Kind::Parts) {
        list = PyTuple_GET_ITEM(nodes_[index].parts, 1);
      }
      Py_ssize_t i = 0;
      if (kind == Kind::Parts && PyList_GET_SIZE(list) > 0 &&
          PyList_GET_ITEM(list, 0) == object && THPVariable_Check(object)) {
        // A tensor that is its own first part: its data, without what its
        // class and its attributes add.
        Py_INCREF(object);
        edges_.push_back(
            {object, nullptr, 0, addLeaf(THPVariable_Unpack(object))});
        i = 1;
      }
      for (; i < PyList_GET_SIZE(list); ++i) {
        addEdge(PyList_GET_ITEM(list, i), nullptr, i);
      }
    }
    nodes_[index].first = first;
    nodes_[index].count = static_cast<uint32_t>(edges_.size()) - first;
  }

  // The node of an object that atFirstSight() left for later, scanned; kPlain
  // if there is nothing in it after all.
  uint32_t visit(PyObject* object, uint32_t parent, uint32_t edgeOfParent) {
    const bool shared = Py_REFCNT(object) > 2; // this one and the edge's
    if (shared || parent == kPlain) {
      const auto found = met_.find(object);
      if (found != met_.end()) {
        if (isNode(found->second) && nodes_[found->second].open) {
          cyclic_ = true;
        }
        return found->second;
      }
    }
    auto* type = Py_TYPE(object);
    Kind kind = Kind::Parts;
    if (type == &PyDict_Type) {
      kind = Kind::Dict;
    } else if (type == &PyList_Type) {
      kind = Kind::List;
    } else if (type == &PyTuple_Type || kindOf(type) == TypeKind::BareTuple) {
      kind = Kind::Tuple;
    }
    py::object answer;
    if (kind == Kind::Parts) {
      answer = callbacks_.expand(py::handle(object));
      if (answer.is_none()) {
        met_.emplace(object, kPlain);
        keep(object);
        return kPlain;
      }
      const long what = PyLong_AsLong(PyTuple_GET_ITEM(answer.ptr(), 0));
      if (what == kMissed) {
        met_.emplace(object, kPlain);
        keep(object);
        const auto details = answer.cast<py::tuple>();
        const auto path =
            pathOf(parent, edgeOfParent) + details[1].cast<std::string>();
        callbacks_.missed(py::handle(object), path, details[2]);
        return kPlain;
      }
      if (what == kReplaced) {
        const auto node = addNode(object, Kind::Finished, parent, edgeOfParent);
        nodes_[node].open = false;
        PyObject* replacement = PyTuple_GET_ITEM(answer.ptr(), 1);
        nodes_[node].changed = replacement != object;
        nodes_[node].filled = true;
        Py_INCREF(replacement);
        nodes_[node].result = replacement;
        met_.emplace(object, node);
        return node;
      }
    }
    const auto node = addNode(object, kind, parent, edgeOfParent);
    nodes_[node].parts = answer ? answer.release().ptr() : nullptr;
    // What users' classes hand out may come again even if only one reference
    // could be seen.
    if (shared || parent == kPlain || kind == Kind::Parts) {
      met_.emplace(object, node);
    }
    scan(node);
    return node;
  }

  void keep(PyObject* object) {
    kept_.push_back(py::reinterpret_borrow<py::object>(object));
  }

  void descend(uint32_t root) {
    struct Frame {
      uint32_t node;
      uint32_t next;
    };
    std::vector<Frame> stack;
    if (nodes_[root].open) {
      stack.push_back({root, 0});
    }
    while (!stack.empty()) {
      auto& frame = stack.back();
      const auto current = frame.node;
      if (frame.next == nodes_[current].count) {
        nodes_[current].open = false;
        order_.push_back(current);
        stack.pop_back();
        continue;
      }
      const auto edge = nodes_[current].first + frame.next++;
      if (edges_[edge].to != kLater) {
        continue;
      }
      const auto before = nodes_.size();
      const auto child = visit(edges_[edge].child, current, edge);
      edges_[edge].to = child;
      if (isNode(child) && child >= before && nodes_[child].open) {
        stack.push_back({child, 0});
      }
    }
  }

  // `batch["boxes"][3].mask`, for a warning.
  std::string pathOf(uint32_t parent, uint32_t edgeOfParent) const {
    std::vector<std::string> steps;
    while (parent != kPlain) {
      const auto& node = nodes_[parent];
      const auto& edge = edges_[edgeOfParent];
      if (node.kind == Kind::Dict) {
        if (PyUnicode_Check(edge.key)) {
          steps.push_back(
              "[\"" + py::handle(edge.key).cast<std::string>() + "\"]");
        } else {
          steps.push_back(
              "[" + py::repr(py::handle(edge.key)).cast<std::string>() + "]");
        }
      } else if (node.kind == Kind::Parts) {
        const auto label =
            py::handle(PyTuple_GET_ITEM(node.parts, 2))(edge.position);
        steps.push_back(label.cast<std::string>());
      } else if (
          PyTuple_Check(node.object) && !PyTuple_CheckExact(node.object) &&
          PyObject_HasAttrString(node.object, "_fields")) {
        const auto fields = py::handle(node.object).attr("_fields");
        steps.push_back(
            "." + py::str(fields[py::int_(edge.position)]).cast<std::string>());
      } else {
        steps.push_back("[" + std::to_string(edge.position) + "]");
      }
      edgeOfParent = node.edgeOfParent;
      parent = node.parent;
    }
    std::string path = "batch";
    for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
      path += *step;
    }
    return path;
  }

  // ---- 3. the way back

  bool isChanged(uint32_t to) const {
    return isLeaf(to) ? leaves_[to - kLeaf].outcome == at::pin::Outcome::Pinned
                      : isNode(to) && nodes_[to].changed;
  }

  bool anyChildChanged(const Node& node) const {
    for (uint32_t i = 0; i < node.count; ++i) {
      if (isChanged(edges_[node.first + i].to)) {
        return true;
      }
    }
    return false;
  }

  void markChanged() {
    bool again = true;
    while (again) {
      again = false;
      for (const auto index : order_) {
        auto& node = nodes_[index];
        if (node.changed) {
          continue;
        }
        node.changed = anyChildChanged(node);
        // Without a cycle children always come first.
        again = again || (node.changed && cyclic_);
      }
    }
  }

  void setResult(Node& node, py::object result) {
    Py_XDECREF(node.result);
    node.result = result.release().ptr();
  }

  void handOnOriginal(uint32_t index) {
    setResult(
        nodes_[index],
        py::reinterpret_borrow<py::object>(nodes_[index].object));
    nodes_[index].filled = true;
  }

  // Calls fill() or make() of an object; what it raises must not end the epoch.
  template <typename Call>
  bool tolerantly(uint32_t index, const Call& call) {
    try {
      call();
      return true;
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) {
        throw;
      }
      const py::object raised = error.value();
      handOnOriginal(index);
      const auto& node = nodes_[index];
      const auto path = pathOf(node.parent, node.edgeOfParent);
      callbacks_.resisted(py::handle(node.object), path, raised);
      return false;
    }
  }

  bool makeShell(uint32_t index) {
    const auto kind = nodes_[index].kind;
    PyObject* object = nodes_[index].object;
    if (kind == Kind::Dict) {
      setResult(nodes_[index], checked(PyDict_Copy(object)));
      return true;
    }
    if (kind == Kind::List) {
      setResult(
          nodes_[index], checked(PyList_GetSlice(object, 0, PY_SSIZE_T_MAX)));
      return true;
    }
    if (kind != Kind::Parts) {
      return false;
    }
    const auto make = py::reinterpret_borrow<py::object>(
        PyTuple_GET_ITEM(nodes_[index].parts, 3));
    if (make.is_none()) {
      return false;
    }
    return tolerantly(index, [&] { setResult(nodes_[index], make()); });
  }

  // What takes the place of a child that changed: the pinned tensor, the
  // rebuilt container or its shell; null if there is nothing yet.
  PyObject* resultOf(uint32_t to) {
    if (isLeaf(to)) {
      auto& tensor = tensors_[to - kLeaf];
      if (tensor == nullptr) {
        tensor =
            checked(THPVariable_Wrap(std::move(leaves_[to - kLeaf].pinned)))
                .release()
                .ptr();
      }
      return tensor;
    }
    if (nodes_[to].result == nullptr) {
      makeShell(to);
    }
    return nodes_[to].result;
  }

  bool childrenAreThere(uint32_t index) {
    for (uint32_t i = 0; i < nodes_[index].count; ++i) {
      const auto to = edges_[nodes_[index].first + i].to;
      if (isChanged(to) && resultOf(to) == nullptr) {
        return false;
      }
    }
    return true;
  }

  // Sets the result of a container all of whose children are there; where one
  // is not, and never will be, the old child stays.
  void fill(uint32_t index) {
    const auto kind = nodes_[index].kind;
    const auto first = nodes_[index].first;
    const auto last = first + nodes_[index].count;
    const auto newChild = [&](const Edge& edge) {
      PyObject* result = resultOf(edge.to);
      return result == nullptr ? edge.child : result;
    };
    nodes_[index].filled = true;
    if (kind == Kind::Tuple) {
      PyObject* object = nodes_[index].object;
      const auto size = PyTuple_GET_SIZE(object);
      auto tuple = checked(PyTuple_New(size));
      auto edge = first;
      for (Py_ssize_t i = 0; i < size; ++i) {
        PyObject* item = PyTuple_GET_ITEM(object, i);
        while (edge < last && edges_[edge].position < i) {
          ++edge;
        }
        if (edge < last && edges_[edge].position == i &&
            isChanged(edges_[edge].to)) {
          item = newChild(edges_[edge]);
        }
        Py_INCREF(item);
        PyTuple_SET_ITEM(tuple.ptr(), i, item);
      }
      auto* type = Py_TYPE(object);
      if (type != &PyTuple_Type) {
        // tuple.__new__ of the subclass: nothing of the user's is run.
        const auto arguments = py::make_tuple(tuple);
        tuple = checked(PyTuple_Type.tp_new(type, arguments.ptr(), nullptr));
      }
      setResult(nodes_[index], std::move(tuple));
      return;
    }
    if (kind == Kind::Parts) {
      const auto parts = py::reinterpret_borrow<py::tuple>(nodes_[index].parts);
      tolerantly(index, [&] {
        auto children = checked(PyList_GetSlice(
            PyTuple_GET_ITEM(parts.ptr(), 1), 0, PY_SSIZE_T_MAX));
        for (auto i = first; i < last; ++i) {
          const auto edge = edges_[i];
          if (isChanged(edge.to)) {
            PyObject* child = newChild(edge);
            Py_INCREF(child);
            PyList_SetItem(children.ptr(), edge.position, child);
          }
        }
        py::object shell =
            nodes_[index].result == nullptr
                ? py::object(py::none())
                : py::reinterpret_borrow<py::object>(nodes_[index].result);
        setResult(nodes_[index], parts[4](shell, children));
      });
      return;
    }
    if (nodes_[index].result == nullptr) {
      makeShell(index);
    }
    PyObject* container = nodes_[index].result;
    for (auto i = first; i < last; ++i) {
      const auto edge = edges_[i];
      if (!isChanged(edge.to)) {
        continue;
      }
      PyObject* child = newChild(edge);
      if (kind == Kind::Dict) {
        if (PyDict_SetItem(container, edge.key, child) != 0) {
          throwPythonError();
        }
      } else if (edge.position < PyList_GET_SIZE(container)) {
        Py_INCREF(child);
        PyList_SetItem(container, edge.position, child);
      }
    }
  }

  void rebuild() {
    markChanged();
    std::vector<uint32_t> postponed;
    for (const auto index : order_) {
      auto& node = nodes_[index];
      if (node.filled) {
        continue;
      }
      if (!node.changed) {
        node.filled = true;
      } else if (
          cyclic_ && !childrenAreThere(index) && resultOf(index) != nullptr) {
        postponed.push_back(index);
      } else {
        fill(index);
      }
    }
    for (const auto index : postponed) {
      if (!nodes_[index].filled) {
        fill(index);
      }
    }
  }

  const Callbacks& callbacks_;
  // Room for a usual batch: asking malloc for a few thousand bytes makes it
  // tidy up what the tensors of the last batch left behind.
  c10::SmallVector<Node, 16> nodes_;
  c10::SmallVector<Edge, 128> edges_;
  c10::SmallVector<uint32_t, 16> order_;
  // Their sources are kept alive by edges, or by the caller of run().
  c10::SmallVector<at::pin::Leaf, 128> leaves_;
  // Of the leaves, as far as asked for.
  c10::SmallVector<PyObject*, 128> tensors_;
  std::vector<c10::Storage> retired_;
  at::pin::Refusals refusals_;
  ska::flat_hash_map<PyObject*, uint32_t> met_;
  ska::flat_hash_map<PyTypeObject*, TypeKind> types_;
  std::vector<py::object> kept_;
  PyTypeObject* lastType_ = nullptr;
  TypeKind lastKind_ = TypeKind::Expand;
  bool cyclic_ = false;
};

// (batch rebuilt, Retired or None, refusals or None); refusals are
// (leaves, bytes, bytes asked first, reason, bytes held or None).
py::tuple pinBatch(
    py::handle batch,
    bool retire,
    py::object kindOfType,
    py::object expand,
    py::object missed,
    py::object resisted) {
  const Callbacks callbacks{
      std::move(kindOfType),
      std::move(expand),
      std::move(missed),
      std::move(resisted)};
  Walk walk(callbacks);
  auto result = walk.run(batch.ptr(), retire);
  py::object retired = py::none();
  if (auto storages = walk.takeRetired(); !storages.empty()) {
    retired = py::cast(std::make_unique<Retired>(std::move(storages)));
  }
  py::object refused = py::none();
  if (const auto& refusals = walk.refusals(); refusals.leaves > 0) {
    refused = py::make_tuple(
        refusals.leaves,
        refusals.bytes,
        refusals.asked,
        refusals.reason,
        refusals.held);
  }
  return py::make_tuple(std::move(result), retired, refused);
}

// What pinBatch() can do with the data of this tensor: 0 pin it, 1 nothing is
// to be done, 2 its own operators have to.
int treatment(const at::Tensor& tensor) {
  return static_cast<int>(at::pin::treatmentOf(tensor));
}

} // namespace

void initPinBatchBindings(PyObject* module) {
  auto m = py::handle(module).cast<py::module>();
  py::class_<Retired>(m, "_Retired").def("release", &Retired::release);
  m.def("_pin_batch", torch::wrap_pybind_function(pinBatch));
  m.def("_set_pin_threads", torch::wrap_pybind_function([](int threads) {
          at::pin::setCopyThreads(threads);
        }));
  m.def("_pin_treatment", torch::wrap_pybind_function(treatment));
  m.def(
      "_select_pin_device",
      torch::wrap_pybind_function_no_gil([](int64_t index) {
        at::pin::selectPinDevice(static_cast<c10::DeviceIndex>(index));
      }));
}

} // namespace torch::pin
