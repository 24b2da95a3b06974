// SPDX-License-Identifier: Apache-2.0
// A libcuda of the few functions that we use, over the host driver's memory. It
// is strict where CUDA is: a handle is mapped whole, over nothing that is mapped
// already; only what is mapped can be unmapped; calls need a current context.
// fake_cuda_fail(k) makes the k-th next call that can fail, fail.
#include <map>
#include <mutex>

#include "driver.h"
#include "libcuda.h"

using namespace vattn;
using namespace vattn::cuda;

namespace {

constexpr std::size_t kGranule = std::size_t{64} << 10;
constexpr std::size_t kPoolBytes = std::size_t{4} << 20;

struct Mapped {
  CUmemGenericAllocationHandle handle;
  std::size_t bytes;
  bool accessible;
};

struct Device {
  std::mutex mutex;
  std::shared_ptr<Driver> host = make_host_driver(kGranule).value();
  std::unique_ptr<PhysicalPages> pool = host->create(kPoolBytes / kGranule, kGranule).value();
  std::size_t used = 0;   // granules handed out (never reused: handles stay unique)
  std::size_t taken = 0;  // granules that another process holds
  std::map<CUmemGenericAllocationHandle, std::pair<std::size_t, int>>
      handles;  // granules, references
  std::map<Address, std::size_t> reservations;
  std::map<Address, Mapped> mappings;
  int contexts = 0;
  int countdown = 0;
};
Device device;
thread_local CUcontext current = nullptr;
CUcontext const kContext = reinterpret_cast<CUcontext>(0x1000);

constexpr CUresult kOutOfMemory = 2, kInvalidContext = 201;

bool fails() { return device.countdown > 0 && --device.countdown == 0; }

// Each call of the list: under the lock, with a context, unless it is to fail.
#define ENTER                                      \
  std::lock_guard lock(device.mutex);              \
  if (current != kContext) return kInvalidContext; \
  if (fails()) return kOutOfMemory

void unref(CUmemGenericAllocationHandle handle) {
  auto found = device.handles.find(handle);
  if (--found->second.second == 0) device.handles.erase(found);
}

// The mappings that make up [at, at + bytes) exactly; empty if they do not.
std::vector<Address> cover(Address at, std::size_t bytes) {
  std::vector<Address> found;
  Address next = at;
  for (auto it = device.mappings.find(at);
       it != device.mappings.end() && it->first == next && next < at + bytes; ++it) {
    found.push_back(it->first);
    next += it->second.bytes;
  }
  if (next != at + bytes) found.clear();
  return found;
}

}  // namespace

