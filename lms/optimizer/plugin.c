/* A plug-in graph optimizer: hands each optimized graph of a training step to a function of Python.

   TensorFlow runs it after its own passes, once for each registered device type that a graph has nodes on.
   It uses TensorFlow's C API alone and links to nothing of TensorFlow: the functions it calls are handed to
   it. So it builds without TensorFlow, and one binary serves TensorFlow 2.15 to 2.21.

   The structures below follow tensorflow/c/experimental/grappler/grappler.h, tf_buffer.h and tf_status.h of
   2.15.1, 2.18.1 and 2.21.0, which are the same there. A test compares every size and offset with the
   installed header. */

#define _GNU_SOURCE /* memmem */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

/* What TensorFlow declares. */

typedef struct LmsStatus LmsStatus;         /* TF_Status */
typedef struct LmsItem LmsItem;             /* TF_GrapplerItem */
typedef struct LmsProperties LmsProperties; /* TF_GraphProperties */

typedef struct LmsBuffer { /* TF_Buffer */
  const void* data;
  size_t length;
  void (*data_deallocator)(void* data, size_t length);
} LmsBuffer;

typedef struct LmsConfigs { /* TP_OptimizerConfigs; all zero is TF_TriState_Default: nothing is switched off */
  size_t struct_size;
  void* ext;
  int32_t toggles[19];
} LmsConfigs;

typedef struct LmsOptimizer { /* TP_Optimizer */
  size_t struct_size;
  void* ext;
  void* (*create_func)(void);
  void (*optimize_func)(void*, const LmsBuffer*, const LmsItem*, LmsBuffer*, LmsStatus*);
  void (*destroy_func)(void*);
} LmsOptimizer;

typedef struct LmsParams { /* TP_OptimizerRegistrationParams */
  size_t struct_size;
  void* ext;
  int32_t major_version;
  int32_t minor_version;
  int32_t patch_version;
  const char* device_type;
  LmsConfigs* optimizer_configs;
  LmsOptimizer* optimizer;
} LmsParams;

#define END_OF(type, field) (offsetof(type, field) + sizeof(((type*)0)->field)) /* TF_OFFSET_OF_END */

enum { OK = 0, ABORTED = 10 }; /* TF_Code */

/* The functions of TensorFlow that we call, in the order of lms/optimizer/compiled_form.py. */
typedef struct Calls {
  void (*set_status)(LmsStatus*, int, const char*);                                             /* TF_SetStatus */
  int (*get_code)(const LmsStatus*);                                                            /* TF_GetCode */
  void (*output_count)(LmsProperties*, const char*, int*, LmsStatus*);             /* TF_GetOutputPropertiesListSize */
  void (*outputs)(LmsProperties*, const char*, LmsBuffer**, int, LmsStatus*);          /* TF_GetOutputPropertiesList */
} Calls;

/* Python; it answers by lms_plugin_reply. With LOST for a device it is told of a call without an answer. */
typedef void (*Editor)(int device, const void* graph, size_t length, const LmsItem* item, void* reply);

/* No result of the call, for that is left to chance where an exception ends it: one that came before the code of
   the call could catch any, as the KeyboardInterrupt does that was pending while TensorFlow was at work. */
typedef struct Reply {
  int answered;
  void* data; /* NULL: the graph stays as it is */
  size_t length;
} Reply;

/* One for each graph or function body that TensorFlow optimizes; it lives through all iterations. */
typedef struct Graph {
  int device;
  int iteration;
} Graph;

enum { LOST = -1, CPU = 0, GPU = 1, DEVICES = 2 };

static const char* const device_types[DEVICES] = {"CPU", "GPU"}; /* TensorFlow keeps the pointer */

/* Shorter graphs hold no training step: a node takes about 120 bytes, half of it the name of its device. */
static const size_t SMALLEST_GRAPH = 512;
static const int DEFAULT_ITERATIONS = 2; /* kDefaultNumberOfIterations in meta_optimizer.cc */

static Calls calls;
static int next_device = -1; /* set and read while one lock of Python's is held */
static int registered = 0;   /* a bit for each device type */

static Editor armed = NULL; /* read and written by any thread, so by atomics alone */
static int inside = 0;      /* threads that are in Python or about to be; atomic */

static __thread int expected_iterations = 0; /* 0: the default */
static __thread int nested = 0;              /* the editor itself makes TensorFlow optimize graphs */

/* Idle is the default. */

static int has(const LmsBuffer* graph, const char* word) {
  return memmem(graph->data, graph->length, word, strlen(word)) != NULL;
}

/* Names and ops of gradients keep these words: gradient_tape/..., gradients/..., ReluGrad, Conv2DBackpropInput. */
static int has_backward_pass(const LmsBuffer* graph) {
  return has(graph, "gradient") || has(graph, "Grad") || has(graph, "Backprop");
}

