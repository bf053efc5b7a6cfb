// Where things lie in a block of the KV cache.
//
// Per KV head: codes of its keys, their parameters, codes of its values, their parameters. Keys lie dimension by
// dimension (all b tokens of one, then of the next), so that scores of neighbouring tokens come out side by side;
// values lie token by token. Codes of 4 bits: dimension c in the low and c + D / 2 in the high half of a byte.
// Parameters: 8 bits one float32 per token; 4 bits b float16 scales, then b float16 minima.
//
// Shapes: b tokens of a block, J KV heads, D head_dim.
#pragma once
#include <cstdint>

#include "plan.h"

namespace qp {

constexpr int8_t kNotFiniteCode = -128;   // static scales cannot carry a NaN or an infinity; no finite value gets this

struct KVLayout {
    int num_kv_heads, head_dim, block_size, key_kind, value_kind;
    int64_t key_parameters, values, value_parameters;   // offsets within a head; its keys come first
    int64_t head_bytes;
    int64_t block_bytes;

    static int64_t code_bytes(int kind, int head_dim) {
        return kind == QP_KV_F32 ? 4 * head_dim : kind == QP_KV_INT4 ? head_dim / 2 : head_dim;
    }

    static int64_t parameter_bytes(int kind) { return kind == QP_KV_INT8 || kind == QP_KV_INT4 ? 4 : 0; }

    static KVLayout of(int num_kv_heads, int head_dim, int block_size, int key_kind, int value_kind) {
        KVLayout layout{num_kv_heads, head_dim, block_size, key_kind, value_kind, 0, 0, 0, 0, 0};
        layout.key_parameters = block_size * code_bytes(key_kind, head_dim);
        layout.values = layout.key_parameters + block_size * parameter_bytes(key_kind);
        layout.value_parameters = layout.values + block_size * code_bytes(value_kind, head_dim);
        layout.head_bytes = layout.value_parameters + block_size * parameter_bytes(value_kind);
        layout.block_bytes = layout.head_bytes * num_kv_heads;
        return layout;
    }
};

}  // namespace qp
