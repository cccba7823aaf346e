/* x W^T on AMX, or silu(x G^T) * (x W^T): x [tokens, inner] of float32 or bfloat16; W and G
   [outputs, inner] of bfloat16, or of int8 with a scale a row. For int8 each token is rounded to
   int8 first, as quantize.py does it.

   A tile of W is the first operand as it lies in memory, so weights need no packing and are read
   once; the tokens are packed, which are few. An output is summed in the same order however many
   tokens there are. */

#include <float.h>
#include <math.h>
#include <string.h>

#include "common.h"

EXPORTED int kvfunc_has_product(void) { return amx_is_allowed(); }

#ifdef AMX

enum {
  OUTPUTS = 32, /* rows of W of a task, which are two tiles */
  DEEP = 64,    /* bytes of a tile's row */
};

typedef struct {
  const char *values;  /* [outputs, inner], or NULL */
  const float *scales; /* [outputs] of int8 */
} matrix;

typedef struct {
  int tokens, inner, outputs;
  int blocks, steps; /* tiles of 16 tokens; tiles along `inner` */
  kind x_kind, kind, out_kind; /* `kind`: of W and of the packed tokens */
  const char *x;
  matrix weight, gate;
  float *x_scales; /* [tokens] of int8 */
  char *packed;    /* [blocks, steps] tiles of (four bytes along inner) x (token) */
  char *out;       /* [tokens, outputs] */
} problem;

/* ---- the tokens ---- */

static inline __m512 load_floats(const char *from, kind kind, int i, __mmask16 mask) {
  if (kind == FLOAT32) return _mm512_maskz_loadu_ps(mask, (const float *)from + i);
  __m256i bits = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)from + i);
  return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
}

static inline __mmask16 first_of(int count) { return count >= 16 ? 0xffff : (1u << count) - 1; }

/* As quantize.py; returns the scale. */
static float quantize(const char *x, kind kind, int inner, int8_t *to) {
  __m512 largest = _mm512_setzero_ps();
  __mmask16 bad = 0;
  for (int i = 0; i < inner; i += 16) {
    __m512 size = _mm512_abs_ps(load_floats(x, kind, i, first_of(inner - i)));
    bad |= _mm512_cmp_ps_mask(size, _mm512_set1_ps(FLT_MAX), _CMP_NLE_UQ);
    largest = _mm512_max_ps(largest, size);
  }
  float scale = bad ? NAN : _mm512_reduce_max_ps(largest) * (float)(1.0 / 127);
  __m512 divisor = _mm512_set1_ps(scale > 0 ? scale : INFINITY), limit = _mm512_set1_ps(127);
  for (int i = 0; i < inner; i += 16) {
    __mmask16 mask = first_of(inner - i);
    __m512 x16 = bad ? _mm512_setzero_ps() : load_floats(x, kind, i, mask);
    __m512 step = _mm512_min_ps(_mm512_div_ps(x16, divisor), limit);
    step = _mm512_max_ps(step, _mm512_sub_ps(_mm512_setzero_ps(), limit));
    _mm512_mask_cvtepi32_storeu_epi8(to + i, mask, _mm512_cvtps_epi32(step));
  }
  return scale;
}

/* 16 tokens, as the second operand has to lie; the memory holds them as rows in between. */
static void pack_block(const void *context, int block, char *memory) {
  const problem *p = context;
  int64_t width = (int64_t)p->steps * DEEP, row_of_x = (int64_t)p->inner * BYTES[p->x_kind];
  memset(memory, 0, 16 * width);
  for (int i = 0; i < least(16, p->tokens - 16 * block); i++) {
    int token = 16 * block + i;
    const char *x = p->x + token * row_of_x;
    if (p->kind == INT8)
      p->x_scales[token] = quantize(x, p->x_kind, p->inner, (int8_t *)memory + i * width);
    else
      memcpy(memory + i * width, x, row_of_x);
  }
  char *to = p->packed + block * 16 * width;
  for (int step = 0; step < p->steps; step++, to += 16 * DEEP) {
    __m512i row[16];
    for (int i = 0; i < 16; i++) row[i] = _mm512_loadu_si512(memory + i * width + step * DEEP);
    transpose(row);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + DEEP * i, row[i]);
  }
}

/* ---- the products ---- */

typedef int32_t sums[4][256]; /* of two tiles of outputs with one of tokens, and with the next */

/* One tile of sums, [output, token], scaled and laid as [token, output]. */
static void scaled(const problem *p, const matrix *w, const int32_t *sums, int output, int token,
                   __m512 to[16]) {
  __m512i row[16];
  for (int i = 0; i < 16; i++) row[i] = _mm512_loadu_si512(sums + 16 * i);
  transpose(row);
  if (p->kind != INT8) {
    for (int i = 0; i < 16; i++) to[i] = (__m512)row[i];
    return;
  }
  __m512 scales = _mm512_maskz_loadu_ps(first_of(p->outputs - output), w->scales + output);
  for (int i = 0; i < least(16, p->tokens - token); i++) {
    __m512 x = _mm512_mul_ps(_mm512_cvtepi32_ps(row[i]), _mm512_set1_ps(p->x_scales[token + i]));
    to[i] = _mm512_mul_ps(x, scales);
  }
}

static inline __m512 silu(__m512 x) {
  floats small = exp_below(-(floats)_mm512_abs_ps(x));
  return (__m512)(where((floats)x >= 0, every(1.0f), small) * (floats)x / (1 + small));
}

