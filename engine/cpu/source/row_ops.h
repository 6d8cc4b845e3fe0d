/* What is done to a row's vectors between products. */

#ifndef KEDGE_ROW_OPS_H
#define KEDGE_ROW_OPS_H

#include "vectors.h"

/* x / sqrt(mean(x^2) + eps) * weights, which may be where x is. */
INLINE void normalise(const float *x, const float *weights, int size, float eps, float *to) {
    Floats squares = {0};
    for (int i = 0; i < size; i += LANES) {
        Floats part = load_some(x + i, size - i);
        squares += part * part;
    }
    float scale = 1.0f / sqrtf(total(squares) / (float)size + eps);
    for (int i = 0; i < size; i += LANES)
        store_some(to + i, load_some(x + i, size - i) * scale * load_some(weights + i, size - i), size - i);
}

/* Turns pairs of neighbours by cosine and sine, which `rotation` has of each. */
INLINE void rotate(float *pairs, const float *rotation, int count, float scale) {
    for (int i = 0; i < count; i += 2) {
        float a = pairs[i], b = pairs[i + 1], cosine = rotation[i] * scale, sine = rotation[i + 1] * scale;
        pairs[i] = a * cosine - b * sine;
        pairs[i + 1] = a * sine + b * cosine;
    }
}

#endif
