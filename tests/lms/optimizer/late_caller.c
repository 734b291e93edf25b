/* Calls a plug-in from threads that Python knows nothing of, and after Python's end. */

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include "tensorflow/c/experimental/grappler/grappler.h"

static TP_Optimizer plugin;
static TF_Buffer graph;
static TF_Status* (*new_status)(void);
static atomic_int calls;

static void call(void) {
  TF_Buffer out = {0};
  void* state = plugin.create_func();
  TF_Status* status = new_status();
  plugin.optimize_func(state, &graph, NULL, &out, status);
  plugin.optimize_func(state, &graph, NULL, &out, status);
  if (out.data_deallocator != NULL) out.data_deallocator((void*)out.data, out.length);
  plugin.destroy_func(state);
  atomic_fetch_add(&calls, 1);
}

static void* call_for_ever(void* unused) {
  for (;;) call();
  return unused;
}

static void call_late(void) {
  int before = atomic_load(&calls);
  usleep(200000);
  for (int i = 0; i < 1000; i++) call();
  fprintf(stderr, "late calls: %s\n", atomic_load(&calls) > before + 1000 ? "from two threads" : "from one");
}

void set_plugin(TP_Optimizer* from, const void* data, size_t length, void* status_maker) {
  plugin = *from;
  graph.data = data;
  graph.length = length;
  new_status = (TF_Status * (*)(void)) status_maker;
}

int count_calls(void) { return atomic_load(&calls); }

/* The library's destructors and atexit come after Py_FinalizeEx. */
void call_until_the_end(void) {
  pthread_t thread;
  atexit(call_late);
  pthread_create(&thread, NULL, call_for_ever, NULL);
  pthread_detach(thread);
}

/* As a Ctrl-C does that comes while TensorFlow is at work. */
void call_with_interrupt_pending(void) {
  kill(getpid(), SIGINT);
  call();
}
