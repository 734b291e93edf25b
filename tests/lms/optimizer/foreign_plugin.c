/* A plug-in graph optimizer of somebody else, built with DEVICE_TYPE; it leaves every graph as it is. */

#include <stdlib.h>
#include <string.h>
#include "tensorflow/c/experimental/grappler/grappler.h"

static void release(void* data, size_t length) {
  (void)length;
  free(data);
}

static void optimize(void* state, const TF_Buffer* in, const TF_GrapplerItem* item, TF_Buffer* out, TF_Status* status) {
  (void)state;
  (void)item;
  (void)status;
  void* copy = malloc(in->length);
  memcpy(copy, in->data, in->length);
  out->data = copy;
  out->length = in->length;
  out->data_deallocator = release;
}

void TF_InitGraph(TP_OptimizerRegistrationParams* params, TF_Status* status) {
  (void)status;
  params->struct_size = TP_OPTIMIZER_REGISTRATION_PARAMS_STRUCT_SIZE;
  params->optimizer_configs->struct_size = TP_OPTIMIZER_CONFIGS_STRUCT_SIZE;
  params->optimizer->struct_size = TP_OPTIMIZER_STRUCT_SIZE;
  params->device_type = DEVICE_TYPE;
  params->optimizer->optimize_func = optimize;
}
