#include "vectors.h"

#include "product.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

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
#define MOST_TALL 6
#else
#define WIDE_TALL 2
#define MOST_TALL 5
#endif

/* Weights come to the second cache before they are asked for: bytes ahead in each block. */
#define AHEAD 2048

/* Rows that stay in the second cache while a thread works through its blocks, by their bytes. */
#define GROUP_BYTES (384 * 1024)

static int blocks_of(const Matrix *matrix) { return PADDED(matrix->outputs) / LANES; }

static int half_blocks(const Matrix *matrix) { return PADDED(matrix->outputs / 2) / LANES; }

/* Blocks as they are packed, always an even number: a paired matrix pads both its halves, another is padded itself. */
static int packed_blocks(const Matrix *matrix) {
    return matrix->paired ? 2 * half_blocks(matrix) : (blocks_of(matrix) + 1) / 2 * 2;
}

API int kedge_lanes(void) { return LANES; }

API size_t kedge_packed_bytes(const Matrix *matrix) {
    size_t width = matrix->format == FLOAT32 ? 4 : 2;
    size_t inputs = matrix->format == BFLOAT16 ? (size_t)(matrix->inputs + 1) / 2 * 2 : (size_t)matrix->inputs;
    return (size_t)packed_blocks(matrix) * LANES * inputs * width;
}

/* Which output stands in a lane of a block; -1 for padding. */
static int output_at(const Matrix *matrix, int block, int lane) {
    if (!matrix->paired) {
        int output = block * LANES + lane;
        return output < matrix->outputs ? output : -1;
    }
    int half = matrix->outputs / 2, output = block / 2 * LANES + lane;
    return output < half ? block % 2 * half + output : -1;
}

/* `weights` has a row of inputs for each output, in the matrix's format. */
API void kedge_pack(const Matrix *matrix, const void *weights, void *packed) {
    int inputs = matrix->inputs, blocks = packed_blocks(matrix);
    int step = matrix->format == BFLOAT16 ? 2 : 1, groups = (inputs + step - 1) / step;
    for (int block = 0; block < blocks; block++)
        for (int lane = 0; lane < LANES; lane++) {
            int output = output_at(matrix, block, lane);
            for (int input = 0; input < groups * step; input++) {
                size_t to = (((size_t)block * groups + input / step) * LANES + lane) * step + input % step;
                size_t from = (size_t)(output < 0 ? 0 : output) * inputs + input;
                int empty = output < 0 || input >= inputs;
                if (matrix->format == FLOAT32)
                    ((uint32_t *)packed)[to] = empty ? 0 : ((const uint32_t *)weights)[from];
                else
                    ((uint16_t *)packed)[to] = empty ? 0 : ((const uint16_t *)weights)[from];
            }
        }
}

API void kedge_pack_bias(const Matrix *matrix, const float *bias, float *packed) {
    for (int block = 0; block < packed_blocks(matrix); block++)
        for (int lane = 0; lane < LANES; lane++) {
            int output = output_at(matrix, block, lane);
            packed[block * LANES + lane] = output < 0 ? 0 : bias[output];
        }
}

int product_width(const Matrix *matrix) {
    return packed_blocks(matrix) / (matrix->paired ? 2 : 1) * LANES;
}

static int rounds_rows(const Matrix *matrix, int rows) {
    int can = HAS_BFLOAT16 && matrix->format == BFLOAT16 && matrix->inputs % ROUNDED_INPUTS == 0;
    return can && matrix->rounds && rows > FEW_ROWS;
}

size_t product_scratch(const Matrix *matrix, int rows) {
    size_t padded = (size_t)(rows + ROUNDED_ROWS - 1) / ROUNDED_ROWS * ROUNDED_ROWS;
    return rounds_rows(matrix, rows) ? padded * (size_t)((matrix->inputs + 1) / 2) * 4 + 64 : 0;
}

/* A group may begin at any row, so the rows that are read behind its last one may lie behind the last of all. */
size_t grouped_scratch(const Matrix *matrices, int count, int rows) {
    size_t most = 0;
    for (int index = 0; index < count; index++) {
        size_t bytes = product_scratch(&matrices[index], rows + ROUNDED_ROWS);
        most = bytes > most ? bytes : most;
    }
    return most;
}

#if defined(__F16C__) || defined(__AVX512F__)
INLINE Floats load_halves(const uint16_t *from) {
#if LANES == 16
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#else
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#endif
}
#elif defined(__aarch64__)
typedef __fp16 Halves __attribute__((vector_size(2 * LANES)));
INLINE Floats load_halves(const uint16_t *from) {
    Halves value;
    memcpy(&value, from, sizeof value);
    return __builtin_convertvector(value, Floats);
}
#else
#error "no float16 here"
#endif

