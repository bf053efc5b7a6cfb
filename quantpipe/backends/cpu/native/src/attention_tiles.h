// The two products of attention over tiles of 16 tokens, straight from stored codes or from floats.
//
// Keys are read dimension by dimension, the tokens of a tile side by side; values token by token. Parameters of the
// codes are not applied here: they belong to tokens, and so to scores and probabilities.
//
// Shapes: M rows (queries times heads), D head_dim, W lanes of a vector.
#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include "step_kernels.h"

namespace qp {
namespace {

constexpr int kTiles = kSpan / kTile;
constexpr int kMaxTileRows = 6;   // their sums stay in registers

// Reads W codes of a row as floats. Where kParts codes share a byte, part 0 is dimension c and part 1 c + D / 2.
template <class S>
struct FloatCodes {
    static constexpr int kParts = 1;
    template <int kPart>
    static typename S::F load(const uint8_t* row, int first) {
        return S::load(reinterpret_cast<const float*>(row) + first);
    }
};

template <class S>
struct ByteCodes {
    static constexpr int kParts = 1;
    template <int kPart>
    static typename S::F load(const uint8_t* row, int first) {
        return S::to_float(S::load_s8(reinterpret_cast<const int8_t*>(row) + first));
    }
};

template <class S>
struct NibbleCodes {
    static constexpr int kParts = 2;
    template <int kPart>
    static typename S::F load(const uint8_t* row, int first) {
        const typename S::I bytes = S::load_u8(row + first);
        // Two shifts instead of a mask, which would take a register away from the sums.
        if constexpr (kPart == 0) return S::to_float(S::template shift_right<28>(S::template shift_left<28>(bytes)));
        return S::to_float(S::template shift_right<4>(bytes));
    }
};

struct KeyTiles {
    const uint8_t* tile[kTiles];   // null: nothing of it is visible
    int64_t stride;                // bytes from one row of codes to the next
    int num_rows;                  // D, or D / 2 where two dimensions share a byte
};

struct ValueTiles {
    const uint8_t* tile[kTiles];
    int first[kTiles], end[kTiles];   // the visible tokens of each tile
    int64_t stride;                   // bytes from one token to the next
};

// acc[m][n] += a(m) * b(n), with the fewer of the factors in registers beside the sums.
template <class S, int M, int N, class A, class B>
inline void add_products(A&& a, B&& b, typename S::F (&acc)[M][N]) {
    using F = typename S::F;
    if constexpr (M < N) {
        F held[M];
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) held[m] = a(m);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
            const F other = b(n);
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) acc[m][n] = S::fma(held[m], other, acc[m][n]);
        }
        return;
    }
    F held[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) held[n] = b(n);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
        const F other = a(m);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) acc[m][n] = S::fma(other, held[n], acc[m][n]);
    }
}

// acc += query times one part of the codes of a row.
template <class S, class Codes, int kPart, int M, int NT>
inline void score_row(const float* query, int64_t ld, const uint8_t* const* tiles, int64_t at,
                      typename S::F (&acc)[M][NT * kTile / S::W]) {
    constexpr int NV = kTile / S::W;
    add_products<S>([&](int m) { return S::set(query[m * ld]); },
                    [&](int n) { return Codes::template load<kPart>(tiles[n / NV] + at, n % NV * S::W); }, acc);
}

// scores[m][tile * 16 + token] = query[m] . codes, for NT tiles.
template <class S, class Codes, int M, int NT>
[[gnu::noinline]] void score_tiles(const float* query, int64_t ld, const uint8_t* const* tiles, int64_t stride,
                                   int num_rows, float* scores) {
    constexpr int N = NT * kTile / S::W;
    typename S::F acc[M][N];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) acc[m][n] = S::zero();
    }
    for (int row = 0; row < num_rows; ++row) score_row<S, Codes, 0, M, NT>(query++, ld, tiles, row * stride, acc);
    // One part after the other: bytes kept for both would take registers away from the sums.
    for (int row = 0; Codes::kParts == 2 && row < num_rows; ++row) {
        score_row<S, Codes, Codes::kParts - 1, M, NT>(query++, ld, tiles, row * stride, acc);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) S::store(scores + m * kSpan + n * S::W, acc[m][n]);
    }
}

// As many sums as hide the latency of a multiplication, as far as registers go.
template <class S>
constexpr int tiles_at_once(int num_rows) {
    const int per_tile = num_rows * kTile / S::W;
    return per_tile <= 3 ? 4 : per_tile <= 6 ? 2 : 1;
}

