// Operators of the simulated device: the CPU's kernels on aliases of the same memory.
//
// [Note: fallback]
// A boxed function takes every operator that has no implementation for CUDA here. It replaces each CUDA tensor by a
// CPU tensor over the same memory, calls the CPU's kernel, and gives results back as CUDA tensors: an argument for an
// argument that was returned, a view for a result in an argument's memory, otherwise a copy in memory of the device.
// Which bytes were read and written follows from the operator's schema. Operators that only make views access none.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_native.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/SDPBackend.h>
#include <torch/library.h>

#include <unordered_set>

#include "device.h"

namespace virtual_cuda {

constexpr c10::DispatchKeySet CUDA_KEYS(c10::DispatchKey::CUDA);

// --- tensors over the same memory

inline at::Tensor with_shape_of(at::Tensor made, const at::Tensor& like) {
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

// `type`: the CPU, or meta, which has no contents.
inline at::Tensor alias_on(DeviceType type, const at::Tensor& tensor) {
  auto* keep = new c10::Storage(tensor.storage());
  void* address = type == DeviceType::CPU ? const_cast<void*>(tensor.storage().data()) : nullptr;
  c10::DataPtr data(address, keep, [](void* kept) { delete static_cast<c10::Storage*>(kept); }, Device(type));
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), nullptr, false);
  const auto key = type == DeviceType::CPU ? c10::DispatchKey::CPU : c10::DispatchKey::Meta;
  return with_shape_of(at::detail::make_tensor<c10::TensorImpl>(
                           c10::Storage(std::move(storage)), c10::DispatchKeySet(key), tensor.dtype()),
                       tensor);
}

inline at::Tensor alias_on_cpu(const at::Tensor& tensor) { return alias_on(DeviceType::CPU, tensor); }

inline at::Tensor view_of(const at::Tensor& base, const at::Tensor& like) {
  return with_shape_of(at::detail::make_tensor<c10::TensorImpl>(
                           c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), like.dtype()),
                       like);
}

