// Three ops that let a variable of a GPU have its value in pinned host memory.
//
// LmsSetHostValue makes a tensor of host memory the variable's value, without a copy where that memory is pinned.
// LmsGetHostValue returns the value there, again without a copy, or copies it from the device. The variable itself stays
// the device's: TensorFlow's own ops read it, and update it in place, through the driver, which maps pinned memory into
// the GPU's addresses. LmsSetDeviceValue gives it device memory again, which AssignVariableOp would do, too; but that makes
// pinned memory the variable's where the value lies there, and gives the old value's back while kernels still read it.
//
// TensorFlow's C API has no door to a variable's buffer, so this takes the C++ headers. It is a library of its own,
// compiled when variables are to lie in host memory: no other training waits for it.

#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "tensorflow/core/framework/allocation_description.pb.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor_description.pb.h"

namespace lmsrun {

using tensorflow::AllocatorAttributes;
using tensorflow::AsyncOpKernel;
using tensorflow::DataType;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::Var;

AllocatorAttributes Pinned() {
  AllocatorAttributes attributes;
  attributes.set_on_host(true);
  attributes.set_gpu_compatible(true);
  return attributes;
}

// Tensors tell which allocator made them by its name.
bool IsPinned(const Tensor& tensor, OpKernelContext* context) {
  tensorflow::TensorDescription description;
  tensor.FillDescription(&description);
  return description.allocation_description().allocator_name() == context->device()->GetAllocator(Pinned())->Name();
}

// Makes a tensor the variable's value.
absl::Status Replace(OpKernelContext* context, DataType dtype, Tensor value) {
  tensorflow::core::RefCountPtr<Var> variable;
  const auto& handle = tensorflow::HandleFromInput(context, 0);
  auto make = [dtype](Var** made) {
    *made = new Var(dtype);
    return absl::OkStatus();
  };
  absl::Status status = tensorflow::LookupOrCreateResource<Var>(context, handle, &variable, make);
  if (!status.ok()) return status;
  Tensor old;
  {
    tensorflow::mutex_lock lock(*variable->mu());
    if (variable->is_initialized && variable->tensor()->dtype() != dtype) {
      return tensorflow::errors::InvalidArgument("the variable ", handle.name(), " is of another type");
    }
    old = std::move(*variable->tensor());
    *variable->tensor() = std::move(value);
    variable->is_initialized = true;
  }
  // A kernel that was launched may still read the old value, and unlike the device's memory, pinned memory is not given
  // out again in the order of the stream. A device that cannot tell runs each kernel at once. The device's own memory goes
  // back at once: a plan counts on it.
  auto* there = context->op_device_context();
  if (there != nullptr && old.IsInitialized() && IsPinned(old, context)) {
    there->ThenExecute(static_cast<tensorflow::Device*>(context->device()), there->stream(), [old] {}).IgnoreError();
  }
  return absl::OkStatus();
}

class SetHostValueOp : public OpKernel {
 public:
  explicit SetHostValueOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("dtype", &dtype_));
    OP_REQUIRES(context, tensorflow::DataTypeCanUseMemcpy(dtype_),
                tensorflow::errors::Unimplemented("values of type ", tensorflow::DataTypeString(dtype_),
                                                  " cannot lie in pinned memory"));
  }

  void Compute(OpKernelContext* context) override {
    Tensor value = context->input(1);
    if (!IsPinned(value, context)) {
      Tensor pinned;
      OP_REQUIRES_OK(context, context->allocate_temp(dtype_, value.shape(), &pinned, Pinned()));
      auto to = pinned.tensor_data(), from = value.tensor_data();
      std::memcpy(const_cast<char*>(to.data()), from.data(), from.size());
      value = std::move(pinned);
    }
    OP_REQUIRES_OK(context, Replace(context, dtype_, std::move(value)));
  }

 private:
  DataType dtype_;
};

class SetDeviceValueOp : public AsyncOpKernel {
 public:
  explicit SetDeviceValueOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("dtype", &dtype_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    Tensor value = context->input(1);
    if (!IsPinned(value, context)) {
      OP_REQUIRES_OK_ASYNC(context, Replace(context, dtype_, std::move(value)), done);
      done();
      return;
    }
    auto copy = std::make_shared<Tensor>();
    OP_REQUIRES_OK_ASYNC(context, context->allocate_temp(dtype_, value.shape(), copy.get()), done);
    auto* device = static_cast<tensorflow::Device*>(context->device());
    context->op_device_context()->CopyCPUTensorToDevice(
        &value, device, copy.get(), [this, context, done, value, copy](const absl::Status& status) {
          context->SetStatus(status.ok() ? Replace(context, dtype_, *copy) : status);
          done();
        });
  }

 private:
  DataType dtype_;
};

class GetHostValueOp : public AsyncOpKernel {
 public:
  explicit GetHostValueOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("dtype", &dtype_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    tensorflow::core::RefCountPtr<Var> variable;
    const auto& handle = tensorflow::HandleFromInput(context, 0);
    OP_REQUIRES_OK_ASYNC(context, tensorflow::LookupResource(context, handle, &variable), done);
    Tensor value;
    bool is_initialized = false;
    {
      tensorflow::tf_shared_lock lock(*variable->mu());
      is_initialized = variable->is_initialized;
      value = *variable->tensor();
    }
    OP_REQUIRES_ASYNC(context, is_initialized,
                      tensorflow::errors::FailedPrecondition("the variable ", handle.name(), " has no value yet"), done);
    OP_REQUIRES_ASYNC(context, value.dtype() == dtype_,
                      tensorflow::errors::InvalidArgument("the variable ", handle.name(), " is of another type"), done);
    if (IsPinned(value, context) || value.NumElements() == 0) {
      context->set_output(0, value);
      done();
      return;
    }
    Tensor* copy = nullptr;
    OP_REQUIRES_OK_ASYNC(context, context->allocate_output(0, value.shape(), &copy, Pinned()), done);
    auto* device = static_cast<tensorflow::Device*>(context->device());
    context->op_device_context()->CopyDeviceTensorToCPU(&value, "LmsGetHostValue", device, copy,
                                                        [context, done, value](const absl::Status& status) {
                                                          context->SetStatus(status);
                                                          done();
                                                        });
  }

 private:
  DataType dtype_;
};

REGISTER_OP("LmsSetHostValue")
    .Input("resource: resource")
    .Input("value: dtype")
    .Attr("dtype: type")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);
REGISTER_OP("LmsSetDeviceValue")
    .Input("resource: resource")
    .Input("value: dtype")
    .Attr("dtype: type")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);
REGISTER_OP("LmsGetHostValue")
    .Input("resource: resource")
    .Output("value: dtype")
    .Attr("dtype: type")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnknownShape);
REGISTER_KERNEL_BUILDER(
    Name("LmsSetHostValue").Device(tensorflow::DEVICE_GPU).HostMemory("resource").HostMemory("value"), SetHostValueOp);
REGISTER_KERNEL_BUILDER(Name("LmsSetDeviceValue").Device(tensorflow::DEVICE_GPU).HostMemory("resource"),
                        SetDeviceValueOp);
REGISTER_KERNEL_BUILDER(
    Name("LmsGetHostValue").Device(tensorflow::DEVICE_GPU).HostMemory("resource").HostMemory("value"), GetHostValueOp);

}  // namespace lmsrun
