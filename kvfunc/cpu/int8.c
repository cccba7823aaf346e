/* x W^T of int8 on AMX: x [tokens, inner], W [outputs, inner], each row with its own scale.

   A tile of W is the first operand as it lies in memory, so weights need no packing and are read
   once; the tokens are packed, which are few. */

#include <string.h>

#include "common.h"

EXPORTED int kvfunc_has_int8(void) { return amx_is_allowed(); }

#ifdef AMX

enum {
  OUTPUTS = 64, /* rows of W of a task */
  DEEP = 64,    /* inner numbers of a tile */
};

typedef struct {
  int tokens, inner, outputs, padded; /* padded: tokens, to whole tiles */
  const int8_t *x, *weight;
  const float *x_scales, *scales;
  int8_t *packed; /* [padded / 16, inner / DEEP] tiles of (four inner numbers) x (token) */
  float *out;     /* [tokens, outputs] */
} problem;

/* Bytes of 16 rows from `from` on, of which `rows` and `bytes` exist; zeros for the others. */
static void load_rows(const int8_t *from, int64_t stride, int rows, int bytes, __m512i to[16]) {
  __mmask64 mask = bytes >= 64 ? ~0ull : (1ull << bytes) - 1;
  for (int i = 0; i < 16; i++)
    to[i] = i < rows ? _mm512_maskz_loadu_epi8(mask, from + i * stride) : _mm512_setzero_si512();
}

static void pack(const problem *p) {
  int8_t *to = p->packed;
  for (int t = 0; t < p->padded; t += 16)
    for (int i = 0; i < p->inner; i += DEEP, to += 16 * DEEP) {
      __m512i row[16];
      load_rows(p->x + (int64_t)t * p->inner + i, p->inner, p->tokens - t, p->inner - i, row);
      transpose(row);
      for (int r = 0; r < 16; r++) _mm512_storeu_si512(to + 64 * r, row[r]);
    }
}

/* One tile of sums, [output, token], scaled and laid as [token, output]. */
static void write_out(const problem *p, const int32_t *sums, int output, int token) {
  __m512i row[16];
  for (int i = 0; i < 16; i++) row[i] = _mm512_loadu_si512(sums + 16 * i);
  transpose(row);
  int outputs = p->outputs - output;
  __mmask16 mask = outputs >= 16 ? 0xffff : (1u << outputs) - 1;
  __m512 scales = _mm512_maskz_loadu_ps(mask, p->scales + output);
  for (int i = 0; i < least(16, p->tokens - token); i++) {
    __m512 x = _mm512_mul_ps(_mm512_cvtepi32_ps(row[i]), _mm512_set1_ps(p->x_scales[token + i]));
    _mm512_mask_storeu_ps(p->out + (int64_t)(token + i) * p->outputs + output, mask,
                          _mm512_mul_ps(x, scales));
  }
}

/* 32 outputs; the memory holds a copy of what of W is no whole tile. */
static void run_rows(const problem *p, int output, char *memory) {
  int depth = up(p->inner, DEEP), steps = depth / DEEP;
  const int8_t *weight = p->weight + (int64_t)output * p->inner;
  int64_t stride = p->inner;
  if (p->outputs - output < 32 || depth != p->inner) {
    int8_t *copy = (int8_t *)memory;
    memset(copy, 0, 32 * (size_t)depth);
    for (int i = 0; i < least(32, p->outputs - output); i++)
      memcpy(copy + (int64_t)i * depth, weight + i * p->inner, p->inner);
    weight = copy, stride = depth;
  }
  _Alignas(64) int32_t sums[4][256];
  for (int token = 0; token < p->padded; token += 32) {
    int both = token + 16 < p->padded;
    const int8_t *left = p->packed + (int64_t)token * depth, *right = left + 16 * (int64_t)depth;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int i = 0; i < steps; i++) {
      _tile_loadd(4, weight + i * DEEP, stride);
      _tile_loadd(5, weight + 16 * stride + i * DEEP, stride);
      _tile_loadd(6, left + 1024 * i, 64);
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 5, 6);
      if (!both) continue;
      _tile_loadd(7, right + 1024 * i, 64);
      _tile_dpbssd(2, 4, 7);
      _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (int i = 0; i < (both ? 4 : 2); i++)
      if (output + 16 * (i % 2) < p->outputs)
        write_out(p, sums[i], output + 16 * (i % 2), token + 16 * (i / 2));
  }
}

static void run_task(const void *context, int index, char *memory) {
  const problem *p = context;
  configure_tiles();
  for (int output = index * OUTPUTS; output < least((index + 1) * OUTPUTS, p->outputs);
       output += 32)
    run_rows(p, output, memory);
  _tile_release();
}

EXPORTED XLA_FFI_Error *kvfunc_int8_product(XLA_FFI_CallFrame *frame) {
  if (asks_for_metadata(frame)) return NULL;
  if (frame->args.size != 4 || frame->rets.size != 1)
    return failure(frame, "a product of int8 takes 4 arrays and gives 1");
  const XLA_FFI_Buffer *in[4], *out = frame->rets.rets[0];
  for (int i = 0; i < 4; i++) in[i] = frame->args.args[i];
  problem p = {.tokens = in[0]->dims[0], .inner = in[0]->dims[1], .outputs = in[2]->dims[0],
               .x = in[0]->data, .x_scales = in[1]->data, .weight = in[2]->data,
               .scales = in[3]->data, .out = out->data};
  p.padded = up(p.tokens, 16);
  size_t depth = up(p.inner, DEEP);
  p.packed = aligned_alloc(64, p.padded * depth + 64);
  if (!p.packed) return failure(frame, "out of memory for a product of int8");
  pack(&p);
  int fault = run_all(frame, threads_of(frame), run_task, &p, up(p.outputs, OUTPUTS) / OUTPUTS,
                      32 * depth);
  free(p.packed);
  return fault ? failure(frame, "out of memory for a product of int8") : NULL;
}

#else

EXPORTED XLA_FFI_Error *kvfunc_int8_product(XLA_FFI_CallFrame *frame) {
  return asks_for_metadata(frame) ? NULL : failure(frame, "this processor has no AMX");
}

#endif
