// Memory of the simulated device and pinned memory, both from the host's heap, and copies between host and device.
//
// [Note: asynchronous copies]
// A copy from the device into pinned memory fills the target with NaN (bytes 0xFF), and writes the data when the host
// synchronizes with the copy: a missing synchronization shows as NaN in the results. A copy from pinned memory keeps
// what it has read, and compares when the host synchronizes: if the host has written to the source before, that is a
// race. It reads what copies before it on its stream have put there. A copy from or to pageable memory blocks the host, as CUDA's does.
//
// [Note: sizes only]
// With `large_bytes`, tensors of more bytes have addresses and no contents: their pages are never touched, operators
// on them compute shapes only (on meta), and copies do nothing. What an operator makes of them that is small is zero.
// So a step of a model of any size takes seconds and little memory, and its log has all operations with their bytes.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "log.h"

namespace virtual_cuda {

using c10::Device;
using c10::DeviceType;

constexpr size_t ALIGNMENT = 512;
constexpr int UNINITIALIZED = 0xFF;  // NaN in every floating dtype

inline std::atomic<int64_t> allocated_bytes{0}, peak_bytes{0};

inline Device current_device() { return Device(DeviceType::CUDA, static_cast<c10::DeviceIndex>(tls_device)); }

inline std::atomic<size_t> large_bytes{0};  // see [Note: sizes only]; 0: all tensors have contents

inline bool is_large(size_t bytes) { return large_bytes != 0 && bytes > large_bytes; }

inline void* new_block(size_t bytes) {
  if (is_large(bytes)) {
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(data != MAP_FAILED, "no addresses for ", bytes, " bytes of the simulated device");
    return data;
  }
  void* data = std::aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
  TORCH_CHECK(data != nullptr, "out of memory for ", bytes, " bytes of the simulated device");
  std::memset(data, large_bytes ? 0 : UNINITIALIZED, bytes);
  return data;
}

struct Block {
  Block(size_t bytes) : data(new_block(bytes)), bytes(bytes), is_mapped(is_large(bytes)) {}
  ~Block() {
    if (is_mapped) {
      munmap(data, bytes);
      return;
    }
    std::memset(data, UNINITIALIZED, bytes);
    std::free(data);
  }
  Block(const Block&) = delete;

  void* const data;
  const size_t bytes;
  const bool is_mapped;
};

struct DeviceMemory final : c10::Allocator {
  // Blocks of now, with the streams that allocated them: a recording begins with their list.
  std::mutex mutex;
  std::map<void*, std::pair<size_t, int64_t>> live;

  void list_live() {
    std::lock_guard<std::mutex> lock(mutex);
    for (const auto& [data, block] : live)
      append({ALLOC, block.second, reinterpret_cast<int64_t>(data), static_cast<int64_t>(block.first), "allocate",
              "before the recording"}, false);
  }
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, current_device()};
    auto* block = new Block(bytes);
    void* data = block->data;
    const int64_t now = allocated_bytes += static_cast<int64_t>(bytes);
    for (int64_t peak = peak_bytes; now > peak && !peak_bytes.compare_exchange_weak(peak, now);) {
    }
    append({ALLOC, current_stream(), reinterpret_cast<int64_t>(data), static_cast<int64_t>(bytes), "allocate"});
    std::lock_guard<std::mutex> lock(mutex);
    live[data] = {bytes, current_stream()};
    return {data, block, &release, current_device()};
  }
  static void release(void* context);
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};

inline DeviceMemory& device_memory() {
  static auto* instance = new DeviceMemory;
  return *instance;
}

inline void DeviceMemory::release(void* context) {
  auto* block = static_cast<Block*>(context);
  if (block == nullptr) return;
  {
    std::lock_guard<std::mutex> lock(device_memory().mutex);
    device_memory().live.erase(block->data);
  }
  allocated_bytes -= static_cast<int64_t>(block->bytes);
  // Without the line: the thread that frees may hold any lock.
  append({FREE, -1, reinterpret_cast<int64_t>(block->data), static_cast<int64_t>(block->bytes), "free"}, false);
  delete block;
}

