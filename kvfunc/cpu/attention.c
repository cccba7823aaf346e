/* Segment attention on the CPU: the contract of kvfunc/attention.py, called by XLA through its FFI.

   Work goes in tasks of (a tile of queries, a KV head, a stretch of the keys it may see), each an
   online softmax over blocks of keys, in float32. Keys are read where they lie; the tile's queries
   are turned once a row. Blocks of bfloat16 run on AMX where the machine has it. */

#include <math.h>
#include <string.h>

#include "common.h"

enum {
  TILE = 64,   /* queries of a tile */
  BLOCK = 128, /* keys of a block */
  FEW = 12,    /* vectors of queries, up to which scores are plain dot products */
  NEVER = INT32_MAX,
};

#define HALVES(x) \
  __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define QUARTERS(x) \
  __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define PAIRS(x) __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define SINGLES(x) \
  __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)

static inline float sum_of(floats x) {
  x += HALVES(x);
  x += QUARTERS(x);
  x += PAIRS(x);
  x += SINGLES(x);
  return x[0];
}
static inline floats larger(floats x, floats y) { return where(y > x, y, x); }
static inline float largest_of(floats x) {
  x = larger(x, HALVES(x));
  x = larger(x, QUARTERS(x));
  x = larger(x, PAIRS(x));
  x = larger(x, SINGLES(x));
  return x[0];
}

/* ---- what is stored ---- */

typedef struct {
  kind kind;
  const char *values;  /* [slots, kv_heads, dim] */
  const float *scales; /* [slots, kv_heads] of INT8 and FP8 */
} stored;

static float fp8_value[256];

static void fill_fp8_table(void) {
  for (int bits = 0; bits < 256; bits++) {
    int exponent = bits >> 3 & 15, fraction = bits & 7;
    float x = exponent ? ldexpf(8 + fraction, exponent - 10) : ldexpf(fraction, -9);
    if ((bits & 127) == 127) x = NAN;
    fp8_value[bits] = bits & 128 ? -x : x;
  }
}

/* The numbers of `count` slots of one KV head as float32 rows of `width` >= dim, zeros behind. */
static void read_block(const stored *s, int64_t slot, int count, int kv_heads, int kv_head, int dim,
                       int width, float *out) {
  for (int i = 0; i < count; i++, out += width) {
    int64_t vector = (slot + i) * kv_heads + kv_head;
    const char *at = s->values + vector * dim * BYTES[s->kind];
    switch (s->kind) {
      case FLOAT32: memcpy(out, at, 4 * dim); break;
      case BFLOAT16: {
        const uint16_t *from = (const uint16_t *)at;
        uint32_t *to = (uint32_t *)out;
        for (int d = 0; d < dim; d++) to[d] = (uint32_t)from[d] << 16;
        break;
      }
      case INT8:
        for (int d = 0; d < dim; d++) out[d] = ((const int8_t *)at)[d] * s->scales[vector];
        break;
      case FP8:
        for (int d = 0; d < dim; d++)
          out[d] = fp8_value[((const uint8_t *)at)[d]] * s->scales[vector];
    }
    for (int d = dim; d < width; d++) out[d] = 0;
  }
}

/* To the nearest bfloat16, ties to even, as a float. */
static inline float rounded(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x == x) bits += 0x7fff + (bits >> 16 & 1);
  bits &= 0xffff0000;
  memcpy(&x, &bits, 4);
  return x;
}

/* ---- the problem ---- */

typedef struct {
  int queries, heads, kv_heads, group, dim, half, rows;
  int64_t slots;
  int window, interleaved; /* window 0: none */
  float scale, softcap;    /* softcap 0: none */
  const float *q;          /* [queries, heads, dim] rotated to their births */
  stored k, v;
  const int32_t *q_start, *q_len, *slot, *length, *raw, *birth, *shift, *visible_until; /* [rows] */
  const int32_t *query_raw, *births; /* [queries] */
  const float *cos, *sin;            /* [rows, half] */
  float *m, *l, *acc;                /* [queries, heads], and [queries, heads, dim] */
} problem;

