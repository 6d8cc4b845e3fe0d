#include "product.h"

#include "quantized.h"

#define API __attribute__((visibility("default")))

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

/* Rows up to which reading the weights takes longer than multiplying them: rounding rows would gain nothing. */
#define FEW_ROWS 4

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

/* Rows that stay in the second cache while a thread works through its blocks, by their bytes. */
#define HEIGHT_BYTES (384 * 1024)

int product_width(const Matrix *matrix) {
    return packed_blocks(matrix) / (matrix->paired ? 2 : 1) * LANES;
}

static int rounds_rows(const Matrix *matrix, int rows) {
    int can = HAS_BFLOAT16 && (matrix->format == BFLOAT16 || is_quantized(matrix));
    return can && matrix->inputs % ROUNDED_INPUTS == 0 && matrix->rounds && rows > FEW_ROWS;
}

/* Many rows are multiplied with a few blocks of floats at a time, which a thread has unpacked: more than two tiles of
   them would each make the weights anew. */
static int unpacks(const Matrix *matrix, int rows) {
    return is_quantized(matrix) && (rounds_rows(matrix, rows) || rows > 2 * MOST_TALL);
}

/* Bytes for a thread's unpacked blocks. */
static size_t unpacked_bytes(const Matrix *matrix) {
    return (size_t)matrix->inputs * MOST_WIDE * LANES * sizeof(float);
}

/* A group may begin at any row, so the rows that are read behind its last one may lie behind the last of all. */
size_t grouped_scratch(const Matrix *matrices, int count, int rows, int threads) {
    size_t rounded = 0, unpacked = 0, room = (size_t)rows + 2 * ROUNDED_ROWS;
    for (int index = 0; index < count; index++) {
        const Matrix *matrix = &matrices[index];
        if (rounds_rows(matrix, rows)) rounded = room * (size_t)((matrix->inputs + 1) / 2) * 4 + 64;
        if (unpacks(matrix, rows)) unpacked = (size_t)threads * unpacked_bytes(matrix);
    }
    return rounded + unpacked;
}

size_t product_scratch(const Matrix *matrix, int rows, int threads) { return grouped_scratch(matrix, 1, rows, threads); }

/* What a tile is multiplied from: rows of floats, or with BFLOAT16 pairs of rounded ones (ROUNDED). */
#define ROUNDED (FLOAT8 + 1)

