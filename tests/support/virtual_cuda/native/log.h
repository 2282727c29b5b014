// The log of a simulated device, and the order that streams, events and the host give to its work.
//
// [Note: clocks]
// Each stream counts its operations. A vector clock maps streams to counts: the operations that certainly have
// completed before a point. A stream has one, an event keeps its stream's from when it was recorded, and the host
// joins one when it synchronizes. `support/virtual_cuda/races.py` computes the same clocks from the log; here they
// decide when asynchronous copies to and from the host become visible, see memory.h.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <torch/csrc/utils/pybind.h>
#include <frameobject.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace virtual_cuda {

using Clock = std::map<int64_t, int64_t>;

inline void join(Clock& into, const Clock& other) {
  for (const auto& [stream, count] : other) {
    int64_t& known = into[stream];
    known = std::max(known, count);
  }
}

// Kinds of log entries; `log.py` has the same list.
enum Kind : int { OP, ALLOC, FREE, RECORD, WAIT, SYNC_STREAM, SYNC_EVENT, SYNC_DEVICE, QUERY, RECORD_STREAM, HOST_RACE };

struct Span {  // bytes of memory that an operation accesses
  int64_t begin, end;
  bool writes;
};

struct Entry {
  Kind kind;
  int64_t stream;
  int64_t id = 0;     // of the event, or the address of the block
  int64_t bytes = 0;  // of the block
  std::string name, where;
  std::vector<Span> spans;
  double flops = 0;
  int itemsize = 0;
  int peer = -1;  // of a message: the rank in the communicator
};

struct Event {
  int64_t id;
  Clock clock;
  std::chrono::steady_clock::time_point at{};  // of the recording, by the host
};

// A copy between the host and the device that the host does not know to be done; see memory.h.
struct Pending {
  at::Tensor host;
  at::Tensor data;  // to arrive in `host`, or read from it
  bool arrives;
  int64_t stream, count;  // the copy's number on its stream
  std::string where;
};

// One per process. All members are guarded by `mutex`, which is never held while Python runs.
struct Log {
  std::mutex mutex;
  bool is_recording = false;
  bool finds_lines = true;
  std::vector<Entry> entries;
  std::unordered_map<int64_t, Clock> streams;
  Clock host;
  int64_t num_events = 0;
  std::vector<Pending> pending;
};

inline Log& log() {
  static Log* instance = new Log;  // memory is freed until the process has ended
  return *instance;
}

constexpr int NUM_DEVICES = 64;  // also of several hosts, which the replay tells apart

inline thread_local int tls_device = 0;
inline thread_local int64_t tls_streams[NUM_DEVICES] = {};

inline int64_t current_stream() { return tls_streams[tls_device]; }

// The innermost four frames of plait in this thread, innermost first; "" for autograd's own threads.
inline std::string program_lines() {
  constexpr int most = 4;
  const std::string package = "/src/plait/";
  if (!Py_IsInitialized()) return "";
  py::gil_scoped_acquire gil;
  std::string found;
  int depth = 0;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame != nullptr && depth < most) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    const std::string path = file == nullptr ? "" : file;
    if (auto at = path.rfind(package); at != std::string::npos) {
      found += (found.empty() ? "" : " < ") + path.substr(at + package.size()) + ":" +
               std::to_string(PyFrame_GetLineNumber(frame));
      depth++;
    }
    Py_DECREF(code);
    PyFrameObject* caller = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = caller;
  }
  Py_XDECREF(frame);
  return found;
}

inline void append(Entry&& entry, bool finds_lines = true) {
  if (!log().is_recording) return;
  if (finds_lines && log().finds_lines) entry.where = program_lines();
  std::lock_guard<std::mutex> lock(log().mutex);
  log().entries.push_back(std::move(entry));
}

// Finish the pending copies for which `is_done` holds, in their order.
template <typename Predicate>
void finish(Predicate is_done) {
  std::vector<Pending> done;
  {
    std::lock_guard<std::mutex> lock(log().mutex);
    std::vector<Pending> left;
    for (Pending& copy : log().pending) (is_done(copy) ? done : left).push_back(std::move(copy));
    log().pending.swap(left);
  }
  for (Pending& copy : done) {
    if (copy.arrives) {
      copy.host.copy_(copy.data);
    } else if (std::memcmp(copy.host.data_ptr(), copy.data.data_ptr(), copy.data.nbytes()) != 0) {
      const auto bytes = static_cast<int64_t>(copy.data.nbytes());
      append({HOST_RACE, copy.stream, 0, bytes, "copy from pinned memory", copy.where}, false);
    }
  }
}

// Finish the copies that the host now knows to be done.
inline void settle() {
  finish([](const Pending& copy) { return log().host[copy.stream] >= copy.count; });
}

// Count an operation on a stream; return its number.
inline int64_t advance(int64_t stream) {
  std::lock_guard<std::mutex> lock(log().mutex);
  Clock& clock = log().streams[stream];
  join(clock, log().host);
  return ++clock[stream];
}

inline void operate(Entry&& entry) {
  advance(entry.stream);
  append(std::move(entry));
}

inline std::shared_ptr<Event> new_event() {
  std::lock_guard<std::mutex> lock(log().mutex);
  return std::make_shared<Event>(Event{++log().num_events});
}

inline void record_event(Event& event, int64_t stream) {
  {
    std::lock_guard<std::mutex> lock(log().mutex);
    Clock& clock = log().streams[stream];
    join(clock, log().host);
    event.clock = clock;
    event.at = std::chrono::steady_clock::now();
  }
  append({RECORD, stream, event.id, 0, "record"});
}

inline void wait_event(const Event& event, int64_t stream) {
  {
    std::lock_guard<std::mutex> lock(log().mutex);
    join(log().streams[stream], event.clock);
  }
  append({WAIT, stream, event.id, 0, "wait"});
}

// The host learns that all work of a stream, of all streams, or before an event, has completed.
inline void sync_stream(int64_t stream, const std::string& name, Kind kind = SYNC_STREAM) {
  {
    std::lock_guard<std::mutex> lock(log().mutex);
    join(log().host, log().streams[stream]);
  }
  append({kind, stream, 0, 0, name});
  settle();
}

inline void sync_device(const std::string& name) {
  {
    std::lock_guard<std::mutex> lock(log().mutex);
    for (auto& [stream, clock] : log().streams) join(log().host, clock);
  }
  append({SYNC_DEVICE, -1, 0, 0, name});
  settle();
}

inline void sync_event(const Event& event, const std::string& name, Kind kind = SYNC_EVENT) {
  {
    std::lock_guard<std::mutex> lock(log().mutex);
    join(log().host, event.clock);
  }
  append({kind, -1, event.id, 0, name});
  settle();
}

inline Span span_of(const at::Tensor& tensor, bool writes) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); dim++) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const auto base = reinterpret_cast<int64_t>(tensor.storage().data());
  const auto itemsize = static_cast<int64_t>(tensor.itemsize());
  return {base + tensor.storage_offset() * itemsize, base + (tensor.storage_offset() + last + 1) * itemsize, writes};
}

}  // namespace virtual_cuda