typedef struct {
  int first, count, first_row, stop_row;
  int last_raw, first_raw, oldest; /* the queries' largest and least raw index, least birth */
  int64_t keys;                    /* that any of its queries may see, over all rows */
} tile;

typedef struct {
  int tile, kv_head;
  int64_t from, to; /* of the tile's keys */
  float *partial;   /* where m, l and acc go if others write to these queries too, or NULL */
} task;

/* The keys [*start, *stop) of a row that some query of a tile may see. */
static void seen(const problem *p, const tile *t, int row, int64_t *start, int64_t *stop) {
  int64_t length = least(p->length[row], p->slots - p->slot[row]), from = 0;
  if (t->first_raw >= p->visible_until[row] || p->slot[row] < 0) length = 0;
  length = least(length, (int64_t)t->last_raw - p->raw[row] + 1);
  *stop = most(length, 0);
  if (p->window)
    from = (int64_t)t->oldest - (p->window - 1) - ((int64_t)p->birth[row] - p->shift[row]);
  *start = least(most(from, 0), *stop);
}

/* ---- one task ---- */

typedef struct {
  int n, padded; /* vectors of queries: (query, head of the group); and with padding */
  int width;     /* of a vector with padding */
  float *q;      /* [padded, width] turned, scaled and rounded to K's type */
  float *m, *l;  /* [padded] */
  float *acc;    /* [padded, width] */
  float *scores; /* [padded, BLOCK]; then the weights */
  float *keys;   /* [BLOCK, width], or [width, BLOCK] */
  float *values; /* [BLOCK, width] */
  float *row;    /* [BLOCK, width] */
  int32_t *low, *high; /* [n] the keys of the block that each vector sees */
  uint16_t *q16, *p16, *k16, *v16; /* the same for AMX */
} scratch;

/* R(shift) of the pairs (x[i * step], x[i * step + apart]); inlined for both orders of pairs. */
static inline __attribute__((always_inline)) void turn(const float *restrict x, int half, int step,
                                                       int apart, const float *restrict cos,
                                                       const float *restrict sin, float scale,
                                                       float *restrict to) {
  for (int i = 0; i < half; i++) {
    float a = x[i * step], b = x[i * step + apart];
    to[i * step] = (a * cos[i] - b * sin[i]) * scale;
    to[i * step + apart] = (b * cos[i] + a * sin[i]) * scale;
  }
}

static void turn_queries(const problem *p, const tile *t, int kv_head, int row, scratch *s) {
  const float *cos = p->cos + (int64_t)row * p->half, *sin = p->sin + (int64_t)row * p->half;
  for (int r = 0; r < s->n; r++) {
    int64_t query = t->first + r / p->group, head = kv_head * p->group + r % p->group;
    const float *from = p->q + (query * p->heads + head) * p->dim;
    float *to = s->q + (int64_t)r * s->width;
    if (p->interleaved)
      turn(from, p->half, 2, 1, cos, sin, p->scale, to);
    else
      turn(from, p->half, 1, p->half, cos, sin, p->scale, to);
    for (int d = 2 * p->half; d < p->dim; d++) to[d] = from[d] * p->scale;
    if (p->k.kind == BFLOAT16 && !s->q16)
      for (int d = 0; d < p->dim; d++) to[d] = rounded(to[d]);
  }
#ifdef AMX
  if (s->q16)
    for (int i = 0; i < s->n * s->width; i += 16)
      _mm256_storeu_si256((__m256i *)(s->q16 + i),
                          (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(s->q + i)));
#endif
}

/* Which of the block's keys each vector of queries sees; whether any sees any. */
static int visible(const problem *p, const tile *t, int row, int first, int count, scratch *s) {
  int some = 0;
  for (int r = 0; r < s->n; r++) {
    int query = t->first + r / p->group;
    int64_t high = (int64_t)p->query_raw[query] - p->raw[row] + 1 - first, low = 0;
    if (p->query_raw[query] >= p->visible_until[row]) high = 0;
    if (p->window)
      low = (int64_t)p->births[query] - p->window + 1 - (p->birth[row] - p->shift[row]) - first;
    s->low[r] = low < 0 ? 0 : low < count ? low : count;
    s->high[r] = high < s->low[r] ? s->low[r] : high < count ? high : count;
    some |= s->low[r] < s->high[r];
  }
  return some;
}