extern "C" {

void fake_cuda_fail(int k) {
  std::lock_guard lock(device.mutex);
  device.countdown = k;
}
int fake_cuda_armed() {
  std::lock_guard lock(device.mutex);
  return device.countdown > 0;
}
// What the process still holds: handles + reservations + mappings + contexts.
int fake_cuda_held() {
  std::lock_guard lock(device.mutex);
  return static_cast<int>(device.handles.size() + device.reservations.size() +
                          device.mappings.size()) +
         device.contexts;
}

// Another process holds so many granules of the device's 64.
void fake_cuda_taken(int granules) {
  std::lock_guard lock(device.mutex);
  device.taken = static_cast<std::size_t>(granules);
}

// After a failed teardown: nothing was ever held.
void fake_cuda_forget() {
  std::lock_guard lock(device.mutex);
  device.handles.clear();
  device.reservations.clear();
  device.mappings.clear();
  device.contexts = 0;
}

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult result, const char** text) {
  *text = result == kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : nullptr;
  return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuGetErrorString(CUresult result, const char** text) {
  *text = result == kOutOfMemory ? "out of memory" : nullptr;
  return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuDeviceGetCount(int* count) { return *count = 1, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* handle, int ordinal) { return *handle = ordinal, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  std::lock_guard lock(device.mutex);
  if (fails()) return kOutOfMemory;
  ++device.contexts;
  return *context = kContext, CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) {
  std::lock_guard lock(device.mutex);
  return --device.contexts, CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) { return *context = current, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return current = context, CUDA_SUCCESS; }
CUresult cuCtxSynchronize() {
  ENTER;
  return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationGranularity(std::size_t* bytes, const CUmemAllocationProp* prop,
                                       int option) {
  if (prop->type != CU_MEM_ALLOCATION_TYPE_PINNED || option != CU_MEM_ALLOC_GRANULARITY_MINIMUM)
    return CUDA_ERROR_INVALID_VALUE;
  return *bytes = kGranule, CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* at, std::size_t bytes, std::size_t, CUdeviceptr,
                             unsigned long long) {
  ENTER;
  if (bytes == 0 || bytes % kGranule != 0) return CUDA_ERROR_INVALID_VALUE;
  auto reserved = device.host->reserve(bytes);
  if (!reserved.ok()) return kOutOfMemory;
  device.reservations[reserved.value()] = bytes;
  return *at = reserved.value(), CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr at, std::size_t bytes) {
  ENTER;
  const auto found = device.reservations.find(at);
  if (found == device.reservations.end() || found->second != bytes) return CUDA_ERROR_INVALID_VALUE;
  const auto next = device.mappings.lower_bound(at);
  if (next != device.mappings.end() && next->first < at + bytes) return CUDA_ERROR_INVALID_VALUE;
  static_cast<void>(device.host->free(at, bytes));
  device.reservations.erase(found);
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                     const CUmemAllocationProp*, unsigned long long) {
  ENTER;
  const std::size_t granules = bytes / kGranule;
  if (bytes % kGranule != 0) return CUDA_ERROR_INVALID_VALUE;
  if (device.handles.empty()) device.used = 0;
  if (device.taken + device.used + granules > device.pool->count) return kOutOfMemory;
  *handle = device.used + 1;
  device.used += granules;
  device.handles[*handle] = {granules, 1};
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  std::lock_guard lock(device.mutex);
  if (!device.handles.contains(handle)) return CUDA_ERROR_INVALID_VALUE;
  return unref(handle), CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr at, std::size_t bytes, std::size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long) {
  ENTER;
  const auto found = device.handles.find(handle);
  if (found == device.handles.end() || offset != 0 || bytes != found->second.first * kGranule)
    return CUDA_ERROR_INVALID_VALUE;
  const auto after = device.mappings.lower_bound(at);
  if (after != device.mappings.end() && after->first < at + bytes) return CUDA_ERROR_INVALID_VALUE;
  if (!device.host->map(*device.pool, static_cast<Page>(handle - 1), found->second.first, at).ok())
    return kOutOfMemory;
  ++found->second.second;
  device.mappings[at] = {handle, bytes, false};
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr at, std::size_t bytes) {
  ENTER;
  const std::vector<Address> parts = cover(at, bytes);
  if (parts.empty()) return CUDA_ERROR_INVALID_VALUE;
  for (Address part : parts) {
    unref(device.mappings[part].handle);
    device.mappings.erase(part);
  }
  return device.host->unmap(at, bytes).ok() ? CUDA_SUCCESS : kOutOfMemory;
}
CUresult cuMemSetAccess(CUdeviceptr at, std::size_t bytes, const CUmemAccessDesc* desc,
                        std::size_t count) {
  ENTER;
  const std::vector<Address> parts = cover(at, bytes);
  if (parts.empty() || count != 1 || desc->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
    return CUDA_ERROR_INVALID_VALUE;
  for (Address part : parts) device.mappings[part].accessible = true;
  return device.host->set_access(at, bytes).ok() ? CUDA_SUCCESS : kOutOfMemory;
}
CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation*, CUdeviceptr at) {
  ENTER;
  *flags = device.mappings[at].accessible ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : 0;
  return CUDA_SUCCESS;
}
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  ENTER;
  const auto found = device.mappings.find(reinterpret_cast<Address>(address));
  if (found == device.mappings.end()) return CUDA_ERROR_INVALID_VALUE;
  ++device.handles[found->second.handle].second;
  return *handle = found->second.handle, CUDA_SUCCESS;
}
CUresult cuMemsetD8_v2(CUdeviceptr at, unsigned char value, std::size_t bytes) {
  ENTER;
  return __builtin_memset(reinterpret_cast<void*>(at), value, bytes), CUDA_SUCCESS;
}
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, std::size_t bytes) {
  ENTER;
  return __builtin_memcpy(reinterpret_cast<void*>(to), from, bytes), CUDA_SUCCESS;
}
CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, std::size_t bytes) {
  ENTER;
  return __builtin_memcpy(to, reinterpret_cast<void*>(from), bytes), CUDA_SUCCESS;
}

}  // extern "C"
