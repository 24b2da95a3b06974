// SPDX-License-Identifier: Apache-2.0
// The CUDA driver: a page is one allocation handle (cuMemCreate).
#include <unordered_map>

#include "driver.h"
#include "libcuda.h"

namespace vattn {
namespace {

using namespace cuda;

constexpr int kOldestDriver = 12000;  // CUDA 12.0; SGLang needs more

// The device's primary context, the one that torch uses, kept alive.
class Context {
 public:
  static Result<std::shared_ptr<Context>> retain(std::shared_ptr<const Library> lib,
                                                 CUdevice device) {
    CUcontext context = nullptr;
    if (Status s = lib->status("cuDevicePrimaryCtxRetain",
                               lib->cuDevicePrimaryCtxRetain(&context, device));
        !s.ok())
      return s;
    return std::shared_ptr<Context>(new Context(std::move(lib), device, context));
  }
  // At process exit CUDA may be gone already: then this fails and nothing is lost.
  ~Context() { lib->cuDevicePrimaryCtxRelease(device); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const std::shared_ptr<const Library> lib;
  const CUdevice device;
  const CUcontext handle;

 private:
  Context(std::shared_ptr<const Library> lib, CUdevice device, CUcontext handle)
      : lib(std::move(lib)), device(device), handle(handle) {}
};

// Makes the context current in the calling thread and puts back what was there:
// a caller's thread may be working with another device.
class Current {
 public:
  explicit Current(const Context& context) : lib_(*context.lib) {
    status_ = lib_.status("cuCtxGetCurrent", lib_.cuCtxGetCurrent(&previous_));
    if (!status_.ok() || previous_ == context.handle) return;
    status_ = lib_.status("cuCtxSetCurrent", lib_.cuCtxSetCurrent(context.handle));
    changed_ = status_.ok();
  }
  ~Current() {
    if (changed_) lib_.cuCtxSetCurrent(previous_);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

  const Status& status() const { return status_; }

 private:
  const Library& lib_;
  CUcontext previous_ = nullptr;
  bool changed_ = false;
  Status status_;
};

class CudaPages final : public PhysicalPages {
 public:
  CudaPages(std::shared_ptr<Context> context, std::size_t count, std::size_t page_bytes)
      : PhysicalPages(count, page_bytes), context_(std::move(context)) {}
  ~CudaPages() override {
    const Current current(*context_);
    for (auto handle : handles) context_->lib->cuMemRelease(handle);
  }

  std::vector<CUmemGenericAllocationHandle> handles;  // by page

 private:
  const std::shared_ptr<Context> context_;
};

CUmemAllocationProp properties(CUdevice device) {
  CUmemAllocationProp prop = {};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  return prop;
}

class CudaDriver final : public Driver {
 public:
  CudaDriver(std::shared_ptr<Context> context, int ordinal, std::size_t granularity)
      : context_(std::move(context)),
        lib_(*context_->lib),
        ordinal_(ordinal),
        granularity_(granularity) {}

  const char* name() const override { return "cuda"; }
  std::size_t granularity() const override { return granularity_; }
  int device() const override { return ordinal_; }
  std::size_t mapping_budget() const override { return 0; }
  bool unmap_stalls_gpu() const override { return true; }
  bool creates_zeroed() const override { return false; }

  Result<Address> reserve(std::size_t bytes) override {
    const Current current(*context_);
    if (!current.status().ok()) return current.status();
    CUdeviceptr at = 0;
    if (Status s =
            check("cuMemAddressReserve", lib_.cuMemAddressReserve(&at, bytes, granularity_, 0, 0));
        !s.ok())
      return s;
    return static_cast<Address>(at);
  }

  Status free(Address at, std::size_t bytes) override {
    const Current current(*context_);
    if (!current.status().ok()) return current.status();
    return check("cuMemAddressFree", lib_.cuMemAddressFree(at, bytes));
  }

  Result<std::unique_ptr<PhysicalPages>> create(std::size_t count,
                                                std::size_t page_bytes) override {
    const Current current(*context_);
    if (!current.status().ok()) return current.status();
    auto pages = std::make_unique<CudaPages>(context_, count, page_bytes);
    pages->handles.reserve(count);
    const CUmemAllocationProp prop = properties(context_->device);
    while (pages->handles.size() < count) {
      CUmemGenericAllocationHandle handle = 0;
      // On failure the destructor releases those made so far.
      if (Status s = check("cuMemCreate", lib_.cuMemCreate(&handle, page_bytes, &prop, 0));
          !s.ok()) {
        return Status::driver(s.text() + ", after " + std::to_string(pages->handles.size()) +
                              " of " + std::to_string(count) + " pages of " +
                              std::to_string(page_bytes) + " bytes");
      }
      pages->handles.push_back(handle);
    }
    return std::unique_ptr<PhysicalPages>(std::move(pages));
  }

  // A handle can only be mapped whole: one call a page.
  Status map(const PhysicalPages& pages, Page first, std::size_t count, Address at) override {
    const Current current(*context_);
    if (!current.status().ok()) return current.status();
    const auto& handles = static_cast<const CudaPages&>(pages).handles;
    for (std::size_t i = 0; i < count; ++i) {
      const CUdeviceptr to = at + i * pages.page_bytes;
      const auto handle = handles[static_cast<std::size_t>(first) + i];
      Status status = check("cuMemMap", lib_.cuMemMap(to, pages.page_bytes, 0, handle, 0));
      if (status.ok()) continue;
      if (i > 0) {
        const Status undone = check("cuMemUnmap", lib_.cuMemUnmap(at, i * pages.page_bytes));
        if (!undone.ok()) return Status::driver(status.text() + "; undoing it: " + undone.text());
      }
      return status;
    }
    return {};
  }

