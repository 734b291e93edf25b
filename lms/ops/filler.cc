// One op that keeps an allocator from handing out more memory than is asked for.
//
// TensorFlow's BFC allocator gives a buffer the smallest free chunk that is large enough, and all of it unless at least
// half would remain. LmsFiller runs right before buffers of known sizes are allocated. It allocates them once to see what
// they are given, and takes what one of them would be given beyond its size, from the end of that chunk; an eighth of that
// is left, for small buffers that come between. What it takes is its output; an empty one where nothing is worth it.
//
// No request of its fails by intention, and none waits for memory; if one fails all the same, TensorFlow's log says so. The C API does not tell what a buffer was given, so
// this takes the C++ headers. It is a library of its own, compiled for the first plan that has fillers.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace lmsrun {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

constexpr int64_t kGranule = 256;    // BFCAllocator::kMinAllocationSize
constexpr int64_t kLeft = 8;         // LEFT of lms/simulate/bfc_arena.py
constexpr double kHalf = 7.0 / 16;   // a request for more than half of a chunk would be given all of it
constexpr int kMostOthers = 8;       // other chunks that are taken before the place is given up

int64_t Rounded(double bytes) { return static_cast<int64_t>(bytes) / kGranule * kGranule; }

class FillerOp : public OpKernel {
 public:
  explicit FillerOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("sizes", &sizes_));
    OP_REQUIRES_OK(context, context->GetAttr("least", &least_));
  }

  bool IsExpensive() override { return false; }

  void Compute(OpKernelContext* context) override { context->set_output(0, Rest(context)); }

 private:
  static Tensor Take(OpKernelContext* context, int64_t bytes) {
    Tensor taken;
    const tensorflow::AllocationAttributes once(/*retry_on_failure=*/false, /*allocation_will_be_logged=*/true, nullptr);
    if (!context
             ->allocate_temp(tensorflow::DT_UINT8, tensorflow::TensorShape({bytes}), &taken,
                             tensorflow::AllocatorAttributes(), once)
             .ok()) {
      return Tensor(tensorflow::DT_UINT8, tensorflow::TensorShape({0}));
    }
    return taken;
  }

  Tensor Rest(OpKernelContext* context) const {
    const Tensor nothing(tensorflow::DT_UINT8, tensorflow::TensorShape({0}));
    std::vector<Tensor> held;  // freed at the end, but for the one that is looked into
    int64_t spare = 0;
    size_t chosen = 0;
    for (int64_t bytes : sizes_) {
      held.push_back(Take(context, bytes));
      if (held.back().NumElements() != bytes) return nothing;
      const int64_t beyond = static_cast<int64_t>(held.back().AllocatedBytes()) - bytes;
      if (beyond > spare) {
        spare = beyond;
        chosen = held.size() - 1;
      }
    }
    if (spare < least_) return nothing;
    const int64_t given = held[chosen].AllocatedBytes();
    const char* begin = held[chosen].tensor_data().data();
    held[chosen] = nothing;
    // Pieces keep the buffer's place, each the same share of what is free when it is taken.
    const int64_t wanted = Rounded(spare - spare / kLeft);
    const double left = static_cast<double>(wanted) / given;
    const int count = std::max(1, static_cast<int>(std::ceil(std::log(left) / std::log(1 - kHalf))));
    const double share = 1 - std::pow(left, 1.0 / count);
    double free = given;
    for (int piece = 0; piece < count; ++piece) {
      if (!TakeWithin(context, Rounded(free * share), begin, given, &held)) return nothing;
      free -= free * share;
    }
    if (!TakeWithin(context, wanted, begin, given, &held)) return nothing;
    return std::move(held.back());
  }

  // Takes bytes of a chunk, and whole other chunks if they are given instead.
  static bool TakeWithin(OpKernelContext* context, int64_t bytes, const char* begin, int64_t given,
                         std::vector<Tensor>* held) {
    for (int other = 0; other < kMostOthers; ++other) {
      Tensor taken = Take(context, bytes);
      if (taken.NumElements() != bytes) return false;
      const char* at = taken.tensor_data().data();
      held->push_back(std::move(taken));
      if (at >= begin && at < begin + given) return true;
    }
    return false;
  }

  std::vector<int64_t> sizes_;
  int64_t least_;
};

REGISTER_OP("LmsFiller")
    .Output("rest: uint8")
    .Attr("sizes: list(int) >= 1")
    .Attr("least: int >= 256")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      context->set_output(0, context->UnknownShapeOfRank(1));
      return tensorflow::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("LmsFiller").Device(tensorflow::DEVICE_CPU), FillerOp);
REGISTER_KERNEL_BUILDER(Name("LmsFiller").Device(tensorflow::DEVICE_GPU), FillerOp);

}  // namespace lmsrun
