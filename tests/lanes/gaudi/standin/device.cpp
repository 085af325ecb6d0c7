// A stand-in for the `hpu` device: tensors that say they live on hpu:0, whose bytes lie in host memory.
//
// Every operation runs torch's CPU kernel on the same bytes and is counted by name. What a real device would
// refuse is refused: an operation on tensors of both devices. Copies between host and device are counted apart.
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <map>
#include <string>

namespace {

constexpr auto kDevice = c10::DeviceType::HPU;
constexpr auto kKey = c10::DispatchKey::HPU;

std::map<std::string, int64_t> counts;
int64_t uploads = 0, downloads = 0, syncs = 0, bytes_in_use = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return {kDevice, 0}; }
  c10::Device getDevice() const override { return {kDevice, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(HPU, Guard);

struct Block {
  void* data;
  size_t size;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  bytes_in_use -= static_cast<int64_t>(block->size);
  c10::free_cpu(block->data);
  delete block;
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, c10::Device(kDevice, 0)};
    auto* block = new Block{c10::alloc_cpu(size), size};
    bytes_in_use += static_cast<int64_t>(size);
    return {block->data, block, &release, c10::Device(kDevice, 0)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
Memory memory;
REGISTER_ALLOCATOR(kDevice, &memory);

bool on_device(const at::Tensor& t) { return t.defined() && t.device().type() == kDevice; }

void drop_storage(void* context) { delete static_cast<c10::Storage*>(context); }

// The same bytes as a tensor of the other device; keeps them alive.
at::Tensor seen_from(const at::Tensor& t, c10::Device device, c10::DispatchKey key) {
  auto* owner = new c10::Storage(t.storage());
  c10::DataPtr bytes(owner->mutable_data(), owner, &drop_storage, device);
  c10::Storage storage(c10::Storage::use_byte_size_t(), owner->nbytes(), std::move(bytes),
                       device.type() == kDevice ? &memory : c10::GetCPUAllocator(), true);
  auto seen = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), t.dtype());
  seen.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides());
  seen.unsafeGetTensorImpl()->set_storage_offset(t.storage_offset());
  return seen;
}

at::Tensor as_host(const at::Tensor& t) {
  return seen_from(t, c10::Device(c10::DeviceType::CPU), c10::DispatchKey::CPU);
}

at::Tensor as_device(const at::Tensor& t) { return seen_from(t, c10::Device(kDevice, 0), kKey); }

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &memory, c10::DispatchKeySet(kKey),
                                   dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, &memory, c10::DispatchKeySet(kKey),
                                           dtype.value_or(at::get_default_dtype_as_scalartype()));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  if (on_device(source) && !on_device(target)) ++downloads;
  if (!on_device(source) && on_device(target)) ++uploads;
  auto from = on_device(source) ? as_host(source) : source;
  auto to = on_device(target) ? as_host(target) : target;
  to.copy_(from);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (source.sizes() != target.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& t) {
  ++syncs;
  return at::_local_scalar_dense(as_host(t));
}

const at::Tensor& resize_(const at::Tensor& t, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  const size_t need = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  auto& storage = const_cast<c10::Storage&>(t.storage());
  if (need > storage.nbytes()) {
    auto grown = memory.allocate(need);
    if (storage.nbytes()) memcpy(grown.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(need);
  }
  return t;
}

at::Tensor strided_view(const at::Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides,
                      std::optional<int64_t> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(t.storage()),
                                                       t.key_set(), t.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  view.unsafeGetTensorImpl()->set_storage_offset(offset.value_or(t.storage_offset()));
  return view;
}

at::Tensor view(const at::Tensor& t, at::IntArrayRef sizes) { return at::native::view(t, sizes); }

at::Tensor reshape_alias(const at::Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return strided_view(t, sizes, strides, std::nullopt);
}

// Runs the CPU kernel of any other operation on the same bytes.
void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  ++counts[schema.operator_name().name];
  const size_t size = schema.arguments().size(), first = stack->size() - size;
  std::vector<std::pair<at::Tensor, at::Tensor>> written;  // the caller's, and as the host saw it
  auto host = [&](const at::Tensor& t, bool writes) {
    if (!t.defined()) return t;
    if (!on_device(t)) {
      TORCH_CHECK(t.dim() == 0, schema.operator_name(), " got tensors on hpu and on ", t.device());
      return t;
    }
    auto seen = as_host(t);
    if (writes) written.emplace_back(t, seen);
    return seen;
  };
  for (size_t i = 0; i < size; ++i) {
    auto& value = (*stack)[first + i];
    const auto* alias = schema.arguments()[i].alias_info();
    const bool writes = alias != nullptr && alias->isWrite();
    if (value.isTensor()) {
      value = host(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(host(t, writes));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& t : value.toOptionalTensorList()) {
        std::optional<at::Tensor> one = t;
        list.push_back(one ? std::optional<at::Tensor>(host(*one, writes)) : std::nullopt);
      }
      value = list;
    } else if (value.isDevice()) {
      value = c10::Device(c10::DeviceType::CPU);
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto& [mine, seen] : written) {
    if (seen.sizes() == mine.sizes() && seen.const_data_ptr() == mine.const_data_ptr()) continue;
    mine.resize_(seen.sizes());  // an output that the kernel laid out anew
    as_host(mine).copy_(seen);
  }
  auto back = [&](const at::Tensor& t) {
    for (auto& [mine, seen] : written)
      if (seen.is_same(t)) return mine;
    return t.defined() ? as_device(t) : t;
  };
  const size_t results = schema.returns().size(), start = stack->size() - results;
  for (size_t i = 0; i < results; ++i) {
    auto& value = (*stack)[start + i];
    if (value.isTensor()) {
      value = back(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(back(t));
      value = list;
    }
  }
}

TORCH_LIBRARY_IMPL(_, HPU, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }

TORCH_LIBRARY_IMPL(aten, HPU, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("resize_", resize_);
  m.impl("as_strided", strided_view);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("op_counts", [] { return counts; });
  m.def("transfers", [] { return std::make_tuple(uploads, downloads, syncs); });
  m.def("bytes_in_use", [] { return bytes_in_use; });
  m.def("reset", [] {
    counts.clear();
    uploads = downloads = syncs = 0;
  });
  m.def("as_host", &as_host, "the same bytes as a CPU tensor, uncounted");
  m.def("as_device", &as_device, "a CPU tensor's bytes as an hpu tensor, uncounted");
}
