// The stand-in GPU with faults: a plug-in that loads the real one and lets copies or events of its device fail.
//
// FAULTY_PLUGIN names the real one. FAULTY_OUT and FAULTY_IN say which of the large copies to the host, or back,
// is refused (0: none); FAULTY_EVENT after how many large copies the device says that a kernel has failed, as a
// driver says it after an illegal access: of every event, from then on.
#include <dlfcn.h>
#include <stdlib.h>

#include <atomic>

#include "tensorflow/c/experimental/stream_executor/stream_executor.h"

namespace {

constexpr uint64_t kLarge = 65536;

int number(const char* name) {
  const char* text = getenv(name);
  return text ? atoi(text) : 0;
}

void* real(const char* name) {
  static void* library = dlopen(getenv("FAULTY_PLUGIN"), RTLD_NOW);
  return dlsym(library, name);
}

SP_StreamExecutor executor;
decltype(SP_PlatformFns::create_stream_executor) create_executor;
std::atomic<int> copies_out{0}, copies_in{0};

bool fails(std::atomic<int>* count, const char* name, uint64_t size) {
  static const int out = number("FAULTY_OUT"), in = number("FAULTY_IN");
  return size >= kLarge && ++*count == (count == &copies_out ? out : in);
}

void dtoh(const SP_Device* device, SP_Stream stream, void* to, const SP_DeviceMemoryBase* from, uint64_t size,
          TF_Status* status) {
  if (fails(&copies_out, "FAULTY_OUT", size)) return TF_SetStatus(status, TF_INTERNAL, "a refused copy out");
  executor.memcpy_dtoh(device, stream, to, from, size, status);
}

void htod(const SP_Device* device, SP_Stream stream, SP_DeviceMemoryBase* to, const void* from, uint64_t size,
          TF_Status* status) {
  if (fails(&copies_in, "FAULTY_IN", size)) return TF_SetStatus(status, TF_INTERNAL, "a refused copy in");
  executor.memcpy_htod(device, stream, to, from, size, status);
}

SE_EventStatus event_status(const SP_Device* device, SP_Event event) {
  static const int last = number("FAULTY_EVENT");
  if (last && copies_out >= last) return SE_EVENT_ERROR;
  return executor.get_event_status(device, event);
}

void create(const SP_Platform* platform, SE_CreateStreamExecutorParams* params, TF_Status* status) {
  create_executor(platform, params, status);
  executor = *params->stream_executor;
  params->stream_executor->memcpy_dtoh = dtoh;
  params->stream_executor->memcpy_htod = htod;
  params->stream_executor->get_event_status = event_status;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void SE_InitPlugin(SE_PlatformRegistrationParams* params,
                                                                     TF_Status* status) {
  reinterpret_cast<void (*)(SE_PlatformRegistrationParams*, TF_Status*)>(real("SE_InitPlugin"))(params, status);
  create_executor = params->platform_fns->create_stream_executor;
  params->platform_fns->create_stream_executor = create;
}

extern "C" __attribute__((visibility("default"))) void TF_InitKernel() {
  reinterpret_cast<void (*)()>(real("TF_InitKernel"))();
}