/* Scores of some vectors with keys as rows. `vectors` is a constant where it is inlined. */
static inline __attribute__((always_inline)) void dots(int vectors, const float *q,
                                                       const float *keys, int count, int width,
                                                       float *scores) {
  for (int i = 0; i < count; i++, keys += width) {
    floats sum[4] = {{0}};
    for (int d = 0; d < width; d += LANES) {
      floats key = load(keys + d);
      for (int r = 0; r < vectors; r++) sum[r] += load(q + r * width + d) * key;
    }
    for (int r = 0; r < vectors; r++) scores[r * BLOCK + i] = sum_of(sum[r]);
  }
}

static void scores_of_few(const scratch *s, const float *keys, int count) {
  for (int r = 0; r < s->n; r += 4) {
    const float *q = s->q + r * s->width;
    float *scores = s->scores + r * BLOCK;
    switch (least(s->n - r, 4)) {
      case 1: dots(1, q, keys, count, s->width, scores); break;
      case 2: dots(2, q, keys, count, s->width, scores); break;
      case 3: dots(3, q, keys, count, s->width, scores); break;
      default: dots(4, q, keys, count, s->width, scores);
    }
  }
}

/* Four rows of a product [., inner] x [inner, .], two vectors of columns at a time. */
static inline __attribute__((always_inline)) void four_rows(
    const float *a, int a_stride, const float *b, int b_stride, int inner, float *out,
    int out_stride, int columns, int accumulate) {
  for (int c = 0; c < columns; c += 2 * LANES) {
    floats sum[4][2];
    for (int r = 0; r < 4; r++)
      for (int h = 0; h < 2; h++)
        sum[r][h] = accumulate ? load(out + r * out_stride + c + h * LANES) : every(0.0f);
    for (int i = 0; i < inner; i++) {
      floats left = load(b + (int64_t)i * b_stride + c);
      floats right = load(b + (int64_t)i * b_stride + c + LANES);
      for (int r = 0; r < 4; r++) {
        float x = a[r * a_stride + i];
        sum[r][0] += x * left;
        sum[r][1] += x * right;
      }
    }
    for (int r = 0; r < 4; r++)
      for (int h = 0; h < 2; h++) store(out + r * out_stride + c + h * LANES, sum[r][h]);
  }
}

/* Online softmax of one vector's scores of a block: they become weights, and m, l and acc are
   brought up to date. `whole`, a constant where it is inlined: all `stop` keys are seen. */
static inline __attribute__((always_inline)) void soften_one(const problem *p, scratch *s, int r,
                                                             int stop, int whole) {
  const ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  float *scores = s->scores + (int64_t)r * BLOCK;
  int low = s->low[r], high = s->high[r];
  if (p->softcap)
    for (int i = low; i < high; i++) scores[i] = p->softcap * tanhf(scores[i] / p->softcap);
  floats largest = every(-INFINITY), sum = every(0.0f);
  for (int i = low / LANES * LANES; i < high; i += LANES) {
    floats x = load(scores + i);
    ints inside = (lane + i >= low) & (lane + i < high);
    largest = whole ? larger(largest, x) : where(inside & (x > largest), x, largest);
  }
  float m = largest_of(largest);
  m = m > s->m[r] ? m : s->m[r];
  if (m > s->m[r]) {
    float old = s->m[r] == -INFINITY ? 0 : expf(s->m[r] - m);
    s->l[r] *= old;
    for (int d = 0; d < s->width; d += LANES)
      store(s->acc + (int64_t)r * s->width + d, load(s->acc + (int64_t)r * s->width + d) * old);
    s->m[r] = m;
  }
  floats base = every(m == -INFINITY ? 0 : m);
  for (int i = 0; i < stop; i += LANES) {
    ints inside = (lane + i >= low) & (lane + i < high);
    floats weight = exp_below(load(scores + i) - base);
    if (!whole) weight = (floats)((ints)weight & inside);
    sum += weight;
#ifdef AMX
    if (s->p16)
      _mm256_storeu_si256((__m256i *)(s->p16 + (int64_t)r * BLOCK + i),
                          (__m256i)_mm512_cvtneps_pbh((__m512)weight));
    else
#endif
      store(scores + i, weight);
  }
  s->l[r] += sum_of(sum);
}

