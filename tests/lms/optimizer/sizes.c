/* Compares the plug-in's own declarations with TensorFlow's, and prints the sizes for those in Python. */

#define _GNU_SOURCE
#include <stdio.h>
#include "tensorflow/c/experimental/grappler/grappler.h"
#include "tensorflow/c/tf_buffer.h"

#define TF_InitGraph lms_TF_InitGraph /* declared with TensorFlow's types in the header */
#include "plugin.c"

#define SAME(ours, theirs, field) _Static_assert(offsetof(ours, field) == offsetof(theirs, field), #field)
#define ENDS(ours, theirs) _Static_assert(sizeof(ours) == sizeof(theirs), #theirs)

SAME(LmsParams, TP_OptimizerRegistrationParams, struct_size);
SAME(LmsParams, TP_OptimizerRegistrationParams, ext);
SAME(LmsParams, TP_OptimizerRegistrationParams, major_version);
SAME(LmsParams, TP_OptimizerRegistrationParams, minor_version);
SAME(LmsParams, TP_OptimizerRegistrationParams, patch_version);
SAME(LmsParams, TP_OptimizerRegistrationParams, device_type);
SAME(LmsParams, TP_OptimizerRegistrationParams, optimizer_configs);
SAME(LmsParams, TP_OptimizerRegistrationParams, optimizer);
ENDS(LmsParams, TP_OptimizerRegistrationParams);
_Static_assert(END_OF(LmsParams, optimizer) == TP_OPTIMIZER_REGISTRATION_PARAMS_STRUCT_SIZE, "struct_size");

SAME(LmsOptimizer, TP_Optimizer, struct_size);
SAME(LmsOptimizer, TP_Optimizer, ext);
SAME(LmsOptimizer, TP_Optimizer, create_func);
SAME(LmsOptimizer, TP_Optimizer, optimize_func);
SAME(LmsOptimizer, TP_Optimizer, destroy_func);
ENDS(LmsOptimizer, TP_Optimizer);
_Static_assert(END_OF(LmsOptimizer, destroy_func) == TP_OPTIMIZER_STRUCT_SIZE, "struct_size");

SAME(LmsConfigs, TP_OptimizerConfigs, struct_size);
SAME(LmsConfigs, TP_OptimizerConfigs, ext);
ENDS(LmsConfigs, TP_OptimizerConfigs);
_Static_assert(offsetof(LmsConfigs, toggles) == offsetof(TP_OptimizerConfigs, disable_model_pruning), "toggles");
_Static_assert(END_OF(LmsConfigs, toggles) == TP_OPTIMIZER_CONFIGS_STRUCT_SIZE, "struct_size");
_Static_assert(TF_TriState_Default == 0, "all zero is all default");

SAME(LmsBuffer, TF_Buffer, data);
SAME(LmsBuffer, TF_Buffer, length);
SAME(LmsBuffer, TF_Buffer, data_deallocator);
ENDS(LmsBuffer, TF_Buffer);

_Static_assert(OK == TF_OK && ABORTED == TF_ABORTED, "codes");

int main(void) {
  printf("%zu %zu %zu %zu\n", (size_t)TP_OPTIMIZER_CONFIGS_STRUCT_SIZE, (size_t)TP_OPTIMIZER_STRUCT_SIZE,
         (size_t)TP_OPTIMIZER_REGISTRATION_PARAMS_STRUCT_SIZE, sizeof(TF_Buffer));
  printf("%zu %zu %zu\n", offsetof(TP_OptimizerConfigs, disable_model_pruning),
         offsetof(TP_OptimizerRegistrationParams, device_type), offsetof(TP_OptimizerRegistrationParams, optimizer));
  return 0;
}
