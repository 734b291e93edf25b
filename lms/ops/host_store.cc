// Two ops that move a tensor out of TensorFlow's own allocator and back.
//
// LmsSwapOut copies its input into a buffer of the process's store and returns it as a tensor; the buffer goes back to
// the store when the last reader has finished, so that a cancelled or failed step leaks nothing. LmsSwapIn copies
// such a tensor into an ordinary output. The store has two tiers: private memory up to a limit, then one mmap'ed file,
// which is unlinked as soon as it is open: nothing of it remains, however the process ends.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace lmsrun {

using tensorflow::Allocator;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// Offsets in a mapped file are multiples of it: 4 KiB on x86, 64 KiB on ppc64le and many aarch64.
const size_t kPage = sysconf(_SC_PAGESIZE);

struct Block {
  size_t capacity;
  off_t file_offset;  // -1: in memory
};

class Store : public Allocator {
 public:
  static Store* Get() {
    static Store* store = new Store;  // never destroyed: kernels may still hold buffers at exit
    return store;
  }

  std::string Name() override { return "lms_store"; }

  // Returns 0, or the errno of the file that could not be made.
  int Configure(int64_t memory_limit, const char* directory) {
    std::lock_guard<std::mutex> lock(mutex_);
    memory_limit_ = memory_limit;
    if (directory == nullptr || directory[0] == 0) return 0;
    if (directory_ == directory && fd_ >= 0) return 0;
    int fd = OpenUnlinked(directory);
    if (fd < 0) return errno;
    if (file_blocks_ == 0 && fd_ >= 0) close(fd_);  // else blocks of the earlier file are still mapped: keep it open
    fd_ = fd;
    file_end_ = 0;
    directory_ = directory;
    return 0;
  }

  void* AllocateRaw(size_t alignment, size_t bytes) override {
    size_t capacity = (bytes + kPage - 1) / kPage * kPage;
    if (capacity == 0) capacity = kPage;
    std::lock_guard<std::mutex> lock(mutex_);
    void* data = Reuse(capacity);
    if (data == nullptr) data = MapMemory(capacity);
    if (data == nullptr) {
      ReleaseFree();
      data = MapMemory(capacity);
    }
    if (data == nullptr) data = MapFile(capacity);
    if (data == nullptr) return nullptr;
    in_use_ += blocks_[data].capacity;
    if (in_use_ > peak_) peak_ = in_use_;
    return data;
  }

  void DeallocateRaw(void* data) override {
    std::lock_guard<std::mutex> lock(mutex_);
    size_t capacity = blocks_[data].capacity;
    in_use_ -= capacity;
    free_.emplace(capacity, data);
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
    blocks_[data] = {capacity, -1};
    return data;
  }

  // posix_fallocate takes the room on the disk now: a full disk is an error here, not a SIGBUS in a copy later.
  void* MapFile(size_t capacity) {
    if (fd_ < 0 || posix_fallocate(fd_, file_end_, capacity) != 0) return nullptr;
    void* data = mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, file_end_);
    if (data == MAP_FAILED) return nullptr;
    blocks_[data] = {capacity, file_end_};
    file_end_ += capacity;
    file_reserved_ += capacity;
    ++file_blocks_;
    return data;
  }

  // Gives free memory blocks back to the system. File blocks stay: their room on the disk is reserved already.
  void ReleaseFree() {
    for (auto block = free_.begin(); block != free_.end();) {
      if (blocks_[block->second].file_offset >= 0) {
        ++block;
        continue;
      }
      munmap(block->second, block->first);
      memory_reserved_ -= block->first;
      blocks_.erase(block->second);
      block = free_.erase(block);
    }
  }

  std::mutex mutex_;
  std::multimap<size_t, void*> free_;
  std::unordered_map<void*, Block> blocks_;
  int64_t memory_limit_ = -1, in_use_ = 0, peak_ = 0, memory_reserved_ = 0, file_reserved_ = 0, file_blocks_ = 0;
  off_t file_end_ = 0;
  int fd_ = -1;
  std::string directory_;
};

char* Data(const Tensor& tensor) { return const_cast<char*>(tensor.tensor_data().data()); }

int64_t CopyTimed(char* to, const char* from, size_t bytes) {
  auto start = std::chrono::steady_clock::now();
  std::memcpy(to, from, bytes);
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
}

class SwapOutOp : public OpKernel {
 public:
  explicit SwapOutOp(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES(construction, tensorflow::DataTypeCanUseMemcpy(input_type(0)),
                tensorflow::errors::InvalidArgument("LMS cannot move tensors of type ",
                                                    tensorflow::DataTypeString(input_type(0))));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& input = context->input(0);
    Store* store = Store::Get();
    Tensor held(store, input.dtype(), input.shape());
    OP_REQUIRES(context, held.IsInitialized() || input.NumElements() == 0,
                tensorflow::errors::ResourceExhausted(
                    "LMS store: no room for ", input.TotalBytes(), " bytes of ", name(), "; ", store->Describe(),
                    ". Raise host_mem_limit_mb, or name a directory with free space (LMS_STORE)."));
    store->ns_out += CopyTimed(Data(held), Data(input), input.TotalBytes());
    store->bytes_out += input.TotalBytes();
    ++store->outs;
    context->set_output(0, held);
  }
};

class SwapInOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& held = context->input(0);
    Store* store = Store::Get();
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, held.shape(), &output));
    store->ns_in += CopyTimed(Data(*output), Data(held), held.TotalBytes());
    store->bytes_in += held.TotalBytes();
    ++store->ins;
  }
};

REGISTER_OP("LmsSwapOut")
    .Input("input: T")
    .Output("held: T")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape);
REGISTER_OP("LmsSwapIn")
    .Input("held: T")
    .Output("output: T")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape);
REGISTER_KERNEL_BUILDER(Name("LmsSwapOut").Device(tensorflow::DEVICE_CPU), SwapOutOp);
REGISTER_KERNEL_BUILDER(Name("LmsSwapIn").Device(tensorflow::DEVICE_CPU), SwapInOp);

}  // namespace lmsrun

extern "C" {
int lms_store_configure(int64_t memory_limit, const char* directory) {
  return lmsrun::Store::Get()->Configure(memory_limit, directory);
}
void lms_store_stats(int64_t* values) { lmsrun::Store::Get()->Stats(values); }
}
