// The arithmetic of a step beside its linears, as functions of one instruction set. Knows no threads and no plan.
//
// Shapes: D head_dim, P pairs of dimensions that rope turns, G query heads that share a KV head, b tokens of a block.
#pragma once
#include <cstdint>

#include "kv_layout.h"

namespace qp {

// Queries of one sequence against one KV head. Row r is head r % G of query r / G; the queries are the tokens at
// first_position, first_position + 1 ... of the sequence.
struct AttentionTask {
    const float* query;            // [num_queries, G * D], rows ld_query apart
    int64_t ld_query;
    float* out;                    // the same shape; written where is_partial is false
    int64_t ld_out;
    int num_queries;
    int num_heads;                 // G
    int64_t first_position;
    int64_t first_token, end_token;   // the context to look at
    int64_t window;                // 0: everything before a token is visible
    int64_t num_sinks;             // first tokens that stay visible outside of the window
    float softmax_scale;
    const KVLayout* layout;
    const uint8_t* cache;          // the layer's buffer
    const int64_t* block_table;    // [at least end_token / b, rounded up]
    int kv_head;
    float key_scale, value_scale;  // of a static rule
    bool is_partial;               // leave sums [rows, D], maxima and totals [rows] in `partial` instead of `out`
    float* partial;                // [rows * (D + 2)]
    float* scratch;                // attention_scratch_floats()
};

struct StepKernels {
    // out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight; out may be x.
    void (*norm)(const float* x, int64_t ldx, int64_t num_rows, int size, const float* weight, float eps, float* out,
                 int64_t ld_out);
    void (*add)(float* x, const float* y, int64_t count);
    // gate[r] = activation(gate[r]) * up[r]
    void (*gate)(int activation, float* gate, const float* up, int64_t ld, int64_t num_rows, int size);
    // Turns num_heads heads of one token in place by cos[P], then sin[P].
    void (*rope)(float* x, int num_heads, int head_dim, int num_pairs, const float* cos_sin);
    // One token's key and value of one head into its slot of a block; `head` is the start of the head's bytes.
    void (*kv_write)(const KVLayout& layout, uint8_t* head, int offset, const float* key, const float* value,
                     float key_scale, float value_scale);
    void (*attend)(const AttentionTask& task);
    // The first index of the largest of x; -1 where that is not finite or there is a NaN.
    int64_t (*argmax)(const float* x, int64_t size);
};

// Rows of a task: more queries than these are several tasks.
constexpr int kMaxRows = 96;
// Tokens of context that are scored at once.
constexpr int kSpan = 64;

}  // namespace qp
