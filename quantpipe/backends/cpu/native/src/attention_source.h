// Where the tiles of a span lie in the cache: pointers to stored codes where those can be used as they are, floats
// where many rows share them or where a block is no whole number of tiles; and the parameters of their tokens.
//
// Shapes: D head_dim, b tokens of a block.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention_tiles.h"
#include "small_floats.h"

namespace qp {
namespace {

inline int padded_dim(int head_dim) { return (head_dim + kTile - 1) / kTile * kTile; }

// A token's block, and its number there.
struct Place {
    const uint8_t* block;
    int64_t offset;
};

inline Place place_of(const AttentionTask& task, int64_t token) {
    const auto size = static_cast<uint32_t>(task.layout->block_size), number = static_cast<uint32_t>(token);
    const uint32_t index = number / size;
    return {task.cache + task.block_table[index] * task.layout->block_bytes, number - index * size};
}

// Keys, or values, of one head as the layout stores them.
class HeadCodes {
   public:
    HeadCodes(const AttentionTask& task, bool is_key)
        : layout_(*task.layout),
          is_key_(is_key),
          kind_(is_key ? layout_.key_kind : layout_.value_kind),
          codes_(task.kv_head * layout_.head_bytes + (is_key ? 0 : layout_.values)),
          parameters_(task.kv_head * layout_.head_bytes + (is_key ? layout_.key_parameters : layout_.value_parameters)),
          code_width_(kind_ == QP_KV_INT4 ? layout_.head_dim / 2 : layout_.head_dim),
          code_bytes_(kind_ == QP_KV_F32 ? 4 : 1) {}

    int kind() const { return kind_; }
    bool has_parameters() const { return kind_ == QP_KV_INT8 || kind_ == QP_KV_INT4; }
    int code_width() const { return code_width_; }
    bool in_tiles() const { return layout_.block_size % kTile == 0; }
    int64_t token_stride() const { return is_key_ ? code_bytes_ : int64_t{code_width_} * code_bytes_; }
    int64_t row_stride() const { return int64_t{layout_.block_size} * code_bytes_; }
    // Codes from this token on.
    const uint8_t* at(const Place& place) const { return place.block + codes_ + place.offset * token_stride(); }

    // Dimension d of a token, without its parameters.
    float code(const Place& place, int d) const {
        const int c = kind_ == QP_KV_INT4 ? d % code_width_ : d;
        const uint8_t* stored = at(place) + c * (is_key_ ? row_stride() : code_bytes_);
        if (kind_ == QP_KV_INT4) return d < code_width_ ? *stored & 15 : *stored >> 4;
        if (kind_ != QP_KV_F32) return static_cast<int8_t>(*stored);
        float value;
        std::memcpy(&value, stored, 4);
        return value;
    }

    void token_parameters(const Place& place, float* scale, float* minimum) const {
        const uint8_t* stored = place.block + parameters_;
        if (kind_ == QP_KV_INT8) {
            std::memcpy(scale, stored + 4 * place.offset, 4);
            return;
        }
        uint16_t halves[2];
        std::memcpy(halves, stored + 2 * place.offset, 2);
        std::memcpy(halves + 1, stored + 2 * (layout_.block_size + place.offset), 2);
        *scale = f16_to_float(halves[0]), *minimum = f16_to_float(halves[1]);
    }

    // Of the tokens of a tile, 0 outside of first .. end: what stands in slots that nobody sees may be anything.
    template <class S>
    void tile_parameters(const Place& place, int first, int end, float* scales, float* minima) const {
        const uint8_t* stored = place.block + parameters_;
        const auto* halves = reinterpret_cast<const uint16_t*>(stored) + place.offset;
        for (int i = 0; i < kTile; i += S::W) {
            if (kind_ == QP_KV_INT8) {
                S::store(scales + i, S::load(reinterpret_cast<const float*>(stored) + place.offset + i));
            } else {
                S::store(scales + i, S::load_f16(halves + i));
                S::store(minima + i, S::load_f16(halves + layout_.block_size + i));
            }
        }
        for (int i = 0; i < first; ++i) scales[i] = minima[i] = 0;
        for (int i = end; i < kTile; ++i) scales[i] = minima[i] = 0;
    }

    void prefetch(const Place& place) const {
        const uint8_t* first = at(place);
        const int64_t num_bytes = int64_t{kTile} * code_width_ * code_bytes_;
        for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(first + i);
        if (has_parameters()) __builtin_prefetch(place.block + parameters_);
    }

   private:
    const KVLayout& layout_;
    bool is_key_;
    int kind_;
    int64_t codes_, parameters_;
    int code_width_, code_bytes_;
};

// Stored codes of whole tiles as floats: rows of `width` codes, each of which may hold two.
template <class S, class Codes>
void widen_rows(const uint8_t* from, int64_t stride, int num_rows, int width, float* to, int64_t ld_row,
                int64_t ld_part) {
    for (int row = 0; row < num_rows; ++row, from += stride, to += ld_row) {
        for (int i = 0; i < width; i += S::W) {
            S::store(to + i, Codes::template load<0>(from, i));
            if constexpr (Codes::kParts == 2) S::store(to + ld_part + i, Codes::template load<1>(from, i));
        }
    }
}

// A whole tile of keys as floats [D, 16].
template <class S>
void widen_key_tile(const HeadCodes& codes, const Place& place, float* to) {
    const int rows = codes.code_width();
    if (codes.kind() == QP_KV_INT4) {
        const int64_t ld_part = int64_t{rows} * kTile;
        widen_rows<S, NibbleCodes<S>>(codes.at(place), codes.row_stride(), rows, kTile, to, kTile, ld_part);
    } else {
        widen_rows<S, ByteCodes<S>>(codes.at(place), codes.row_stride(), rows, kTile, to, kTile, 0);
    }
}

// The key of token i of such a tile.
inline void widen_key(const HeadCodes& codes, const Place& place, int head_dim, int i, float* to) {
    for (int d = 0; d < head_dim; ++d) to[d * kTile + i] = codes.code(place, d);
}

// The first tokens of a tile of values as floats [.., padded D].
template <class S>
void widen_value_tile(const HeadCodes& codes, const Place& place, int num_tokens, int head_dim, float* to) {
    const int64_t ld = padded_dim(head_dim);
    const int width = codes.code_width();
    if (codes.kind() == QP_KV_INT4) {
        widen_rows<S, NibbleCodes<S>>(codes.at(place), codes.token_stride(), num_tokens, width, to, ld, width);
    } else {
        widen_rows<S, ByteCodes<S>>(codes.at(place), codes.token_stride(), num_tokens, width, to, ld, 0);
    }
}

inline void widen_value(const HeadCodes& codes, const Place& place, int head_dim, float* to) {
    for (int d = 0; d < padded_dim(head_dim); ++d) to[d] = d < head_dim ? codes.code(place, d) : 0.0f;
}

}  // namespace
}  // namespace qp
