// Two ops that move a tensor out of TensorFlow's own allocator and back.
//
// LmsSwapOut copies its input into a buffer of the process's store and returns it as a tensor; the buffer goes back to
// the store when the last reader has finished, so that a cancelled or failed step leaks nothing. LmsSwapIn copies
// such a tensor into an ordinary output. The store has two tiers: private memory up to a limit, then one mmap'ed file,
// which is unlinked as soon as it is open: nothing of it remains, however the process ends.
//
// Written against TensorFlow's C API: a rank waits for this to be compiled before its first step, and the headers of the
// C++ one take ten times as long and 600 MB.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "tensorflow/c/kernels.h"
#include "tensorflow/c/ops.h"
#include "tensorflow/c/tf_datatype.h"
#include "tensorflow/c/tf_status.h"
#include "tensorflow/c/tf_tensor.h"

namespace lmsrun {

struct Block {
  size_t capacity;
  int file;  // the number of its file; 0: in memory
};

class Store {
 public:
  static Store* Get() {
    static Store* store = new Store;  // never destroyed: kernels may still hold buffers at exit
    return store;
  }

  // Blocks are multiples of `page`, at least the system's: 4 KiB on x86, 64 KiB on ppc64le and many aarch64. Returns 0,
  // or the errno of the file that could not be made; then nothing has changed.
  int Configure(int64_t memory_limit, const char* directory, int64_t page) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::string wanted = directory == nullptr ? "" : directory;
    if (wanted != directory_) {
      int fd = wanted.empty() ? -1 : OpenUnlinked(wanted.c_str());
      if (fd < 0 && !wanted.empty()) return errno;
      UseFile(fd);
      directory_ = wanted;
    }
    memory_limit_ = memory_limit;
    page_ = std::max<size_t>(page, sysconf(_SC_PAGESIZE));
    peak_ = in_use_;
    return 0;
  }

  // Room for `bytes`, on a page of its own; nullptr where none is left.
  void* Allocate(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    size_t capacity = std::max<size_t>(1, (bytes + page_ - 1) / page_) * page_;
    void* data = Reuse(capacity);
    if (data == nullptr) data = MapMemory(capacity);
    if (data == nullptr) {
      // File blocks stay: their room on the disk is reserved already.
      ReleaseFree([](const Block& block) { return block.file == 0; });
      data = MapMemory(capacity);
    }
    if (data == nullptr) data = MapFile(capacity);
    if (data == nullptr) return nullptr;
    in_use_ += blocks_[data].capacity;
    if (in_use_ > peak_) peak_ = in_use_;
    return data;
  }

  void Free(void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    Block block = blocks_[data];
    in_use_ -= block.capacity;
    if (block.file != 0 && block.file != file_) {
      Unmap(data, block);
    } else {
      free_.emplace(block.capacity, data);
    }
  }

  // Whether a block that is in use begins there.
  bool Holds(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    return blocks_.count(const_cast<void*>(data)) > 0;
  }

  void Stats(int64_t* values) {
    std::lock_guard<std::mutex> lock(mutex_);
    int64_t now[] = {in_use_,   peak_,    memory_reserved_, file_reserved_, outs.load(),
                     ins.load(), bytes_out.load(), bytes_in.load(), ns_out.load(), ns_in.load()};
    std::memcpy(values, now, sizeof(now));
  }