static void soften(const problem *p, scratch *s, int count) {
  int stop = up(count, 2 * LANES);
  for (int r = 0; r < s->n; r++)
    if (s->low[r] == 0 && s->high[r] == stop)
      soften_one(p, s, r, stop, 1);
    else
      soften_one(p, s, r, stop, 0);
}

static void plain_block(const problem *p, int64_t slot, int kv_head, int count, scratch *s) {
  int padded = up(count, 2 * LANES);
  if (s->n <= FEW) {
    read_block(&p->k, slot, count, p->kv_heads, kv_head, p->dim, s->width, s->keys);
    scores_of_few(s, s->keys, count);
  } else {
    read_block(&p->k, slot, count, p->kv_heads, kv_head, p->dim, s->width, s->row);
    for (int i = 0; i < padded; i++)
      for (int d = 0; d < p->dim; d++)
        s->keys[d * BLOCK + i] = i < count ? s->row[i * s->width + d] : 0;
    for (int r = 0; r < s->n; r += 4)
      four_rows(s->q + (int64_t)r * s->width, s->width, s->keys, BLOCK, p->dim,
                s->scores + (int64_t)r * BLOCK, BLOCK, padded, 0);
  }
  soften(p, s, count);
  read_block(&p->v, slot, count, p->kv_heads, kv_head, p->dim, s->width, s->values);
  for (int r = 0; r < s->n; r += 4)
    four_rows(s->scores + (int64_t)r * BLOCK, BLOCK, s->values, s->width, count,
              s->acc + (int64_t)r * s->width, s->width, s->width, 1);
}

#ifdef AMX

/* 16 keys, 32 dims each, to rows of (dim pair) x (key), as the second operand has to lie. */
static void transpose_keys(const uint16_t *from, int64_t stride, int keys, int dims,
                           uint16_t *to) {
  __m512i row[16];
  __mmask32 mask = dims >= 32 ? ~0u : (1u << dims) - 1;
  for (int i = 0; i < 16; i++)
    row[i] = i < keys ? _mm512_maskz_loadu_epi16(mask, from + i * stride) : _mm512_setzero_si512();
  transpose(row);
  for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + 32 * i, row[i]);
}

/* 32 values, 32 dims each, to two tiles of (key pair) x (dim). */
static void interleave_pairs(const uint16_t *from, int64_t stride, int keys, int dims,
                             uint16_t *left, uint16_t *right) {
  __m512i low, high;
  uint16_t index[2][32];
  for (int i = 0; i < 32; i++) {
    index[0][i] = i / 2 + (i % 2 ? 32 : 0);
    index[1][i] = i / 2 + 16 + (i % 2 ? 32 : 0);
  }
  low = _mm512_loadu_si512(index[0]), high = _mm512_loadu_si512(index[1]);
  __mmask32 mask = dims >= 32 ? ~0u : (1u << dims) - 1;
  for (int i = 0; i < 32; i += 2) {
    __m512i even = i < keys ? _mm512_maskz_loadu_epi16(mask, from + i * stride)
                            : _mm512_setzero_si512();
    __m512i odd = i + 1 < keys ? _mm512_maskz_loadu_epi16(mask, from + (i + 1) * stride)
                               : _mm512_setzero_si512();
    _mm512_storeu_si512(left + 16 * i, _mm512_permutex2var_epi16(even, low, odd));
    _mm512_storeu_si512(right + 16 * i, _mm512_permutex2var_epi16(even, high, odd));
  }
}