static void write_out(const problem *p, const int32_t *sums, const int32_t *gate_sums, int output,
                      int token) {
  __m512 x[16], gate[16];
  scaled(p, &p->weight, sums, output, token, x);
  if (p->gate.values) scaled(p, &p->gate, gate_sums, output, token, gate);
  __mmask16 mask = first_of(p->outputs - output);
  for (int i = 0; i < least(16, p->tokens - token); i++) {
    int64_t at = (int64_t)(token + i) * p->outputs + output;
    if (p->gate.values) x[i] = _mm512_mul_ps(x[i], silu(gate[i]));
    if (p->out_kind == FLOAT32)
      _mm512_mask_storeu_ps((float *)p->out + at, mask, x[i]);
    else
      _mm256_mask_storeu_epi16((uint16_t *)p->out + at, mask, (__m256i)_mm512_cvtneps_pbh(x[i]));
  }
}

/* The sums of 32 outputs with 16 tokens, or with 32. */
static void sum_tiles(kind kind, const char *weight, int64_t stride, const char *left,
                      const char *right, int steps, sums to) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int i = 0; i < steps; i++) {
    _tile_loadd(4, weight + i * DEEP, stride);
    _tile_loadd(5, weight + 16 * stride + i * DEEP, stride);
    _tile_loadd(6, left + 16 * DEEP * i, DEEP);
    if (kind == INT8) {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 5, 6);
    } else {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
    }
    if (!right) continue;
    _tile_loadd(7, right + 16 * DEEP * i, DEEP);
    if (kind == INT8) {
      _tile_dpbssd(2, 4, 7);
      _tile_dpbssd(3, 5, 7);
    } else {
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, to[0], 64);
  _tile_stored(1, to[1], 64);
  if (!right) return;
  _tile_stored(2, to[2], 64);
  _tile_stored(3, to[3], 64);
}

/* 32 rows of a matrix and the bytes between them; copied to the memory if no whole tiles. */
static const char *rows_of(const problem *p, const matrix *w, int output, char *memory,
                           int64_t *stride) {
  int64_t row = (int64_t)p->inner * BYTES[p->kind], width = (int64_t)p->steps * DEEP;
  const char *values = w->values + output * row;
  *stride = width;
  if (p->outputs - output >= OUTPUTS && row == width) return values;
  memset(memory, 0, OUTPUTS * width);
  for (int i = 0; i < least(OUTPUTS, p->outputs - output); i++)
    memcpy(memory + i * width, values + i * row, row);
  return memory;
}

/* 32 outputs of all tokens. */
static void run_outputs(const void *context, int index, char *memory) {
  const problem *p = context;
  int output = index * OUTPUTS;
  int64_t stride, block = (int64_t)16 * p->steps * DEEP;
  const char *weight = rows_of(p, &p->weight, output, memory, &stride), *gate = NULL;
  if (p->gate.values) gate = rows_of(p, &p->gate, output, memory + 2 * block, &stride);
  configure_tiles();
  _Alignas(64) sums of_weight, of_gate;
  for (int b = 0; b < p->blocks; b += 2) {
    const char *left = p->packed + b * block, *right = b + 1 < p->blocks ? left + block : NULL;
    sum_tiles(p->kind, weight, stride, left, right, p->steps, of_weight);
    if (gate) sum_tiles(p->kind, gate, stride, left, right, p->steps, of_gate);
    for (int i = 0; i < (right ? 4 : 2); i++)
      if (output + 16 * (i % 2) < p->outputs)
        write_out(p, of_weight[i], of_gate[i], output + 16 * (i % 2), 16 * (b + i / 2));
  }
  _tile_release();
}

EXPORTED XLA_FFI_Error *kvfunc_product(XLA_FFI_CallFrame *frame) {
  if (asks_for_metadata(frame)) return NULL;
  if (frame->args.size != 5 || frame->rets.size != 1)
    return failure(frame, "a product takes 5 arrays and gives 1");
  const XLA_FFI_Buffer *in[5], *out = frame->rets.rets[0];
  for (int i = 0; i < 5; i++) in[i] = frame->args.args[i];
  problem p = {.tokens = in[0]->dims[0], .inner = in[0]->dims[1], .outputs = in[1]->dims[0],
               .x_kind = kind_of(in[0]->dtype), .kind = kind_of(in[1]->dtype),
               .out_kind = kind_of(out->dtype), .x = in[0]->data,
               .weight = {in[1]->data, in[2]->data}, .out = out->data};
  if (in[3]->dims[0]) p.gate = (matrix){in[3]->data, in[4]->data};
  p.blocks = up(p.tokens, 16) / 16;
  p.steps = up(p.inner * BYTES[p.kind], DEEP) / DEEP;
  size_t block = (size_t)16 * p.steps * DEEP;
  p.packed = aligned_alloc(64, p.blocks * block + 64);
  p.x_scales = malloc(sizeof(float) * (p.tokens + 1));
  int threads = threads_of(frame);
  int fault = !p.packed || !p.x_scales ||
              run_all(frame, threads, pack_block, &p, p.blocks, block) ||
              run_all(frame, threads, run_outputs, &p, up(p.outputs, OUTPUTS) / OUTPUTS, 4 * block);
  free(p.packed), free(p.x_scales);
  return fault ? failure(frame, "out of memory for a product") : NULL;
}

#else

EXPORTED XLA_FFI_Error *kvfunc_product(XLA_FFI_CallFrame *frame) {
  return asks_for_metadata(frame) ? NULL : failure(frame, "this processor has no AMX");
}

#endif
