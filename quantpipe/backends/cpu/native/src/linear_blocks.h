// From panels and tokens to tiles: what is kept in which cache, and which source of weights a tile reads.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "linear_activations.h"
#include "linear_sources.h"
#include "linear_tiles.h"

namespace qp {
namespace {

using TileRun = void (*)(const Tile&);

template <class V, template <class, class, int, int> class TileKind, class Source, int C, int... kRows>
constexpr std::array<TileRun, sizeof...(kRows)> tile_runs(std::integer_sequence<int, kRows...>) {
    return {TileKind<V, Source, kRows + 1, C>::run...};
}

// Weights of integers as the floats they mean, for activations in float32.
template <class V, bool IsNibbles>
void expand_integers(const Tile& tile, int num_vectors, uint8_t* target) {
    const LinearView& view = *tile.view;
    float* out = reinterpret_cast<float*>(target);
    const uint8_t* words = tile.words;
    for (int k = tile.first_k; k < tile.end_k; k += IsNibbles ? 8 : 4) {
        const size_t scale_at =
            (size_t(tile.panel) * view.num_scales + k / (view.group * view.groups_per_scale)) * kPanel + tile.column;
        for (int c = 0; c < num_vectors; ++c) {
            const size_t at = scale_at + c * V::W;
            const auto scale = view.has_bf16_scales ? V::load_bf16(static_cast<const uint16_t*>(view.scales) + at)
                                                    : V::load(static_cast<const float*>(view.scales) + at);
            const auto zero = view.zeros == nullptr ? V::iset(view.center()) : V::load_u8(view.zeros + at);
            auto word = V::iload(words + c * V::W * 4);
            const auto put = [&](int i, typename V::I code) {
                V::store(out + (i * num_vectors + c) * V::W, V::mul(V::to_float(V::isub(code, zero)), scale));
            };
            for (int i = 0; i < 4; ++i) {
                if constexpr (IsNibbles) {
                    put(i, V::iand(word, V::iset(15)));
                    put(i + 4, V::iand(V::template shift_right<4>(word), V::iset(15)));
                } else {
                    put(i, V::iand(word, V::iset(255)));
                }
                word = V::template shift_right<8>(word);
            }
        }
        words += tile.word_bytes;
        out += (IsNibbles ? 8 : 4) * num_vectors * V::W;
    }
}

// Every step of every word, one after the other.
template <class V, class Source>
void expand_steps(const Tile& tile, int num_vectors, uint8_t* target) {
    const uint8_t* words = tile.words;
    for (int k = tile.first_k; k < tile.end_k; k += Source::kWordK) {
        prefetch_word(words + kAhead);
        for (int s = 0; s < Source::kSteps; ++s) {
            for (int c = 0; c < num_vectors; ++c) {
                V::istore(target, Source::step(V::iload(words + c * V::W * 4), s));
                target += V::W * 4;
            }
        }
        words += tile.word_bytes;
    }
}

// Packed: what lies in memory. Expanded: what tiles of many rows read. kReadsPacked: whether few rows can do without.
template <class V, template <class, class, int, int> class TileKind, class Packed, class Expanded, bool ReadsPacked>
struct Blocks {
    static constexpr bool kIsFloat = Expanded::kWordK == 1;
    static constexpr int kBlockK = kIsFloat ? kFloatBlockK : kIntegerBlockK;
    static constexpr int kTileRows = V::kTileRows;
    static constexpr int kVectors = V::kTileVectors, kPanelVectors = kPanel / V::W;
    // Nothing is gained by expanding what is used as it lies in memory.
    static constexpr bool kAlwaysPacked = ReadsPacked && Packed::kSteps == 1 && kVectors == kPanelVectors;
    using Expand = void (*)(const Tile&, int, uint8_t*);

    static void run(const LinearView& view, const Activations& x, int first_panel, int end_panel, int begin, int end,
                    float* y, int64_t ldy, uint8_t* scratch, Expand expand) {
        Tile tile{};
        tile.view = &view;
        tile.activations = &x;
        float* totals = reinterpret_cast<float*>(scratch);
        int32_t* unscaled = reinterpret_cast<int32_t*>(scratch + kSumBytes);
        for (int token = begin; token < end; token += kTokenBlock) {
            const int num_rows = std::min(kTokenBlock, end - token);
            for (int panel = first_panel; panel < end_panel; ++panel) {
                tile.panel = panel;
                std::memset(totals, 0, sizeof(float) * kPanel * num_rows);
                for (int k = 0; k < view.k_padded; k += kBlockK) {
                    tile.first_k = k;
                    tile.end_k = std::min(k + kBlockK, view.k_padded);
                    run_panel(tile, token, num_rows, totals, unscaled, scratch + 2 * kSumBytes, expand);
                }
                finish(view, panel, num_rows, totals, y + token * ldy, ldy);
            }
        }
    }

