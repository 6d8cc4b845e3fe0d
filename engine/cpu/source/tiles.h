/* Tiles of a product: some blocks of outputs of some rows, whose sums are in registers. */

#ifndef KEDGE_TILES_H
#define KEDGE_TILES_H

#include "packed.h"
#include "quantized.h"

#if defined(__AVX512BF16__)
#define HAS_BFLOAT16 1
#else
#define HAS_BFLOAT16 0
#endif

#if defined(__AMX_BF16__)
#include "amx.h"
#define ROUNDED_ROWS AMX_ROWS   /* rows are rounded in memory for a multiple of these */
#define ROUNDED_INPUTS AMX_INPUTS /* and only if the inputs are a multiple of these */
#else
#define ROUNDED_ROWS 1
#define ROUNDED_INPUTS 1
#endif

/* A tile is 4 or 2 blocks of outputs times some rows, all of it in registers. */
#define MOST_WIDE 4
#if REGISTERS == 32
#define WIDE_TALL 6
#define DENSE_TALL 6
#define MOST_TALL 12 /* of a quantized matrix, whose weights take longer to load than those of others */
#else
#define WIDE_TALL 2
#define DENSE_TALL 5
#define MOST_TALL 5
#endif

/* Weights come to the second cache before they are asked for: bytes ahead in each block. */
#define AHEAD 2048

/* What a tile is multiplied from: rows of floats, or with BFLOAT16 pairs of rounded ones (ROUNDED). */
#define ROUNDED (FLOAT4 + 1)

typedef struct {
    const Matrix *matrix;
    const char *x;
    size_t x_stride; /* bytes */
    float *y;
    size_t y_stride; /* floats */
    int how;
} Tiles;

INLINE Floats gated(const Matrix *matrix, Floats gate, Floats up) {
    float limit = matrix->limit;
    if (limit == 0) return silu_mul(gate, up);
    gate = smaller(every(limit), gate); /* NaN stays */
    up = larger(every(-limit), smaller(every(limit), up));
    return gate / (1.0f + exponential(gate * -matrix->alpha)) * (up + 1.0f);
}

INLINE void finish(const Tiles *tiles, int block, int row, const int wide, const int tall,
                   Floats sums[MOST_WIDE][MOST_TALL]) {
    const float *bias = tiles->matrix->bias;
    if (bias != NULL)
        UNROLL for (int o = 0; o < wide; o++) {
            Floats added = load(bias + (size_t)(block + o) * LANES);
            UNROLL for (int n = 0; n < tall; n++) sums[o][n] += added;
        }
    UNROLL for (int n = 0; n < tall; n++) {
        float *y = tiles->y + (size_t)(row + n) * tiles->y_stride;
        if (tiles->how == GATED) {
            UNROLL for (int o = 0; o + 1 < wide; o += 2) {
                store(y + (size_t)(block + o) / 2 * LANES, gated(tiles->matrix, sums[o][n], sums[o + 1][n]));
            }
            continue;
        }
        UNROLL for (int o = 0; o < wide; o++) {
            float *to = y + (size_t)(block + o) * LANES;
            store(to, tiles->how == ADD ? load(to) + sums[o][n] : sums[o][n]);
        }
    }
}

INLINE void fetch_ahead(const void *weights) { __builtin_prefetch((const char *)weights + AHEAD, 0, 2); }

#define X(n, i) (((const float *)(x + (n) * x_stride))[i])
#define ADD_INPUT(weights, i)                               \
    UNROLL for (int n = 0; n < tall; n++) {                 \
        float value = X(n, i);                              \
        UNROLL for (int o = 0; o < wide; o++) sums[o][n] += weights[o] * value; \
    }

/* A tile of a quantized matrix: the same sums, in the same order, as of its weights in FLOAT32. */
INLINE void quantized_tile(const Tiles *tiles, int block, int row, const int wide, const int tall, const int kind) {
    Floats sums[MOST_WIDE][MOST_TALL], weights[2][MOST_WIDE];
    const Matrix *matrix = tiles->matrix;
    const char *x = tiles->x + (size_t)row * tiles->x_stride;
    const size_t x_stride = tiles->x_stride, stride = block_bytes(matrix);
    const uint8_t *at[MOST_WIDE];
    Group groups[MOST_WIDE];
    UNROLL for (int o = 0; o < wide; o++) {
        at[o] = (const uint8_t *)matrix->packed + (size_t)(block + o) * stride;
        UNROLL for (int n = 0; n < tall; n++) sums[o][n] = (Floats){0};
    }
    for (int from = 0; from < matrix->inputs; from += matrix->group) {
        int end = matrix->inputs - from < matrix->group ? matrix->inputs : from + matrix->group;
        UNROLL for (int o = 0; o < wide; o++) {
            groups[o] = group_at(at[o], kind);
            at[o] += head_bytes(kind);
        }
        for (int i = from; i < end; i += 2) {
            UNROLL for (int o = 0; o < wide; o++) {
                fetch_ahead(at[o]);
                at[o] = two_weights(at[o], groups[o], kind, &weights[0][o], &weights[1][o]);
            }
            ADD_INPUT(weights[0], i)
            ADD_INPUT(weights[1], i + 1)
        }
    }
    finish(tiles, block, row, wide, tall, sums);
}