/* What a tile is multiplied from: rows of floats, or with BFLOAT16 pairs of rounded ones (ROUNDED). */
#define ROUNDED 3

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
                Floats gate = sums[o][n], up = sums[o + 1][n];
                store(y + (size_t)(block + o) / 2 * LANES, gate / (1.0f + exponential(-gate)) * up);
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

INLINE void tile(const Tiles *tiles, int block, int row, const int wide, const int tall, const int kind) {
    Floats sums[MOST_WIDE][MOST_TALL], weights[MOST_WIDE];
    const Matrix *matrix = tiles->matrix;
    const char *x = tiles->x + (size_t)row * tiles->x_stride;
    const size_t x_stride = tiles->x_stride;
    const int inputs = matrix->inputs, pairs = inputs / 2;
    UNROLL for (int o = 0; o < wide; o++) UNROLL for (int n = 0; n < tall; n++) sums[o][n] = (Floats){0};
#define X(n, i) (((const float *)(x + (n) * x_stride))[i])
#define ADD_INPUT(i)                                        \
    UNROLL for (int n = 0; n < tall; n++) {                 \
        float value = X(n, i);                              \
        UNROLL for (int o = 0; o < wide; o++) sums[o][n] += weights[o] * value; \
    }
    if (kind == FLOAT32 || kind == FLOAT16) {
        const size_t stride = (size_t)inputs * LANES;
        const size_t first = (size_t)block * stride;
        for (int i = 0; i < inputs; i++) {
            UNROLL for (int o = 0; o < wide; o++) {
                size_t at = first + o * stride + (size_t)i * LANES;
                const float *floats = (const float *)matrix->packed + at;
                const uint16_t *halves = (const uint16_t *)matrix->packed + at;
                fetch_ahead(kind == FLOAT32 ? (const void *)floats : (const void *)halves);
                weights[o] = kind == FLOAT32 ? load(floats) : load_halves(halves);
            }
            ADD_INPUT(i)
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
            ADD_INPUT(2 * i)
            UNROLL for (int o = 0; o < wide; o++) weights[o] = (Floats)(both[o] & 0xffff0000u);
            ADD_INPUT(2 * i + 1)
        }
        if (inputs % 2) {
            UNROLL for (int o = 0; o < wide; o++) {
                Words both;
                memcpy(&both, packed + o * stride + (size_t)pairs * LANES, sizeof both);
                weights[o] = (Floats)(both << 16);
            }
            ADD_INPUT(inputs - 1)
        }
    }
#undef ADD_INPUT
#undef X
    finish(tiles, block, row, wide, tall, sums);
}

/* One function for each kind of weights, whose tiles have constant sizes. */
#define ROWS(wide, tall, kind) \
    case tall: tile(tiles, block, row, wide, tall, kind); break;
#if REGISTERS == 32
#define WIDE_CASES(kind) \
    ROWS(4, 1, kind) ROWS(4, 2, kind) ROWS(4, 3, kind) ROWS(4, 4, kind) ROWS(4, 5, kind) ROWS(4, 6, kind)
#define NARROW_CASES(kind) \
    ROWS(2, 1, kind) ROWS(2, 2, kind) ROWS(2, 3, kind) ROWS(2, 4, kind) ROWS(2, 5, kind) ROWS(2, 6, kind)
#else
#define WIDE_CASES(kind) ROWS(4, 1, kind) ROWS(4, 2, kind)
#define NARROW_CASES(kind) ROWS(2, 1, kind) ROWS(2, 2, kind) ROWS(2, 3, kind) ROWS(2, 4, kind) ROWS(2, 5, kind)
#endif

#define KIND(name, kind)                                                                \
    static void name(const Tiles *tiles, int block, int wide, int row, int tall) {      \
        if (wide == 4) switch (tall) { WIDE_CASES(kind) }                               \
        else switch (tall) { NARROW_CASES(kind) }                                       \
    }

KIND(tile_float32, FLOAT32)
KIND(tile_bfloat16, BFLOAT16)
KIND(tile_float16, FLOAT16)
#if HAS_BFLOAT16
KIND(tile_rounded, ROUNDED)
#else
#define tile_rounded tile_bfloat16
#endif

static void (*const KINDS[])(const Tiles *, int, int, int, int) = {tile_float32, tile_bfloat16, tile_float16,
                                                                   tile_rounded};