// `cpu`: may be on meta.
inline at::Tensor copy_on_device(const at::Tensor& cpu) {
  at::Tensor made = at::detail::empty_strided_generic(cpu.sizes(), cpu.strides(), &device_memory(), CUDA_KEYS,
                                                      cpu.scalar_type());
  if (cpu.numel() && !cpu.is_meta() && !is_large(cpu.nbytes())) alias_on_cpu(made).copy_(cpu);
  if (cpu.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// --- costs and synchronizations of operators

inline double product(const at::Tensor& tensor) { return static_cast<double>(tensor.numel()); }

// Multiply-adds count as two. Zero for everything that is bound by memory.
inline double flops_of(const std::string& name, const std::vector<at::Tensor>& args) {
  if (args.size() < 2) return 0;
  const bool adds = name == "aten::addmm" || name == "aten::baddbmm" || name == "aten::addmm_";
  if (adds && args.size() >= 3) return 2 * product(args[1]) * static_cast<double>(args[2].size(-1));
  if (name == "aten::mm" || name == "aten::bmm") return 2 * product(args[0]) * static_cast<double>(args[1].size(-1));
  // Attention with a causal mask: a product for the scores and one for the output, half of each; five backward.
  const bool is_backward = name == "aten::_scaled_dot_product_flash_attention_backward";
  if (name == "aten::_scaled_dot_product_flash_attention" || is_backward)
    return (is_backward ? 5 : 2) * product(args[is_backward ? 1 : 0]) * static_cast<double>(args[1].size(2));
  if (name == "aten::mv" || name == "aten::dot") return 2 * product(args[0]);
  return 0;
}

// Operators whose result, or its shape, the host reads.
inline bool host_reads(const std::string& name, bool indexes_by_bools) {
  static const std::unordered_set<std::string> names{
      "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2",
      "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::is_nonzero"};
  if (names.count(name)) return true;
  // An index of bools is one of nonzero(), which aten::index calls on the device.
  return indexes_by_bools && (name == "aten::index_put_" || name == "aten::_index_put_impl_");
}

inline bool makes_view(const c10::FunctionSchema& schema) {
  if (schema.returns().empty()) return false;
  for (const auto& result : schema.returns())
    if (result.alias_info() == nullptr || result.alias_info()->isWrite()) return false;
  return true;
}

// The default CPU generator draws an operator's numbers; for its time it has the device generator's state.
struct DrawFromDevice {
  explicit DrawFromDevice(bool draws) : draws(draws) {
    if (!draws) return;
    before = cpu()->get_state();
    cpu()->set_state(*device()->get_state());
  }
  ~DrawFromDevice() {
    if (!draws) return;
    device()->set_state(*cpu()->get_state());
    cpu()->set_state(*before);
  }
  static c10::GeneratorImpl* cpu() { return at::detail::getDefaultCPUGenerator().unsafeGetGeneratorImpl(); }
  static c10::GeneratorImpl* device() { return default_generator(-1).unsafeGetGeneratorImpl(); }
  const bool draws;
  c10::intrusive_ptr<c10::TensorImpl> before;
};

// --- the fallback

class CpuCall {
 public:
  CpuCall(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(stack), entry_{OP, current_stream()} {
    entry_.name = op.schema().operator_name().name;
  }

  void run() {
    const auto& arguments = op_.schema().arguments();
    const size_t first = stack_->size() - arguments.size();
    for (size_t each = first; each < stack_->size(); each++)
      if (has_large((*stack_)[each])) type_ = DeviceType::Meta;
    bool has_generator = false;
    for (size_t each = 0; each < arguments.size(); each++) {
      const auto* alias = arguments[each].alias_info();
      to_cpu((*stack_)[first + each], alias != nullptr && alias->isWrite(), has_generator);
    }
    entry_.flops = flops_of(entry_.name, inputs_);
    entry_.itemsize = inputs_.empty() ? 0 : static_cast<int>(inputs_[0].itemsize());
    if (host_reads(entry_.name, indexes_by_bools_)) sync_stream(entry_.stream, entry_.name);
    {
      DrawFromDevice generator(!has_generator && op_.hasTag(at::Tag::nondeterministic_seeded));
      const auto key = type_ == DeviceType::CPU ? c10::DispatchKey::CPU : c10::DispatchKey::Meta;
      op_.redispatchBoxed(c10::DispatchKeySet(key), stack_);
    }
    for (auto& [cpu, device] : pairs_)
      if (cpu.numel() != device.numel()) grow(cpu, device);
    const size_t first_result = stack_->size() - op_.schema().returns().size();
    for (size_t each = first_result; each < stack_->size(); each++) to_device((*stack_)[each]);
    if (!entry_.spans.empty() && !makes_view(op_.schema())) operate(std::move(entry_));
  }

 private:
  // See [Note: sizes only] in memory.h.
  static bool has_large(const c10::IValue& value) {
    if (large_bytes == 0) return false;
    if (value.isTensor()) return value.toTensor().defined() && value.toTensor().is_cuda() && is_large(value.toTensor().nbytes());
    if (!value.isTensorList()) return false;
    for (const at::Tensor& tensor : value.toTensorVector())
      if (tensor.is_cuda() && is_large(tensor.nbytes())) return true;
    return false;
  }

  at::Tensor cpu_of(const at::Tensor& tensor, bool writes) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    inputs_.push_back(tensor);
    // An `out=` tensor without elements may be resized by the kernel, which needs memory of the CPU's allocator.
    const bool may_grow = writes && tensor.numel() == 0;
    pairs_.emplace_back(
        may_grow ? at::empty(tensor.sizes(), at::dtype(tensor.scalar_type()).device(type_)) : alias_on(type_, tensor),
        tensor);
    if (tensor.numel()) entry_.spans.push_back(span_of(tensor, writes));
    return pairs_.back().first;
  }

  void to_cpu(c10::IValue& value, bool writes, bool& has_generator) {
    if (value.isTensor()) {
      value = cpu_of(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(cpu_of(tensor, writes));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        indexes_by_bools_ |= tensor && tensor->scalar_type() == at::kBool;
        list.push_back(tensor ? std::optional<at::Tensor>(cpu_of(*tensor, writes)) : std::nullopt);
      }
      value = list;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      value = c10::IValue(Device(type_));
    } else if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
      has_generator = true;
      value = static_cast<Generator*>(value.toGenerator().unsafeGetGeneratorImpl())->cpu;
    }
  }

  void grow(const at::Tensor& cpu, const at::Tensor& device) {
    at::Tensor grown = copy_on_device(cpu.contiguous());  // may be on meta
    auto* storage = device.storage().unsafeGetStorageImpl();
    resize_storage(storage, 0);
    resize_storage(storage, grown.nbytes());
    if (!is_large(grown.nbytes())) std::memcpy(storage->mutable_data(), grown.storage().data(), grown.nbytes());
    device.unsafeGetTensorImpl()->set_storage_offset(0);
    device.unsafeGetTensorImpl()->set_sizes_and_strides(grown.sizes(), grown.strides());
    if (device.numel()) entry_.spans.push_back(span_of(device, true));
  }

  at::Tensor device_of(const at::Tensor& result) {
    if (!result.defined()) return result;
    for (auto& [cpu, device] : pairs_)
      if (cpu.is_same(result)) return device;
    for (auto& [cpu, device] : pairs_)
      if (result.storage().unsafeGetStorageImpl() == cpu.storage().unsafeGetStorageImpl())
        return view_of(device, result);
    at::Tensor made = copy_on_device(result);
    if (made.numel()) entry_.spans.push_back(span_of(made, true));
    return made;
  }

  void to_device(c10::IValue& value) {
    if (value.isTensor()) {
      value = device_of(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(device_of(tensor));
      value = list;
    }
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  Entry entry_;
  bool indexes_by_bools_ = false;
  DeviceType type_ = DeviceType::CPU;  // of the kernel
  std::vector<at::Tensor> inputs_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;  // on the CPU, on the device
};

inline void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  CpuCall(op, stack).run();
}

// --- operators with an implementation of their own

inline at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                        std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_memory(), CUDA_KEYS,
                                   c10::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                                std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                                std::optional<Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           &device_memory(), CUDA_KEYS, c10::dtype_or_default(dtype));
}