INLINE void tile(const Tiles *tiles, int block, int row, const int wide, const int tall, const int kind) {
    Floats sums[MOST_WIDE][MOST_TALL], weights[MOST_WIDE];
    const Matrix *matrix = tiles->matrix;
    const char *x = tiles->x + (size_t)row * tiles->x_stride;
    const size_t x_stride = tiles->x_stride;
    const int inputs = matrix->inputs, pairs = inputs / 2;
    UNROLL for (int o = 0; o < wide; o++) UNROLL for (int n = 0; n < tall; n++) sums[o][n] = (Floats){0};
    if (kind == FLOAT32 || kind == FLOAT16) {
        const size_t stride = (size_t)inputs * LANES;
        const size_t first = (size_t)block * stride;
        for (int i = 0; i < inputs; i++) {
            UNROLL for (int o = 0; o < wide; o++) {
                size_t at = first + o * stride + (size_t)i * LANES;
                const float *floats = (const float *)matrix->packed + at;
                const uint16_t *halves = (const uint16_t *)matrix->packed + at;
                fetch_ahead(kind == FLOAT32 ? (const void *)floats : (const void *)halves);
                weights[o] = kind == FLOAT32 ? load(floats) : widened(shorts_at(halves));
            }
            ADD_INPUT(weights, i)
        }
    } else {
        const size_t stride = (size_t)((inputs + 1) / 2) * LANES;
        const uint32_t *packed = (const uint32_t *)matrix->packed + (size_t)block * stride;
#if HAS_BFLOAT16
        if (kind == ROUNDED) {
            for (int i = 0; i < (inputs + 1) / 2; i++) {
                UNROLL for (int o = 0; o < wide; o++) {
                    const uint32_t *pairs_of = packed + o * stride + (size_t)i * LANES;
                    fetch_ahead(pairs_of);
                    weights[o] = load((const float *)pairs_of);
                }
                UNROLL for (int n = 0; n < tall; n++) {
                    __m512bh pair = (__m512bh)_mm512_set1_epi32(((const int32_t *)(x + n * x_stride))[i]);
                    UNROLL for (int o = 0; o < wide; o++)
                        sums[o][n] = (Floats)_mm512_dpbf16_ps((__m512)sums[o][n], (__m512bh)weights[o], pair);
                }
            }
            finish(tiles, block, row, wide, tall, sums);
            return;
        }
#endif
        for (int i = 0; i < pairs; i++) {
            Words both[MOST_WIDE];
            UNROLL for (int o = 0; o < wide; o++) {
                const uint32_t *pairs_of = packed + o * stride + (size_t)i * LANES;
                fetch_ahead(pairs_of);
                memcpy(&both[o], pairs_of, sizeof both[o]);
                weights[o] = (Floats)(both[o] << 16);
            }
            ADD_INPUT(weights, 2 * i)
            UNROLL for (int o = 0; o < wide; o++) weights[o] = (Floats)(both[o] & 0xffff0000u);
            ADD_INPUT(weights, 2 * i + 1)
        }
        if (inputs % 2) {
            UNROLL for (int o = 0; o < wide; o++) {
                Words both;
                memcpy(&both, packed + o * stride + (size_t)pairs * LANES, sizeof both);
                weights[o] = (Floats)(both << 16);
            }
            ADD_INPUT(weights, inputs - 1)
        }
    }
    finish(tiles, block, row, wide, tall, sums);
}

/* One function for each kind of weights, whose tiles have constant sizes. */
#define ROWS(tile, wide, tall, kind) \
    case tall: tile(tiles, block, row, wide, tall, kind); break;
#define FEW_CASES(tile, wide, kind) ROWS(tile, wide, 1, kind) ROWS(tile, wide, 2, kind)
#define MORE_CASES(tile, wide, kind) \
    FEW_CASES(tile, wide, kind) ROWS(tile, wide, 3, kind) ROWS(tile, wide, 4, kind) ROWS(tile, wide, 5, kind)