typedef struct {
    const Matrix *matrix;
    const char *x;
    size_t x_stride; /* bytes */
    float *y;
    size_t y_stride; /* floats */
    int how;
} Tiles;

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
        if (tiles->how == SILU_MUL) {
            UNROLL for (int o = 0; o + 1 < wide; o += 2) {
                store(y + (size_t)(block + o) / 2 * LANES, silu_mul(sums[o][n], sums[o + 1][n]));
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
            at[o] += GROUP_HEAD;
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
#if HAS_BFLOAT16
KIND(tile_rounded, tile, ROUNDED, NARROW_CASES)
#else
#define tile_rounded tile_bfloat16
#endif

static void (*const KINDS[])(const Tiles *, int, int, int, int) = {
    [FLOAT32] = tile_float32, [BFLOAT16] = tile_bfloat16, [FLOAT16] = tile_float16, [INT8] = tile_int8,
    [INT4] = tile_int4,       [FLOAT8] = tile_float8,     [ROUNDED] = tile_rounded,
};

static int tallest(int kind) { return kind == INT8 || kind == INT4 || kind == FLOAT8 ? MOST_TALL : DENSE_TALL; }

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

static void round_rows(int rows, const float *x, int x_stride, int inputs, uint16_t *rounded, Team *team, int thread) {
    int first, end, width = (inputs + 1) / 2 * 2;
    team_share(team, thread, rows, &first, &end);
    for (int row = first; row < end; row++) {
        uint16_t *to = rounded + (size_t)row * width;
        const float *from = x + (size_t)row * x_stride;
        for (int i = 0; i < inputs; i++) to[i] = round_to_bfloat16(from[i]);
        if (width > inputs) to[inputs] = 0;
    }
    team_meet(team);
}

/* How a product is cut: into pieces of blocks times parts of the rows. `height` rows stay in the second cache; a part of
   an unpacked matrix's rows is longer. */
typedef struct {
    int kind, blocks, rows, piece, pieces, height, part, parts;
} Cut;

static Cut cut_of(const Tiles *tiles, int kind, int rows, int threads) {
    Cut cut = {.kind = kind, .blocks = packed_blocks(tiles->matrix), .rows = rows};
    int tall = kind == ROUNDED && ROUNDED_ROWS > DENSE_TALL ? 2 * ROUNDED_ROWS : tallest(kind);
    cut.height = (int)(HEIGHT_BYTES / tiles->x_stride) / tall * tall;
    if (cut.height < tall) cut.height = tall;
    /* Pieces large enough to be read at memory's full speed, and some for each thread. */
    int piece = (cut.blocks + 8 * threads - 1) / (8 * threads);
    cut.piece = piece < 4 ? 4 : piece > 16 ? 16 : (piece + 3) / 4 * 4;
    cut.pieces = (cut.blocks + cut.piece - 1) / cut.piece;
    cut.part = cut.height;
    if (unpacks(tiles->matrix, rows)) {
        /* All rows at a time, unless that leaves threads without a piece. */
        int wanted = (2 * threads + cut.pieces - 1) / cut.pieces, each = (rows + wanted - 1) / wanted;
        cut.part = (each + cut.height - 1) / cut.height * cut.height;
    }
    cut.parts = (rows + cut.part - 1) / cut.part;
    return cut;
}

static void multiply_by_kind(const Tiles *tiles, int kind, int first, int end, int row, int rows) {
#if defined(__AMX_BF16__)
    if (kind == ROUNDED) {
        multiply_rounded(tiles, first, end, row, rows);
        return;
    }
#endif
    multiply(tiles, kind, first, end, row, rows);
}

static void unpack(const Matrix *matrix, int block, int rounds, float *to) {
    const uint8_t *packed = (const uint8_t *)matrix->packed + (size_t)block * block_bytes(matrix);
#define UNPACK(format) \
    case format: rounds ? unpack_block(matrix, packed, format, 1, to) : unpack_block(matrix, packed, format, 0, to); break;
    switch (matrix->format) { UNPACK(INT8) UNPACK(INT4) UNPACK(FLOAT8) }
#undef UNPACK
}

/* Blocks first .. end-1 of a quantized matrix, which are unpacked a few at a time, with rows row .. row+rows-1. */
static void multiply_unpacked(const Tiles *tiles, const Cut *cut, int first, int end, int row, int rows,
                              float *unpacked) {
    const Matrix *matrix = tiles->matrix;
    Matrix part = {.packed = unpacked, .format = cut->kind == ROUNDED ? BFLOAT16 : FLOAT32, .inputs = matrix->inputs};
    for (int block = first; block < end; block += MOST_WIDE) {
        int count = end - block < MOST_WIDE ? end - block : MOST_WIDE;
        for (int o = 0; o < count; o++)
            unpack(matrix, block + o, cut->kind == ROUNDED, unpacked + (size_t)o * block_bytes(&part) / sizeof(float));
        part.bias = matrix->bias == NULL ? NULL : matrix->bias + (size_t)block * LANES;
        Tiles dense = *tiles;
        dense.matrix = &part;
        dense.y += (size_t)(tiles->how == SILU_MUL ? block / 2 : block) * LANES;
        for (int done = 0; done < rows; done += cut->height)
            multiply_by_kind(&dense, cut->kind, 0, count, row + done,
                             done + cut->height < rows ? cut->height : rows - done);
    }
}

static void multiply_piece(const Tiles *tiles, const Cut *cut, int64_t index, float *unpacked) {
    int first = (int)(index % cut->pieces) * cut->piece, row = (int)(index / cut->pieces) * cut->part;
    int end = first + cut->piece < cut->blocks ? first + cut->piece : cut->blocks;
    int rows = row + cut->part < cut->rows ? cut->part : cut->rows - row;
    if (unpacks(tiles->matrix, cut->rows))
        multiply_unpacked(tiles, cut, first, end, row, rows, unpacked);
    else
        multiply_by_kind(tiles, cut->kind, first, end, row, rows);
}

void grouped_product(const Matrix *matrices, int count, const int32_t *first, const float *x, int x_stride, float *y,
                     int y_stride, int how, void *scratch, Team *team, int thread) {
    size_t rounded_stride = (size_t)(matrices->inputs + 1) / 2 * 4, room = unpacked_bytes(matrices);
    float *unpacked = (float *)((char *)scratch + (size_t)thread * room);
    int rounds = 0, many = 0;
    for (int index = 0; index < count; index++) {
        int rows = first[index + 1] - first[index];
        rounds |= rounds_rows(&matrices[index], rows);
        many |= unpacks(&matrices[index], rows);
    }
    char *rounded = (char *)scratch + (many ? (size_t)team_size(team) * room : 0);
    if (rounds) round_rows(first[count], x, x_stride, matrices->inputs, (uint16_t *)rounded, team, thread);
    int64_t next = team_next(team), before = 0;
    for (int index = 0; index < count; index++) {
        const Matrix *matrix = &matrices[index];
        int row = first[index], rows = first[index + 1] - row;
        if (rows == 0) continue;
        Tiles tiles = {matrix, (const char *)(x + (size_t)row * (size_t)x_stride), (size_t)x_stride * 4,
                       y + (size_t)row * (size_t)y_stride, (size_t)y_stride, how};
        int kind = unpacks(matrix, rows) ? FLOAT32 : matrix->format;
        if (rounds_rows(matrix, rows)) {
            kind = ROUNDED;
            tiles.x = rounded + (size_t)row * rounded_stride;
            tiles.x_stride = rounded_stride;
        }
        Cut cut = cut_of(&tiles, kind, rows, team_size(team));
        int64_t pieces = (int64_t)cut.pieces * cut.parts;
        for (; next < before + pieces; next = team_next(team)) multiply_piece(&tiles, &cut, next - before, unpacked);
        before += pieces;
    }
}

void product(const Matrix *matrix, int rows, const float *x, int x_stride, float *y, int y_stride, int how,
             void *scratch, Team *team, int thread) {
    const int32_t first[] = {0, rows};
    grouped_product(matrix, 1, first, x, x_stride, y, y_stride, how, scratch, team, thread);
}

typedef struct {
    const Matrix *matrix;
    int rows, x_stride, y_stride, how;
    const float *x;
    float *y;
    void *scratch;
} Product;

static void product_work(void *job, Team *team, int thread) {
    Product *p = job;
    product(p->matrix, p->rows, p->x, p->x_stride, p->y, p->y_stride, p->how, p->scratch, team, thread);
}

API size_t kedge_product_scratch(const Matrix *matrix, int rows, Team *team) {
    return product_scratch(matrix, rows, team_size(team));
}

API int kedge_product_width(const Matrix *matrix) { return product_width(matrix); }

/* A product by itself. */
API void kedge_product(Team *team, const Matrix *matrix, int rows, const float *x, int x_stride, float *y, int y_stride,
                       int how, void *scratch) {
    Product job = {matrix, rows, x_stride, y_stride, how, x, y, scratch};
    team_run(team, product_work, &job);
}
