// SPDX-License-Identifier: Apache-2.0
// The few CUDA driver functions we need, declared here and looked up in
// libcuda.so.1 at run time: neither the CUDA toolkit nor a GPU is needed to
// build or to import. Names and layouts are cuda.h's (CUDA 13.0); the
// static_asserts hold them to it.
#pragma once

#include <cstddef>
#include <memory>

#include "status.h"

namespace vattn::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUmemGenericAllocationHandle = unsigned long long;
struct CUctx_st;
using CUcontext = CUctx_st*;

inline constexpr CUresult CUDA_SUCCESS = 0;
inline constexpr CUresult CUDA_ERROR_INVALID_VALUE = 1;
inline constexpr int CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102;
inline constexpr int CU_MEM_ALLOCATION_TYPE_PINNED = 1;
inline constexpr int CU_MEM_LOCATION_TYPE_DEVICE = 1;
inline constexpr int CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0;
inline constexpr int CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3;

struct CUmemLocation {
  int type;
  int id;
};

struct CUmemAllocationProp {
  int type;
  int requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
};

struct CUmemAccessDesc {
  CUmemLocation location;
  int flags;
};

static_assert(sizeof(CUmemLocation) == 8);
static_assert(sizeof(CUmemAllocationProp) == 32);
static_assert(offsetof(CUmemAllocationProp, location) == 8);
static_assert(offsetof(CUmemAllocationProp, win32HandleMetaData) == 16);
static_assert(offsetof(CUmemAllocationProp, allocFlags) == 24);
static_assert(sizeof(CUmemAccessDesc) == 12);
static_assert(offsetof(CUmemAccessDesc, flags) == 8);

// (member, exported symbol, parameters). All return CUresult. The symbols are
// what cuda.h's macros make of the names; of cuMemcpy and cuMemset these are the
// forms on the legacy default stream.
#define VATTN_CUDA_FUNCTIONS(X)                                                          \
  X(cuInit, "cuInit", (unsigned flags))                                                  \
  X(cuDriverGetVersion, "cuDriverGetVersion", (int* version))                            \
  X(cuGetErrorName, "cuGetErrorName", (CUresult, const char** text))                     \
  X(cuGetErrorString, "cuGetErrorString", (CUresult, const char** text))                 \
  X(cuDeviceGetCount, "cuDeviceGetCount", (int* count))                                  \
  X(cuDeviceGet, "cuDeviceGet", (CUdevice*, int ordinal))                                \
  X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int* value, int attribute, CUdevice)) \
  X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CUcontext*, CUdevice))        \
  X(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (CUdevice))               \
  X(cuCtxGetCurrent, "cuCtxGetCurrent", (CUcontext*))                                    \
  X(cuCtxSetCurrent, "cuCtxSetCurrent", (CUcontext))                                     \
  X(cuCtxSynchronize, "cuCtxSynchronize", ())                                            \
  X(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity",                      \
    (std::size_t* bytes, const CUmemAllocationProp*, int option))                        \
  X(cuMemAddressReserve, "cuMemAddressReserve",                                          \
    (CUdeviceptr*, std::size_t bytes, std::size_t alignment, CUdeviceptr hint,           \
     unsigned long long flags))                                                          \
  X(cuMemAddressFree, "cuMemAddressFree", (CUdeviceptr, std::size_t bytes))              \
  X(cuMemCreate, "cuMemCreate",                                                          \
    (CUmemGenericAllocationHandle*, std::size_t bytes, const CUmemAllocationProp*,       \
     unsigned long long flags))                                                          \
  X(cuMemRelease, "cuMemRelease", (CUmemGenericAllocationHandle))                        \
  X(cuMemMap, "cuMemMap",                                                                \
    (CUdeviceptr, std::size_t bytes, std::size_t offset, CUmemGenericAllocationHandle,   \
     unsigned long long flags))                                                          \
  X(cuMemUnmap, "cuMemUnmap", (CUdeviceptr, std::size_t bytes))                          \
  X(cuMemSetAccess, "cuMemSetAccess",                                                    \
    (CUdeviceptr, std::size_t bytes, const CUmemAccessDesc*, std::size_t count))         \
  X(cuMemGetAccess, "cuMemGetAccess",                                                    \
    (unsigned long long* flags, const CUmemLocation*, CUdeviceptr))                      \
  X(cuMemRetainAllocationHandle, "cuMemRetainAllocationHandle",                          \
    (CUmemGenericAllocationHandle*, void* address))                                      \
  X(cuMemsetD8, "cuMemsetD8_v2", (CUdeviceptr, unsigned char value, std::size_t bytes))  \
  X(cuMemcpyHtoD, "cuMemcpyHtoD_v2", (CUdeviceptr, const void*, std::size_t bytes))      \
  X(cuMemcpyDtoH, "cuMemcpyDtoH_v2", (void*, CUdeviceptr, std::size_t bytes))

// The loaded library. Never unloaded: CUDA does not survive that.
struct Library {
#define VATTN_DECLARE(member, symbol, parameters) CUresult(*member) parameters = nullptr;
  VATTN_CUDA_FUNCTIONS(VATTN_DECLARE)
#undef VATTN_DECLARE

  // A DriverError that names the call: "cuMemMap: CUDA_ERROR_OUT_OF_MEMORY (2) out of memory".
  Status status(const char* call, CUresult result) const;

  static Result<std::shared_ptr<const Library>> load(const char* file);
};

}  // namespace vattn::cuda