/* Counting in before the editor is read makes sure that whoever disarms and then sees nobody inside is alone. */
static Reply ask_editor(const Graph* state, const LmsBuffer* graph, const LmsItem* item) {
  Reply reply = {0, NULL, 0};
  __atomic_add_fetch(&inside, 1, __ATOMIC_SEQ_CST);
  Editor editor = __atomic_load_n(&armed, __ATOMIC_SEQ_CST);
  if (editor != NULL) {
    nested++;
    editor(state->device, graph->data, graph->length, item, &reply);
    if (!reply.answered) editor(LOST, NULL, 0, NULL, NULL);
    nested--;
  }
  __atomic_sub_fetch(&inside, 1, __ATOMIC_SEQ_CST);
  return reply;
}

static void release(void* data, size_t length) {
  (void)length;
  free(data);
}

static void optimize(void* opaque, const LmsBuffer* in, const LmsItem* item, LmsBuffer* out, LmsStatus* status) {
  Graph* state = (Graph*)opaque;
  Reply reply = {0, NULL, 0};
  int last = expected_iterations > 0 ? expected_iterations : DEFAULT_ITERATIONS;
  if (state != NULL && ++state->iteration == last && nested == 0 && in->length >= SMALLEST_GRAPH &&
      __atomic_load_n(&armed, __ATOMIC_RELAXED) != NULL && has_backward_pass(in))
    reply = ask_editor(state, in, item);
  if (reply.data == NULL) {
    /* MetaOptimizer takes it for "did nothing": it neither logs nor copies the graph. */
    calls.set_status(status, ABORTED, "nothing to do");
    return;
  }
  out->data = reply.data;
  out->length = reply.length;
  out->data_deallocator = release;
}

static void* create(int device) {
  Graph* state = (Graph*)calloc(1, sizeof(Graph));
  if (state != NULL) state->device = device;
  return state;
}

static void* create_cpu(void) { return create(CPU); }
static void* create_gpu(void) { return create(GPU); }
static void destroy(void* state) { free(state); }

/* TensorFlow's loader calls it. Without a device type of ours to register, TensorFlow refuses the plug-in. */
EXPORT void TF_InitGraph(LmsParams* params, LmsStatus* status) {
  (void)status;
  params->struct_size = END_OF(LmsParams, optimizer);
  params->optimizer_configs->struct_size = END_OF(LmsConfigs, toggles);
  params->optimizer->struct_size = END_OF(LmsOptimizer, destroy_func);
  params->device_type = NULL;
  if (next_device < 0) return;
  params->device_type = device_types[next_device];
  params->optimizer->create_func = next_device == CPU ? create_cpu : create_gpu;
  params->optimizer->optimize_func = optimize;
  params->optimizer->destroy_func = destroy;
  registered |= 1 << next_device;
  next_device = -1;
}

/* What Python calls. */

/* Changes with these functions; Python takes no other number. */
EXPORT int lms_plugin_version(void) { return 1; }

EXPORT void lms_plugin_connect(const Calls* from) { calls = *from; }

/* The device type that the next TF_InitGraph registers. */
EXPORT void lms_plugin_register_next(int device) { next_device = device; }

EXPORT int lms_plugin_registered(void) { return registered; }

/* NULL: idle again. */
EXPORT void lms_plugin_arm(Editor editor) { __atomic_store_n(&armed, editor, __ATOMIC_SEQ_CST); }

EXPORT int lms_plugin_inside(void) { return __atomic_load_n(&inside, __ATOMIC_SEQ_CST); }

EXPORT void lms_plugin_expect_iterations(int count) { expected_iterations = count; }

/* An edited graph, or NULL to leave it. */
EXPORT void lms_plugin_reply(void* opaque, const void* data, size_t length) {
  Reply* reply = (Reply*)opaque;
  reply->answered = 1;
  if (data == NULL || (reply->data = malloc(length)) == NULL) return;
  memcpy(reply->data, data, length);
  reply->length = length;
}

/* Shapes. A protobuf message is a run of fields: a varint of number * 8 + kind, then the value. */

typedef struct Bytes {
  const uint8_t* at;
  const uint8_t* end;
} Bytes;

enum { VARINT = 0, FIXED64 = 1, LENGTH = 2, FIXED32 = 5 };

static int read_varint(Bytes* in, uint64_t* value) {
  *value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    if (in->at == in->end) return 0;
    uint8_t byte = *in->at++;
    *value |= (uint64_t)(byte & 0x7f) << shift;
    if (byte < 0x80) return 1;
  }
  return 0;
}

/* Reads one field: a number into value, or the bytes of a message into part. */
static int read_field(Bytes* in, uint64_t* number, int* kind, uint64_t* value, Bytes* part) {
  uint64_t key, skip;
  if (!read_varint(in, &key)) return 0;
  *number = key >> 3;
  *kind = (int)(key & 7);
  if (*kind == VARINT) return read_varint(in, value);
  if (*kind == LENGTH) {
    if (!read_varint(in, &skip)) return 0;
  } else if (*kind == FIXED64 || *kind == FIXED32) {
    skip = *kind == FIXED64 ? 8 : 4;
  } else {
    return 0;
  }
  if (skip > (uint64_t)(in->end - in->at)) return 0;
  part->at = in->at;
  part->end = in->at += skip;
  return 1;
}

