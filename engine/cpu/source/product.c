#include "product.h"

#include "tiles.h"

#define API __attribute__((visibility("default")))

/* Rows up to which reading the weights takes longer than multiplying them: rounding rows would gain nothing. */
#define FEW_ROWS 4

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
    size_t x_stride; /* bytes */
} Cut;

/* `x_stride` is that of rows of floats. */
static Cut cut_of(const Matrix *matrix, int rows, int x_stride, int threads) {
    Cut cut = {.kind = unpacks(matrix, rows) ? FLOAT32 : matrix->format, .blocks = packed_blocks(matrix), .rows = rows,
               .x_stride = (size_t)x_stride * sizeof(float)};
    if (rounds_rows(matrix, rows)) {
        cut.kind = ROUNDED;
        cut.x_stride = (size_t)(matrix->inputs + 1) / 2 * 4;
    }
    int tall = cut.kind == ROUNDED && ROUNDED_ROWS > DENSE_TALL ? 2 * ROUNDED_ROWS : tallest(cut.kind);
    cut.height = (int)(HEIGHT_BYTES / cut.x_stride) / tall * tall;
    if (cut.height < tall) cut.height = tall;
    /* Pieces large enough to be read at memory's full speed, and some for each thread. */
    int piece = (cut.blocks + 8 * threads - 1) / (8 * threads);
    cut.piece = piece < 4 ? 4 : piece > 16 ? 16 : (piece + 3) / 4 * 4;
    cut.pieces = (cut.blocks + cut.piece - 1) / cut.piece;
    cut.part = cut.height;
    if (unpacks(matrix, rows)) {
        /* All rows at a time, unless that leaves threads without a piece. */
        int wanted = (2 * threads + cut.pieces - 1) / cut.pieces, each = (rows + wanted - 1) / wanted;
        cut.part = (each + cut.height - 1) / cut.height * cut.height;
    }
    cut.parts = (rows + cut.part - 1) / cut.part;
    return cut;
}

static void unpack(const Matrix *matrix, int block, int rounds, float *to) {
    const uint8_t *packed = (const uint8_t *)matrix->packed + (size_t)block * block_bytes(matrix);
#define UNPACK(format) \
    case format: rounds ? unpack_block(matrix, packed, format, 1, to) : unpack_block(matrix, packed, format, 0, to); break;
    switch (matrix->format) { UNPACK(INT8) UNPACK(INT4) UNPACK(FLOAT8) UNPACK(FLOAT4) }
#undef UNPACK
}

/* Blocks first .. end-1 of a quantized matrix, which are unpacked a few at a time, with rows row .. row+rows-1. */
static void multiply_unpacked(const Tiles *tiles, const Cut *cut, int first, int end, int row, int rows,
                              float *unpacked) {
    const Matrix *matrix = tiles->matrix;
    Matrix part = {.packed = unpacked, .format = cut->kind == ROUNDED ? BFLOAT16 : FLOAT32, .inputs = matrix->inputs,
                   .alpha = matrix->alpha, .limit = matrix->limit};
    for (int block = first; block < end; block += MOST_WIDE) {
        int count = end - block < MOST_WIDE ? end - block : MOST_WIDE;
        for (int o = 0; o < count; o++)
            unpack(matrix, block + o, cut->kind == ROUNDED, unpacked + (size_t)o * block_bytes(&part) / sizeof(float));
        part.bias = matrix->bias == NULL ? NULL : matrix->bias + (size_t)block * LANES;
        Tiles dense = *tiles;
        dense.matrix = &part;
        dense.y += (size_t)(tiles->how == GATED ? block / 2 : block) * LANES;
        for (int done = 0; done < rows; done += cut->height)
            multiply_by_kind(&dense, cut->kind, 0, count, row + done,
                             done + cut->height < rows ? cut->height : rows - done);
    }
}

typedef struct {
    int first, end, row, rows; /* blocks first .. end-1 of rows row .. row+rows-1 */
} Piece;

static Piece piece_of(const Cut *cut, int64_t index) {
    Piece piece = {.first = (int)(index % cut->pieces) * cut->piece, .row = (int)(index / cut->pieces) * cut->part};
    piece.end = piece.first + cut->piece < cut->blocks ? piece.first + cut->piece : cut->blocks;
    piece.rows = piece.row + cut->part < cut->rows ? cut->part : cut->rows - piece.row;
    return piece;
}

static void multiply_piece(const Tiles *tiles, const Cut *cut, const Piece *piece, float *unpacked) {
    if (unpacks(tiles->matrix, cut->rows))
        multiply_unpacked(tiles, cut, piece->first, piece->end, piece->row, piece->rows, unpacked);
    else
        multiply_by_kind(tiles, cut->kind, piece->first, piece->end, piece->row, piece->rows);
}

/* Floats for a piece of each thread's. */
static size_t room_of(const Cut *cut) { return (size_t)cut->part * (size_t)cut->piece * LANES; }