#if REGISTERS == 32
#define WIDE_CASES(tile, kind) MORE_CASES(tile, 4, kind) ROWS(tile, 4, 6, kind)
#define NARROW_CASES(tile, kind) MORE_CASES(tile, 2, kind) ROWS(tile, 2, 6, kind)
#define TALL_CASES(tile, kind)                                                              \
    NARROW_CASES(tile, kind) ROWS(tile, 2, 7, kind) ROWS(tile, 2, 8, kind)                  \
    ROWS(tile, 2, 9, kind) ROWS(tile, 2, 10, kind) ROWS(tile, 2, 11, kind) ROWS(tile, 2, 12, kind)
#else
#define WIDE_CASES(tile, kind) FEW_CASES(tile, 4, kind)
#define NARROW_CASES(tile, kind) MORE_CASES(tile, 2, kind)
#define TALL_CASES NARROW_CASES
#endif

#define KIND(name, tile, kind, narrow_cases)                                            \
    static void name(const Tiles *tiles, int block, int wide, int row, int tall) {      \
        if (wide == 4) switch (tall) { WIDE_CASES(tile, kind) }                         \
        else switch (tall) { narrow_cases(tile, kind) }                                 \
    }

KIND(tile_float32, tile, FLOAT32, NARROW_CASES)
KIND(tile_bfloat16, tile, BFLOAT16, NARROW_CASES)
KIND(tile_float16, tile, FLOAT16, NARROW_CASES)
KIND(tile_int8, quantized_tile, INT8, TALL_CASES)
KIND(tile_int4, quantized_tile, INT4, TALL_CASES)
KIND(tile_float8, quantized_tile, FLOAT8, TALL_CASES)
KIND(tile_float4, quantized_tile, FLOAT4, TALL_CASES)
#if HAS_BFLOAT16
KIND(tile_rounded, tile, ROUNDED, NARROW_CASES)
#else
#define tile_rounded tile_bfloat16
#endif

static void (*const KINDS[])(const Tiles *, int, int, int, int) = {
    [FLOAT32] = tile_float32, [BFLOAT16] = tile_bfloat16, [FLOAT16] = tile_float16, [INT8] = tile_int8,
    [INT4] = tile_int4,       [FLOAT8] = tile_float8,     [FLOAT4] = tile_float4,   [ROUNDED] = tile_rounded,
};

static int tallest(int kind) { return kind >= INT8 && kind <= FLOAT4 ? MOST_TALL : DENSE_TALL; }

/* Blocks first .. end-1 of rows row .. row+rows-1, in tiles of nearly equal height. */
static void multiply(const Tiles *tiles, int kind, int first, int end, int row, int rows) {
    int wider = rows <= WIDE_TALL || WIDE_TALL == tallest(kind), most = wider ? WIDE_TALL : tallest(kind);
    int count = (rows + most - 1) / most;
    for (int block = first; block < end;) {
        int wide = wider && end - block >= 4 ? 4 : 2;
        for (int index = 0; index < count; index++) {
            int from = (int)((int64_t)rows * index / count), to = (int)((int64_t)rows * (index + 1) / count);
            KINDS[kind](tiles, block, wide, row + from, to - from);
        }
        block += wide;
    }
}

#if defined(__AMX_BF16__)
/* The same for rounded rows, two blocks and 32 rows at a time. */
static void multiply_rounded(const Tiles *tiles, int first, int end, int row, int rows) {
    const Matrix *matrix = tiles->matrix;
    const size_t stride = block_bytes(matrix);
    AmxSums sums;
    amx_begin();
    for (int block = first; block < end; block += 2)
        for (int from = 0; from < rows; from += 2 * AMX_ROWS) {
            const char *x = tiles->x + (size_t)(row + from) * tiles->x_stride;
            const char *weights = (const char *)matrix->packed + (size_t)block * stride;
            if (rows - from > AMX_ROWS)
                amx_product(x, tiles->x_stride, weights, stride, matrix->inputs, 1, sums);
            else
                amx_product(x, tiles->x_stride, weights, stride, matrix->inputs, 0, sums);
            for (int n = 0; n < 2 * AMX_ROWS && from + n < rows; n++) {
                Floats of_row[MOST_WIDE][MOST_TALL];
                for (int o = 0; o < 2; o++) of_row[o][0] = load(sums[n / AMX_ROWS][o][n % AMX_ROWS]);
                finish(tiles, block, row + from + n, 2, 1, of_row);
            }
        }
    amx_end();
}
#endif

static void multiply_by_kind(const Tiles *tiles, int kind, int first, int end, int row, int rows) {
#if defined(__AMX_BF16__)
    if (kind == ROUNDED) {
        multiply_rounded(tiles, first, end, row, rows);
        return;
    }
#endif
    multiply(tiles, kind, first, end, row, rows);
}

#endif
