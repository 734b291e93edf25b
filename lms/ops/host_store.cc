// Two ops that move a tensor out of TensorFlow's own allocator and back.
//
// LmsSwapOut copies its input into a buffer of the process's store and returns it as a tensor; the buffer goes back to
// the store when the last reader has finished, so that a cancelled or failed step leaks nothing. LmsSwapIn copies
// such a tensor into an ordinary output. The store has two tiers: private memory up to a limit, then one mmap'ed file,
// which is unlinked as soon as it is open: nothing of it remains, however the process ends.
//
// LmsAllocatorStats tells what the allocator of its device counts, more of it than TensorFlow's Python shows.

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

struct Block {
  size_t capacity;
  int file;  // the number of its file; 0: in memory
};

class Store : public Allocator {
 public:
  static Store* Get() {
    static Store* store = new Store;  // never destroyed: kernels may still hold buffers at exit
    return store;
  }

  std::string Name() override { return "lms_store"; }

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

  void* AllocateRaw(size_t alignment, size_t bytes) override {
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

  void DeallocateRaw(void* data) override {
    std::lock_guard<std::mutex> lock(mutex_);
    Block block = blocks_[data];
    in_use_ -= block.capacity;
    if (block.file != 0 && block.file != file_) {
      Unmap(data, block);
    } else {
      free_.emplace(block.capacity, data);
    }
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

// Figures in the order of lms/allocator.py; -1 where the allocator does not know.
class AllocatorStatsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, tensorflow::TensorShape({5}), &output));
    auto stats = context->device()->GetAllocator(tensorflow::AllocatorAttributes())->GetStats();
    int64_t values[] = {-1, -1, -1, -1, -1};
    if (stats) {
      values[0] = stats->num_allocs;
      values[1] = stats->largest_alloc_size;
      values[2] = stats->bytes_limit.value_or(-1);
      values[3] = stats->pool_bytes.value_or(-1);
      values[4] = stats->peak_pool_bytes.value_or(-1);
    }
    std::memcpy(Data(*output), values, sizeof(values));
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
REGISTER_OP("LmsAllocatorStats")
    .Output("stats: int64")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      context->set_output(0, context->Vector(5));
      return tensorflow::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("LmsSwapOut").Device(tensorflow::DEVICE_CPU), SwapOutOp);
REGISTER_KERNEL_BUILDER(Name("LmsSwapIn").Device(tensorflow::DEVICE_CPU), SwapInOp);
REGISTER_KERNEL_BUILDER(Name("LmsAllocatorStats").Device(tensorflow::DEVICE_CPU), AllocatorStatsOp);
REGISTER_KERNEL_BUILDER(Name("LmsAllocatorStats").Device(tensorflow::DEVICE_GPU).HostMemory("stats"), AllocatorStatsOp);

}  // namespace lmsrun

extern "C" {
int lms_store_configure(int64_t memory_limit, const char* directory, int64_t page) {
  return lmsrun::Store::Get()->Configure(memory_limit, directory, page);
}
void lms_store_stats(int64_t* values) { lmsrun::Store::Get()->Stats(values); }
}