/* The matrix from a block on. */
static Matrix behind(const Matrix *matrix, int block) {
    Matrix rest = *matrix;
    rest.packed = (const char *)matrix->packed + (size_t)block * block_bytes(matrix);
    rest.bias = matrix->bias == NULL ? NULL : matrix->bias + (size_t)block * LANES;
    return rest;
}

/* A piece of a product to which something is added while it is in the cache. */
static void multiply_piece_with(const Tiles *tiles, const Cut *cut, const Piece *piece, const Added *added, float *room,
                                float *unpacked) {
    int blocks = piece->end - piece->first, gates = tiles->how == GATED;
    size_t y_stride = tiles->y_stride;
    float *y = tiles->y + (size_t)piece->row * y_stride;
    float *raw = gates ? room : y + (size_t)piece->first * LANES;
    size_t stride = gates ? (size_t)blocks * LANES : y_stride;
    Matrix matrix = behind(tiles->matrix, piece->first);
    Tiles whole = {&matrix, tiles->x + (size_t)piece->row * tiles->x_stride, tiles->x_stride, raw, stride,
                   gates ? STORE : tiles->how};
    Piece here = {0, blocks, 0, piece->rows};
    multiply_piece(&whole, cut, &here, unpacked);
    for (int index = 0; index < added->count; index++) {
        int from = added->first[index], end = added->first[index + 1];
        if (from < piece->row) from = piece->row;
        if (end > piece->row + piece->rows) end = piece->row + piece->rows;
        if (from >= end || added->matrices[index].outputs == 0) continue;
        Matrix more = behind(&added->matrices[index], piece->first);
        Tiles part = {&more, (const char *)(added->x + (size_t)from * (size_t)added->x_stride),
                      (size_t)added->x_stride * sizeof(float), raw + (size_t)(from - piece->row) * stride, stride, ADD};
        multiply(&part, more.format, 0, blocks, 0, end - from);
    }
    for (int row = 0; gates && row < piece->rows; row++)
        for (int block = 0; block < blocks; block += 2) {
            const float *pair = raw + (size_t)row * stride + (size_t)block * LANES;
            store(y + (size_t)row * y_stride + (size_t)(piece->first + block) / 2 * LANES,
                  gated(&matrix, load(pair), load(pair + LANES)));
        }
}

/* All matrices have the same inputs, also those without outputs. `added` is for a single matrix, or NULL. */
static void multiply_all(const Matrix *matrices, int count, const int32_t *first, const float *x, int x_stride, float *y,
                         int y_stride, int how, const Added *added, void *scratch, Team *team, int thread) {
    size_t room = unpacked_bytes(matrices);
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
        Cut cut = cut_of(matrix, rows, x_stride, team_size(team));
        const char *from = cut.kind == ROUNDED ? rounded : (const char *)x;
        Tiles tiles = {matrix, from + (size_t)row * cut.x_stride, cut.x_stride, y + (size_t)row * (size_t)y_stride,
                       (size_t)y_stride, how};
        int64_t pieces = (int64_t)cut.pieces * cut.parts;
        for (; next < before + pieces; next = team_next(team)) {
            Piece piece = piece_of(&cut, next - before);
            if (added == NULL)
                multiply_piece(&tiles, &cut, &piece, unpacked);
            else
                multiply_piece_with(&tiles, &cut, &piece, added, added->room + (size_t)thread * room_of(&cut), unpacked);
        }
        before += pieces;
    }
}

void grouped_product(const Matrix *matrices, int count, const int32_t *first, const float *x, int x_stride, float *y,
                     int y_stride, int how, void *scratch, Team *team, int thread) {
    multiply_all(matrices, count, first, x, x_stride, y, y_stride, how, NULL, scratch, team, thread);
}

void product(const Matrix *matrix, int rows, const float *x, int x_stride, float *y, int y_stride, int how,
             void *scratch, Team *team, int thread) {
    const int32_t first[] = {0, rows};
    multiply_all(matrix, 1, first, x, x_stride, y, y_stride, how, NULL, scratch, team, thread);
}

void product_alone(const Matrix *matrix, int rows, const float *x, int x_stride, float *y, int y_stride) {
    Tiles tiles = {matrix, (const char *)x, (size_t)x_stride * sizeof(float), y, (size_t)y_stride, STORE};
    multiply(&tiles, matrix->format, 0, packed_blocks(matrix), 0, rows);
}

void product_with(const Matrix *matrix, const Added *added, const float *x, int x_stride, float *y, int y_stride, int how,
                  void *scratch, Team *team, int thread) {
    const int32_t first[] = {0, added->first[added->count]};
    multiply_all(matrix, 1, first, x, x_stride, y, y_stride, how, added, scratch, team, thread);
}

size_t added_room(const Matrix *matrix, int rows, int x_stride, int threads) {
    Cut cut = cut_of(matrix, rows, x_stride, threads);
    return (size_t)threads * room_of(&cut);
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
