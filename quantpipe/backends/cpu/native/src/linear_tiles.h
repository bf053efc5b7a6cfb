// The innermost loops: R tokens by C vectors of output channels, over a stretch of K.
//
// Shapes: R tokens, C vectors of V::W output channels, K in_features, S weight scales along K.
#pragma once

#include "linear_kernels.h"
#include "small_floats.h"

// Inlined into their callers these loops lose their registers.
#define QP_TILE __attribute__((noinline)) static void
#define QP_UNROLL _Pragma("GCC unroll 16")

namespace qp {
namespace {

struct Tile {
    const LinearView* view;
    const Activations* activations;
    int panel;
    int column;             // first output channel, within the panel
    int token;              // first row of the activations
    int first_k, end_k;
    const uint8_t* words;   // of first_k and the first output channel
    size_t word_bytes;      // from one word of K to the next
    float* totals;          // [R] rows of a panel, from the first output channel on: what is added to
    int32_t* unscaled;      // likewise: sums of a group that the last stretch did not end
};

template <class V, class Source, int R, int C>
struct FloatTile {
    using F = typename V::F;

    QP_TILE run(const Tile& tile) {
        const uint8_t* words = tile.words;
        const size_t row_floats = tile.activations->row_bytes / sizeof(float);
        const float* x = reinterpret_cast<const float*>(tile.activations->x) + tile.token * row_floats + tile.first_k;
        F sums[R][C];
        QP_UNROLL
        for (int r = 0; r < R; ++r) {
            QP_UNROLL
            for (int c = 0; c < C; ++c) sums[r][c] = V::zero();
        }
        for (int k = tile.first_k; k < tile.end_k; k += Source::kWordK) {
            QP_UNROLL
            for (int s = 0; s < Source::kSteps; ++s) {
                F w[C];
                QP_UNROLL
                for (int c = 0; c < C; ++c) w[c] = V::as_float(Source::step(V::iload(words + c * V::W * 4), s));
                QP_UNROLL
                for (int r = 0; r < R; ++r) {
                    const F a = V::set(x[r * row_floats + s]);
                    QP_UNROLL
                    for (int c = 0; c < C; ++c) sums[r][c] = V::fma(a, w[c], sums[r][c]);
                }
            }
            words += tile.word_bytes;
            x += Source::kWordK;
        }
        for (int r = 0; r < R; ++r) {
            float* totals = tile.totals + r * kPanel;
            for (int c = 0; c < C; ++c) {
                V::store(totals + c * V::W, V::add(V::load(totals + c * V::W), sums[r][c]));
            }
        }
    }
};

template <class V, class Source, int R, int C>
struct IntegerTile {
    using F = typename V::F;
    using I = typename V::I;
    // Sums of 16 bits have room for so many inputs.
    static constexpr bool kSumsInEighths = Source::kIsNibbles && !Source::kIsPairs && !V::kHasByteDot;
    static constexpr int kEighthsK = 32;
    static constexpr int kStepBytes = 4;

    QP_TILE run(const Tile& tile) {
        const LinearView& view = *tile.view;
        const size_t row_bytes = tile.activations->row_bytes;
        const uint8_t* words = tile.words;
        const uint8_t* x = tile.activations->x + tile.token * row_bytes + tile.first_k * (Source::kIsPairs ? 2 : 1);
        int k = tile.first_k;
        while (k < tile.end_k) {
            const int g = k / view.group, group_end = (g + 1) * view.group;
            const int end = group_end < tile.end_k ? group_end : tile.end_k;
            I sums[R][C];
            begin(tile, g, k == g * view.group, sums);
            if constexpr (kSumsInEighths) {
                for (; k < end; k += kEighthsK) add_in_eighths(words, tile.word_bytes, x, row_bytes, sums);
            } else {
                for (; k < end; k += Source::kWordK) add_word<false>(words, tile.word_bytes, x, row_bytes, sums);
            }
            if (end == group_end) {
                scale(tile, g, sums);
            } else {
                put_aside(tile, sums);
            }
        }
    }