// Addresses of pinned memory, for `is_pinned`.
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, Device(DeviceType::CPU)};
    auto* block = new Block(bytes);
    std::lock_guard<std::mutex> lock(mutex());
    blocks()[reinterpret_cast<uintptr_t>(block->data)] = bytes;
    return {block->data, block, &release, Device(DeviceType::CPU)};
  }
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    if (block == nullptr) return;
    {
      std::lock_guard<std::mutex> lock(mutex());
      blocks().erase(reinterpret_cast<uintptr_t>(block->data));
    }
    delete block;
  }
  static bool contains(const void* pointer) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    std::lock_guard<std::mutex> lock(mutex());
    auto next = blocks().upper_bound(address);
    return next != blocks().begin() && address < std::prev(next)->first + std::prev(next)->second;
  }
  static std::mutex& mutex() {
    static auto* instance = new std::mutex;
    return *instance;
  }
  static std::map<uintptr_t, size_t>& blocks() {
    static auto* instance = new std::map<uintptr_t, size_t>;
    return *instance;
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};

inline PinnedMemory& pinned_memory() {
  static auto* instance = new PinnedMemory;
  return *instance;
}

// What `torch.UntypedStorage.resize_` does on CUDA.
inline void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  if (bytes == 0) {
    storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
    storage->set_nbytes(static_cast<size_t>(0));
    return;
  }
  c10::DataPtr data = device_memory().allocate(bytes);
  if (storage->data() != nullptr && !is_large(bytes)) std::memcpy(data.get(), storage->data(), std::min(bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

inline bool overlap(const at::Tensor& one, const at::Tensor& other) {
  const auto* first = static_cast<const char*>(one.const_data_ptr());
  const auto* second = static_cast<const char*>(other.const_data_ptr());
  return first < second + other.nbytes() && second < first + one.nbytes();
}

// Let `source`, the data of a device tensor, arrive in `host` when the host synchronizes with the copy.
inline void copy_later(const at::Tensor& host, const at::Tensor& source, int64_t stream, int64_t count) {
  Pending copy{host, source.clone(), true, stream, count, ""};
  finish([&](const Pending& earlier) {  // reads before it on the stream: checked now, as their source changes
    return !earlier.arrives && overlap(earlier.host, host) && log().streams[stream][earlier.stream] >= earlier.count;
  });
  std::memset(host.data_ptr(), UNINITIALIZED, host.nbytes());
  std::lock_guard<std::mutex> lock(log().mutex);
  log().pending.push_back(std::move(copy));
}

// Return what a copy on `stream` reads from pinned memory: also data that has not arrived for the host, if the stream
// is ordered after its copy. Otherwise, when the host synchronizes, check that it has not written there meanwhile.
inline at::Tensor read_pinned(const at::Tensor& host, int64_t stream, int64_t count) {
  at::Tensor data = host.clone();
  auto* base = static_cast<char*>(data.data_ptr());
  const std::string where = log().is_recording ? program_lines() : "";
  bool has_arrived = true;
  std::lock_guard<std::mutex> lock(log().mutex);
  const auto begin = reinterpret_cast<intptr_t>(host.data_ptr()), end = begin + static_cast<intptr_t>(host.nbytes());
  for (const Pending& copy : log().pending) {
    if (!copy.arrives || log().streams[stream][copy.stream] < copy.count) continue;
    const auto first = reinterpret_cast<intptr_t>(copy.host.data_ptr());
    const auto from = std::max(begin, first), to = std::min(end, first + static_cast<intptr_t>(copy.data.nbytes()));
    if (from >= to) continue;
    std::memcpy(base + (from - begin), static_cast<char*>(copy.data.data_ptr()) + (from - first), to - from);
    has_arrived = false;
  }
  if (has_arrived) log().pending.push_back({host, data, false, stream, count, where});
  return data;
}

}  // namespace virtual_cuda
