// One op that tells what the allocator of its device counts, more of it than TensorFlow's Python shows.
//
// TensorFlow's C API has no door to an allocator, so this takes the C++ headers, and half a minute of a busy compiler.
// It is a library of its own, compiled when somebody asks for these figures: no training waits for it.

#include <cstdint>
#include <cstring>

#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace lmsrun {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// Figures in the order of lms/device/allocator_counters.py; -1 where the allocator does not know.
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
    std::memcpy(output->flat<int64_t>().data(), values, sizeof(values));
  }
};

REGISTER_OP("LmsAllocatorStats")
    .Output("stats: int64")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      context->set_output(0, context->Vector(5));
      return tensorflow::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("LmsAllocatorStats").Device(tensorflow::DEVICE_CPU), AllocatorStatsOp);
REGISTER_KERNEL_BUILDER(Name("LmsAllocatorStats").Device(tensorflow::DEVICE_GPU).HostMemory("stats"), AllocatorStatsOp);

}  // namespace lmsrun
