// What a plan holds, as its own files see it.
//
// Shapes: T tokens of a step, H hidden_size, D head_dim, I intermediate size, R rows whose logits are wanted.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "aligned.h"
#include "head_search.h"
#include "linear.h"
#include "plan.h"
#include "rope.h"
#include "step_kernels.h"
#include "threads.h"

namespace qp {

struct Norm {
    std::vector<float> weight;   // empty: there is no such norm
    float eps = 0;

    static Norm of(const qp_norm& norm, int size) {
        if (norm.weight == nullptr) return {};
        return {std::vector<float>(norm.weight, norm.weight + size), norm.eps};
    }
    explicit operator bool() const { return !weight.empty(); }
    int size() const { return static_cast<int>(weight.size()); }
};

// A task of attention still without its place in the buffers. Pieces of the same rows follow one another.
struct AttentionPart {
    int sequence, kv_head, first_head, num_heads;
    int64_t first_row;                  // the row of the step that the sequence begins with
    int64_t first_query, num_queries;   // of the sequence's new tokens
    int piece, num_pieces;
    int64_t partial;                    // offset in floats
};

// What a step does alike in all layers of one kind.
struct LayerKind {
    int num_heads, num_kv_heads, head_dim, rope, window;
    // Of the step:
    int step_window = 0;        // the layers' own, or the batch's where that is smaller
    bool meets_sinks = false;   // whether sinks meet queries that are turned for them
    RopeRows turns, sink_turns;
    std::vector<AttentionPart> parts;
    int64_t num_partial_floats = 0;

    bool equals(const qp_layer& layer) const {
        return num_heads == layer.num_heads && num_kv_heads == layer.num_kv_heads && head_dim == layer.head_dim &&
               rope == layer.rope && window == layer.window;
    }
};

struct Layer {
    qp_layer sizes;   // its pointers to norm weights are not read after loading
    int kind;         // in Plan::kinds
    Norm attention_norm, query_norm, key_norm, post_attention_norm, mlp_norm, post_mlp_norm;
    const Linear *query, *key, *value, *output, *gate, *up, *down;   // key, value and up null where joined

    int query_width() const { return sizes.num_heads * sizes.head_dim; }
    int key_width() const { return sizes.num_kv_heads * sizes.head_dim; }
    int qkv_width() const { return query_width() + 2 * key_width(); }
};

// Grow to the largest step and stay.
struct StepBuffers {
    Aligned hidden;       // [T, H]
    Aligned normed;       // [T, H]
    Aligned part;         // [T, H] what attention or the MLP adds
    Aligned qkv;          // [T, (heads + 2 KV heads) * D]
    Aligned attended;     // [T, heads * D]
    Aligned sink_query;   // [T, heads * D]
    Aligned gate_up;      // [T, 2I]
    Aligned head_input;   // [R, H]
    HeadSearch search;
    Aligned partial;      // attention over pieces of a context
    std::vector<Aligned> attention;   // per thread

    int64_t num_bytes() const;
};

// Adds up where the time of a step goes: each mark ends the part named.
class Stopwatch {
   public:
    void start() { last_ = now(); }
    void mark(int part) {
        const double time = now();
        seconds[part] += time - last_;
        last_ = time;
    }
    double seconds[QP_NUM_TIMES] = {};

   private:
    static double now() {
        return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }
    double last_ = 0;
};

struct Plan {
    explicit Plan(const qp_shape& given);

    qp_shape shape;
    Norm final_norm;
    const Linear* head;
    std::vector<std::unique_ptr<RopeTable>> ropes;
    std::vector<LayerKind> kinds;
    std::vector<Layer> layers;
    const StepKernels& kernels;
    Threads threads;
    Workspace workspace;
    StepBuffers buffers;
    Stopwatch watch;
    std::atomic<bool> has_written_not_finite{false};   // kNotFiniteCode, into any cache
};

struct Step {
    Plan& plan;
    const qp_batch& batch;
    const qp_kv& kv;
};

// Rows of a loop that cost about `row_work` elementary operations each: enough per chunk to be worth a thread's while.
inline int rows_per_chunk(int64_t row_work) {
    constexpr int64_t kChunkWork = 1 << 16;
    return static_cast<int>(row_work >= kChunkWork ? 1 : kChunkWork / row_work);
}

// Calls fn(first, end) over pieces of [0, num_rows).
template <class Fn>
void for_rows(Threads& threads, int num_rows, int64_t row_work, Fn&& fn) {
    const int size = rows_per_chunk(row_work);
    threads.parallel_for((num_rows + size - 1) / size, [&](int chunk, int) {
        fn(chunk * size, num_rows < (chunk + 1) * size ? num_rows : (chunk + 1) * size);
    });
}

KVLayout layout_of(const Layer& layer, const qp_kv& kv);
// Of a sequence: tokens taken away before its held ones.
inline int64_t num_dropped(const Step& step, int sequence) {
    return step.batch.dropped_blocks ? step.batch.dropped_blocks[sequence] * step.kv.block_size : 0;
}
// The rope and the tasks of each kind of layer in this step.
void prepare_kinds(Step& step);
// The tasks of one kind.
void divide_attention(Step& step, LayerKind& kind);
// Norms queries and keys, turns them, and puts keys and values into the cache.
void place_heads(Step& step, int index);
// Fills buffers.attended from buffers.qkv and the cache.
void attend(Step& step, int index);

}  // namespace qp