  std::string Describe() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::string text = "it holds " + std::to_string(in_use_) + " bytes";
    if (memory_limit_ >= 0) text += ", its memory limit is " + std::to_string(memory_limit_) + " bytes";
    if (fd_ >= 0) text += ", and no room is left for its file in " + directory_;
    return text;
  }

  std::atomic<int64_t> outs{0}, ins{0}, bytes_out{0}, bytes_in{0}, ns_out{0}, ns_in{0};

 private:
  static int OpenUnlinked(const char* directory) {
#ifdef O_TMPFILE
    int nameless = open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (nameless >= 0) return nameless;
#endif
    std::string name = std::string(directory) + "/lmsrun-store-XXXXXX";
    int fd = mkostemp(&name[0], O_CLOEXEC);
    if (fd >= 0) unlink(name.c_str());
    return fd;
  }

  // Blocks of the file before stay mapped while they are in use; its room on the disk goes back with the last of them.
  void UseFile(int fd) {
    if (fd_ >= 0) close(fd_);
    fd_ = fd;
    file_end_ = 0;
    ++file_;
    ReleaseFree([](const Block& block) { return block.file != 0; });
  }

  // The smallest free block that is not more than a quarter too large.
  void* Reuse(size_t capacity) {
    auto found = free_.lower_bound(capacity);
    if (found == free_.end() || found->first > capacity + capacity / 4) return nullptr;
    void* data = found->second;
    free_.erase(found);
    return data;
  }

  void* MapMemory(size_t capacity) {
    if (memory_limit_ >= 0 && memory_reserved_ + static_cast<int64_t>(capacity) > memory_limit_) return nullptr;
    void* data = mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return nullptr;
    memory_reserved_ += capacity;
    blocks_[data] = {capacity, 0};
    return data;
  }

  // posix_fallocate takes the room on the disk now: a full disk is an error here, not a SIGBUS in a copy later.
  void* MapFile(size_t capacity) {
    if (fd_ < 0 || posix_fallocate(fd_, file_end_, capacity) != 0) return nullptr;
    void* data = mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, file_end_);
    if (data == MAP_FAILED) return nullptr;
    blocks_[data] = {capacity, file_};
    file_end_ += capacity;
    file_reserved_ += capacity;
    return data;
  }

  // Gives free blocks of a kind back to the system.
  template <typename Kind>
  void ReleaseFree(Kind is_wanted) {
    for (auto free = free_.begin(); free != free_.end();) {
      Block block = blocks_[free->second];
      if (!is_wanted(block)) {
        ++free;
        continue;
      }
      Unmap(free->second, block);
      free = free_.erase(free);
    }
  }

  void Unmap(void* data, const Block& block) {
    munmap(data, block.capacity);
    (block.file == 0 ? memory_reserved_ : file_reserved_) -= block.capacity;
    blocks_.erase(data);
  }

  std::mutex mutex_;
  std::multimap<size_t, void*> free_;
  std::unordered_map<void*, Block> blocks_;
  int64_t memory_limit_ = -1, in_use_ = 0, peak_ = 0, memory_reserved_ = 0, file_reserved_ = 0;
  size_t page_ = sysconf(_SC_PAGESIZE);
  off_t file_end_ = 0;
  int fd_ = -1, file_ = 0;
  std::string directory_;
};

// The C API's objects are freed by hand; these do it at the end of a scope.
struct Status {
  TF_Status* const own = TF_NewStatus();
  ~Status() { TF_DeleteStatus(own); }
  bool ok() const { return TF_GetCode(own) == TF_OK; }
};

struct Tensor {
  TF_Tensor* own = nullptr;
  ~Tensor() {
    if (own != nullptr) TF_DeleteTensor(own);
  }
  void* data() const { return TF_TensorData(own); }
  size_t bytes() const { return TF_TensorByteSize(own); }
  TF_DataType type() const { return TF_TensorType(own); }
  std::vector<int64_t> dims() const {
    std::vector<int64_t> dims(TF_NumDims(own));
    for (size_t i = 0; i < dims.size(); ++i) dims[i] = TF_Dim(own, i);
    return dims;
  }
};

int64_t CopyTimed(void* to, const void* from, size_t bytes) {
  auto start = std::chrono::steady_clock::now();
  if (bytes > 0) std::memcpy(to, from, bytes);
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
}

void GiveBack(void* data, size_t, void*) { Store::Get()->Free(data); }

void FailForRoom(TF_OpKernelContext* context, size_t bytes) {
  Status status;
  TF_StringView name = TF_GetOpKernelName(context);
  std::string text = "LMS store: no room for " + std::to_string(bytes) + " bytes of " +
                     std::string(name.data, name.len) + "; " + Store::Get()->Describe() +
                     ". Raise host_mem_limit_mb, or name a directory with free space (LMS_STORE).";
  TF_SetStatus(status.own, TF_RESOURCE_EXHAUSTED, text.c_str());
  TF_OpKernelContext_Failure(context, status.own);
}