   private:
    template <bool InEighths>
    static inline __attribute__((always_inline)) void add_word(const uint8_t*& words, size_t word_bytes,
                                                               const uint8_t*& x, size_t row_bytes, I (&sums)[R][C]) {
        QP_UNROLL
        for (int s = 0; s < Source::kSteps; ++s) {
            I w[C];
            QP_UNROLL
            for (int c = 0; c < C; ++c) w[c] = Source::step(V::iload(words + c * V::W * 4), s);
            QP_UNROLL
            for (int r = 0; r < R; ++r) {
                const I a = V::ibroadcast(x + r * row_bytes + s * kStepBytes);
                QP_UNROLL
                for (int c = 0; c < C; ++c) sums[r][c] = dot<InEighths>(sums[r][c], w[c], a);
            }
        }
        words += word_bytes;
        x += Source::kSteps * kStepBytes;
    }

    static inline __attribute__((always_inline)) void add_in_eighths(const uint8_t*& words, size_t word_bytes,
                                                                     const uint8_t*& x, size_t row_bytes,
                                                                     I (&sums)[R][C]) {
        I eighths[R][C];
        QP_UNROLL
        for (int r = 0; r < R; ++r) {
            QP_UNROLL
            for (int c = 0; c < C; ++c) eighths[r][c] = V::izero();
        }
        QP_UNROLL
        for (int i = 0; i < kEighthsK / Source::kWordK; ++i) add_word<true>(words, word_bytes, x, row_bytes, eighths);
        QP_UNROLL
        for (int r = 0; r < R; ++r) {
            QP_UNROLL
            for (int c = 0; c < C; ++c) sums[r][c] = V::add_nibble_sums(sums[r][c], eighths[r][c]);
        }
    }

    template <bool InEighths>
    static inline __attribute__((always_inline)) I dot(I sum, I w, I a) {
        if constexpr (InEighths) return V::nibble_dot4(sum, w, a);
        else if constexpr (Source::kIsPairs) return V::dot2(sum, w, a);
        else if constexpr (V::kHasByteDot) return V::dot4(sum, w, a);
        else return sum;
    }

    // Codes are unsigned: what they exceed the weights by, times the sum of the activations, is taken off beforehand.
    static inline __attribute__((always_inline)) void begin(const Tile& tile, int g, bool is_new, I (&sums)[R][C]) {
        const LinearView& view = *tile.view;
        QP_UNROLL
        for (int c = 0; c < C; ++c) {
            const I code = view.zeros == nullptr ? V::iset(view.center())
                                                 : V::load_u8(view.zeros + scale_index(tile, g) + c * V::W);
            QP_UNROLL
            for (int r = 0; r < R; ++r) {
                if (is_new) {
                    const int32_t x_sum = tile.activations->sums[int64_t{tile.token + r} * view.num_groups() + g];
                    sums[r][c] = view.zeros == nullptr ? V::iset(-view.center() * x_sum) : V::imul(code, V::iset(-x_sum));
                } else {
                    sums[r][c] = V::iload(tile.unscaled + r * kPanel + c * V::W);
                }
            }
        }
    }

    static inline __attribute__((always_inline)) void scale(const Tile& tile, int g, I (&sums)[R][C]) {
        const LinearView& view = *tile.view;
        QP_UNROLL
        for (int c = 0; c < C; ++c) {
            const size_t index = scale_index(tile, g) + c * V::W;
            const F w = view.has_bf16_scales ? V::load_bf16(static_cast<const uint16_t*>(view.scales) + index)
                                             : V::load(static_cast<const float*>(view.scales) + index);
            QP_UNROLL
            for (int r = 0; r < R; ++r) {
                const F a = V::set(tile.activations->scales[int64_t{tile.token + r} * view.num_groups() + g]);
                float* total = tile.totals + r * kPanel + c * V::W;
                V::store(total, V::add(V::load(total), V::mul(V::mul(V::to_float(sums[r][c]), w), a)));
            }
        }
    }

    static inline __attribute__((always_inline)) void put_aside(const Tile& tile, I (&sums)[R][C]) {
        QP_UNROLL
        for (int r = 0; r < R; ++r) {
            QP_UNROLL
            for (int c = 0; c < C; ++c) V::istore(tile.unscaled + r * kPanel + c * V::W, sums[r][c]);
        }
    }

    static size_t scale_index(const Tile& tile, int g) {
        const LinearView& view = *tile.view;
        return (size_t(tile.panel) * view.num_scales + g / view.groups_per_scale) * kPanel + tile.column;
    }
};

}  // namespace
}  // namespace qp