inline at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                             std::optional<c10::SymInt> offset) {
  const auto start = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

inline at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

inline at::Tensor& set_(at::Tensor& self, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

inline at::Tensor& set_to_storage(at::Tensor& self, c10::Storage storage) {
  const c10::SymInt numel = static_cast<int64_t>(storage.nbytes() / self.itemsize()), step = 1;
  return set_(self, std::move(storage), 0, c10::SymIntArrayRef(&numel, 1), c10::SymIntArrayRef(&step, 1));
}

inline at::Tensor& set_to_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_(self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

inline at::Tensor& copy_on_stream(at::Tensor& self, const at::Tensor& source) {
  if (self.const_data_ptr() == source.const_data_ptr() && self.scalar_type() == source.scalar_type() &&
      self.is_contiguous() && source.is_contiguous())
    return self;  // as at::native::copy_device_to_device
  Entry entry{OP, current_stream(), 0, 0, "aten::copy_"};
  entry.spans = {span_of(source, false), span_of(self, true)};
  if (!is_large(self.nbytes()) && !is_large(source.nbytes())) alias_on_cpu(self).copy_(alias_on_cpu(source));
  operate(std::move(entry));
  return self;
}

// See [Note: asynchronous copies].
inline at::Tensor& copy_across(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const bool to_host = source.is_cuda();
  const at::Tensor& device = to_host ? source : self;
  const at::Tensor& host = to_host ? self : source;
  const bool is_direct = host.is_non_overlapping_and_dense() && device.is_non_overlapping_and_dense() &&
                         host.strides() == device.strides() && host.scalar_type() == device.scalar_type();
  const bool is_asynchronous = non_blocking && is_direct && PinnedMemory::contains(host.const_data_ptr());
  const int64_t stream = current_stream(), count = advance(stream);
  Entry entry{OP, stream, 0, 0, to_host ? "copy to host" : "copy to device"};
  entry.spans = {span_of(device, !to_host)};
  entry.bytes = static_cast<int64_t>(host.nbytes());
  append(std::move(entry));
  if (is_large(host.nbytes()) || is_large(device.nbytes())) {
    if (!is_asynchronous) sync_stream(stream, to_host ? "blocking copy to host" : "blocking copy to device");
    return self;
  }
  if (to_host && is_asynchronous) {
    copy_later(self, alias_on_cpu(source), stream, count);
    return self;
  }
  if (to_host) {
    self.copy_(alias_on_cpu(source));
  } else {
    alias_on_cpu(self).copy_(is_asynchronous ? read_pinned(source, stream, count) : source);
  }
  if (!is_asynchronous) sync_stream(stream, to_host ? "blocking copy to host" : "blocking copy to device");
  return self;
}

inline at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  if (self.is_cuda() && source.is_cuda()) {
    return source.numel() == self.numel() ? copy_on_stream(self, source)
                                          : copy_on_stream(self, source.expand_as(self));
  }
  return copy_across(self, source.numel() == self.numel() ? source : source.expand_as(self), non_blocking);
}

// `name`: who records.
inline void record_stream(const at::Tensor& self, int64_t stream, const std::string& name) {
  append({RECORD_STREAM, stream, reinterpret_cast<int64_t>(self.storage().data()), 0, name});
}

// The kernel of scaled_dot_product_attention: on meta, flash attention, otherwise one made of operators that the CPU has.
inline int64_t attention_kernel(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(large_bytes ? at::SDPBackend::flash_attention : at::SDPBackend::math);
}

}  // namespace virtual_cuda
