// SPDX-License-Identifier: Apache-2.0
#include "libcuda.h"

#include <dlfcn.h>

#include <string>

namespace vattn::cuda {

Status Library::status(const char* call, CUresult result) const {
  if (result == CUDA_SUCCESS) return {};
  const char* name = nullptr;
  const char* text = nullptr;
  // Both fail for a code they do not know, and leave null.
  if (cuGetErrorName(result, &name) != CUDA_SUCCESS || !name) name = "unknown CUDA error";
  if (cuGetErrorString(result, &text) != CUDA_SUCCESS || !text) text = "";
  return Status::driver(std::string(call) + ": " + name + " (" + std::to_string(result) + ") " +
                        text);
}

Result<std::shared_ptr<const Library>> Library::load(const char* file) {
  void* handle = ::dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    const char* why = ::dlerror();
    return Status::driver(std::string("the NVIDIA driver's library cannot be loaded (is the driver "
                                      "installed, and the container started with GPUs?): ") +
                          (why ? why : file));
  }
  auto library = std::make_shared<Library>();
#define VATTN_LOOK_UP(member, symbol, parameters)                                         \
  library->member = reinterpret_cast<decltype(library->member)>(::dlsym(handle, symbol)); \
  if (!library->member)                                                                   \
    return Status::driver(std::string(file) + " has no " + symbol +                       \
                          ": the NVIDIA driver is too old");
  VATTN_CUDA_FUNCTIONS(VATTN_LOOK_UP)
#undef VATTN_LOOK_UP
  return std::shared_ptr<const Library>(std::move(library));
}

}  // namespace vattn::cuda
