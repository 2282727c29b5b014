// The device guard, the generator and the hooks through which torch sees a CUDA device.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <utility>

#include "memory.h"

namespace virtual_cuda {

using c10::DeviceIndex;
using c10::Stream;

// Streams are numbered from 1; 0 is the default stream. CUDA has 32 per priority, which torch gives out in turn: with
// `pool_size`, so does the simulation, otherwise no two share a number.
struct Streams {
  std::atomic<int64_t> num_made{0}, pool_size{0};
  int64_t next() {
    const int64_t number = num_made++, size = pool_size;
    return 1 + (size ? number % size : number);
  }
};

inline Streams& streams() {
  static auto* instance = new Streams;
  return *instance;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Stream stream_of(Device device, int64_t id) { return Stream(Stream::UNSAFE, device, id); }
  static Event& event_of(void* event) { return **static_cast<std::shared_ptr<Event>*>(event); }

  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override {
    const Device before = current_device();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return current_device(); }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) tls_device = device.index();
  }
  Stream getStream(Device device) const override { return stream_of(device, tls_streams[device.index()]); }
  Stream getDefaultStream(Device device) const override { return stream_of(device, 0); }
  Stream getNewStream(Device device, int) const override { return stream_of(device, streams().next()); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    int64_t& current = tls_streams[stream.device_index()];
    const Stream before = stream_of(stream.device(), current);
    current = stream.id();
    return before;
  }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new std::shared_ptr<Event>(new_event());
    record_event(event_of(*event), stream.id());
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) wait_event(event_of(event), stream.id());
  }
  bool queryEvent(void* event) const override {
    if (event != nullptr) sync_event(event_of(event), "event.query", QUERY);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) sync_event(event_of(event), "event.synchronize");
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(event_of(second).at - event_of(first).at).count();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<std::shared_ptr<Event>*>(event);
  }
  DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }
  bool queryStream(const Stream& stream) const override {
    sync_stream(stream.id(), "stream.query", QUERY);
    return true;
  }
  void synchronizeStream(const Stream& stream) const override { sync_stream(stream.id(), "stream.synchronize"); }
  void synchronizeDevice(const DeviceIndex) const override { sync_device("device.synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    append({RECORD_STREAM, stream.id(), reinterpret_cast<int64_t>(data.get()), 0, "record_stream"});
  }
};

// A CUDA generator whose numbers are drawn by a CPU generator of its own.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex index)
      : c10::GeneratorImpl(Device(DeviceType::CUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        cpu(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.unsafeGetGeneratorImpl()->seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->cpu = cpu.clone();
    return copy;
  }

  at::Generator cpu;
};

inline const at::Generator& default_generator(DeviceIndex index) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (int each = 0; each < NUM_DEVICES; each++) made->push_back(at::make_generator<Generator>(each));
    return made;
  }();
  return (*generators)[index < 0 ? tls_device : index];
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  int getNumGPUs() const override { return NUM_DEVICES; }
  DeviceIndex current_device() const override { return tls_device; }
  DeviceIndex getCurrentDevice() const override { return tls_device; }
  void setCurrentDevice(DeviceIndex index) const override { tls_device = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(tls_device, int(index)); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  Device getDeviceFromPtr(void*) const override { return virtual_cuda::current_device(); }
  bool isPinnedPtr(const void* pointer) const override { return PinnedMemory::contains(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory(); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? tls_device : index);
  }
  void deviceSynchronize(DeviceIndex) const override { sync_device("device.synchronize"); }
};

}  // namespace virtual_cuda