void* MakeSwapOut(TF_OpKernelConstruction* construction) {
  Status status;
  TF_DataType type;
  TF_OpKernelConstruction_GetAttrType(construction, "T", &type, status.own);
  if (status.ok() && TF_DataTypeSize(type) == 0) {
    TF_SetStatus(status.own, TF_INVALID_ARGUMENT, "LMS cannot move tensors that are no plain memory");
  }
  if (!status.ok()) TF_OpKernelConstruction_Failure(construction, status.own);
  return nullptr;
}

void SwapOut(void*, TF_OpKernelContext* context) {
  Status status;
  Tensor input, held;
  TF_GetInput(context, 0, &input.own, status.own);
  if (!status.ok()) return TF_OpKernelContext_Failure(context, status.own);
  Store* store = Store::Get();
  void* room = store->Allocate(input.bytes());
  if (room == nullptr) return FailForRoom(context, input.bytes());
  store->ns_out += CopyTimed(room, input.data(), input.bytes());
  store->bytes_out += input.bytes();
  ++store->outs;
  std::vector<int64_t> dims = input.dims();
  held.own = TF_NewTensor(input.type(), dims.data(), dims.size(), room, input.bytes(), GiveBack, nullptr);
  TF_SetOutput(context, 0, held.own, status.own);
  if (!status.ok()) TF_OpKernelContext_Failure(context, status.own);
}

void SwapIn(void*, TF_OpKernelContext* context) {
  Status status;
  Tensor held, output;
  TF_GetInput(context, 0, &held.own, status.own);
  if (!status.ok()) return TF_OpKernelContext_Failure(context, status.own);
  std::vector<int64_t> dims = held.dims();
  output.own = TF_AllocateOutput(context, 0, held.type(), dims.data(), dims.size(), held.bytes(), status.own);
  if (!status.ok()) return TF_OpKernelContext_Failure(context, status.own);
  Store* store = Store::Get();
  store->ns_in += CopyTimed(output.data(), held.data(), held.bytes());
  store->bytes_in += held.bytes();
  ++store->ins;
}

void KeepShape(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeHandle* shape = TF_NewShapeHandle();
  TF_ShapeInferenceContextGetInput(context, 0, shape, status);
  if (TF_GetCode(status) == TF_OK) TF_ShapeInferenceContextSetOutput(context, 0, shape, status);
  TF_DeleteShapeHandle(shape);
}

void* MakeNothing(TF_OpKernelConstruction*) { return nullptr; }
void DeleteNothing(void*) {}

bool Register(const char* op, const char* input, const char* output, void* (*make)(TF_OpKernelConstruction*),
              void (*compute)(void*, TF_OpKernelContext*)) {
  Status status;
  TF_OpDefinitionBuilder* definition = TF_NewOpDefinitionBuilder(op);
  TF_OpDefinitionBuilderAddInput(definition, input);
  TF_OpDefinitionBuilderAddOutput(definition, output);
  TF_OpDefinitionBuilderAddAttr(definition, "T: type");
  TF_OpDefinitionBuilderSetIsStateful(definition, true);
  TF_OpDefinitionBuilderSetShapeInferenceFunction(definition, KeepShape);
  TF_RegisterOpDefinition(definition, status.own);
  if (!status.ok()) return false;
  TF_RegisterKernelBuilder(op, TF_NewKernelBuilder(op, "CPU", make, compute, DeleteNothing), status.own);
  return status.ok();
}

const bool registered = Register("LmsSwapOut", "input: T", "held: T", MakeSwapOut, SwapOut) &&
                        Register("LmsSwapIn", "held: T", "output: T", MakeNothing, SwapIn);

}  // namespace lmsrun

extern "C" {
int lms_store_configure(int64_t memory_limit, const char* directory, int64_t page) {
  return lmsrun::Store::Get()->Configure(memory_limit, directory, page);
}
void lms_store_stats(int64_t* values) { lmsrun::Store::Get()->Stats(values); }
int lms_store_holds(const void* data) { return lmsrun::Store::Get()->Holds(data); }
}