   private:
    static void run_panel(Tile tile, int token, int num_rows, float* totals, int32_t* unscaled, uint8_t* expanded,
                          Expand expand) {
        const LinearView& view = *tile.view;
        const uint8_t* packed =
            view.weights + tile.panel * view.panel_bytes + size_t(tile.first_k) / Packed::kWordK * kPanel * 4;
        tile.token = token;
        tile.totals = totals;
        tile.unscaled = unscaled;
        tile.words = packed;
        tile.word_bytes = kPanel * 4;
        tile.ahead = kAhead;
        if constexpr (ReadsPacked) {
            if (num_rows == 1) return TileKind<V, Packed, 1, kPanelVectors>::run(tile);
        }
        const bool reads_packed = ReadsPacked && (kAlwaysPacked || num_rows <= kTileRows);
        const int num_tiles = (num_rows + kTileRows - 1) / kTileRows;
        const int rows_each = (num_rows + num_tiles - 1) / num_tiles;
        for (int column = 0; column < kPanel; column += kVectors * V::W) {
            tile.column = column;
            tile.words = packed + column * 4;
            tile.word_bytes = kPanel * 4;
            if (!reads_packed) {
                expand(tile, kVectors, expanded);
                tile.words = expanded;
                tile.word_bytes = kVectors * V::W * 4;
                tile.ahead = 0;
            }
            for (int row = 0; row < num_rows; row += rows_each) {
                tile.token = token + row;
                tile.totals = totals + row * kPanel + column;
                tile.unscaled = unscaled + row * kPanel + column;
                run_tile(tile, std::min(rows_each, num_rows - row), reads_packed);
            }
        }
    }

    static void run_tile(const Tile& tile, int num_rows, bool reads_packed) {
        constexpr auto kRows = std::make_integer_sequence<int, kTileRows>{};
        if constexpr (ReadsPacked) {
            static constexpr auto kPackedRuns = tile_runs<V, TileKind, Packed, kVectors>(kRows);
            if (reads_packed) return kPackedRuns[num_rows - 1](tile);
        }
        if constexpr (!kAlwaysPacked) {
            static constexpr auto kExpandedRuns = tile_runs<V, TileKind, Expanded, kVectors>(kRows);
            kExpandedRuns[num_rows - 1](tile);
        }
    }

    static void finish(const LinearView& view, int panel, int num_rows, const float* totals, float* y, int64_t ldy) {
        const int first = panel * kPanel, width = std::min(kPanel, view.n - first);
        for (int row = 0; row < num_rows; ++row) {
            float with_bias[kPanel];
            for (int i = 0; i < kPanel; i += V::W) {
                V::store(with_bias + i, V::add(V::load(totals + row * kPanel + i), V::load(view.bias + first + i)));
            }
            std::memcpy(y + row * ldy + first, with_bias, sizeof(float) * width);
        }
    }
};

template <class V, class Packed, class Expanded>
using IntegerBlocks = Blocks<V, IntegerTile, Packed, Expanded, true>;

template <class V>
void run_linear(const LinearView& view, const Activations& x, int first_panel, int end_panel, int begin, int end,
                float* y, int64_t ldy, uint8_t* scratch) {
    const auto with = [&](auto blocks, auto expand) {
        blocks.run(view, x, first_panel, end_panel, begin, end, y, ldy, scratch, expand);
    };
    if (view.kind == LinearKind::f32) {
        return with(Blocks<V, FloatTile, Floats<V>, Floats<V>, true>{}, expand_steps<V, Floats<V>>);
    }
    if (view.kind == LinearKind::bf16) {
        return with(Blocks<V, FloatTile, Bf16Pairs<V>, Floats<V>, true>{}, expand_steps<V, Bf16Pairs<V>>);
    }
    if (x.form == ActivationForm::floats) {
        if (view.is_nibbles()) {
            return with(Blocks<V, FloatTile, NibbleQuads<V>, Floats<V>, false>{}, expand_integers<V, true>);
        }
        return with(Blocks<V, FloatTile, Quads<V, false>, Floats<V>, false>{}, expand_integers<V, false>);
    }
    if (x.form == ActivationForm::pairs) {
        if (view.is_nibbles()) {
            return with(IntegerBlocks<V, NibblePairs<V>, WidePairs<V>>{}, expand_steps<V, NibblePairs<V>>);
        }
        return with(IntegerBlocks<V, BytePairs<V>, WidePairs<V>>{}, expand_steps<V, BytePairs<V>>);
    }
    if (view.is_nibbles()) {
        return with(IntegerBlocks<V, NibbleQuads<V>, Quads<V, true>>{}, expand_steps<V, NibbleQuads<V>>);
    }
    if constexpr (V::kHasByteDot) {
        with(IntegerBlocks<V, Quads<V, false>, Quads<V, false>>{}, expand_steps<V, Quads<V, false>>);
    }
}

template <class V>
constexpr LinearKernels linear_kernels() {
    return {V::kHasByteDot, ActivationWriter<V>::write, run_linear<V>};
}

}  // namespace
}  // namespace qp
