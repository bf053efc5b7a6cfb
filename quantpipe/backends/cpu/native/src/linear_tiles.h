// The innermost loops: R tokens by C vectors of output channels, over a stretch of K.
//
// Shapes: R tokens, C vectors of V::W output channels, K in_features, S weight scales along K.
#pragma once

#include "linear_kernels.h"
#include "small_floats.h"

// Inlined into their callers these loops lose their registers.
#define QP_TILE __attribute__((noinline)) static void
#define QP_INLINE static inline __attribute__((always_inline))
#define QP_UNROLL _Pragma("GCC unroll 16")

namespace qp {
namespace {

// How far ahead of its use a weight is asked for, in bytes.
constexpr int kAhead = 2048;


// For few tokens weights are used as fast as memory gives them, and the CPU alone does not look beyond a page. The end of
// the weights may lie before what is asked for, which does no harm.
QP_INLINE void prefetch_word(const uint8_t* words) {
    __builtin_prefetch(words);
    __builtin_prefetch(words + 64);
}

struct Tile {
    const LinearView* view;
    const Activations* activations;
    int panel;
    int column;             // first output channel, within the panel
    int token;              // first row of the activations
    int first_k, end_k;
    const uint8_t* words;   // of first_k and the first output channel
    size_t word_bytes;      // from one word of K to the next
    size_t ahead;           // what is asked for beforehand
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
            prefetch_word(words + tile.ahead);
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
        Stretch stretch(tile);
        const int group = tile.view->group, end_k = tile.end_k;
        int k = tile.first_k, g = k / group;
        bool is_new = k == g * group;
        for (; k < end_k; ++g, is_new = true) {
            const int group_end = (g + 1) * group, end = group_end < end_k ? group_end : end_k;
            I sums[R][C];
            begin(tile, g, is_new, sums);
            if constexpr (kSumsInEighths) {
                for (; k < end; k += kEighthsK) add_in_eighths(stretch, sums);
            } else {
                for (; k < end; k += Source::kWordK) add_word<false>(stretch, sums);
            }
            if (end == group_end) {
                scale(tile, g, sums);
            } else {
                put_aside(tile, sums);
            }
        }
    }

   private:
    // Where the next word lies, and the activations that it is multiplied by.
    struct Stretch {
        const uint8_t* words;
        const uint8_t* x;
        const size_t word_bytes, row_bytes, ahead;

        explicit Stretch(const Tile& tile)
            : words(tile.words),
              x(tile.activations->x + tile.token * tile.activations->row_bytes +
                tile.first_k * (Source::kIsPairs ? 2 : 1)),
              word_bytes(tile.word_bytes),
              row_bytes(tile.activations->row_bytes),
              ahead(tile.ahead) {}
    };

    template <bool InEighths>
    QP_INLINE void add_word(Stretch& stretch, I (&sums)[R][C]) {
        prefetch_word(stretch.words + stretch.ahead);
        QP_UNROLL
        for (int s = 0; s < Source::kSteps; ++s) {
            I w[C];
            QP_UNROLL
            for (int c = 0; c < C; ++c) w[c] = Source::step(V::iload(stretch.words + c * V::W * 4), s);
            QP_UNROLL
            for (int r = 0; r < R; ++r) {
                const I a = V::ibroadcast(stretch.x + r * stretch.row_bytes + s * kStepBytes);
                QP_UNROLL
                for (int c = 0; c < C; ++c) sums[r][c] = dot<InEighths>(sums[r][c], w[c], a);
            }
        }
        stretch.words += stretch.word_bytes;
        stretch.x += Source::kSteps * kStepBytes;
    }

    QP_INLINE void add_in_eighths(Stretch& stretch, I (&sums)[R][C]) {
        I eighths[R][C];
        QP_UNROLL
        for (int r = 0; r < R; ++r) {
            QP_UNROLL
            for (int c = 0; c < C; ++c) eighths[r][c] = V::izero();
        }
        QP_UNROLL
        for (int k = 0; k < kEighthsK; k += Source::kWordK) add_word<true>(stretch, eighths);
        QP_UNROLL
        for (int r = 0; r < R; ++r) {
            QP_UNROLL
            for (int c = 0; c < C; ++c) sums[r][c] = V::add_nibble_sums(sums[r][c], eighths[r][c]);
        }
    }

    template <bool InEighths>
    QP_INLINE I dot(I sum, I w, I a) {
        if constexpr (InEighths) return V::nibble_dot4(sum, w, a);
        else if constexpr (Source::kIsPairs) return V::dot2(sum, w, a);
        else if constexpr (V::kHasByteDot) return V::dot4(sum, w, a);
        else return sum;
    }

    QP_INLINE void begin(const Tile& tile, int g, bool is_new, I (&sums)[R][C]) {
        if (!is_new) return take_up(tile, sums);
        const LinearView& view = *tile.view;
        const int num_groups = view.num_groups();
        const int32_t* starts = tile.activations->starts + int64_t{tile.token} * num_groups + g;
        QP_UNROLL
        for (int r = 0; r < R; ++r) {
            QP_UNROLL
            for (int c = 0; c < C; ++c) sums[r][c] = V::iset(starts[r * num_groups]);
        }
        if (view.zeros == nullptr) return;
        QP_UNROLL
        for (int c = 0; c < C; ++c) {
            const I zero = V::load_u8(view.zeros + scale_index(tile, g) + c * V::W);
            QP_UNROLL
            for (int r = 0; r < R; ++r) sums[r][c] = V::imul(sums[r][c], zero);
        }
    }

    QP_INLINE void scale(const Tile& tile, int g, I (&sums)[R][C]) {
        const LinearView& view = *tile.view;
        const int num_groups = view.num_groups();
        const float* a = tile.activations->scales + int64_t{tile.token} * num_groups + g;
        F w[C];
        for (int c = 0; c < C; ++c) {
            const size_t index = scale_index(tile, g) + c * V::W;
            w[c] = view.has_bf16_scales ? V::load_bf16(static_cast<const uint16_t*>(view.scales) + index)
                                        : V::load(static_cast<const float*>(view.scales) + index);
        }
        float* totals = tile.totals;
        QP_UNROLL
        for (int r = 0; r < R; ++r) {
            const F a_r = V::set(a[r * num_groups]);
            QP_UNROLL
            for (int c = 0; c < C; ++c) {
                float* total = totals + r * kPanel + c * V::W;
                V::store(total, V::add(V::load(total), V::mul(V::mul(V::to_float(sums[r][c]), w[c]), a_r)));
            }
        }
    }

    QP_INLINE void take_up(const Tile& tile, I (&sums)[R][C]) {
        QP_UNROLL
        for (int r = 0; r < R; ++r) {
            QP_UNROLL
            for (int c = 0; c < C; ++c) sums[r][c] = V::iload(tile.unscaled + r * kPanel + c * V::W);
        }
    }

    QP_INLINE void put_aside(const Tile& tile, I (&sums)[R][C]) {
        QP_UNROLL
        for (int r = 0; r < R; ++r) {
            QP_UNROLL
            for (int c = 0; c < C; ++c) V::istore(tile.unscaled + r * kPanel + c * V::W, sums[r][c]);
        }
    }

    static size_t scale_index(const Tile& tile, int g) {
        const LinearView& view = *tile.view;
        const int s = view.groups_per_scale == 1 ? g : g / view.groups_per_scale;
        return (size_t(tile.panel) * view.num_scales + s) * kPanel + tile.column;
    }
};

}  // namespace
}  // namespace qp