/* 32 rows of a product (or 16, if no more are wanted), 32 columns at a time. The second operand
   lies in tiles of 1 KiB, [inner / 32, columns / 16]. */
static void tiles_product(int rows, const uint16_t *a, int a_stride, const uint16_t *b,
                          int b_columns, int inner, float *out, int out_stride, int columns,
                          int accumulate) {
  int both = rows > 16;
  for (int c = 0; c < columns; c += 32) {
    float *at[4] = {out + c, out + c + 16, out + 16 * (int64_t)out_stride + c,
                    out + 16 * (int64_t)out_stride + c + 16};
    if (accumulate) {
      _tile_loadd(0, at[0], 4 * out_stride);
      _tile_loadd(1, at[1], 4 * out_stride);
      if (both) _tile_loadd(2, at[2], 4 * out_stride);
      if (both) _tile_loadd(3, at[3], 4 * out_stride);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int i = 0; i < inner; i += 32) {
      const uint16_t *right = b + 512 * ((int64_t)(i / 32) * b_columns + c / 16);
      _tile_loadd(4, a + i, 2 * a_stride);
      _tile_loadd(6, right, 64);
      _tile_loadd(7, right + 512, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (!both) continue;
      _tile_loadd(5, a + 16 * (int64_t)a_stride + i, 2 * a_stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, at[0], 4 * out_stride);
    _tile_stored(1, at[1], 4 * out_stride);
    if (!both) continue;
    _tile_stored(2, at[2], 4 * out_stride);
    _tile_stored(3, at[3], 4 * out_stride);
  }
}

static void amx_block(const problem *p, int64_t slot, int kv_head, int count, scratch *s) {
  int padded = up(count, 32), tiles = s->width / 16;
  int64_t stride = (int64_t)p->kv_heads * p->dim, first = slot * stride + (int64_t)kv_head * p->dim;
  const uint16_t *k = (const uint16_t *)p->k.values + first;
  const uint16_t *v = (const uint16_t *)p->v.values + first;
  for (int d = 0; d < s->width; d += 32)
    for (int i = 0; i < padded; i += 16)
      transpose_keys(k + i * stride + d, stride, count - i, p->dim - d,
                     s->k16 + 512 * (d / 32 * (BLOCK / 16) + i / 16));
  for (int r = 0; r < s->n; r += 32)
    tiles_product(s->n - r, s->q16 + (int64_t)r * s->width, s->width, s->k16, BLOCK / 16, s->width,
                  s->scores + (int64_t)r * BLOCK, BLOCK, padded, 0);
  soften(p, s, count);
  for (int i = 0; i < padded; i += 32)
    for (int d = 0; d < s->width; d += 32) {
      uint16_t *to = s->v16 + 512 * (i / 32 * tiles + d / 16);
      interleave_pairs(v + i * stride + d, stride, count - i, p->dim - d, to, to + 512);
    }
  for (int r = 0; r < s->n; r += 32)
    tiles_product(s->n - r, s->p16 + (int64_t)r * BLOCK, BLOCK, s->v16, tiles, padded,
                  s->acc + (int64_t)r * s->width, s->width, s->width, 1);
}

#endif

static int on_amx(const problem *p) {
  return amx_is_allowed() && p->k.kind == BFLOAT16 && p->v.kind == BFLOAT16;
}

static size_t carve(char **at, size_t bytes) {
  size_t place = (size_t)*at;
  *at += (bytes + 63) / 64 * 64;
  return place;
}

/* Lays the scratch memory out from `at`; with NULL, the size is what comes back. */
static size_t lay_out(const problem *p, int vectors, char *at, scratch *s) {
  char *start = at;
  s->n = vectors;
  s->padded = up(vectors, 32);
  s->width = up(p->dim, 32);
  size_t vector = 4 * s->width;
  s->q = (float *)carve(&at, s->padded * vector);
  s->acc = (float *)carve(&at, s->padded * vector);
  s->m = (float *)carve(&at, 4 * s->padded);
  s->l = (float *)carve(&at, 4 * s->padded);
  s->low = (int32_t *)carve(&at, 4 * s->padded);
  s->high = (int32_t *)carve(&at, 4 * s->padded);
  s->scores = (float *)carve(&at, 4 * s->padded * BLOCK);
  if (on_amx(p)) {
    s->q16 = (uint16_t *)carve(&at, s->padded * vector / 2);
    s->p16 = (uint16_t *)carve(&at, 2 * s->padded * BLOCK);
    s->k16 = (uint16_t *)carve(&at, BLOCK * vector / 2);
    s->v16 = (uint16_t *)carve(&at, BLOCK * vector / 2);
  } else {
    s->q16 = s->p16 = s->k16 = s->v16 = NULL;
    s->keys = (float *)carve(&at, BLOCK * vector);
    s->values = (float *)carve(&at, BLOCK * vector);
    s->row = (float *)carve(&at, BLOCK * vector);
  }
  return at - start;
}

static void write_out(const problem *p, const tile *t, const task *job, const scratch *s) {
  int row = p->dim + 2;
  for (int r = 0; r < s->n; r++) {
    const float *acc = s->acc + (int64_t)r * s->width;
    if (job->partial) {
      float *to = job->partial + (int64_t)r * row;
      to[0] = s->m[r], to[1] = s->l[r];
      memcpy(to + 2, acc, 4 * p->dim);
    } else {
      int64_t at = (int64_t)(t->first + r / p->group) * p->heads + job->kv_head * p->group +
                   r % p->group;
      p->m[at] = s->m[r], p->l[at] = s->l[r];
      memcpy(p->acc + at * p->dim, acc, 4 * p->dim);
    }
  }
}

typedef struct {
  const problem *problem;
  const tile *tiles;
  const task *tasks;
} work;

static void run_task(const void *context, int index, char *memory) {
  const work *w = context;
  const problem *p = w->problem;
  const task *job = &w->tasks[index];
  const tile *t = &w->tiles[job->tile];
  scratch s;
  lay_out(p, t->count * p->group, memory, &s);
  memset(s.q, 0, 4 * (size_t)s.padded * s.width);
  memset(s.acc, 0, 4 * (size_t)s.padded * s.width);
  memset(s.l, 0, 4 * (size_t)s.padded);
  for (int r = 0; r < s.n; r++) s.m[r] = -INFINITY;
#ifdef AMX
  if (s.q16) configure_tiles();
#endif
  int64_t before = 0;
  int turned = -1; /* the row that the queries are turned for */
  for (int row = t->first_row; row < t->stop_row && before < job->to; row++) {
    int64_t start, stop;
    seen(p, t, row, &start, &stop);
    int64_t from = most(job->from - before + start, start);
    int64_t to = least(job->to - before + start, stop);
    before += stop - start;
    if (from >= to) continue;
    if (turned < 0 || p->shift[row] != p->shift[turned]) turn_queries(p, t, job->kv_head, row, &s);
    turned = row;
    for (int64_t first = from; first < to; first += BLOCK) {
      int count = least(to - first, BLOCK);
      if (!visible(p, t, row, first, count, &s)) continue;
#ifdef AMX
      if (s.q16) {
        amx_block(p, p->slot[row] + first, job->kv_head, count, &s);
        continue;
      }
#endif
      plain_block(p, p->slot[row] + first, job->kv_head, count, &s);
    }
  }
#ifdef AMX
  if (s.q16) _tile_release();
#endif
  write_out(p, t, job, &s);
}

/* ---- all tasks ---- */

/* Cuts the table into tiles of at most TILE queries, over neighbouring rows of the same queries. */
static int cut(const problem *p, tile *tiles) {
  int count = 0;
  for (int row = 0, stop; row < p->rows; row = stop) {
    int start = p->q_start[row], length = p->q_len[row];
    for (stop = row + 1; stop < p->rows && p->q_start[stop] == start && p->q_len[stop] == length;)
      stop++;
    if (start < 0) continue;
    length = least(length, p->queries - start);
    for (int j = 0; j < length; j += TILE) {
      tile t = {start + j, least(TILE, length - j), row, stop, -1, NEVER, NEVER, 0};
      for (int i = t.first; i < t.first + t.count; i++) {
        t.last_raw = most(t.last_raw, p->query_raw[i]);
        t.first_raw = least(t.first_raw, p->query_raw[i]);
        t.oldest = least(t.oldest, p->births[i]);
      }
      for (int r = row; r < stop; r++) {
        int64_t from, to;
        seen(p, &t, r, &from, &to);
        t.keys += to - from;
      }
      if (!t.keys) continue;
      if (tiles) tiles[count] = t;
      count++;
    }
  }
  return count;
}

typedef struct {
  int tile_count, task_count;
  int vectors;      /* of the largest tile */
  tile *tiles;
  task *tasks;
  int32_t *writers; /* [queries] how many tasks of each KV head write to a query */
  float *partials, *free_partial;
} plan;

/* Into how many tasks a tile is cut for each KV head, that all threads have something to do. */
static int64_t parts_of(const tile *t, int64_t share) {
  return least((t->keys * t->count - 1) / share, (t->keys - 1) / (2 * BLOCK)) + 1;
}

static int64_t partial_size(const problem *p, const tile *t) {
  return (int64_t)t->count * p->group * (p->dim + 2);
}

static void add_tasks(const problem *p, int index, int64_t parts, plan *all) {
  const tile *t = &all->tiles[index];
  int merged = 0;
  for (int j = 0; j < t->count; j++) merged |= all->writers[t->first + j] > 1;
  int64_t step = up((t->keys + parts - 1) / parts, 16);
  for (int head = 0; head < p->kv_heads; head++)
    for (int64_t from = 0; from < t->keys; from += step) {
      float *partial = merged ? all->free_partial : NULL;
      if (merged) all->free_partial += partial_size(p, t);
      all->tasks[all->task_count++] =
          (task){index, head, from, least(from + step, t->keys), partial};
    }
}

/* Whether there is memory for it. */
static int make_plan(const problem *p, int threads, plan *all) {
  all->tile_count = cut(p, NULL);
  all->tiles = malloc(sizeof(tile) * most(all->tile_count, 1));
  all->writers = calloc(most(p->queries, 1), sizeof *all->writers);
  if (!all->tiles || !all->writers) return 0;
  cut(p, all->tiles);
  int64_t cost = 0; /* of one KV head */
  for (int i = 0; i < all->tile_count; i++) cost += all->tiles[i].keys * all->tiles[i].count;
  int64_t share = threads == 1 ? INT64_MAX : cost * p->kv_heads / (4 * threads) + 1;

  int64_t tasks = 0, partials = 0;
  for (int i = 0; i < all->tile_count; i++) {
    const tile *t = &all->tiles[i];
    int64_t parts = parts_of(t, share);
    for (int j = 0; j < t->count; j++) all->writers[t->first + j] += parts;
    tasks += parts * p->kv_heads;
    partials += parts * p->kv_heads * partial_size(p, t);
    all->vectors = most(all->vectors, t->count * p->group);
  }
  all->tasks = malloc(sizeof(task) * (tasks + 1));
  all->partials = all->free_partial = malloc(4 * (partials + 1));
  if (!all->tasks || !all->partials) return 0;
  for (int i = 0; i < all->tile_count; i++) add_tasks(p, i, parts_of(&all->tiles[i], share), all);
  return 1;
}

static void free_plan(const plan *all) {
  free(all->tiles), free(all->writers), free(all->tasks), free(all->partials);
}

static void merge(float *m, float *l, float *acc, const float *part, int dim) {
  float largest = *m > part[0] ? *m : part[0];
  float old = *m == -INFINITY ? 0 : expf(*m - largest);
  float new = part[0] == -INFINITY ? 0 : expf(part[0] - largest);
  *m = largest;
  *l = old * *l + new * part[1];
  for (int d = 0; d < dim; d++) acc[d] = old * acc[d] + new * part[2 + d];
}

static void merge_task(const problem *p, const tile *t, const task *job) {
  const float *part = job->partial;
  for (int r = 0; r < t->count * p->group; r++, part += p->dim + 2) {
    int64_t at = (int64_t)(t->first + r / p->group) * p->heads + job->kv_head * p->group +
                 r % p->group;
    merge(p->m + at, p->l + at, p->acc + at * p->dim, part, p->dim);
  }
}

static const char *attend(XLA_FFI_CallFrame *frame, const problem *p, int threads) {
  const char *no_memory = "out of memory for the scratch space of segment attention";
  plan all = {0};
  if (!make_plan(p, threads, &all)) return free_plan(&all), no_memory;
  int64_t outputs = (int64_t)p->queries * p->heads;
  for (int64_t i = 0; i < outputs; i++) p->m[i] = -INFINITY;
  memset(p->l, 0, 4 * outputs);
  memset(p->acc, 0, 4 * outputs * p->dim);
  scratch s;
  work w = {p, all.tiles, all.tasks};
  int failed = run_all(frame, threads, run_task, &w, all.task_count,
                       lay_out(p, all.vectors, NULL, &s));
  for (int i = 0; !failed && i < all.task_count; i++)
    if (all.tasks[i].partial) merge_task(p, &all.tiles[all.tasks[i].tile], &all.tasks[i]);
  free_plan(&all);
  return failed ? no_memory : NULL;
}

/* ---- the call from XLA ---- */

static const void *attribute(const XLA_FFI_CallFrame *frame, const char *name) {
  for (int64_t i = 0; i < frame->attrs.size; i++) {
    const XLA_FFI_ByteSpan *found = frame->attrs.names[i];
    if (found->len == strlen(name) && !memcmp(found->ptr, name, found->len))
      return ((const XLA_FFI_Scalar *)frame->attrs.attrs[i])->value;
  }
  return NULL;
}

EXPORTED XLA_FFI_Error *kvfunc_segment_attention(XLA_FFI_CallFrame *frame) {
  if (asks_for_metadata(frame)) return NULL;
  const XLA_FFI_Buffer *in[17], *out[3];
  if (frame->args.size != 17 || frame->rets.size != 3)
    return failure(frame, "segment attention takes 17 arrays and gives 3");
  for (int i = 0; i < 17; i++) in[i] = frame->args.args[i];
  for (int i = 0; i < 3; i++) out[i] = frame->rets.rets[i];
  problem p = {
      .queries = in[0]->dims[0], .heads = in[0]->dims[1], .dim = in[0]->dims[2],
      .slots = in[1]->dims[0], .kv_heads = in[1]->dims[1], .rows = in[5]->dims[0],
      .half = in[15]->dims[1],
      .group = in[0]->dims[1] / in[1]->dims[1],
      .window = *(const int32_t *)attribute(frame, "window"),
      .interleaved = *(const int32_t *)attribute(frame, "interleaved"),
      .scale = *(const float *)attribute(frame, "scale"),
      .softcap = *(const float *)attribute(frame, "softcap"),
      .q = in[0]->data,
      .k = {kind_of(in[1]->dtype), in[1]->data, in[3]->data},
      .v = {kind_of(in[2]->dtype), in[2]->data, in[4]->data},
      .q_start = in[5]->data, .q_len = in[6]->data, .slot = in[7]->data, .length = in[8]->data,
      .raw = in[9]->data, .birth = in[10]->data, .shift = in[11]->data,
      .visible_until = in[12]->data, .query_raw = in[13]->data, .births = in[14]->data,
      .cos = in[15]->data, .sin = in[16]->data,
      .m = out[0]->data, .l = out[1]->data, .acc = out[2]->data,
  };
  const char *fault = attend(frame, &p, threads_of(frame));
  return fault ? failure(frame, fault) : NULL;
}

__attribute__((constructor)) static void prepare(void) {
  fill_fp8_table();
}