template <class S, class Codes, int M>
void score_rows(const float* query, int64_t ld, const KeyTiles& keys, float* scores) {
    constexpr int NT = tiles_at_once<S>(M);
    for (int i = 0; i < kTiles;) {
        bool is_whole = i + NT <= kTiles;
        for (int j = i; is_whole && j < i + NT; ++j) is_whole = keys.tile[j] != nullptr;
        if (is_whole) {
            score_tiles<S, Codes, M, NT>(query, ld, keys.tile + i, keys.stride, keys.num_rows, scores + i * kTile);
            i += NT;
            continue;
        }
        if (keys.tile[i]) {
            score_tiles<S, Codes, M, 1>(query, ld, keys.tile + i, keys.stride, keys.num_rows, scores + i * kTile);
        }
        ++i;
    }
}

// out[m][first .. first + NV * W] += sum over tokens of weights[m][token] * codes of the token.
template <class S, class Codes, int kPart, int M, int NV>
[[gnu::noinline]] void weigh_columns(const float* weights, const ValueTiles& values, int first, float* out,
                                     int64_t ld) {
    typename S::F acc[M][NV];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
        for (int n = 0; n < NV; ++n) acc[m][n] = S::load(out + m * ld + n * S::W);
    }
    for (int i = 0; i < kTiles; ++i) {
        const uint8_t* row = values.tile[i] + values.first[i] * values.stride;
        for (int token = values.first[i]; token < values.end[i]; ++token, row += values.stride) {
            const float* weight = weights + i * kTile + token;
            add_products<S>([&](int m) { return S::set(weight[m * kSpan]); },
                            [&](int n) { return Codes::template load<kPart>(row, first + n * S::W); }, acc);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
        for (int n = 0; n < NV; ++n) S::store(out + m * ld + n * S::W, acc[m][n]);
    }
}

template <class S>
constexpr int vectors_at_once(int num_rows) {
    return num_rows == 1 ? 8 : num_rows <= 3 ? 4 : 2;
}

// width: codes of a part, a multiple of W.
template <class S, class Codes, int kPart, int M>
void weigh_part(const float* weights, const ValueTiles& values, int width, float* out, int64_t ld) {
    constexpr int NV = vectors_at_once<S>(M);
    int d = 0;
    for (; d + NV * S::W <= width; d += NV * S::W) {
        weigh_columns<S, Codes, kPart, M, NV>(weights, values, d, out + d, ld);
    }
    for (; d + 2 * S::W <= width; d += 2 * S::W) {
        weigh_columns<S, Codes, kPart, M, 2>(weights, values, d, out + d, ld);
    }
    if (d < width) weigh_columns<S, Codes, kPart, M, 1>(weights, values, d, out + d, ld);
}

// out [M, D] += weights [M, tokens] * codes.
template <class S, class Codes, int M>
void weigh_rows(const float* weights, const ValueTiles& values, int head_dim, float* out, int64_t ld) {
    const int width = head_dim / Codes::kParts;
    weigh_part<S, Codes, 0, M>(weights, values, width, out, ld);
    if constexpr (Codes::kParts == 2) weigh_part<S, Codes, 1, M>(weights, values, width, out + width, ld);
}

using ScoreRows = void (*)(const float* query, int64_t ld, const KeyTiles& keys, float* scores);
using WeighRows = void (*)(const float* weights, const ValueTiles& values, int head_dim, float* out, int64_t ld);

// By number of rows, less 1.
template <class S, class Codes, int... kLess>
constexpr std::array<ScoreRows, sizeof...(kLess)> score_variants(std::integer_sequence<int, kLess...>) {
    return {score_rows<S, Codes, kLess + 1>...};
}

template <class S, class Codes, int... kLess>
constexpr std::array<WeighRows, sizeof...(kLess)> weigh_variants(std::integer_sequence<int, kLess...>) {
    return {weigh_rows<S, Codes, kLess + 1>...};
}

template <class S, class Codes>
struct TileProducts {
    using Less = std::make_integer_sequence<int, kMaxTileRows>;
    static constexpr auto score = score_variants<S, Codes>(Less());
    static constexpr auto weigh = weigh_variants<S, Codes>(Less());
};

template <class S>
ScoreRows score_function(int kind, int num_rows) {
    if (kind == QP_KV_F32) return TileProducts<S, FloatCodes<S>>::score[num_rows - 1];
    if (kind == QP_KV_INT4) return TileProducts<S, NibbleCodes<S>>::score[num_rows - 1];
    return TileProducts<S, ByteCodes<S>>::score[num_rows - 1];
}

template <class S>
WeighRows weigh_function(int kind, int num_rows) {
    if (kind == QP_KV_F32) return TileProducts<S, FloatCodes<S>>::weigh[num_rows - 1];
    if (kind == QP_KV_INT4) return TileProducts<S, NibbleCodes<S>>::weigh[num_rows - 1];
    return TileProducts<S, ByteCodes<S>>::weigh[num_rows - 1];
}

}  // namespace
}  // namespace qp
