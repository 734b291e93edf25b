/* Asks the processor for the size of its largest cache in the way in which Eigen does.

   TensorFlow's own kernels share their work out by that size, so that it must be the same number. The files
   of Linux tell another one for processors of AMD: there they have the part of the cache that one core can
   use, and Eigen has all of it. */

#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

#if defined(__x86_64__)
#include <cpuid.h>

enum { DATA = 1, UNIFIED = 3, LEVEL = 3, MOST_CACHES = 16 };

static int64_t listed(void) { /* processors of Intel, and all others */
  int64_t found = 0;
  for (unsigned number = 0; number < MOST_CACHES; ++number) {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(4, number, &a, &b, &c, &d)) break;
    unsigned kind = a & 0xF;
    if (!kind) break;
    if ((kind == DATA || kind == UNIFIED) && (a >> 5 & 7) == LEVEL) {
      found = ((int64_t)(b >> 22) + 1) * ((b >> 12 & 0x3FF) + 1) * ((b & 0xFFF) + 1) * ((int64_t)c + 1);
    }
  }
  return found;
}

/* Returns the bytes; 0 where the processor does not tell. */
EXPORT int64_t lms_l3_bytes(void) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(0, &a, &b, &c, &d)) return 0;
  if (b != signature_AMD_ebx || c != signature_AMD_ecx || d != signature_AMD_edx) return listed();
  if (!__get_cpuid(0x80000006u, &a, &b, &c, &d)) return 0;
  return ((int64_t)(d & 0x0FFFC000) >> 18) * 512 * 1024;
}
#else
EXPORT int64_t lms_l3_bytes(void) { return 0; } /* nor does Eigen ask */
#endif
