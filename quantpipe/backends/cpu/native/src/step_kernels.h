// The arithmetic of a step beside its linears, as functions of one instruction set. Knows no threads and no plan.
//
// Shapes: D head_dim, P pairs of dimensions that rope turns, G query heads that share a KV head, b tokens of a block.
#pragma once
#include <cstdint>

#include "kv_layout.h"

namespace qp {

// Tokens of context that are scored at once; contexts are cut at multiples of it.
constexpr int kSpan = 64;
// Tokens whose keys are taken side by side; blocks of KV that are no multiple of it are read token by token.
constexpr int kTile = 16;
constexpr int kMaxHeadDim = 1024;

// Queries of one sequence against one KV head. Row r is head r % G of query r / G. Tokens are numbered as they are
// held; the queries are the tokens first_query, first_query + 1 ... A query at token q sees the tokens up to q, with a
// window w of these those from q + 1 - w on, and the sinks. Positions of tokens from num_first on are num_dropped
// higher than their numbers; by so much are those between the sinks and num_first further back.
struct AttentionTask {
    const KVLayout* layout;
    const uint8_t* cache;             // the layer's buffer
    const int64_t* block_table;       // of the sequence
    int kv_head;
    float key_scale, value_scale;     // of a static rule
    bool may_hold_not_finite;         // whether kNotFiniteCode has to be looked for
    const float* query;               // [num_queries, G * D], rows ld_query apart
    int64_t ld_query;
    const float* sink_query;          // the queries that meet the sinks, rows ld_out apart; null: the same
    float* out;                       // [num_queries, G * D], rows ld_out apart; null: sums are left in `partial`
    int64_t ld_out;
    float* partial;                   // sums [rows, D], then largest scores [rows], then totals [rows]
    int num_queries, num_heads;       // at most attention_rows() together
    int64_t first_query;
    int64_t first_token, end_token;   // the context to look at; the first a multiple of kSpan
    int64_t window;                   // 0: everything before a token is visible
    int64_t num_sinks, num_first, num_dropped;
    float softmax_scale;
    float* scratch;                   // attention_scratch_floats()
};

// Rows of one task: what its sums take should stay in the cache.
inline int attention_rows(int head_dim) {
    const int rows = 96 * 64 / head_dim / 6 * 6;
    return rows < 12 ? 12 : rows > 96 ? 96 : rows;
}

inline int64_t attention_scratch_floats(int head_dim) {
    const int64_t rows = attention_rows(head_dim), padded = (head_dim + 15) / 16 * 16;
    return rows * (3 * padded + 2 * kSpan + 4) + kSpan * (2 * padded + 4);
}

struct StepKernels {
    // out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight; out may be x.
    void (*norm)(const float* x, int64_t ldx, int64_t num_rows, int size, const float* weight, float eps, float* out,
                 int64_t ld_out);
    void (*add)(float* x, const float* y, int64_t count);
    // gate[r] = activation(gate[r]) * up[r]
    void (*gate)(int activation, float* gate, const float* up, int64_t ld, int64_t num_rows, int size);
    // Turns the heads of one token in place by cosines [P], then sines [P].
    void (*rope)(float* x, int num_heads, int head_dim, int num_pairs, const float* cos_sin);
    // One token's key and value of one head into slot `offset` of a block; `head` is where the head's bytes begin.
    // True where kNotFiniteCode was written.
    bool (*kv_write)(const KVLayout& layout, uint8_t* head, int offset, const float* key, const float* value,
                     float key_scale, float value_scale);
    void (*attend)(const AttentionTask& task);
    // The first index of the largest of x; -1 where that is not finite or there is a NaN.
    int64_t (*argmax)(const float* x, int64_t size);
};

}  // namespace qp
