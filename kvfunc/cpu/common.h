/* What the operations share: types of numbers, vectors, AMX, XLA's thread pool and its errors. */

#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && defined(__linux__)
#define AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

static inline int up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* ---- types of numbers ---- */

typedef enum { FLOAT32, BFLOAT16, INT8, FP8 } kind;

static const int BYTES[] = {4, 2, 1, 1};

static inline kind kind_of(XLA_FFI_DataType type) {
  switch (type) {
    case XLA_FFI_DataType_F32: return FLOAT32;
    case XLA_FFI_DataType_S8: return INT8;
    case XLA_FFI_DataType_U8:
    case XLA_FFI_DataType_F8E4M3FN: return FP8;
    default: return BFLOAT16; /* or its bits in U16; the caller admits no other type */
  }
}

/* ---- vectors: compilers split them where registers are narrower ---- */

enum { LANES = 16 };

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

static inline floats load(const float *at) {
  floats x;
  memcpy(&x, at, sizeof x);
  return x;
}
static inline void store(float *at, floats x) { memcpy(at, &x, sizeof x); }
static inline floats every(float x) { return x - (floats){0}; }
static inline floats where(ints mask, floats yes, floats no) {
  return (floats)((mask & (ints)yes) | (~mask & (ints)no));
}

/* exp(x) for x <= 0 to two units in the last place; below 2^-126 it is 0, NaN stays NaN. */
static inline floats exp_below(floats x) {
  const float half_way = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
  floats n = (x * 1.44269504f + half_way) - half_way;
  floats r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  floats p = 1.98756912e-4f * r + 1.39819994e-3f;
  p = p * r + 8.33345205e-3f;
  p = p * r + 4.16657962e-2f;
  p = p * r + 1.66666657e-1f;
  p = p * r + 5.0e-1f;
  p = p * r * r + r + 1.0f;
  ints exponent = (__builtin_convertvector(n, ints) + 127) << 23;
  return where(x < every(-87.33f), every(0.0f), p * (floats)exponent);
}

/* ---- AMX ---- */

#ifdef AMX

/* Whether the kernel lets this process use the tiles. */
static inline int amx_is_allowed(void) {
  enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
  static atomic_int allowed = -1;
  if (atomic_load(&allowed) < 0)
    atomic_store(&allowed, !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA));
  return atomic_load(&allowed);
}

/* All eight tiles as 16 rows of 64 bytes. */
static inline void configure_tiles(void) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } config = {.palette = 1};
  for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
  _tile_loadconfig(&config);
}

/* 16 x 16 numbers of 32 bits. */
static inline void transpose(__m512i row[16]) {
  __m512i next[16];
  for (int i = 0; i < 16; i += 2) {
    next[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
    next[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    row[i] = _mm512_unpacklo_epi64(next[i], next[i + 2]);
    row[i + 1] = _mm512_unpackhi_epi64(next[i], next[i + 2]);
    row[i + 2] = _mm512_unpacklo_epi64(next[i + 1], next[i + 3]);
    row[i + 3] = _mm512_unpackhi_epi64(next[i + 1], next[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    next[i] = _mm512_shuffle_i32x4(row[i], row[i + 4], 0x88);
    next[i + 4] = _mm512_shuffle_i32x4(row[i], row[i + 4], 0xdd);
    next[i + 8] = _mm512_shuffle_i32x4(row[i + 8], row[i + 12], 0x88);
    next[i + 12] = _mm512_shuffle_i32x4(row[i + 8], row[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    row[i] = _mm512_shuffle_i32x4(next[i], next[i + 8], 0x88);
    row[i + 8] = _mm512_shuffle_i32x4(next[i], next[i + 8], 0xdd);
  }
}

#else

static inline int amx_is_allowed(void) { return 0; }

#endif

/* ---- tasks on XLA's thread pool ---- */

/* Task `index` of a job; `memory` is scratch space of the job's size, the thread's own. */
typedef void run_one(const void *context, int index, char *memory);

typedef struct {
  run_one *run;
  const void *context;
  int count;
  size_t memory;
  atomic_int next, done, holders, out_of_memory;
} job;

static inline void leave(job *j) {
  if (atomic_fetch_sub(&j->holders, 1) == 1) free(j);
}

static inline void run_tasks(job *j) {
  char *memory = NULL;
  for (int i; (i = atomic_fetch_add(&j->next, 1)) < j->count; atomic_fetch_add(&j->done, 1)) {
    if (!memory) memory = aligned_alloc(64, (j->memory + 64) / 64 * 64);
    if (memory)
      j->run(j->context, i, memory);
    else
      atomic_store(&j->out_of_memory, 1);
  }
  free(memory);
}

static inline void help(void *data) {
  run_tasks(data);
  leave(data);
}

static inline void forget(XLA_FFI_CallFrame *frame, XLA_FFI_Error *error) {
  XLA_FFI_Error_Destroy_Args destroy = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
  frame->api->XLA_FFI_Error_Destroy(&destroy);
}

static inline int threads_of(XLA_FFI_CallFrame *frame) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL,
                                             frame->ctx, &threads};
  XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_NumThreads(&args);
  if (error) forget(frame, error);
  return error ? 1 : threads;
}

/* Runs tasks 0 ... count - 1 on the caller and on as many others of the pool as there is work for.
   Whoever comes late finds nothing left, so nobody waits for a thread that never starts. Returns
   whether memory ran out. */
static inline int run_all(XLA_FFI_CallFrame *frame, int threads, run_one *run, const void *context,
                          int count, size_t memory) {
  job *j = calloc(1, sizeof *j);
  if (!j) return 1;
  j->run = run, j->context = context, j->count = count, j->memory = memory;
  atomic_store(&j->holders, 1);
  for (int i = 1; i < least(threads, count); i++) {
    XLA_FFI_ThreadPool_Schedule_Args args = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL,
                                             frame->ctx, help, j};
    atomic_fetch_add(&j->holders, 1);
    XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_Schedule(&args);
    if (error) {
      forget(frame, error);
      leave(j);
      break;
    }
  }
  run_tasks(j);
  while (atomic_load(&j->done) < count) sched_yield(); /* what is left is under way */
  int fault = atomic_load(&j->out_of_memory);
  leave(j);
  return fault;
}

/* ---- XLA's calls ---- */

/* XLA asks once what version of its interface a function was built for. */
static inline int asks_for_metadata(XLA_FFI_CallFrame *frame) {
  if (!frame->extension_start || frame->extension_start->type != XLA_FFI_Extension_Metadata)
    return 0;
  XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)frame->extension_start)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  metadata->traits = 0;
  return 1;
}

static inline XLA_FFI_Error *failure(XLA_FFI_CallFrame *frame, const char *message) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message,
                                    XLA_FFI_Error_Code_INTERNAL};
  return frame->api->XLA_FFI_Error_Create(&args);
}

#define EXPORTED __attribute__((visibility("default")))