/* Blocks first .. end-1 of rows row .. row+rows-1, in tiles of nearly equal height. */
static void multiply(const Tiles *tiles, int kind, int first, int end, int row, int rows) {
    int wider = rows <= WIDE_TALL || WIDE_TALL == MOST_TALL, most = wider ? WIDE_TALL : MOST_TALL;
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
    const size_t block_bytes = (size_t)matrix->inputs * LANES * 2;
    AmxSums sums;
    amx_begin();
    for (int block = first; block < end; block += 2)
        for (int from = 0; from < rows; from += 2 * AMX_ROWS) {
            const char *x = tiles->x + (size_t)(row + from) * tiles->x_stride;
            const char *weights = (const char *)matrix->packed + block * block_bytes;
            if (rows - from > AMX_ROWS)
                amx_product(x, tiles->x_stride, weights, block_bytes, matrix->inputs, 1, sums);
            else
                amx_product(x, tiles->x_stride, weights, block_bytes, matrix->inputs, 0, sums);
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

/* How a product is cut: into pieces of blocks times groups of rows. */
typedef struct {
    int kind, blocks, rows, piece, pieces, group, groups;
} Cut;

static Cut cut_of(const Tiles *tiles, int kind, int rows, int threads) {
    Cut cut = {.kind = kind, .blocks = packed_blocks(tiles->matrix), .rows = rows};
    int tall = kind == ROUNDED && ROUNDED_ROWS > MOST_TALL ? 2 * ROUNDED_ROWS : MOST_TALL;
    cut.group = (int)(GROUP_BYTES / tiles->x_stride) / tall * tall;
    if (cut.group < tall) cut.group = tall;
    /* Pieces large enough to be read at memory's full speed, and some for each thread. */
    int piece = (cut.blocks + 8 * threads - 1) / (8 * threads);
    cut.piece = piece < 4 ? 4 : piece > 16 ? 16 : (piece + 3) / 4 * 4;
    cut.pieces = (cut.blocks + cut.piece - 1) / cut.piece;
    cut.groups = (rows + cut.group - 1) / cut.group;
    return cut;
}

static void multiply_piece(const Tiles *tiles, const Cut *cut, int64_t index) {
    int first = (int)(index % cut->pieces) * cut->piece, row = (int)(index / cut->pieces) * cut->group;
    int end = first + cut->piece < cut->blocks ? first + cut->piece : cut->blocks;
    int taken = row + cut->group < cut->rows ? cut->group : cut->rows - row;
#if defined(__AMX_BF16__)
    if (cut->kind == ROUNDED) {
        multiply_rounded(tiles, first, end, row, taken);
        return;
    }
#endif
    multiply(tiles, cut->kind, first, end, row, taken);
}

void grouped_product(const Matrix *matrices, int count, const int32_t *first, const float *x, int x_stride, float *y,
                     int y_stride, int how, void *scratch, Team *team, int thread) {
    size_t rounded_stride = (size_t)(matrices->inputs + 1) / 2 * 4;
    int rounds = 0;
    for (int index = 0; index < count; index++)
        rounds |= rounds_rows(&matrices[index], first[index + 1] - first[index]);
    if (rounds) round_rows(first[count], x, x_stride, matrices->inputs, scratch, team, thread);
    int64_t next = team_next(team), before = 0;
    for (int index = 0; index < count; index++) {
        const Matrix *matrix = &matrices[index];
        int row = first[index], rows = first[index + 1] - row;
        if (rows == 0) continue;
        Tiles tiles = {matrix, (const char *)(x + (size_t)row * (size_t)x_stride), (size_t)x_stride * 4,
                       y + (size_t)row * (size_t)y_stride, (size_t)y_stride, how};
        int kind = matrix->format;
        if (rounds_rows(matrix, rows)) {
            kind = ROUNDED;
            tiles.x = (const char *)scratch + (size_t)row * rounded_stride;
            tiles.x_stride = rounded_stride;
        }
        Cut cut = cut_of(&tiles, kind, rows, team_size(team));
        int64_t pieces = (int64_t)cut.pieces * cut.groups;
        for (; next < before + pieces; next = team_next(team)) multiply_piece(&tiles, &cut, next - before);
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

API size_t kedge_product_scratch(const Matrix *matrix, int rows) { return product_scratch(matrix, rows); }

API int kedge_product_width(const Matrix *matrix) { return product_width(matrix); }

/* A product by itself. */
API void kedge_product(Team *team, const Matrix *matrix, int rows, const float *x, int x_stride, float *y, int y_stride,
                       int how, void *scratch) {
    Product job = {matrix, rows, x_stride, y_stride, how, x, y, scratch};
    team_run(team, product_work, &job);
}
