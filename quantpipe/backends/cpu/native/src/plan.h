// A decoder as a plan that one call executes: what Python fills in, in plain C types.
//
// Shapes: V vocabulary, H hidden_size, T tokens of a step, S sequences, B KV blocks of the longest table, R rows whose
// logits are wanted, L layers, J KV heads, D head_dim, I intermediate size, P pairs of dimensions that rope turns,
// b tokens of a KV block. Every array is dense and row-major. Structures may go as soon as the call that took them
// returns; what is said to be borrowed must outlive the plan.
#ifndef QP_PLAN_H
#define QP_PLAN_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { QP_F32 = 0, QP_BF16 = 1, QP_F16 = 2 };                                     // qp_shape.embedding_dtype
enum { QP_SILU = 0, QP_GELU_TANH = 1 };                                           // qp_layer.activation
enum { QP_KV_F32 = 0, QP_KV_INT8 = 1, QP_KV_INT8_STATIC = 2, QP_KV_INT4 = 3 };    // qp_kv.key_kind, .value_kind

// x / sqrt(mean(x^2) + eps) * weight. The weight (an offset is already added) is copied; null: there is no such norm.
typedef struct qp_norm {
    const float* weight;
    float eps;
} qp_norm;

typedef struct qp_shape {
    int32_t hidden_size;
    int32_t vocab_size;
    int32_t num_threads;       // 1: everything in the calling thread
    int32_t embedding_dtype;   // QP_F32, QP_BF16 or QP_F16
    const void* embedding;     // [V, H], borrowed; only the rows of a step's tokens are read. Null: those of the head,
                               // which is then f32 or bf16
    float embedding_scale;
    qp_norm final_norm;        // [H]
    const void* head;          // linear [V, H], borrowed
} qp_shape;

// Linears are handles of qp_linear_*, borrowed. Layers run in the order in which they are added.
typedef struct qp_layer {
    qp_norm attention_norm;        // [H]
    qp_norm query_norm;            // [D] or null
    qp_norm key_norm;              // [D] or null
    qp_norm post_attention_norm;   // [H] or null
    qp_norm mlp_norm;              // [H]
    qp_norm post_mlp_norm;         // [H] or null
    const void* query;             // [num_heads * D, H]; where key and value are null: all three, one below the other
    const void* key;               // [J * D, H] or null
    const void* value;             // [J * D, H] or null
    const void* output;            // [H, num_heads * D]
    const void* gate;              // [I, H]; where up is null: gate, then up, one below the other
    const void* up;                // [I, H] or null
    const void* down;              // [H, I]
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;              // a multiple of 8
    int32_t intermediate_size;
    int32_t rope;                  // what qp_plan_add_rope returned
    int32_t window;                // a token sees itself and window - 1 before it; 0: everything before it
    int32_t activation;            // QP_SILU or QP_GELU_TANH
    float softmax_scale;
} qp_layer;

// One step. Sequence s brings query_lens[s] tokens (0 is allowed), the last ones of context_lens[s]. Windows, sinks and
// dropped blocks mean what backends/protocol.py says of a BatchInput.
typedef struct qp_batch {
    int32_t num_tokens;              // T
    int32_t num_sequences;           // S
    int32_t table_width;             // B
    int32_t num_rows;                // R
    int32_t num_sinks;               // 0: none
    int32_t window;                  // 0: only the layers' own
    const int64_t* token_ids;        // [T]
    const int64_t* positions;        // [T]
    const int64_t* slots;            // [T] block * b + offset: where a token's key and value go
    const int64_t* query_lens;       // [S]
    const int64_t* context_lens;     // [S]
    const int64_t* block_table;      // [S, B] of the blocks that are held
    const int64_t* logit_rows;       // [R] rows of T, ascending
    const int64_t* dropped_blocks;   // [S], or null: none
} qp_batch;

// A layer's buffer is [num_blocks, qp_kv_block_bytes(...)]: a block is one run of bytes, copied by one memcpy.
typedef struct qp_kv {
    int32_t block_size;              // b
    int32_t num_blocks;
    int32_t key_kind;                // QP_KV_*
    int32_t value_kind;
    void* const* layers;             // [L] buffers, zeroed at first, 4-byte aligned (64 is faster)
    const float* key_scales;         // [L, J] for QP_KV_INT8_STATIC, else null
    const float* value_scales;
} qp_kv;

// Parts of a step, in the order of qp_plan_times.
enum {
    QP_TIME_EMBEDDING = 0,
    QP_TIME_NORM,          // norms and residual sums
    QP_TIME_QKV,           // linears by what they compute
    QP_TIME_ROPE_KV,       // query and key norms, rope, KV write
    QP_TIME_ATTENTION,
    QP_TIME_OUTPUT,
    QP_TIME_GATE_UP,
    QP_TIME_ACTIVATION,
    QP_TIME_DOWN,
    QP_TIME_HEAD,          // final norm, head, argmax
    QP_NUM_TIMES
};

// Null with qp_last_error() where something is wrong.
void* qp_plan_new(const qp_shape*);
void qp_plan_free(void* plan);
// The number of the rope, for qp_layer.rope; -1 with qp_last_error(). inverse_frequencies [P] is copied.
int32_t qp_plan_add_rope(void* plan, int32_t num_pairs, const double* inverse_frequencies, float attention_scale);
// 0, or -1 with qp_last_error().
int32_t qp_plan_add_layer(void* plan, const qp_layer*);
// Writes this step's keys and values. Either of logits [R, V] and argmax [R] may be null. argmax is the lowest of the
// most likely ids, -1 where a row has none (a NaN, an infinity, or nothing but -inf). 0, or -1 with qp_last_error():
// what would read or write outside of the arrays given (ids, slots, blocks, lengths) is refused before anything runs.
// One call per plan at a time.
int32_t qp_plan_forward(void* plan, const qp_batch*, const qp_kv*, float* logits, int32_t* argmax);
// Seconds since the plan was made, [QP_NUM_TIMES].
void qp_plan_times(const void* plan, double* seconds);
// Bytes held beside the linears: norms, rope tables and the work space as it has grown.
int64_t qp_plan_bytes(const void* plan);
// Bytes of one block of one layer; -1 with qp_last_error().
int64_t qp_kv_block_bytes(int32_t num_kv_heads, int32_t head_dim, int32_t block_size, int32_t key_kind,
                          int32_t value_kind);

// How many tokens attention takes at once: blocks of KV that are no multiple of it are read token by token, slower.
int32_t qp_kv_tile(void);

// Single parts of a step, for tests.

// The layer's norms of queries and keys, rope, KV write and attention: attended [T, num_heads * D] from
// qkv [T, (num_heads + 2J) * D]. The layer's linears and other norms are not read. 0, or -1 with qp_last_error().
int32_t qp_attention_apply(const qp_layer*, int32_t num_pairs, const double* inverse_frequencies,
                           float attention_scale, const qp_batch*, const qp_kv*, const float* qkv, float* attended,
                           int32_t num_threads);
// gate[i] = activation(gate[i]) * up[i]
void qp_gate_apply(int32_t activation, float* gate, const float* up, int32_t size);
int64_t qp_argmax_apply(const float* x, int64_t size);

#ifdef __cplusplus
}
#endif
#endif
