// One op that gives a variable a new value in the memory that it has.
//
// AssignVariableOp makes the new value's buffer the variable's and frees the old one, so that a variable lies elsewhere
// after each step. LmsAssign copies the value into the old buffer. Where somebody else holds that buffer (a reader, a
// variable that shares it), or it is of another shape or none, it does what AssignVariableOp does: whoever holds an old
// value keeps it. TensorFlow's own ResourceStridedSliceAssign writes without the variable's lock: a second thread saw
// values of which half was new.
//
// TensorFlow's C API has no door to a variable's buffer, so this takes the C++ headers. It is a library of its own,
// compiled for the first plan that has it.

#include <atomic>
#include <cstring>
#include <memory>
#include <utility>

#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace lmsrun {

using tensorflow::DataType;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::Var;

class AssignOp : public OpKernel {
 public:
  explicit AssignOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("dtype", &dtype_));
    OP_REQUIRES_OK(context, context->GetAttr("validate_shape", &validate_shape_));
  }

  void Compute(OpKernelContext* context) override {
    tensorflow::core::RefCountPtr<Var> variable;
    const auto& handle = tensorflow::HandleFromInput(context, 0);
    auto make = [this](Var** made) {
      *made = new Var(dtype_);
      return absl::OkStatus();
    };
    OP_REQUIRES_OK(context, tensorflow::LookupOrCreateResource<Var>(context, handle, &variable, make));
    const Tensor& value = context->input(1);
    Tensor old;  // freed after the lock is released
    tensorflow::mutex_lock lock(*variable->mu());
    OP_REQUIRES(context, !variable->is_initialized || variable->tensor()->dtype() == dtype_,
                tensorflow::errors::InvalidArgument(
                    "the variable ", handle.name(), " is of type ", tensorflow::DataTypeString(variable->tensor()->dtype()),
                    ", and the new value of type ", tensorflow::DataTypeString(dtype_)));
    OP_REQUIRES(context, !validate_shape_ || !variable->is_initialized || variable->tensor()->shape() == value.shape(),
                tensorflow::errors::InvalidArgument("the variable ", handle.name(), " has shape ",
                                                    variable->tensor()->shape().DebugString(), ", and the new value ",
                                                    value.shape().DebugString()));
    if (!HasRoom(variable.get(), value) || !Copied(context, value, variable->tensor())) {
      Tensor made = value;
      if (variable->copy_on_read_mode.load()) {  // as AssignVariableOp: the buffer is to be the variable's alone
        OP_REQUIRES_OK(context, context->allocate_temp(dtype_, value.shape(), &made));
        OP_REQUIRES(context, Copied(context, value, &made),
                    tensorflow::errors::Internal("the new value of the variable ", handle.name(), " cannot be copied"));
      }
      old = std::move(*variable->tensor());
      *variable->tensor() = std::move(made);
    }
    variable->is_initialized = true;
  }

 private:
  // Whether the variable has memory for such a value, which nobody else looks at.
  static bool HasRoom(Var* variable, const Tensor& value) {
    return variable->is_initialized && variable->tensor()->RefCountIsOne() &&
           variable->tensor()->shape() == value.shape();
  }

  // Copies after all kernels launched so far and before all later ones; tells whether the device does that. It has to say
  // so before it returns, as TensorFlow's devices do, whose copies are launched then.
  static bool Copied(OpKernelContext* context, const Tensor& value, Tensor* to) {
    if (!tensorflow::DataTypeCanUseMemcpy(value.dtype())) return false;
    if (value.NumElements() == 0) return true;
    auto* there = context->op_device_context();
    if (there == nullptr) {
      const auto from = value.tensor_data();
      std::memcpy(const_cast<char*>(to->tensor_data().data()), from.data(), from.size());
      return true;
    }
    auto launched = std::make_shared<std::atomic<bool>>(false);
    there->CopyTensorInSameDevice(&value, static_cast<tensorflow::Device*>(context->device()), to,
                                  [launched](const absl::Status& status) { launched->store(status.ok()); });
    return launched->load();
  }

  DataType dtype_;
  bool validate_shape_;
};

REGISTER_OP("LmsAssign")
    .Input("resource: resource")
    .Input("value: dtype")
    .Attr("dtype: type")
    .Attr("validate_shape: bool = false")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);
REGISTER_KERNEL_BUILDER(Name("LmsAssign").Device(tensorflow::DEVICE_CPU), AssignOp);
REGISTER_KERNEL_BUILDER(Name("LmsAssign").Device(tensorflow::DEVICE_GPU).HostMemory("resource"), AssignOp);

}  // namespace lmsrun
