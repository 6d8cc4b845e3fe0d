/* Products of bfloat16 in the tile registers of Intel's AMX: eight registers of 16 rows, each of 64 bytes. */

#ifndef KEDGE_AMX_H
#define KEDGE_AMX_H

#include <immintrin.h>

#include "vectors.h"

#define AMX_ROWS 16
#define AMX_INPUTS 32 /* pairs of inputs fill the rows of a register */

/* Sums of up to two registers of rows times two blocks of outputs. */
typedef float AmxSums[2][2][AMX_ROWS][LANES];

/* The shapes of this thread's registers. Between amx_begin and amx_end they take room in each change of threads. */
static inline void amx_begin(void) {
    struct {
        uint8_t palette, start_row, unused[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) shapes.row_bytes[tile] = 64, shapes.rows[tile] = AMX_ROWS;
    __asm__ volatile("" ::"r"(&shapes) : "memory"); /* GCC 12 takes only the first bytes for read */
    _tile_loadconfig(&shapes);
}

static inline void amx_end(void) { _tile_release(); }

/* Rows are x_stride bytes apart, and there is memory for whole registers of them. The two blocks of weights are
   block_bytes apart. `inputs` is a multiple of AMX_INPUTS. With `both` there are two registers of rows. */
INLINE void amx_product(const char *x, size_t x_stride, const char *weights, size_t block_bytes, int inputs,
                        const int both, AmxSums sums) {
    const char *lower = x + AMX_ROWS * x_stride;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int i = 0; i < inputs; i += AMX_INPUTS) {
        const char *pairs = weights + (size_t)i * LANES * 2;
        _tile_loadd(4, x + (size_t)i * 2, x_stride);
        _tile_loadd(6, pairs, 64);
        _tile_loadd(7, pairs + block_bytes, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (both) {
            _tile_loadd(5, lower + (size_t)i * 2, x_stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0][0], 64);
    _tile_stored(1, sums[0][1], 64);
    if (both) {
        _tile_stored(2, sums[1][0], 64);
        _tile_stored(3, sums[1][1], 64);
    }
}

#endif