  Status set_access(Address at, std::size_t bytes) override {
    const Current current(*context_);
    if (!current.status().ok()) return current.status();
    CUmemAccessDesc desc = {};
    desc.location = {CU_MEM_LOCATION_TYPE_DEVICE, context_->device};
    desc.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return check("cuMemSetAccess", lib_.cuMemSetAccess(at, bytes, &desc, 1));
  }

  Status unmap(Address at, std::size_t bytes) override {
    const Current current(*context_);
    if (!current.status().ok()) return current.status();
    return check("cuMemUnmap", lib_.cuMemUnmap(at, bytes));
  }

  Status zero(Address at, std::size_t bytes) override {
    const Current current(*context_);
    if (!current.status().ok()) return current.status();
    if (Status s = check("cuMemsetD8", lib_.cuMemsetD8(at, 0, bytes)); !s.ok()) return s;
    // The default stream says nothing to other streams: finish before they start.
    return check("cuCtxSynchronize", lib_.cuCtxSynchronize());
  }

  Status write(Address to, const void* from, std::size_t bytes) override {
    const Current current(*context_);
    if (!current.status().ok()) return current.status();
    if (Status s = check("cuMemcpyHtoD", lib_.cuMemcpyHtoD(to, from, bytes)); !s.ok()) return s;
    // From pageable memory it returns when the data is staged, not when it has arrived.
    return check("cuCtxSynchronize", lib_.cuCtxSynchronize());
  }

  Status read(void* to, Address from, std::size_t bytes) override {
    const Current current(*context_);
    if (!current.status().ok()) return current.status();
    return check("cuMemcpyDtoH", lib_.cuMemcpyDtoH(to, from, bytes));
  }

  Result<std::vector<Mapping>> inspect(const PhysicalPages& pages,
                                       std::span<const Address> at) override {
    const Current current(*context_);
    if (!current.status().ok()) return current.status();
    const auto& handles = static_cast<const CudaPages&>(pages).handles;
    std::unordered_map<CUmemGenericAllocationHandle, std::int64_t> page_of;
    for (std::size_t i = 0; i < handles.size(); ++i)
      page_of[handles[i]] = static_cast<std::int64_t>(i);
    std::vector<Mapping> found;
    found.reserve(at.size());
    for (Address address : at) {
      CUmemGenericAllocationHandle handle = 0;
      const CUresult result =
          lib_.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(address));
      if (result == CUDA_ERROR_INVALID_VALUE) {
        found.push_back({});  // nothing is mapped there
        continue;
      }
      if (Status s = check("cuMemRetainAllocationHandle", result); !s.ok()) return s;
      if (Status s = check("cuMemRelease", lib_.cuMemRelease(handle)); !s.ok()) return s;
      const auto page = page_of.find(handle);
      unsigned long long flags = 0;
      const CUmemLocation location = {CU_MEM_LOCATION_TYPE_DEVICE, context_->device};
      if (Status s = check("cuMemGetAccess", lib_.cuMemGetAccess(&flags, &location, address));
          !s.ok())
        return s;
      found.push_back({page == page_of.end() ? Mapping::kForeign : page->second,
                       flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
    }
    return found;
  }

 private:
  Status check(const char* call, CUresult result) const { return lib_.status(call, result); }

  const std::shared_ptr<Context> context_;
  const Library& lib_;
  const int ordinal_;
  const std::size_t granularity_;
};

}  // namespace

Result<std::shared_ptr<Driver>> make_cuda_driver(int device, const char* library) {
  auto loaded = Library::load(library);
  if (!loaded.ok()) return loaded.status();
  const std::shared_ptr<const Library> lib = loaded.value();

  if (Status s = lib->status("cuInit", lib->cuInit(0)); !s.ok()) return s;
  int version = 0;
  if (Status s = lib->status("cuDriverGetVersion", lib->cuDriverGetVersion(&version)); !s.ok())
    return s;
  if (version < kOldestDriver)
    return Status::driver("the NVIDIA driver supports CUDA " + std::to_string(version / 1000) +
                          "." + std::to_string(version % 1000 / 10) + "; 12.0 or newer is needed");
  int count = 0;
  if (Status s = lib->status("cuDeviceGetCount", lib->cuDeviceGetCount(&count)); !s.ok()) return s;
  if (device < 0 || device >= count)
    return Status::invalid("device is " + std::to_string(device) + ": this process sees " +
                           std::to_string(count) + " CUDA devices (CUDA_VISIBLE_DEVICES)");
  CUdevice handle = 0;
  if (Status s = lib->status("cuDeviceGet", lib->cuDeviceGet(&handle, device)); !s.ok()) return s;
  int supported = 0;
  const int attribute = CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
  if (Status s = lib->status("cuDeviceGetAttribute",
                             lib->cuDeviceGetAttribute(&supported, attribute, handle));
      !s.ok())
    return s;
  if (!supported)
    return Status::driver(
        "CUDA device " + std::to_string(device) +
        " does not support virtual memory management (cuMemMap): it cannot be used");
  auto context = Context::retain(lib, handle);
  if (!context.ok()) return context.status();

  std::size_t granularity = 0;
  const CUmemAllocationProp prop = properties(handle);
  if (Status s = lib->status("cuMemGetAllocationGranularity",
                             lib->cuMemGetAllocationGranularity(&granularity, &prop,
                                                                CU_MEM_ALLOC_GRANULARITY_MINIMUM));
      !s.ok())
    return s;
  return std::shared_ptr<Driver>(
      std::make_shared<CudaDriver>(context.value(), device, granularity));
}

}  // namespace vattn