typedef struct Numbers {
  int64_t* data;
  size_t length;
  size_t room;
} Numbers;

static int append(Numbers* to, int64_t value) {
  if (to->length == to->room) {
    size_t room = to->room ? 2 * to->room : 4096;
    int64_t* data = (int64_t*)realloc(to->data, room * sizeof(int64_t));
    if (data == NULL) return 0;
    to->data = data;
    to->room = room;
  }
  to->data[to->length++] = value;
  return 1;
}

/* TensorShapeProto.Dim of tensor_shape.proto: 1 is the size. Grappler numbers unknown sizes -1, -2, ... */
static int read_dimension(Bytes in, int64_t* size) {
  uint64_t number, value;
  int kind;
  Bytes part;
  *size = 0;
  while (in.at < in.end) {
    if (!read_field(&in, &number, &kind, &value, &part)) return 0;
    if (number == 1 && kind == VARINT) *size = (int64_t)value < 0 ? -1 : (int64_t)value;
  }
  return 1;
}

/* TensorShapeProto: 2 are the dimensions, 3 says that their number is unknown. At `rank` stands their count. */
static int read_shape(Bytes in, Numbers* to, size_t rank) {
  uint64_t number, value;
  int kind, unknown = 0;
  int64_t size;
  Bytes part;
  while (in.at < in.end) {
    if (!read_field(&in, &number, &kind, &value, &part)) return 0;
    if (number == 2 && kind == LENGTH) {
      if (!read_dimension(part, &size) || !append(to, size)) return 0;
      to->data[rank]++;
    } else if (number == 3 && kind == VARINT) {
      unknown = value != 0;
    }
  }
  if (unknown) {
    to->length = rank + 1;
    to->data[rank] = -1;
  }
  return 1;
}

/* OpInfo.TensorProperties of op_performance_data.proto: 1 is the dtype, 2 the shape; no shape is a scalar. */
static int read_properties(const void* data, size_t length, Numbers* to) {
  uint64_t number, value;
  int kind;
  Bytes in = {(const uint8_t*)data, (const uint8_t*)data + length}, part;
  size_t dtype = to->length, rank = dtype + 1;
  if (!append(to, 0) || !append(to, 0)) return 0;
  while (in.at < in.end) {
    if (!read_field(&in, &number, &kind, &value, &part)) return 0;
    if (number == 1 && kind == VARINT) to->data[dtype] = (int64_t)value;
    if (number == 2 && kind == LENGTH && !read_shape(part, to, rank)) return 0;
  }
  return 1;
}

static int read_outputs(LmsProperties* properties, const char* name, LmsStatus* status, Numbers* to) {
  int count = 0, good;
  calls.output_count(properties, name, &count, status);
  if (calls.get_code(status) != OK || !append(to, count)) return 0;
  if (count <= 0) return 1;
  LmsBuffer* buffers = (LmsBuffer*)calloc((size_t)count, sizeof(LmsBuffer));
  LmsBuffer** pointers = (LmsBuffer**)calloc((size_t)count, sizeof(LmsBuffer*));
  good = buffers != NULL && pointers != NULL;
  if (good) {
    for (int i = 0; i < count; i++) pointers[i] = &buffers[i];
    calls.outputs(properties, name, pointers, count, status);
    good = calls.get_code(status) == OK;
    for (int i = 0; i < count; i++) {
      good = good && read_properties(buffers[i].data, buffers[i].length, to);
      if (buffers[i].data_deallocator != NULL)
        buffers[i].data_deallocator((void*)buffers[i].data, buffers[i].length);
    }
  }
  free(pointers);
  free(buffers);
  return good;
}

/* For each of the names, which stand behind one another, each with its end: the number of outputs, and for each
   of these its dtype, its rank (-1: unknown) and its sizes (-1: open). Gives how many numbers it wrote to *numbers,
   to be freed with lms_plugin_free, or -1 and the reason in status where it is TensorFlow's. */
EXPORT int64_t lms_plugin_outputs(LmsProperties* properties, const char* names, int64_t count, LmsStatus* status,
                                  int64_t** numbers) {
  Numbers to = {NULL, 0, 0};
  for (int64_t i = 0; i < count; i++, names += strlen(names) + 1) {
    if (!read_outputs(properties, names, status, &to)) {
      free(to.data);
      return -1;
    }
  }
  *numbers = to.data;
  return (int64_t)to.length;
}

/* The same for one message, for the tests. */
EXPORT int64_t lms_plugin_read_properties(const void* data, size_t length, int64_t** numbers) {
  Numbers to = {NULL, 0, 0};
  if (!read_properties(data, length, &to)) {
    free(to.data);
    return -1;
  }
  *numbers = to.data;
  return (int64_t)to.length;
}

EXPORT void lms_plugin_free(void* data) { free(data); }
