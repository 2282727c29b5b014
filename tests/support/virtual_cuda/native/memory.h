// Memory of the simulated device and pinned memory, both from the host's heap, and copies between host and device.
//
// [Note: asynchronous copies]
// A copy from the device into pinned memory fills the target with NaN (bytes 0xFF), and writes the data when the host
// synchronizes with the copy: a missing synchronization shows as NaN in the results. A copy from pinned memory keeps
// what it has read, and compares when the host synchronizes: if the host has written to the source before, that is a
// race. A copy from or to pageable memory blocks the host, as CUDA's does. A copy that is ordered after another one of
// the same pinned memory, by streams and events, finds it done.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "log.h"

namespace virtual_cuda {

using c10::Device;
using c10::DeviceType;

constexpr int NUM_DEVICES = 8;
constexpr size_t ALIGNMENT = 512;
constexpr int UNINITIALIZED = 0xFF;  // NaN in every floating dtype

inline std::atomic<int64_t> allocated_bytes{0}, peak_bytes{0};

inline Device current_device() { return Device(DeviceType::CUDA, static_cast<c10::DeviceIndex>(tls_device)); }

inline void* new_block(size_t bytes) {
  void* data = std::aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
  TORCH_CHECK(data != nullptr, "out of memory for ", bytes, " bytes of the simulated device");
  std::memset(data, UNINITIALIZED, bytes);
  return data;
}

struct Block {
  void* data;
  size_t bytes;
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
    void* data = new_block(bytes);
    const int64_t now = allocated_bytes += static_cast<int64_t>(bytes);
    for (int64_t peak = peak_bytes; now > peak && !peak_bytes.compare_exchange_weak(peak, now);) {
    }
    append({ALLOC, current_stream(), reinterpret_cast<int64_t>(data), static_cast<int64_t>(bytes), "allocate"});
    std::lock_guard<std::mutex> lock(mutex);
    live[data] = {bytes, current_stream()};
    return {data, new Block{data, bytes}, &release, current_device()};
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
  std::memset(block->data, UNINITIALIZED, block->bytes);
  std::free(block->data);
  delete block;
}

// Addresses of pinned memory, for `is_pinned`.
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, Device(DeviceType::CPU)};
    auto* block = new Block{new_block(bytes), bytes};
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
    std::free(block->data);
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
  if (storage->data() != nullptr) std::memcpy(data.get(), storage->data(), std::min(bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

inline std::pair<uintptr_t, uintptr_t> addresses_of(const at::Tensor& host) {
  const auto begin = reinterpret_cast<uintptr_t>(host.const_data_ptr());
  return {begin, begin + host.nbytes()};  // dense
}

// Let `source_cpu`, the data of a device tensor, arrive in `host` when the host synchronizes with `stream`.
inline void copy_later(const at::Tensor& host, const at::Tensor& source_cpu, int64_t stream, int64_t count) {
  at::Tensor arriving = source_cpu.to(host.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  std::memset(host.data_ptr(), UNINITIALIZED, host.nbytes());
  const auto [begin, end] = addresses_of(host);
  std::lock_guard<std::mutex> lock(log().mutex);
  log().pending.push_back({begin, end, stream, count, [host, arriving]() { host.copy_(arriving); }});
}

// Check, when the host synchronizes with `stream`, that it has not written to `host` meanwhile.
inline void check_later(const at::Tensor& host, int64_t stream, int64_t count) {
  at::Tensor read = host.clone();
  const std::string where = log().is_recording ? program_lines() : "";
  const auto [begin, end] = addresses_of(host);
  std::lock_guard<std::mutex> lock(log().mutex);
  log().pending.push_back({begin, end, stream, count, [host, read, stream, where]() {
    if (std::memcmp(host.data_ptr(), read.data_ptr(), read.nbytes()) != 0)
      append({HOST_RACE, stream, 0, static_cast<int64_t>(read.nbytes()), "copy from pinned memory", where}, false);
  }});
}

}  // namespace virtual_cuda
