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

// Keys, or values, of one head as the layout stores them.
class HeadCodes {
   public:
    HeadCodes(const AttentionTask& task, bool is_key)
        : task_(task),
          layout_(*task.layout),
          is_key_(is_key),
          kind_(is_key ? layout_.key_kind : layout_.value_kind),
          offset_(task.kv_head * layout_.head_bytes + (is_key ? 0 : layout_.values)),
          parameters_(task.kv_head * layout_.head_bytes + (is_key ? layout_.key_parameters : layout_.value_parameters)) {}

    int kind() const { return kind_; }
    int code_width() const { return kind_ == QP_KV_INT4 ? layout_.head_dim / 2 : layout_.head_dim; }
    int code_bytes() const { return kind_ == QP_KV_F32 ? 4 : 1; }
    bool in_tiles() const { return layout_.block_size % kTile == 0; }
    const uint8_t* block(int64_t token) const {
        return task_.cache + task_.block_table[token / layout_.block_size] * layout_.block_bytes;
    }
    // Codes of a tile, where blocks consist of tiles.
    const uint8_t* tile(int64_t token) const {
        return block(token) + offset_ + token % layout_.block_size * token_stride();
    }
    int64_t token_stride() const { return is_key_ ? code_bytes() : int64_t{code_width()} * code_bytes(); }
    int64_t row_stride() const { return int64_t{layout_.block_size} * code_bytes(); }

    // Dimension d of a token, without its parameters.
    float code(int64_t token, int d) const {
        const int c = kind_ == QP_KV_INT4 ? d % code_width() : d;
        const uint8_t* at = tile(token) + c * (is_key_ ? row_stride() : code_bytes());
        if (kind_ == QP_KV_INT4) return d < code_width() ? *at & 15 : *at >> 4;
        if (kind_ != QP_KV_F32) return static_cast<int8_t>(*at);
        float value;
        std::memcpy(&value, at, 4);
        return value;
    }

    // Scales and minima of the tokens of a tile.
    void parameters(int64_t token, int first, int end, float* scales, float* minima) const {
        for (int i = first; i < end; ++i) {
            const int64_t offset = (token + i) % layout_.block_size;
            const uint8_t* at = block(token + i) + parameters_;
            if (kind_ == QP_KV_INT8) {
                std::memcpy(scales + i, at + 4 * offset, 4);
            } else {
                uint16_t halves[2];
                std::memcpy(halves, at + 2 * offset, 2);
                std::memcpy(halves + 1, at + 2 * (layout_.block_size + offset), 2);
                scales[i] = f16_to_float(halves[0]), minima[i] = f16_to_float(halves[1]);
            }
        }
    }

    void prefetch(int64_t token) const {
        const uint8_t* at = tile(token);
        const int64_t num_bytes = int64_t{kTile} * code_width() * code_bytes();
        for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(at + i);
        if (kind_ == QP_KV_INT8 || kind_ == QP_KV_INT4) __builtin_prefetch(block(token) + parameters_);
    }

   private:
    const AttentionTask& task_;
    const KVLayout& layout_;
    bool is_key_;
    int kind_;
    int64_t offset_, parameters_;
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

// A tile of keys [D, 16]; pairs of dimensions that share a byte follow one another.
template <class S>
void widen_keys(const HeadCodes& codes, int64_t token, int first, int end, int head_dim, float* to) {
    if (codes.in_tiles()) {
        const uint8_t* from = codes.tile(token);
        const int rows = codes.code_width();
        if (codes.kind() == QP_KV_INT4) {
            widen_rows<S, NibbleCodes<S>>(from, codes.row_stride(), rows, kTile, to, 2 * kTile, kTile);
        } else {
            widen_rows<S, ByteCodes<S>>(from, codes.row_stride(), rows, kTile, to, kTile, 0);
        }
        return;
    }
    const bool in_pairs = codes.kind() == QP_KV_INT4;
    std::memset(to, 0, sizeof(float) * head_dim * kTile);
    for (int i = first; i < end; ++i) {
        for (int d = 0; d < head_dim; ++d) {
            const int row = !in_pairs ? d : 2 * (d % (head_dim / 2)) + (d >= head_dim / 2);
            to[row * kTile + i] = codes.code(token + i, d);
        }
    }
}

// A tile of values [16, padded D]; what lies outside of first .. end stays as it was.
template <class S>
void widen_values(const HeadCodes& codes, int64_t token, int first, int end, int head_dim, float* to) {
    const int64_t ld = padded_dim(head_dim);
    const int width = codes.code_width();
    to += first * ld;
    if (codes.in_tiles() && width % S::W == 0 && head_dim == ld && codes.kind() != QP_KV_F32) {
        const uint8_t* from = codes.tile(token) + first * codes.token_stride();
        if (codes.kind() == QP_KV_INT4) {
            widen_rows<S, NibbleCodes<S>>(from, codes.token_stride(), end - first, width, to, ld, width);
        } else {
            widen_rows<S, ByteCodes<S>>(from, codes.token_stride(), end - first, width, to, ld, 0);
        }
        return;
    }
    for (int i = first; i < end; ++i, to += ld) {
        for (int d = 0; d < ld; ++d) to[d] = d < head_dim ? codes.code(token + i, d) : 0.0f;
    }
}

}  // namespace
}  // namespace qp
