/* The part of the CUDA driver that Triton calls: it runs nothing and keeps what the last launch has handed over. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int Result;

enum { FUNCTIONS = 64, PARAMETERS = 255, BYTES = 1 << 14 };
/* a function handle points at how many parameters the kernel has, which the test fills in, and at their bytes */
typedef struct {
  int count, sizes[PARAMETERS];
} Function;
Function functions[FUNCTIONS];
int loaded, launches, encodings, pointers; /* calls so far */
unsigned char handed_over[BYTES];          /* the parameters, one after the other */
unsigned grid[3];
Function *launched; /* last */

typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream, *attributes;
  unsigned attribute_count;
} Configuration;

Result cuLaunchKernelEx(const Configuration *configuration, Function *function, void **parameters, void **extra) {
  unsigned char *end = handed_over;
  memset(handed_over, 0, BYTES);
  for (int i = 0; i < function->count; i++) {
    memcpy(end, parameters[i], function->sizes[i]);
    end += function->sizes[i];
  }
  memcpy(grid, configuration->grid, sizeof grid);
  launched = function;
  launches++;
  return 0;
}

/* A tensor map that is legible: address, dimensions, sizes, strides in bytes, box. */
Result cuTensorMapEncodeTiled(uint64_t *map, int type, unsigned rank, void *address, const uint64_t *size,
                              const uint64_t *stride, const uint32_t *box, const uint32_t *step, int interleave,
                              int swizzle, int promotion, int fill) {
  memset(map, 0, 128);
  *map++ = (uint64_t)address;
  *map++ = rank;
  for (unsigned i = 0; i < rank; i++) *map++ = size[i];
  for (unsigned i = 0; i + 1 < rank; i++) *map++ = stride[i];
  for (unsigned i = 0; i < rank; i++) *map++ = box[i];
  *map++ = swizzle;
  encodings++;
  return 0;
}

Result cuPointerGetAttribute(uint64_t *address, int attribute, uint64_t pointer) {
  *address = pointer;
  pointers++;
  return 0;
}

/* an H200 where it is asked for: compute capability 9.0, shared memory and registers */
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case 75: *value = 9; break;
    case 76: *value = 0; break;
    case 8: *value = 49152; break;
    case 12: *value = 65536; break;
    case 16: *value = 132; break;
    case 97: *value = 232448; break;
    default: *value = 1;
  }
  return 0;
}
Result cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute == 0 ? 1024 : 0; return 0; }
Result cuCtxGetCurrent(void **context) { *context = &launches; return 0; }
Result cuDevicePrimaryCtxRetain(void **context, int device) { *context = &launches; return 0; }
Result cuCtxGetDevice(int *device) { *device = 0; return 0; }
Result cuCtxGetLimit(size_t *value, int limit) { *value = 0; return 0; }
Result cuDeviceGet(int *device, int ordinal) { *device = 0; return 0; }
Result cuDeviceGetCount(int *found) { *found = 1; return 0; }
Result cuGetErrorString(int error, const char **text) { *text = "the stub fails never"; return 0; }
Result cuModuleLoadData(void **module, const void *image) { *module = &launches; return 0; }
Result cuModuleGetFunction(Function **function, void *module, const char *name) {
  *function = &functions[loaded++ % FUNCTIONS];
  return 0;
}
Result cuOccupancyMaxActiveClusters(int *clusters, void *function, const void *configuration) { *clusters = 1; return 0; }
Result cuStreamGetCaptureInfo_v2(void *asked, int *status) { *status = 0; return 0; }
Result cuStreamIsCapturing(void *asked, int *status) { *status = 0; return 0; }

#define DOES_NOTHING(name) Result name(void) { return 0; }
DOES_NOTHING(cuInit)
DOES_NOTHING(cuDriverGetVersion)
DOES_NOTHING(cuCtxSetCurrent)
DOES_NOTHING(cuCtxPushCurrent)
DOES_NOTHING(cuCtxPopCurrent)
DOES_NOTHING(cuCtxSetLimit)
DOES_NOTHING(cuCtxSynchronize)
DOES_NOTHING(cuFuncSetAttribute)
DOES_NOTHING(cuFuncSetCacheConfig)
DOES_NOTHING(cuModuleUnload)
DOES_NOTHING(cuTensorMapEncodeIm2col)
