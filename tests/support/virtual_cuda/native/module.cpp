// A CUDA device made of host memory, for a torch that was built without CUDA. See README.md.
#include "operators.h"

namespace vc = virtual_cuda;

namespace {
struct Install {
  Install() {
    constexpr uint8_t priority = 10;  // above that of torch's own allocators
    c10::SetAllocator(c10::DeviceType::CUDA, &vc::device_memory(), priority);
    c10::impl::DeviceGuardImplRegistrar(c10::DeviceType::CUDA, new vc::Guard());
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&vc::attention_kernel);
  }
} install;

vc::Entry entry_of(int64_t stream, const std::string& name, const std::vector<at::Tensor>& reads,
                   const std::vector<at::Tensor>& writes, int64_t communicator, int64_t sequence, int peer) {
  vc::Entry entry{vc::OP, stream, communicator, sequence, name};
  entry.peer = peer;
  for (const at::Tensor& tensor : reads)
    if (tensor.numel()) entry.spans.push_back(vc::span_of(tensor, false));
  for (const at::Tensor& tensor : writes)
    if (tensor.numel()) entry.spans.push_back(vc::span_of(tensor, true));
  return entry;
}

py::list take_entries() {
  std::vector<vc::Entry> taken;
  {
    std::lock_guard<std::mutex> lock(vc::log().mutex);
    taken.swap(vc::log().entries);
  }
  py::list found;
  for (const vc::Entry& entry : taken) {
    py::list spans;
    for (const vc::Span& span : entry.spans) spans.append(py::make_tuple(span.begin, span.end, span.writes));
    found.append(py::make_tuple(static_cast<int>(entry.kind), entry.stream, entry.id, entry.bytes, entry.name,
                                entry.where, spans, entry.flops, entry.itemsize, entry.peer));
  }
  return found;
}
}  // namespace

namespace at {
using Creator = c10::Registerer<std::string, std::unique_ptr<CUDAHooksInterface>, CUDAHooksArgs>;
C10_REGISTER_CREATOR(CUDAHooksRegistry, CUDAHooks, (Creator::DefaultCreator<vc::Hooks>))
}  // namespace at

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&vc::run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(vc::empty));
  m.impl("empty_strided", TORCH_FN(vc::empty_strided));
  m.impl("as_strided", TORCH_FN(vc::as_strided));
  m.impl("view", TORCH_FN(vc::view));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(vc::set_));
  m.impl("set_.source_Storage", TORCH_FN(vc::set_to_storage));
  m.impl("set_.source_Tensor", TORCH_FN(vc::set_to_tensor));
  m.impl("copy_", TORCH_FN(vc::copy_));
  m.impl("record_stream", [](at::Tensor& self, c10::Stream stream) { vc::record_stream(self, stream.id(), "record_stream"); });
}

PYBIND11_MODULE(virtual_cuda_native, m) {
  m.def("set_device", [](int index) { vc::tls_device = index; });
  m.def("current_device", []() { return vc::tls_device; });
  m.def("set_stream_pool", [](int64_t size) {
    vc::streams().pool_size = size;
    if (size) vc::streams().num_made = 0;
  });
  m.def("sync_stream", [](int64_t id, const std::string& name) { vc::sync_stream(id, name); });
  m.def("sync_device", &vc::sync_device);
  m.def("set_recording", [](bool is_recording, bool finds_lines) {
    const bool begins = is_recording && !vc::log().is_recording;
    vc::log().is_recording = is_recording;
    vc::log().finds_lines = finds_lines;
    if (begins) vc::device_memory().list_live();
  });
  m.def("operate", [](int64_t stream, const std::string& name, const std::vector<at::Tensor>& reads,
                      const std::vector<at::Tensor>& writes, int64_t communicator, int64_t sequence, int peer) {
    vc::operate(entry_of(stream, name, reads, writes, communicator, sequence, peer));
  });
  m.def("record_stream", &vc::record_stream);
  m.def("alias_on_cpu", [](const at::Tensor& tensor) { return vc::alias_on_cpu(tensor); });
  m.def("resize_storage", [](int64_t storage, size_t bytes) {
    vc::resize_storage(reinterpret_cast<c10::StorageImpl*>(storage), bytes);
  });
  m.def("set_large_bytes", [](size_t bytes) { vc::large_bytes = bytes; });
  m.def("is_large", [](const at::Tensor& tensor) { return vc::is_large(tensor.nbytes()); });
  m.def("take_entries", &take_entries);
  m.def("allocated_bytes", []() { return vc::allocated_bytes.load(); });
  m.def("peak_bytes", []() { return vc::peak_bytes.load(); });
  m.def("reset_peak", []() { vc::peak_bytes = vc::allocated_bytes.load(); });
  m.def("default_generator", [](int index) { return vc::default_generator(static_cast<c10::DeviceIndex>(index)); });
}
